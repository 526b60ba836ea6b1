"""Every invariant of the allocator, checked from the outside: what the arrays say of one another must agree."""

from __future__ import annotations

import numpy as np

from .array_types import Ints
from .block_pool import BlockPool
from .companions import Companions
from .errors import require
from .preemption import Preemption
from .prefix_cache import PrefixCache
from .rows import Rows


def check(requests: Rows, pool: BlockPool, cache: PrefixCache | None, preemption: Preemption) -> None:
    """Raises AssertionError that says what broke."""
    pool.check()
    live = np.array(sorted(requests.row_of.values()), np.int64)
    require(len(np.unique(live)) == len(live), "two ids have one row: {}", requests.row_of)
    require(
        np.array_equal((requests.lengths >= 0).nonzero()[0], live),
        "rows with a length and no id: {}, {}",
        requests.lengths,
        live,
    )
    held = preemption.held.references(pool)
    for g, tables in enumerate(requests.groups):
        columns = np.arange(tables.tables.shape[1])
        mapped = columns < tables.columns(np.maximum(requests.lengths, 0))[:, None]
        mapped &= columns >= tables.begin[:, None]
        require(
            np.array_equal(mapped, tables.tables >= 0),
            "group {}: tables and lengths disagree: {}, {}, {}",
            g,
            tables.tables,
            requests.lengths,
            tables.begin,
        )
        seen = tables.group.horizon(np.maximum(requests.lengths, 0)) // requests.block_size
        require(
            (tables.begin <= seen).all(), "group {}: blocks within the horizon are gone: {}, {}", g, tables.begin, seen
        )
        held += np.bincount(tables.tables[mapped], minlength=pool.num_blocks)
        ordered = np.sort(tables.tables, 1)
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        require(not twice.any(), "group {}: a row holds a block twice: {}", g, tables.tables)
    require(np.array_equal(held, pool.ref_count), "tables hold {}, reference counts are {}", held, pool.ref_count)
    preemption.check()
    if cache:
        cache.check()
        _check_tokens(requests, cache, live)


def _check_tokens(requests: Rows, cache: PrefixCache, rows: Ints) -> None:
    """Raises AssertionError unless every committed full block of `rows` has the identity that its place gives it."""
    size, tables = requests.block_size, requests.groups[cache.anchor].tables
    for row in rows.tolist():
        known, length = int(requests.known[row]), int(requests.lengths[row])
        require(0 <= known <= length, "row {} has {} committed tokens of {}", row, known, length)
        for column in range(-(-known // size)):
            block = int(tables[row, column])
            filled = min(size, known - column * size)
            require(
                cache.tokens.filled[block] >= filled,
                "row {}: block {} knows {} of {} tokens",
                row,
                block,
                cache.tokens.filled[block],
                filled,
            )
            if filled < size or not requests.root[row]:
                continue
            above = cache.serial[tables[row, column - 1]] if column else requests.root[row]
            require(
                cache.serial[block] > 0, "row {}: block {} in column {} is full and has no identity", row, block, column
            )
            require(cache.parent[block] == above, "row {}: block {} does not continue the block before it", row, block)
            if cache.companions:
                _check_beside(requests, cache, cache.companions, row, column, block)


def _check_beside(
    requests: Rows, cache: PrefixCache, companions: Companions, row: int, column: int, anchor: int
) -> None:
    for g in companions.others:
        block = int(requests.groups[g].tables[row, column])
        parent = companions.parents(g, np.array([anchor]))[0]
        require(
            block < 0 or (cache.serial[block] > 0 and cache.parent[block] == parent),
            "row {}: block {} of group {} in column {} is not known beside block {}",
            row,
            block,
            g,
            column,
            anchor,
        )
