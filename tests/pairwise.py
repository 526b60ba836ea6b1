"""Covering arrays: few combinations in which every two values of different factors meet at least once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = dict[str, Any]


def cover(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows that hold every pair of values, the same at each call so that compiled kernels are found again.

    Greedy: a row starts with an uncovered pair; each further factor takes the value that meets the most uncovered pairs.
    """
    order = list(factors)
    left = dict.fromkeys(_pairs(factors))  # a dict keeps its order
    rows: list[Row] = []
    while left:
        row = dict(next(iter(left)))
        for name in [name for name in order if name not in row]:

            def gain(value: Any, name: str = name, row: Row = row) -> int:
                met = [sorted([held, (name, value)], key=lambda x: order.index(x[0])) for held in row.items()]
                return sum(tuple(pair) in left for pair in met)

            row[name] = max(factors[name], key=gain)
        rows.append({name: row[name] for name in order})
        for pair in combinations(rows[-1].items(), 2):
            left.pop(pair, None)
    return rows


def uncovered(rows: list[Row], factors: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Pairs of `factors` that no row holds."""
    held = {pair for row in rows for pair in combinations([(name, row[name]) for name in factors], 2)}
    return [pair for pair in _pairs(factors) if pair not in held]


def _pairs(factors: Mapping[str, Sequence[Any]]) -> Iterator[Any]:
    for a, b in combinations(factors, 2):
        yield from product([(a, x) for x in factors[a]], [(b, y) for y in factors[b]])
