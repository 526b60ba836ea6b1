"""How requests come to hold the same blocks: forks, and the reordering of a beam search. Neither takes a block."""

from __future__ import annotations

import numpy as np

from .array_types import Ints
from .block_pool import BlockPool
from .rows import Rows
from .tables import laid_by_row


def fork(requests: Rows, pool: BlockPool, sources: Ints, targets: Ints) -> None:
    """Give each of the rows `targets [n]`, which have no request yet, all that `sources[i]` has."""
    lengths = requests.lengths.take(sources)
    for tables in requests.groups:
        columns = tables.columns(lengths)
        pool.acquire(tables.flat.take(tables.entries(sources, tables.begin.take(sources), columns)))
        tables.tables[targets] = tables.tables.take(sources, 0)
        tables.begin[targets] = tables.begin.take(sources)
        tables.mark(targets, 0)
    _take_over(requests, targets, sources)


def reorder(requests: Rows, pool: BlockPool, rows: Ints, sources: Ints) -> None:
    """Give each of `rows [n]` what row `rows[sources[i]]` had, for all of them at once."""
    moved = (sources != np.arange(len(sources))).nonzero()[0]
    if not len(moved):
        return
    targets, origins = rows.take(moved), rows.take(sources.take(moved))
    lengths = requests.lengths.take(rows)
    lost, sizes = [], []
    for tables in requests.groups:
        window = tables.window(int(tables.columns(lengths).max()) or 1)
        old, new = window[targets], window[origins]
        before, after = old.view(np.int32), new.view(np.int32)
        differs = (before != after).nonzero()[0]  # sharing leaves most entries as they are
        gained, gone = after.take(differs), before.take(differs)
        pool.acquire(gained[gained >= 0])
        held = gone >= 0
        lost.append(gone[held])
        sizes.append(np.bincount(differs[held] // (len(before) // len(moved)), minlength=len(moved)))
        window[targets] = new
        if tables.limited:
            tables.begin[targets] = tables.begin.take(origins)
        tables.mark(targets, 0)
    pool.release(*laid_by_row(lost, sizes))
    _take_over(requests, targets, origins)


def _take_over(requests: Rows, targets: Ints, sources: Ints) -> None:
    for values in (requests.lengths, requests.known, requests.root):
        values[targets] = values.take(sources)
