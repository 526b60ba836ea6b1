"""What happens to tables when full blocks become known: identities, and one block in place of two equal ones.

With several groups the anchor, which has the chain, comes first for all rows, then each other group for all rows.
"""

from __future__ import annotations

import numpy as np

from .block_pool import BlockPool, Ints
from .companions import Companions
from .errors import require
from .prefix_cache import PrefixCache, Tokens
from .rows import Rows
from .tables import BlockTables, ranges

_BEGINNING, _ZERO, _ONE = np.zeros(1, np.int64), np.array(0), np.array(1)


def commit_decoded(
    requests: Rows, pool: BlockPool, cache: PrefixCache, rows: Ints, known: Ints, lengths: Ints, tokens: object
) -> bool:
    """Commit as after a decode step: one token of each of `rows [n]` is open, and its block private.

    False, with nothing done, when this is not so, or `tokens` are not a flat int32 array of as many.
    """
    n, tables, size = len(rows), requests.groups[0], cache.size
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.shape != (n,) or pool.sharing:
        return False
    if np.count_nonzero(lengths - known == _ONE) < n:
        return False
    columns = known // size
    offsets = columns * size
    np.subtract(known, offsets, out=offsets)
    blocks = tables.flat.take(rows * tables.width + columns).astype(np.int64)
    if not cache.learn_one_each(blocks, offsets, tokens):
        return False
    requests.known[rows] = known + _ONE
    full = (offsets == size - _ONE).nonzero()[0]
    full = full[requests.root.take(rows.take(full)) > 0]
    if len(full):
        heads = rows.take(full)
        _identify(
            requests, pool, cache, tables, heads, np.arange(len(full)), columns.take(full), blocks.take(full), True
        )
    return True


def commit_run(
    requests: Rows, pool: BlockPool, cache: PrefixCache, rows: Ints, known: Ints, lengths: Ints, tokens: object
) -> bool:
    """Commit as after a prompt: all tokens of one request that are open, in blocks that know nothing of them yet.

    False, with nothing done, when this is not so, or `tokens` are not a flat int32 array of as many.
    """
    if len(rows) != 1 or not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        return False
    row, begin, end, size = int(rows[0]), int(known[0]), int(lengths[0]), requests.block_size
    table, first = requests.groups[0].tables[row], begin // size
    blocks = table[first : -(-end // size)].astype(np.int64)
    if len(tokens) != end - begin or begin == end or not tokens.flags.c_contiguous:
        return False
    if not cache.learn_run(blocks, begin - first * size, tokens):
        return False
    requests.known[row] = end
    root, blocks = int(requests.root[row]), blocks[: end // size - first]
    if len(blocks) and root and not cache.identify_new(blocks, first, int(table[first - 1]) if first else -1, root):
        _adopt_chain(requests, pool, cache, 0, rows, np.array([first]), np.array([end // size]), True)
    return True


def learn(
    tables: BlockTables, cache: PrefixCache, rows: Ints, known: Ints, counts: Ints, tokens: Tokens
) -> tuple[int, int] | None:
    """The next `counts[i]` tokens of `rows[i]`, after the `known[i]` first, are `tokens`, row after row: their blocks hold them now.

    Returns the row's place in the batch and the position of a token that contradicts what is known of a shared block, with nothing
    changed that can be seen; None when all is well.
    """
    size, n = tables.block_size, len(rows)
    if n == 1 and len(tokens):
        first, stop = int(known[0]) // size, -(-(int(known[0]) + len(tokens)) // size)
        blocks = tables.tables[rows[0], first:stop].astype(np.int64)
        if cache.learn_run(blocks, int(known[0]) - first * size, tokens):
            return None
    places, owners = ranges(known, counts), np.repeat(np.arange(n), counts)
    columns = places // size
    blocks = tables.at(rows.take(owners), columns).astype(np.int64)
    wrong = cache.learn(blocks, places - columns * size, tokens)
    return (int(owners[wrong[0]]), int(places[wrong[0]])) if len(wrong) else None


def adopt(
    requests: Rows, pool: BlockPool, cache: PrefixCache, companions: Companions | None, rows: Ints, first: Ints, stop: Ints,
    replace: bool = True,
) -> None:  # fmt: skip
    """Give columns `[first[i], stop[i])` of `rows[i]`, whose tokens are all known, their identities.

    A block whose identity another one has gives way to that one where it can, unless `replace` is False.
    """
    anchor = companions.anchor if companions else 0
    _adopt_chain(requests, pool, cache, anchor, rows, first, stop, replace)
    if companions:
        for g in companions.others:
            _adopt_beside(requests, pool, cache, companions, g, rows, first, stop, replace)


def _adopt_chain(
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
            _adopt_chain(requests, pool, cache, g, rows[here], first[here], stop[here], replace)
        return
    _identify(requests, pool, cache, tables, rows, owners, columns, blocks, one_each, replace)


def _identify(
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
    canonical = cache.identify(blocks, columns, starts, above, requests.root.take(heads))
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
    cache.copy(anchors, blocks)
    nothing_above = np.full(len(blocks), -1)
    parents = companions.parents(g, anchors)
    canonical = cache.identify(blocks, columns, np.arange(len(blocks)), nothing_above, parents)
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


def check_tokens(requests: Rows, cache: PrefixCache, companions: Companions | None, rows: Ints) -> None:
    """Raises AssertionError unless every committed full block of `rows` has the identity that its place gives it."""
    size, tables = requests.block_size, requests.groups[companions.anchor if companions else 0].tables
    for row in rows.tolist():
        known, length = int(requests.known[row]), int(requests.lengths[row])
        require(0 <= known <= length, f"row {row} has {known} committed tokens of {length}")
        for column in range(-(-known // size)):
            block = int(tables[row, column])
            filled = min(size, known - column * size)
            require(
                cache.filled[block] >= filled,
                f"row {row}: block {block} knows {cache.filled[block]} of {filled} tokens",
            )
            if filled < size or not requests.root[row]:
                continue
            above = cache.serial[tables[row, column - 1]] if column else requests.root[row]
            require(cache.serial[block] > 0, f"row {row}: block {block} in column {column} is full and has no identity")
            require(cache.parent[block] == above, f"row {row}: block {block} does not continue the block before it")
            if companions:
                _check_beside(requests, cache, companions, row, column, block)


def _check_beside(
    requests: Rows, cache: PrefixCache, companions: Companions, row: int, column: int, anchor: int
) -> None:
    for g in companions.others:
        block = int(requests.groups[g].tables[row, column])
        parent = companions.parents(g, np.array([anchor]))[0]
        require(
            block < 0 or (cache.serial[block] > 0 and cache.parent[block] == parent),
            f"row {row}: block {block} of group {g} in column {column} is not known beside block {anchor}",
        )
