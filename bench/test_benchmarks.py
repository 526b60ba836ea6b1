"""The rows of `bench.summary` under pytest-benchmark, a group each; `make bench`. The table stands after the tests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from bench.summary import GROUPS, Case, cases, why_not


def parameters() -> list[Any]:
    found: list[Any] = []
    for group in GROUPS:
        if reason := why_not(group):
            found.append(pytest.param(Case(group, "", lambda: None), id=group, marks=pytest.mark.skip(reason=reason)))
        else:
            found += [pytest.param(case, id=f"{group}: {case.work}") for case in cases(group)]
    return found


@pytest.mark.parametrize("case", parameters())
def test_benchmark(benchmark: Any, case: Case, measured: list[Any]) -> None:
    benchmark.group = case.group
    row = benchmark.pedantic(case.run, rounds=1, iterations=1)  # the scripts have their own rounds
    benchmark.extra_info.update(asdict(row))
    measured.append(row)
    assert row.ours > 0
    if case.group == "gpu-attention":
        assert row.of_limit < 1.2, "faster than reading the same bytes: something was not read"
