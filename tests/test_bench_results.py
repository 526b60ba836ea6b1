"""Result files and the summary table of the benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.record import record
from bench.results import Row, latest, load, of_each_machine, save, table


def test_ratio_and_part_of_the_limit_say_how_much_faster_than_the_peer_and_how_near_the_limit() -> None:
    row = Row("cpu-attention", "decode", 200.0, "us", peer=500.0, limit=150.0)
    assert row.ratio == 2.5
    assert row.of_limit == 0.75
    assert Row("control-plane", "grow", 1.0, "us").ratio is None


def test_table_has_every_row_under_its_group_and_blanks_for_what_was_not_measured() -> None:
    rows = [
        Row("a", "with all", 2.0, "us", peer=30.0, limit=1.0),
        Row("a", "alone", 12345.6, "ns"),
        Row("b", "alone", 0.5, "ns"),
    ]
    lines = table(rows).splitlines()
    assert [line.split()[0] for line in lines] == ["work", "a", "with", "alone", "b", "alone"]
    assert lines[2].split() == ["with", "all", "2", "30", "15x", "1", "50%", "us"]
    assert lines[3].split() == ["alone", "12346", "ns"]


def test_saved_rows_come_back_with_machine_date_and_versions(tmp_path: Path) -> None:
    rows = [Row("a", "x", 2.0, "us", peer=3.0, more={"gb_s": 4.5}), Row("a", "y", 1.0, "ns")]
    path = save("figures", rows, "python -m bench.figures", notes={"peer": "other 1.0"}, folder=tmp_path)
    content, back = load(path)
    assert back == rows and latest("figures", tmp_path) == path
    assert content["command"] == "python -m bench.figures" and content["machine"]["cores"] >= 1
    assert "numpy" in content["versions"] and None not in content["versions"].values()
    text = path.with_suffix(".txt").read_text()
    assert text.startswith("# python -m bench.figures\n# " + content["date"]) and "peer other 1.0" in text
    assert table(rows) in text


def test_latest_is_the_newest_date_of_exactly_that_name(tmp_path: Path) -> None:
    for name in ("cpu-2026-01-02", "cpu-2026-11-01", "cpu-2025-12-31", "cpu-attention-2027-01-01"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": []}))
    assert latest("cpu", tmp_path).name == "cpu-2026-11-01.json"
    with pytest.raises(FileNotFoundError, match="no gpu-DATE"):
        latest("gpu", tmp_path)


def test_what_a_command_prints_is_kept_unless_it_fails(tmp_path: Path) -> None:
    say = [sys.executable, "-c", "print('one'); print('two'); print('three')"]
    assert record("said", say, last=2, folder=tmp_path) == 0
    (path,) = tmp_path.iterdir()
    lines = path.read_text().splitlines()
    assert path.name.startswith("said-20") and lines[0].startswith("# python -c ") and "cores of" in lines[1]
    assert lines[2:] == ["two", "three"]
    path.unlink()
    assert record("failed", [sys.executable, "-c", "print(1); raise SystemExit(3)"], folder=tmp_path) == 3
    assert not list(tmp_path.iterdir())


def test_each_machine_shows_its_newest_run(tmp_path: Path) -> None:
    for name, date, processor in (
        ("cpu-2026-01-02", "2026-01-02", "one"), ("cpu-2026-03-01-other", "2026-03-01", "other"), ("cpu-2026-02-01", "2026-02-01", "one"),
    ):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": date, "machine": {"processor": processor}}))
    assert [path.stem for path in of_each_machine("cpu", tmp_path)] == ["cpu-2026-03-01-other", "cpu-2026-02-01"]
    with pytest.raises(FileNotFoundError):
        of_each_machine("gpu", tmp_path)
