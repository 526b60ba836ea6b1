"""Block tables of one group of layers, and what changed in them since the last step.

A table is a row of one `[rows, columns] int32` array, -1 where no block is mapped; rows and columns grow by half when they run out,
so that no step pays for it. Of a request's columns those from `begin` on are mapped: the others left the group's horizon.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .array_types import Blocks, Ints
from .groups import Group

UNCHANGED = np.iinfo(np.int32).max


class BlockTables:
    """The tables of all requests. Methods trust their caller."""

    def __init__(self, block_size: int, rows: int, group: Group) -> None:
        self.block_size, self.group = block_size, group
        self.limited = group.limited
        self.tables = np.full((rows, 8), -1, np.int32)  # [rows, columns]
        self.flat = self.tables.reshape(-1)  # the same memory
        self.width = np.array(8)  # columns
        self.begin: Ints = np.zeros(rows, np.int64)  # first mapped column
        self.changed = np.full(
            rows, UNCHANGED, np.int32
        )  # first column that may differ from what the last step reported
        self.any_changed = False
        self._window: npt.NDArray[Any] = self.tables[:, 0]  # see `window`
        self._window_columns = 0
        self._padding = np.zeros(0, np.int64)

    def columns(self, lengths: Ints) -> Ints:
        """Table columns that `lengths [n]` tokens need."""
        result: Ints = (lengths + (self.block_size - 1)) // self.block_size
        return result

    def widen(self, columns: int) -> None:
        """Make room for `columns` in every table."""
        rows, width = self.tables.shape
        if columns > width:
            wide = np.full((rows, max(columns, width + width // 2)), -1, np.int32)
            wide[:, :width] = self.tables
            self.tables, self.flat, self.width = wide, wide.reshape(-1), np.array(wide.shape[1])

    def at(self, rows: Ints, columns: Ints) -> Blocks:
        """Block ids `[n]` at `(rows[i], columns[i])`."""
        return self.flat.take(rows * self.tables.shape[1] + columns)

    def map(self, rows: Ints, columns: Ints, blocks: Blocks) -> None:
        """Set the entries at `(rows[i], columns[i])`."""
        self.flat[rows * self.tables.shape[1] + columns] = blocks

    def cut(self, rows: Ints, lengths: Ints, old: Ints) -> tuple[Blocks, Ints]:
        """Unmap the columns between `lengths` and `old` tokens; returns their blocks, and how many of each row."""
        if len(rows) == 1 and not self.limited:
            row, begin = int(rows[0]), -(-int(lengths[0]) // self.block_size)
            table = self.tables[row, begin : -(-int(old[0]) // self.block_size)]
            blocks = table.copy()
            table.fill(-1)
            self.changed[row] = min(int(self.changed[row]), begin)
            self.any_changed = True
            return blocks, np.array([len(blocks)])
        first, stop = self.columns(lengths), self.columns(old)
        self.mark(rows, first)
        if self.limited:
            begins = self.begin.take(rows)
            self.begin[rows] = np.minimum(begins, first)
            first = np.maximum(first, begins)
        at = (first < stop).nonzero()[0]
        entries = self.entries(rows.take(at), first.take(at), stop.take(at))
        blocks = self.flat.take(entries)
        self.flat[entries] = -1
        return blocks, stop - first

    def entries(self, rows: Ints, first: Ints, stop: Ints) -> Ints:
        """Indices into `flat` of columns `[first[i], stop[i])` of `rows[i]`, row after row."""
        return ranges(rows * self.tables.shape[1] + first, stop - first)

    def kernel_blocks(self, rows: Ints, first: Ints, stop: Ints, per: int) -> Blocks:
        """Kernel blocks in kernel columns `[first[i], stop[i])` of `rows[i]`, row after row; `per` of them make a block."""
        at = ranges(rows * (self.tables.shape[1] * per) + first, stop - first)
        return (self.flat.take(at // per) * per + at % per).astype(np.int32)

    def snapshot(self, rows: Ints, columns: int, extra: int) -> Blocks:
        """The first `columns` columns of `rows`, row after row, then room for `extra` more values: one contiguous piece.

        A row is read as one element of `columns * 4` bytes, in a single gather that needs no index per entry.
        """
        padding = -(-extra // columns)
        if len(rows) == 1 or padding > 64 * len(
            rows
        ):  # many tokens of few sequences: room for them costs nothing when it is not filled
            packed = np.empty(len(rows) * columns + extra, np.int32)
            for i, row in enumerate(rows.tolist()):
                packed[i * columns : (i + 1) * columns] = self.tables[row, :columns]
            return packed
        if padding > len(self._padding):
            self._padding = np.zeros(2 * padding, np.int64)
        return self.window(columns)[np.concatenate((rows, self._padding[:padding]))].view(np.int32)

    def window(self, columns: int) -> npt.NDArray[np.void]:
        """The first `columns` columns of every row, each row one element: a view `[rows]`."""
        if columns != self._window_columns or self._window.base is not self.tables:
            kind = np.dtype((np.void, columns * 4))
            self._window = np.ndarray(len(self.tables), kind, self.tables, strides=self.tables.strides[:1])
            self._window_columns = columns
        return self._window

    def mark(self, rows: Ints, columns: Ints | int) -> None:
        """Note that `rows` may differ from `columns` on, for the next step's delta."""
        self.changed[rows] = (
            0 if isinstance(columns, int) and not columns else np.minimum(self.changed.take(rows), columns)
        )
        self.any_changed = True

    def add_rows(self, count: int) -> None:
        """Make room for `count` rows in all."""
        old, width = self.tables.shape
        tables = np.full((count, width), -1, np.int32)
        tables[:old] = self.tables
        self.tables, self.flat = tables, tables.reshape(-1)
        self.begin = extended(self.begin, count, 0)
        self.changed = extended(self.changed, count, UNCHANGED)


def laid_by_row(blocks: Sequence[npt.NDArray[Any]], sizes: Sequence[Ints]) -> tuple[npt.NDArray[Any], Ints]:
    """Blocks of several groups, row after row and in a row group after group; and how many each table has, in this order.

    `blocks[g]` are those of group g, row after row, `sizes[g] [n]` of them in each row.
    """
    if len(blocks) == 1:
        return blocks[0], sizes[0]
    row = np.concatenate([np.repeat(np.arange(len(size)), size) for size in sizes])
    laid = np.concatenate(blocks).astype(np.int64)
    return laid.take(np.argsort(row, kind="stable")), np.stack(sizes, 1).reshape(-1)


def cut(groups: list[BlockTables], rows: Ints, lengths: Ints, old: Ints) -> tuple[npt.NDArray[Any], Ints]:
    """Unmap what lies between `lengths` and `old` tokens of `rows` in all tables; returns arguments of `BlockPool.release`."""
    if len(groups) == 1:
        return groups[0].cut(rows, lengths, old)
    blocks, sizes = zip(*(tables.cut(rows, lengths, old) for tables in groups), strict=True)
    return laid_by_row(blocks, sizes)


def ranges(starts: Ints, counts: Ints) -> Ints:
    """`starts[0], starts[0] + 1, ...` with `counts[0]` values, then those of `starts[1]`, and so on."""
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - ends + counts, counts) + np.arange(total)


def extended(array: npt.NDArray[Any], size: int, fill: int) -> npt.NDArray[Any]:
    """`array [n]` and then `fill`, up to `size` values."""
    result = np.full(size, fill, array.dtype)
    result[: len(array)] = array
    return result
