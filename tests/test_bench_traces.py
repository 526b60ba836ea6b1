"""Replays of traces: hits counted by hand, pools that are too small, and files without token ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.traces import FOLDER, lengths_only, prefix_hits
from cupaged.study.traces import read

needs = {name: pytest.mark.skipif(not (FOLDER / name).exists(), reason=f"no trace {name}") for name in (
    "mooncake_conversation_trace.jsonl", "AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv",
)}  # fmt: skip


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    """Two conversations that take turns; every prompt repeats its conversation's earlier ones."""
    path = tmp_path / "turns.jsonl"
    turns = [(1, [0, 1, 2]), (2, [7, 8]), (3, [0, 1, 2, 3]), (4, [7, 8, 9]), (5, [0, 1, 2, 3, 4])]
    path.write_text("\n".join(
        json.dumps({"timestamp": at, "input_length": 512 * len(ids) - 12, "output_length": 1, "hash_ids": ids}) for at, ids in turns
    ))  # fmt: skip
    return path


def test_a_pool_with_room_finds_every_full_block_that_was_there(conversations: Path) -> None:
    trace = read(conversations)
    hits = prefix_hits(trace, 100)
    # the last block of a prompt is not full, so that what follows it in the next turn is not found: 2 of 3, 1 of 2, 3 of 4
    assert (hits.blocks, hits.references) == (2 + 1 + 3, 2 + 1 + 3 + 2 + 4)


def test_a_pool_for_one_prompt_forgets_it_before_the_next_turn(conversations: Path) -> None:
    hits = prefix_hits(read(conversations), 5)
    assert 0 < hits.blocks < 6


def test_lengths_alone_say_how_full_the_pool_is_and_never_hit(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"2023-11-16 18:17:0{i}.0,40,5\n" for i in range(4))
    )
    roomy = lengths_only(read(path), 1024)
    assert roomy.preempted == 0 and roomy.running_peak == 1 and roomy.prefix_hits is None
    assert roomy.used_peak == 44 / 1024  # 40 and four more: the fifth token is never fed back


@needs["mooncake_conversation_trace.jsonl"]
def test_hits_of_the_mooncake_trace_grow_with_the_pool() -> None:
    trace = read(FOLDER / "mooncake_conversation_trace.jsonl").first(1000)
    rates = [prefix_hits(trace, size).blocks for size in (1_000, 5_000, 30_000)]
    assert rates == sorted(rates) and rates[0] < rates[-1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=mark) for name, mark in needs.items() if name.endswith(".csv")]
)
def test_azure_traces_run_in_a_pool_that_is_too_small_for_all(name: str) -> None:
    trace = read(FOLDER / name).first(1000)
    small, large = (lengths_only(trace, slots) for slots in (16_384, 131_072))
    assert small.admitted == large.admitted == len(trace)
    assert small.running_mean <= large.running_mean + 1 and (small.wait_mean or 0) >= (large.wait_mean or 0)
    assert large.preempted == 0
