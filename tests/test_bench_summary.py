"""The list of benchmarks and the command that runs a few of them."""

from __future__ import annotations

import pytest

from bench import summary
from bench.results import Row
from bench.summary import GROUPS, Case, cases, why_not


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_works_with_names_of_their_own_or_a_reason(group: str) -> None:
    if reason := why_not(group):
        assert "not installed" in reason or "no GPU" in reason
        return
    every, few = cases(group), cases(group, short=True)
    names = [case.work for case in every]
    assert len(set(names)) == len(names) and all(case.group == group for case in every)
    assert 0 < len(few) < len(every) and {case.work for case in few} <= set(names)


def test_the_command_prints_one_table_and_says_what_did_not_run_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cupaged.__main__ import main

    def some(group: str, short: bool = False) -> list[Case]:
        assert short and group != "gpu-attention"
        return [Case(group, "work", lambda: Row(group, "work", 2.0, "us", peer=5.0, limit=1.0))]

    monkeypatch.setattr(summary, "cases", some)
    monkeypatch.setattr(summary, "why_not", lambda group: "no GPU found" if group == "gpu-attention" else "")
    monkeypatch.delenv("CUPAGED_VLLM_PYTHON", raising=False)
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert out.count("2.50x") == 3 and out.count("ours") == 1
    assert "gpu-attention: not run: no GPU found" in out
    assert "peer: not run: CUPAGED_VLLM_PYTHON" in out


def test_control_plane_rows_have_goal_and_peer_in_the_unit_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import control_plane

    asked: list[list[str]] = []

    def peer(names: list[str]) -> dict[str, float]:
        asked.append(names)
        return {"decode:64": 2000.0}

    work = control_plane.Work("grow", lambda: 40.0, "us/step", 60, "decode:64", 64 / 1e3, 5)
    monkeypatch.setattr(control_plane, "works", lambda trace: [work, work])
    monkeypatch.setattr(control_plane, "run_peer", peer)
    rows = [case.run() for case in cases("control-plane", short=True)]
    assert rows[0] == Row("control-plane", "grow", 40.0, "us/step", 128.0, 60, {"faster": 5})
    assert asked == [["decode:64"]], "the peer runs once for all works"
