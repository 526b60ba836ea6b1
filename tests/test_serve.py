"""The command `serve` on a tiny model: every request is answered, the same whatever the pool, and the figures are printed."""

from __future__ import annotations

import ast
import re

import pytest

pytest.importorskip("gguf", reason="the model tests need: pip install 'cupaged[models]'")
pytest.importorskip("tokenizers", reason="the model tests need: pip install 'cupaged[models]'")

import tiny_llama

from cupaged.__main__ import main

LARGE = ("--num-blocks", "1000", "--no-prefix-cache")
SMALL = ("--num-blocks", "42", "--host-blocks", "60", "--token-budget", "40")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return str(tiny_llama.write(path, 0, metadata={"context_length": 1000}))


def serve(capsys: pytest.CaptureFixture[str], model: str, *options: str) -> str:
    """What the command prints."""
    assert main(["serve", "--model", model, "--requests", "7", "--max-tokens", "20", "--rate", "0", *options]) == 0
    return capsys.readouterr().out


def answers(printed: str) -> dict[int, str]:
    """The answer lines by the request's number."""
    return {int(number): text for number, text in re.findall(r"^ *[\d.]+ s \[(\d+)\] (.*)$", printed, re.MULTILINE)}


def test_every_request_is_answered_the_same_from_a_pool_that_runs_out(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    large, small = serve(capsys, tiny, *LARGE), serve(capsys, tiny, *SMALL)
    assert answers(large) == answers(small) and sorted(answers(large)) == list(range(7))
    assert answers(large)[3].endswith("(and 2 more)") and answers(large)[5].endswith("(and 2 more)")
    assert "0 swapped to the host, 0 computed again" in large and "prefix cache" not in large
    assert int(re.search(r"(\d+) swapped", small)[1]) > 0 and re.search(
        r"cache +\d+ of \d+ tokens of joining requests, \d+%", small
    )  # type: ignore[index]


def test_every_request_is_answered_from_a_cache_of_float16(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted(answers(serve(capsys, tiny, *SMALL, "--kv-dtype", "float16"))) == list(range(7))


def test_figures_are_within_their_limits_and_the_percentiles_rise(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = serve(capsys, tiny, *SMALL)
    for name in ("time to the first token, s", "between tokens, s", "whole answer, s"):
        waits = [float(x) for x in re.search(rf"^{name}(( +[\d.]+){{4}})$", printed, re.MULTILINE)[1].split()]  # type: ignore[index]
        assert waits == sorted(waits) and waits[-1] > 0
    for name, limit in (("sequences in the batch", 16), ("tokens computed", 40), ("blocks in use", 42)):
        mean, most, shown = re.search(rf"^{name} +([\d.]+) +(\d+) +(\d+)$", printed, re.MULTILINE).groups()  # type: ignore[union-attr]
        assert 0 < float(mean) <= int(most) <= int(shown) == limit


def test_stream_prints_the_pieces_of_every_answer(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = serve(capsys, tiny, *SMALL, "--stream")
    for number in (0, 1, 2, 4):
        pieces = re.findall(rf"^ *[\d.]+ s \[{number}\.0\] (.*)$", printed, re.MULTILINE)
        text = " ".join("".join(ast.literal_eval(piece) for piece in pieces).split())
        assert len(pieces) > 5 and text[:50] in answers(printed)[number]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--num-blocks", "5", "the pool has 5 and keeps 1 as its watermark"),
        ("--watermark", "2", "watermark: expected a number from 0.0 to 1.0"),
        ("--host-blocks", "-1", "host_blocks: expected"),
        ("--max-sequences", "2", "3 sequences, but at most 2"),
        ("--token-budget", "8", "max_sequences: expected 1 to token_budget"),
    ],
)
def test_options_that_cannot_be_used_are_refused_in_one_line(
    tiny: str, capsys: pytest.CaptureFixture[str], option: str, value: str, message: str
) -> None:
    assert main(["serve", "--model", tiny, "--requests", "4", "--rate", "0", "--num-blocks", "60", option, value]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("cupaged: ") and message in error
