"""How an allocator makes its steps: snapshots of tables, slots for new tokens, and a number for the order in which steps run."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from .array_types import Ints
from .block_pool import BlockPool
from .rows import Rows
from .steps import Step, write_slots

_NONE: Ints = np.zeros(0, np.int64)
_ZERO: Ints = np.zeros(1, np.int64)


class StepMaker:
    """Makes steps of rows of `requests`, which speak of kernel blocks: `per` of them make a block.

    Attributes:
        origin: whose steps they are, in other processes too.
        serial: of the newest step.
        after: serial of the newest step with copies or swaps.
        copies: of all steps so far.
    """

    def __init__(self, requests: Rows, pool: BlockPool, per: int) -> None:
        self._requests, self._groups, self._pool, self._per = requests, requests.groups, pool, per
        self._nothing_copied = [_NONE] * len(self._groups)
        self.origin = int.from_bytes(os.urandom(8))
        self.serial = self.after = self.copies = 0

    def begin(self, rows: Ints, columns: int, num_tokens: int) -> list[Step]:
        """A step of each group for `rows [n]`, with their tables as they are: the caller fills in what it maps, copies and swaps."""
        return [Step(tables, rows, columns, num_tokens) for tables in self._groups]

    def finish(
        self,
        steps: list[Step],
        lengths: Ints,
        counts: Ints | None,
        total: Ints,
        copied: Sequence[Ints] = (),
        cached: int = 0,
    ) -> Step:
        """Fill in what follows from the tables, and number the step; returns that of the first group.

        Rows had `lengths [n]` tokens, got `counts` (None: one each) and have `total` now. `copied` are each group's sequences whose
        last block was replaced by a copy; `cached` tokens were found in the prefix cache.
        """
        size, (n, columns) = self._requests.block_size, steps[0].block_tables.shape
        if n == 1:
            first, stop = int(lengths[0]) // size, -(-int(total[0]) // size)
            for step in steps:
                step.query_start_loc[:] = 0, len(step.slot_mapping)
                write_slots(step.slot_mapping, step.block_tables[0, first:stop], int(lengths[0]) - first * size, size)
                step.seq_lens[:] = total
        else:
            base = np.arange(n) * (columns * size)  # token 0 of each sequence, the tables laid end to end
            if counts is None:
                token = base + lengths
                starts = np.arange(n + 1)
            else:
                ends = counts.cumsum()
                starts = np.concatenate((_ZERO, ends))
                token = np.repeat(base + (lengths - ends + counts), counts) + np.arange(len(steps[0].slot_mapping))
            entry = token // size
            for step in steps:
                np.multiply(step.block_tables.reshape(-1).take(entry) - entry, size, out=step.slot_mapping)
                step.slot_mapping += token
                step.query_start_loc[:] = starts
                step.seq_lens[:] = total
        copies = 0
        for g, (step, at) in enumerate(zip(steps, copied or self._nothing_copied, strict=True)):
            self.number(step, g, lengths, at)
            copies += len(step.copies)
            if cached:
                step.num_cached.fill(cached)
        self.copies += copies
        if copies or len(steps[0].swap_out) or len(steps[0].swap_in):
            self.after = self.serial
        if len(steps) > 1:
            steps[0].other_groups = tuple(steps[1:])
        return steps[0]

    def number(self, step: Step, g: int, lengths: Ints, copied: Ints = _NONE) -> None:
        """Give the step of group `g` its number, the first group's the next one, and what it says of the pool and of changed tables."""
        if not g:
            self.serial += 1
        pool, tables = self._pool, self._groups[g]
        step.num_cached = np.zeros(len(lengths), np.int32)
        step.block_size, step.num_blocks = self._requests.block_size, pool.num_blocks
        step.sharing = not tables.limited and pool.sharing  # a table with holes has no beginning to share
        step.origin, step.serial, step.after = self.origin, self.serial, self.after
        step.keep_changes(tables, self._requests.lengths, lengths, copied, self._per)
        if self._per > 1:
            step.to_kernel_blocks(self._per)
