"""Blocks that leave the horizon of their group of layers when requests grow, and where one can no longer be truncated to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .array_types import Ints
from .block_pool import BlockPool
from .rows import Rows
from .steps import Step
from .tables import BlockTables, laid_by_row, ranges


@dataclass(frozen=True, slots=True)
class Leaving:
    """Blocks that a growth gives back before it takes any."""

    cuts: list[tuple[Ints, Ints, Ints]]  # of each group: positions in the batch, first column and end of what leaves
    blocks: Ints  # in the order of release
    tables: Ints  # how many of them belong to one table, and then to the next
    freed: int  # how many nobody else holds

    def unmap(self, groups: list[BlockTables], steps: list[Step]) -> None:
        """Make -1 of the entries, in the tables and in those of each group's step."""
        for tables, step, (at, first, stop) in zip(groups, steps, self.cuts, strict=True):
            rows = step.rows.take(at)
            tables.flat[tables.entries(rows, first, stop)] = -1
            tables.begin[rows] = stop
            width = step.block_tables.shape[1]
            step.block_tables.reshape(-1)[ranges(at * width + first, stop - first)] = -1


def find_leaving(
    groups: list[BlockTables], pool: BlockPool, rows: Ints, lengths: Ints, counts: Ints | None
) -> Leaving | None:
    """What lies wholly before the first token that the next query sees, in `rows [n]` that have `lengths` and get `counts` tokens.

    Rows that get no token keep everything: a truncation to an earlier length may follow.
    """
    cuts, blocks, sizes = [], [], []
    for tables in groups:
        begin = tables.begin.take(rows)
        stop = tables.group.horizon(lengths) // tables.block_size
        passed = stop > begin
        if counts is not None:
            passed &= counts > 0
        at = passed.nonzero()[0]
        cuts.append((at, begin.take(at), stop.take(at)))
        blocks.append(tables.flat.take(tables.entries(rows.take(at), *cuts[-1][1:])))
        size = np.zeros(len(rows), np.int64)
        size[at] = cuts[-1][2] - cuts[-1][1]
        sizes.append(size)
    if not any(map(len, blocks)):
        return None
    laid, table_sizes = laid_by_row(blocks, sizes)
    laid = laid.astype(np.int64, copy=False)
    return Leaving(cuts, laid, table_sizes, pool.would_free(laid))


def check_horizon(requests: Rows, rows: Ints, lengths: Ints) -> None:
    """Raises ValueError unless every group has all blocks that the next token after `lengths [n]` sees, or it sees none."""
    size = requests.block_size
    for g, tables in enumerate(requests.groups):
        if not tables.limited:
            continue
        column = tables.group.horizon(lengths) // size
        gone = (tables.begin.take(rows) > column) & (column * size < lengths)
        if gone.any():
            i = int(np.argmax(gone))
            least = tables.group.beyond(int(tables.begin[rows[i]]) * size)
            raise ValueError(
                f"lengths: expected at least {least} for request {requests.names[rows[i]]!r}, got {lengths[i]}: the tokens that "
                f"group {g} would see before it are gone; truncate to 0 and compute them again"
            )
