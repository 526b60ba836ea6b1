"""Request traces: files of others, and the workloads that are built in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cupaged.study import traces
from cupaged.study.traces import BUILT_IN, mean


def test_azure_traces_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
        b"2023-11-16 18:15:50.9951690,396,0\r\n2023-11-16 18:15:45.6805900,9,1\r\n"
    )
    trace = traces.read(path)
    np.testing.assert_allclose(trace.arrivals, [0, 1, 5.314579], atol=1e-5)
    assert trace.prompts.tolist() == [9, 374, 396] and trace.outputs.tolist() == [1, 44, 1]
    assert trace.finals.tolist() == [9, 417, 396] and trace.prefixes is None


def test_mooncake_traces_keep_the_hashes_of_their_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [2**70, 4]},
        {"timestamp": 2500, "input_length": 512, "output_length": 9, "hash_ids": [2**70]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    trace = traces.read(path)
    assert trace.arrivals.tolist() == [0, 2] and trace.prefixes == ((0, 1), (0,))
    assert trace.first(1).prefixes == ((0, 1),) and trace.at_once().arrivals.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "time,tokens\n1,2\n", "a.csv: expected the columns TIMESTAMP"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,5,x\n",
            "a.csv, line 2: invalid literal",
        ),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,1\n",
            "line 2: expected a prompt of at least 1",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 5}\n', "a.jsonl, line 1: KeyError 'output_length'"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1, 2]}\n', "got 2 for 5"),
        (
            "a.jsonl",
            '{"timestamp": NaN, "input_length": 5, "output_length": 5}\n',
            "line 1: expected a finite time, got nan",
        ),
        ("a.jsonl", '{"timestamp": 1, "input_length": 1e999, "output_length": 5}\n', "a.jsonl, line 1: OverflowError"),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 5, "output_length": 5}\n'
            '{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n',
            "line 2: expected hash_ids in every line",
        ),
        ("a.csv", "\udcff", "a.csv: expected text in UTF-8"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(ValueError) as error:
        traces.read(tmp_path / name)
    assert message in str(error.value)


@pytest.mark.parametrize(("name", "prompt", "output"), [("sharegpt", 161.31, 337.99), ("alpaca", 19.31, 58.45)])
def test_built_in_workloads_have_the_means_of_the_paper(name: str, prompt: float, output: float) -> None:
    workload = BUILT_IN[name]
    assert mean(workload.prompts) == pytest.approx(prompt, rel=0.005)
    assert mean(workload.outputs) == pytest.approx(output, rel=0.005)
    drawn = workload.draw(name, 80_000, None, np.random.default_rng())  # 5% are ten deviations of such a mean and more
    assert drawn.prompts.mean() == pytest.approx(prompt, rel=0.05) and drawn.outputs.mean() == pytest.approx(
        output, rel=0.05
    )
    assert drawn.prompts.min() >= 1 and drawn.outputs.min() >= 1
    assert len(drawn) / drawn.arrivals[-1] == pytest.approx(workload.rate, rel=0.05)
