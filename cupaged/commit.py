"""What happens to tables when full blocks become known: identities, and one block in place of two equal ones."""

from __future__ import annotations

import numpy as np

from .block_pool import BlockPool, Ints, require
from .prefix_cache import PrefixCache, Tokens
from .rows import Rows
from .tables import ranges

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
        _identify(requests, pool, cache, heads, np.arange(len(full)), columns.take(full), blocks.take(full), True)
    return True


def learn(
    requests: Rows, cache: PrefixCache, rows: Ints, known: Ints, counts: Ints, tokens: Tokens
) -> tuple[int, int] | None:
    """The next `counts[i]` tokens of `rows[i]`, after the `known[i]` first, are `tokens`, row after row: their blocks hold them now.

    Returns the row's place in the batch and the position of a token that contradicts what is known of a shared block, with nothing
    changed that can be seen; None when all is well.
    """
    tables, size, n = requests.groups[0], requests.block_size, len(rows)
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
    requests: Rows, pool: BlockPool, cache: PrefixCache, rows: Ints, first: Ints, stop: Ints, replace: bool = True
) -> None:
    """Give columns `[first[i], stop[i])` of `rows[i]`, whose tokens are all known, their identities, as row by row would.

    A block whose identity another one has gives way to that one where it can, unless `replace` is False.
    """
    tables = requests.groups[0]
    if len(rows) == 1:
        columns = np.arange(first[0], stop[0])
        owners, one_each = np.zeros(len(columns), np.int64), len(columns) == 1
        blocks = tables.tables[rows[0], first[0] : stop[0]].astype(np.int64)
    else:
        counts = stop - first
        one_each = bool(np.count_nonzero(counts == 1) == len(rows))
        owners = np.arange(len(rows)) if one_each else np.repeat(np.arange(len(rows)), counts)
        columns = first if one_each else ranges(first, counts)
        blocks = tables.at(rows.take(owners), columns).astype(np.int64)
    if pool.sharing and len(rows) > 1 and (pool.occurrences(blocks) > 1).any():
        for i in range(len(rows)):  # rows with blocks in common: the first one names them
            here = slice(i, i + 1)
            adopt(requests, pool, cache, rows[here], first[here], stop[here], replace)
        return
    _identify(requests, pool, cache, rows, owners, columns, blocks, one_each, replace)


def _identify(
    requests: Rows,
    pool: BlockPool,
    cache: PrefixCache,
    rows: Ints,
    owners: Ints,
    columns: Ints,
    blocks: Ints,
    one_each: bool,
    replace: bool = True,
) -> None:
    """`adopt` for `blocks [m]` in `columns [m]` of `rows[owners[m]]`, of which at most one row has each; `one_each` row has one of them."""
    tables = requests.groups[0]
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

    twins = (canonical != blocks).nonzero()[0]
    if not len(twins):
        return
    of = rows.take(owners.take(twins))
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


def check_tokens(requests: Rows, cache: PrefixCache, rows: Ints) -> None:
    """Raises AssertionError unless every committed full block of `rows` has an identity that continues the one before it."""
    size, tables = requests.block_size, requests.groups[0].tables
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
            if filled == size and requests.root[row]:
                above = cache.serial[tables[row, column - 1]] if column else requests.root[row]
                require(
                    cache.serial[block] > 0, f"row {row}: block {block} in column {column} is full and has no identity"
                )
                require(cache.parent[block] == above, f"row {row}: block {block} does not continue the block before it")
