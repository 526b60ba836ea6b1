"""The allocator's tables in another process: a scheduler owns them, a worker follows."""

from __future__ import annotations

import numpy as np

from .arguments import integer
from .array_types import Ints
from .steps import Delta
from .tables import ranges


class TableMirror:
    """Tables and lengths rebuilt from the deltas of all steps, in order.

    Attributes:
        tables: `[rows, columns] int32`, -1 where no block is mapped; row numbers are the allocator's.
        lengths: `[rows] int64`, 0 for a row without a request.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = integer(block_size, "block_size", 1)
        self.tables = np.full((8, 8), -1, np.int32)
        self.lengths = np.zeros(8, np.int64)
        self._begin = np.zeros(8, np.int64)  # first mapped column of each row
        self._serial = 0

    def apply(self, delta: Delta) -> None:
        """Bring tables and lengths to where they stood after the delta's step.

        Raises ValueError, with nothing changed, unless the delta is the next one, of steps with this block size.
        """
        if not isinstance(delta, Delta):
            raise TypeError(f"delta: expected what step.delta gives, got {type(delta).__name__}")
        if delta.serial != self._serial + 1:
            raise ValueError(
                f"delta: expected that of step {self._serial + 1}, got step {delta.serial}; apply every step's, in order"
            )
        columns = -(-delta.lengths // self.block_size)
        needed = int(np.maximum(columns - delta.first, 0).sum())
        if needed != len(delta.blocks):
            raise ValueError(
                f"delta: expected {needed} ids of blocks of {self.block_size} tokens, got {len(delta.blocks)}; give the mirror the "
                "block_size of the steps"
            )
        self._make_room(int(delta.rows.max(initial=-1)) + 1, int(columns.max(initial=0)))
        width = self.tables.shape[1]
        flat = self.tables.reshape(-1)
        used = -(-self.lengths[delta.rows] // self.block_size)
        flat[_entries(delta.rows * width, delta.first, used)] = -1
        flat[_entries(delta.rows * width, self._begin[delta.rows], np.minimum(delta.begin, used))] = -1
        flat[_entries(delta.rows * width, delta.first, columns)] = delta.blocks
        self.lengths[delta.rows], self._begin[delta.rows] = delta.lengths, delta.begin
        self._serial = delta.serial

    def _make_room(self, rows: int, columns: int) -> None:
        old_rows, old_columns = self.tables.shape
        if rows > old_rows or columns > old_columns:
            rows = old_rows if rows <= old_rows else max(rows, old_rows + old_rows // 2)
            columns = old_columns if columns <= old_columns else max(columns, old_columns + old_columns // 2)
            tables = np.full((rows, columns), -1, np.int32)
            lengths, begin = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
            tables[:old_rows, :old_columns] = self.tables
            lengths[:old_rows], begin[:old_rows] = self.lengths, self._begin
            self.tables, self.lengths, self._begin = tables, lengths, begin


def _entries(starts: Ints, first: Ints, stop: Ints) -> Ints:
    return ranges(starts + first, np.maximum(stop - first, 0))
