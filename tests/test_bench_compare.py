"""The logic of `make bench-compare`, on made-up figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from bench.compare import confirmed, regressions, relative
from bench.results import Row


def row(work: str, ours: float, limit: float | None = None, group: str = "control-plane") -> Row:
    return Row(group, work, ours, "us", limit=limit)


def test_only_what_is_more_than_30_percent_slower_is_reported() -> None:
    saved = [row("same", 1.0), row("faster", 1.0), row("at the edge", 1.0), row("over it", 1.0), row("gone", 1.0)]
    now = [row("same", 1.0), row("faster", 0.2), row("at the edge", 1.3), row("over it", 1.31), row("new", 9.0)]
    lines = regressions(saved, now)
    assert len(lines) == 1
    assert lines[0].startswith("control-plane: over it: 1.31 times the saved run")


def test_works_of_one_name_in_two_groups_are_two() -> None:
    saved = [row("decode", 1.0), row("decode", 10.0, group="cpu-attention")]
    assert regressions(saved, [row("decode", 10.0, group="cpu-attention")]) == []
    assert len(regressions(saved, [row("decode", 10.0)])) == 1


def test_only_what_a_second_measurement_shows_as_well_is_a_regression() -> None:
    saved = [row("noisy", 1.0), row("slow", 1.0), row("fine", 1.0)]
    asked: list[str] = []

    def again(slow: Row) -> Row:
        asked.append(slow.work)
        return row(slow.work, {"noisy": 1.1, "slow": 1.6}[slow.work])

    lines = confirmed(saved, [row("noisy", 1.5), row("slow", 1.4), row("fine", 1.2)], again)
    assert asked == ["noisy", "slow"], "what was not slow is not measured again"
    assert len(lines) == 1 and lines[0].startswith("control-plane: slow: 1.60 times")


def from_list(values: list[float]) -> Callable[[], float]:
    one: Iterator[float] = iter(values)
    return lambda: next(one)


def test_a_machine_twice_as_slow_is_no_regression() -> None:
    figures = [10.0, 11.0, 9.0, 10.0, 50.0, 10.0, 8.0]
    ours = from_list(figures)
    fast = relative(lambda: row("x", ours()), from_list([2.0] * 7))
    ours = from_list([2 * f for f in figures])
    slow = relative(lambda: row("x", ours()), from_list([4.0] * 7))
    assert fast.ours == slow.ours == 5.0, "the median, so that one bad run of seven does not count"
    assert regressions([fast], [slow]) == []


@pytest.mark.parametrize(("group", "unit"), [("cpu-attention", 4.0), ("control-plane", 5.0)])
def test_attention_is_measured_by_the_reading_of_the_same_moment_and_a_budget_is_no_yardstick(
    group: str, unit: float
) -> None:
    found = relative(lambda: row("x", 20.0, limit=4.0, group=group), lambda: 5.0)
    assert found.ours == 20.0 / unit
