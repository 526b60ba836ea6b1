"""What happens to tables when full blocks become known: identities, and one block in place of two equal ones."""

from __future__ import annotations

import numpy as np

from .block_pool import BlockPool, Ints, require
from .prefix_cache import PrefixCache
from .rows import Rows
from .tables import ranges


def adopt(
    requests: Rows, pool: BlockPool, cache: PrefixCache, rows: Ints, first: Ints, stop: Ints, replace: bool = True
) -> None:
    """Give columns `[first[i], stop[i])` of `rows[i]`, whose tokens are all known, their identities, as row by row would.

    A block whose identity another one has gives way to that one where it can, unless `replace` is False.
    """
    tables = requests.groups[0]
    counts = stop - first
    one_each = np.count_nonzero(counts == 1) == len(rows)
    owners = np.arange(len(rows)) if one_each else np.repeat(np.arange(len(rows)), counts)
    columns = first if one_each else ranges(first, counts)
    blocks = tables.at(rows.take(owners), columns).astype(np.int64)
    if pool.sharing and len(rows) > 1 and (pool.occurrences(blocks) > 1).any():
        for i in range(len(rows)):  # rows with blocks in common: the first one names them
            here = slice(i, i + 1)
            adopt(requests, pool, cache, rows[here], first[here], stop[here], replace)
        return
    unnamed = (cache.serial.take(blocks) == 0).nonzero()[0]  # others may have named the first of a row's blocks
    if len(unnamed) < len(blocks):
        if not len(unnamed):
            return
        columns, owners, blocks = columns.take(unnamed), owners.take(unnamed), blocks.take(unnamed)
    begins = np.ones(len(owners), np.bool_)
    np.not_equal(owners[1:], owners[:-1], out=begins[1:])
    starts = begins.nonzero()[0]
    heads, before = rows.take(owners.take(starts)), columns.take(starts) - 1
    above = tables.at(heads, np.maximum(before, 0)).astype(np.int64)
    above[before < 0] = -1
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
