"""The command of the memory study: `python -m cupaged simulate`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cupaged.__main__ import main
from cupaged.study import policies, traces


@pytest.fixture
def small_trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.csv"
    rows = [f"2023-11-16 18:15:{second:02},{100 + 7 * second},{20 + second}" for second in range(30)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def test_the_command_writes_figures_and_a_picture(
    small_trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    out = tmp_path / "results" / "study"
    assert main(["simulate", str(small_trace), "--limit", "25", "--pool", "1024", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "25 requests" in said and "in the paper under 4%" in said
    found = json.loads(out.with_name("study.json").read_text())
    default = policies.default(traces.read(small_trace))
    assert list(found["policies"]) == default and found["requests"] == 25
    assert found["policies"]["paged-1"]["useful"] == 1.0
    assert found["policies"]["oracle"]["internal"] == 0
    sizes = found["running_by_pool"]["paged-16"]
    assert list(sizes) == ["256", "512", "1024", "2048", "4096"] and sizes["512"] < sizes["1024"] < sizes["4096"]
    assert out.with_name("study.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_goes_without_tqdm_and_says_what_a_picture_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    out = tmp_path / "study"
    assert main(["simulate", "alpaca", "--limit", "20", "--policies", "oracle", "beam-2", "--out", str(out)]) == 0
    assert "pip install 'cupaged[plot]'" in capsys.readouterr().out
    assert list(json.loads(out.with_name("study.json").read_text())["policies"]) == ["oracle", "beam-2"]


def test_a_study_in_which_nothing_fits_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    assert main(["simulate", "alpaca", "--limit", "10", "--max-length", "6", "--out", str(out)]) == 0
    rows = json.loads(out.with_name("study.json").read_text())["policies"].values()
    assert {(row["rejected"], row["admitted"], row["wait_mean"]) for row in rows} == {(10, 0, None)}
    assert "in the paper" not in capsys.readouterr().out


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    def figures(seed: int) -> object:
        assert (
            main(
                [
                    "simulate",
                    "alpaca",
                    "--limit",
                    "30",
                    "--seed",
                    str(seed),
                    "--policies",
                    "beam-4",
                    "--out",
                    str(tmp_path / "s"),
                ]
            )
            == 0
        )
        return json.loads((tmp_path / "s.json").read_text())["policies"]

    assert figures(5) == figures(5) != figures(6)


def test_a_trace_that_is_not_there_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "nowhere.csv"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "expected a file or one of sharegpt, alpaca, got nowhere.csv" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "prefix-cache"], "a prefix cache needs a trace with hash ids"),
        (["--pool", "127"], "expected at least 128 slots"),
        (["--out", f"{__file__}/folder/figures"], "Not a directory"),
        (["--out", ""], "--out: expected the name of a file"),
    ],
)
def test_what_cannot_be_studied_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "alpaca", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and message in error


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--limit", "few"),
        ("--limit", "0"),
        ("--interval", "0"),
        ("--interval", "nan"),
        ("--rate", "x"),
        ("--seed", "-1"),
        ("--geometry", "1,2"),
    ],
)
def test_an_option_that_is_no_such_number_says_what_was_expected(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["simulate", "alpaca", option, value])
    assert stopped.value.code == 2
    assert f"argument {option}: expected " in (error := capsys.readouterr().err) and f"got {value}" in error


def test_importing_the_command_imports_no_plotting_and_no_progress_bar() -> None:
    code = "import sys, cupaged, cupaged.simulate; print(sorted({'matplotlib', 'tqdm', 'numba', 'cupy'} & set(sys.modules)))"
    root = Path(__file__).resolve().parent.parent
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
