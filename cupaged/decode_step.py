"""The step that a running batch takes again and again: one token for each sequence, none of them writing into a shared block.

It does exactly what `Growth.extend` would, which serves every other case, with a third of its array operations: for a thousand
sequences each of them costs as much to call as to do. So operands are arrays made beforehand: a Python int is converted at every use.
"""

from __future__ import annotations

import numpy as np

from .array_types import Blocks, Int32s, Ints
from .block_pool import BlockPool
from .errors import OutOfBlocks
from .rows import MAX_TOKENS, Rows
from .steps import Step

_ZERO, _ONE = np.array(0), np.array(1)


class DecodeStep:
    """Extends rows of `requests` by one token with blocks of `pool`."""

    def __init__(self, requests: Rows, pool: BlockPool) -> None:
        self._requests, self._pool = requests, pool
        self._size = np.array(requests.block_size)
        self._counting: Int32s = np.zeros(0, np.int32)  # 0, 1, 2 ...

    def extend(self, rows: Ints, lengths: Ints) -> tuple[Step, Blocks]:
        """One more token for each of `rows [n]`, n > 0, which have `lengths`; returns the step, unnumbered, and the blocks taken."""
        tables, pool, size, n = self._requests.groups[0], self._pool, self._size, len(rows)
        column = lengths // size  # of the new token
        offset = column * size
        np.subtract(lengths, offset, out=offset)
        growing = (offset == _ZERO).nonzero()[0]
        if len(growing) > pool.num_free:
            raise OutOfBlocks(len(growing), pool.num_free)
        longest = int(lengths[lengths.argmax()]) + 1
        if longest > MAX_TOKENS:
            raise ValueError(f"n: a sequence holds at most 2**31 - 1 tokens, not {longest}")
        columns = -(-longest // tables.block_size)
        tables.widen(columns)
        step = Step(tables, rows, columns, n)
        blocks = pool.take(len(growing))  # the last thing that can fail; from here on, state changes

        entry = rows * tables.width
        entry += column
        if len(blocks):
            tables.flat[entry.take(growing)] = blocks
            step.block_tables[growing, column.take(growing)] = blocks
        slots = step.slot_mapping
        slots[:] = tables.flat.take(entry)
        slots *= size
        slots += offset
        total = lengths + _ONE
        self._requests.lengths[rows] = total
        step.seq_lens[:] = total
        step.query_start_loc[:] = self._count(n + 1)
        return step, blocks

    def _count(self, n: int) -> Int32s:
        if n > len(self._counting):
            self._counting = np.arange(2 * n, dtype=np.int32)
        return self._counting[:n]
