"""What happens to tables when full blocks get identities: one block in place of two equal ones.

With several groups the anchor, which has the chain, comes first for all rows, then each other group for all rows.
"""

from __future__ import annotations

import numpy as np

from .array_types import Ints
from .block_pool import BlockPool
from .companions import Companions
from .identify import identify
from .prefix_cache import PrefixCache
from .rows import Rows
from .tables import BlockTables, ranges

_BEGINNING, _ZERO = np.zeros(1, np.int64), np.array(0)


def adopt(
    requests: Rows, pool: BlockPool, cache: PrefixCache, companions: Companions | None, rows: Ints, first: Ints, stop: Ints,
    replace: bool = True,
) -> None:  # fmt: skip
    """Give columns `[first[i], stop[i])` of `rows[i]`, whose tokens are all known, their identities.

    A block whose identity another one has gives way to that one where it can, unless `replace` is False.
    """
    anchor = companions.anchor if companions else 0
    adopt_chain(requests, pool, cache, anchor, rows, first, stop, replace)
    if companions:
        for g in companions.others:
            _adopt_beside(requests, pool, cache, companions, g, rows, first, stop, replace)


def adopt_chain(
    requests: Rows, pool: BlockPool, cache: PrefixCache, g: int, rows: Ints, first: Ints, stop: Ints, replace: bool
) -> None:
    """`adopt` for group `g`, which has the chain, as row by row would."""
    tables = requests.groups[g]
    if len(rows) == 1:
        columns = np.arange(first[0], stop[0])
        owners, one_each = np.zeros(len(columns), np.int64), len(columns) == 1
        blocks = tables.tables[rows[0], first[0] : stop[0]].astype(np.int64)
    else:
        one_each = bool(np.count_nonzero(stop - first == 1) == len(rows))
        owners, columns = _places(first, stop)
        blocks = tables.at(rows.take(owners), columns).astype(np.int64)
    if pool.sharing and len(rows) > 1 and (pool.occurrences(blocks) > 1).any():
        for i in range(len(rows)):  # rows with blocks in common: the first one names them
            here = slice(i, i + 1)
            adopt_chain(requests, pool, cache, g, rows[here], first[here], stop[here], replace)
        return
    identify_in_tables(requests, pool, cache, tables, rows, owners, columns, blocks, one_each, replace)


def identify_in_tables(
    requests: Rows,
    pool: BlockPool,
    cache: PrefixCache,
    tables: BlockTables,
    rows: Ints,
    owners: Ints,
    columns: Ints,
    blocks: Ints,
    one_each: bool,
    replace: bool = True,
) -> None:
    """`adopt` for `blocks [m]` in `columns [m]` of `rows[owners[m]]`, of which at most one row has each; `one_each` row has one of them."""
    unnamed = (cache.serial.take(blocks) == 0).nonzero()[0]  # others may have named the first of a row's blocks
    if len(unnamed) < len(blocks):
        if not len(unnamed):
            return
        columns, owners, blocks = columns.take(unnamed), owners.take(unnamed), blocks.take(unnamed)
    if len(rows) == 1 or one_each:
        starts = np.arange(len(owners)) if one_each else _BEGINNING
    else:
        begins = np.ones(len(owners), np.bool_)
        np.not_equal(owners[1:], owners[:-1], out=begins[1:])
        starts = begins.nonzero()[0]
    heads, before = rows.take(owners.take(starts)), columns.take(starts) - 1
    above = tables.at(heads, before).astype(np.int64)  # column -1 is somewhere else in the tables
    above[before < _ZERO] = -1
    canonical = identify(cache, blocks, columns, starts, above, requests.root.take(heads))
    _replace(requests, pool, cache, tables, rows.take(owners), columns, blocks, canonical, replace)


def _adopt_beside(
    requests: Rows,
    pool: BlockPool,
    cache: PrefixCache,
    companions: Companions,
    g: int,
    rows: Ints,
    first: Ints,
    stop: Ints,
    replace: bool,
) -> None:
    """`adopt` for group `g`, whose blocks are known by their anchors, as row by row would. What left the horizon stays unknown."""
    tables = requests.groups[g]
    owners, columns = _places(np.maximum(first, tables.begin.take(rows)), stop)
    blocks = tables.at(rows.take(owners), columns).astype(np.int64)
    if pool.sharing and len(rows) > 1 and (pool.occurrences(blocks) > 1).any():
        for i in range(len(rows)):
            here = slice(i, i + 1)
            _adopt_beside(requests, pool, cache, companions, g, rows[here], first[here], stop[here], replace)
        return
    unnamed = (cache.serial.take(blocks) == 0).nonzero()[0]
    if not len(unnamed):
        return
    columns, blocks, of = columns.take(unnamed), blocks.take(unnamed), rows.take(owners.take(unnamed))
    anchors = requests.groups[companions.anchor].at(of, columns).astype(np.int64)
    cache.tokens.copy(anchors, blocks)
    nothing_above = np.full(len(blocks), -1)
    parents = companions.parents(g, anchors)
    canonical = identify(cache, blocks, columns, np.arange(len(blocks)), nothing_above, parents)
    _replace(requests, pool, cache, tables, of, columns, blocks, canonical, replace)


def _places(first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Which row, and which column: `[first[i], stop[i])` of row i, row after row."""
    counts = np.maximum(stop - first, 0)
    if np.count_nonzero(counts == 1) == len(counts):
        return np.arange(len(counts)), first
    return np.repeat(np.arange(len(counts)), counts), ranges(first, counts)


def _replace(
    requests: Rows,
    pool: BlockPool,
    cache: PrefixCache,
    tables: BlockTables,
    rows: Ints,
    columns: Ints,
    blocks: Ints,
    canonical: Ints,
    replace: bool,
) -> None:
    """Put `canonical [n]` in the place of `blocks` at `(rows[i], columns[i])`, or make them twins where the block must stay."""
    twins = (canonical != blocks).nonzero()[0]
    if not len(twins):
        return
    of = rows.take(twins)
    free = (
        (pool.ref_count.take(blocks.take(twins)) == 1)
        & (requests.known.take(of) == requests.lengths.take(of))
        & replace
    )
    for block, other in zip(blocks[twins[~free]].tolist(), canonical[twins[~free]].tolist(), strict=True):
        cache.join(block, other)
    replaced, of = twins[free], of[free]
    if not len(replaced):
        return
    pool.take(0, reuse=canonical.take(replaced))
    tables.map(of, columns.take(replaced), canonical.take(replaced).astype(np.int32))
    pool.release(blocks.take(replaced))
    np.minimum.at(tables.changed, of, columns.take(replaced).astype(np.int32))
    tables.any_changed = True
