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


class Adoption:
    """Gives blocks in the tables of `requests` their identities in `cache`.

    A block whose identity another one has gives way to that one where it can, unless `replace` is False.
    """

    def __init__(self, requests: Rows, pool: BlockPool, cache: PrefixCache) -> None:
        self._requests, self._pool, self._cache = requests, pool, cache

    def adopt(self, rows: Ints, first: Ints, stop: Ints, replace: bool = True) -> None:
        """Identities for columns `[first[i], stop[i])` of `rows[i]`, whose tokens are all known; one column at least for each row."""
        self.adopt_chain(rows, first, stop, replace)
        companions = self._cache.companions
        if companions:
            for g in companions.others:
                self._adopt_beside(companions, g, rows, first, stop, replace)

    def adopt_chain(self, rows: Ints, first: Ints, stop: Ints, replace: bool = True) -> None:
        """`adopt` for the group that has the chain, as row by row would."""
        pool, tables = self._pool, self._requests.groups[self._cache.anchor]
        if len(rows) == 1:
            columns = np.arange(first[0], stop[0])
            owners = np.zeros(len(columns), np.int64)
            blocks = tables.tables[rows[0], first[0] : stop[0]].astype(np.int64)
        else:
            owners, columns = _places(first, stop)
            blocks = tables.at(rows.take(owners), columns).astype(np.int64)
        if pool.sharing and len(rows) > 1 and (pool.occurrences(blocks) > 1).any():
            for i in range(len(rows)):  # rows with blocks in common: the first one names them
                here = slice(i, i + 1)
                self.adopt_chain(rows[here], first[here], stop[here], replace)
            return
        self.adopt_blocks(rows, owners, columns, blocks, replace)

    def adopt_blocks(self, rows: Ints, owners: Ints, columns: Ints, blocks: Ints, replace: bool = True) -> None:
        """`adopt_chain` for `blocks [m]` in `columns [m]` of `rows[owners[m]]`; each row has one at least, and no two have the same."""
        tables = self._requests.groups[self._cache.anchor]
        one_each = len(blocks) == len(rows)
        unnamed = (self._cache.serial.take(blocks) == 0).nonzero()[
            0
        ]  # others may have named the first of a row's blocks
        if len(unnamed) < len(blocks):
            if not len(unnamed):
                return
            columns, owners, blocks = columns.take(unnamed), owners.take(unnamed), blocks.take(unnamed)
        if one_each:
            starts = np.arange(len(owners))
        elif len(rows) == 1:
            starts = _BEGINNING
        else:
            begins = np.ones(len(owners), np.bool_)
            np.not_equal(owners[1:], owners[:-1], out=begins[1:])
            starts = begins.nonzero()[0]
        heads, before = rows.take(owners.take(starts)), columns.take(starts) - 1
        above = tables.at(heads, before).astype(np.int64)  # column -1 is somewhere else in the tables
        above[before < _ZERO] = -1
        canonical = identify(self._cache, blocks, columns, starts, above, self._requests.root.take(heads))
        self._replace(tables, rows.take(owners), columns, blocks, canonical, replace)

    def _adopt_beside(self, companions: Companions, g: int, rows: Ints, first: Ints, stop: Ints, replace: bool) -> None:
        """`adopt` for group `g`, whose blocks are known by their anchors, as row by row would. What left the horizon stays unknown."""
        pool, cache, tables = self._pool, self._cache, self._requests.groups[g]
        owners, columns = _places(np.maximum(first, tables.begin.take(rows)), stop)
        blocks = tables.at(rows.take(owners), columns).astype(np.int64)
        if pool.sharing and len(rows) > 1 and (pool.occurrences(blocks) > 1).any():
            for i in range(len(rows)):
                here = slice(i, i + 1)
                self._adopt_beside(companions, g, rows[here], first[here], stop[here], replace)
            return
        unnamed = (cache.serial.take(blocks) == 0).nonzero()[0]
        if not len(unnamed):
            return
        columns, blocks, of = columns.take(unnamed), blocks.take(unnamed), rows.take(owners.take(unnamed))
        anchors = self._requests.groups[companions.anchor].at(of, columns).astype(np.int64)
        cache.tokens.copy(anchors, blocks)
        nothing_above = np.full(len(blocks), -1)
        parents = companions.parents(g, anchors)
        canonical = identify(cache, blocks, columns, np.arange(len(blocks)), nothing_above, parents)
        self._replace(tables, of, columns, blocks, canonical, replace)

    def _replace(
        self, tables: BlockTables, rows: Ints, columns: Ints, blocks: Ints, canonical: Ints, replace: bool
    ) -> None:
        """Put `canonical [n]` in the place of `blocks` at `(rows[i], columns[i])`, or make them twins where the block must stay."""
        twins = (canonical != blocks).nonzero()[0]
        if not len(twins):
            return
        requests, pool = self._requests, self._pool
        of = rows.take(twins)
        free = (
            (pool.ref_count.take(blocks.take(twins)) == 1)
            & (requests.known.take(of) == requests.lengths.take(of))
            & replace
        )
        for block, other in zip(blocks[twins[~free]].tolist(), canonical[twins[~free]].tolist(), strict=True):
            self._cache.join(block, other)
        replaced, of = twins[free], of[free]
        if not len(replaced):
            return
        pool.take(0, reuse=canonical.take(replaced))
        tables.map(of, columns.take(replaced), canonical.take(replaced).astype(np.int32))
        pool.release(blocks.take(replaced))
        np.minimum.at(tables.changed, of, columns.take(replaced).astype(np.int32))
        tables.any_changed = True


def _places(first: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """Which row, and which column: `[first[i], stop[i])` of row i, row after row."""
    counts = np.maximum(stop - first, 0)
    if np.count_nonzero(counts == 1) == len(counts):
        return np.arange(len(counts)), first
    return np.repeat(np.arange(len(counts)), counts), ranges(first, counts)
