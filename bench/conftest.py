"""Prints what the benchmarks measured as one table after pytest-benchmark's own."""

from __future__ import annotations

from typing import Any

import pytest

from bench.results import Row
from bench.summary import GROUPS, report, why_not

_ROWS: list[Row] = []


@pytest.fixture
def measured() -> list[Row]:
    """Rows that the summary shows."""
    return _ROWS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _ROWS:
        terminalreporter.section("summary")
        terminalreporter.write_line(report(_ROWS, {group: why_not(group) for group in GROUPS}))
