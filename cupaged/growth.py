"""How requests get longer: find what a batch needs, take it at once, and hand out the step."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from .array_types import Blocks, Ints
from .block_pool import BlockPool
from .decode_step import DecodeStep
from .errors import OutOfBlocks
from .horizon import Leaving, find_leaving
from .prefix_cache import PrefixCache
from .prompts import Attachment
from .rehearsal import Rehearsal
from .rows import MAX_TOKENS, Rows
from .steps import Step, write_slots
from .tables import BlockTables, ranges

_NONE: Ints = np.zeros(0, np.int64)
_ZERO: Ints = np.zeros(1, np.int64)
_NO_COPYING = (_NONE, _NONE)


@dataclass(slots=True)
class Plan:
    """What an extension needs. `growing` and the first of `copying` are positions in the batch."""

    column: Ints  # [n] column of the first new token
    total: Ints  # [n] lengths afterwards
    growing: Ints  # sequences that get new columns
    growing_column: Ints  # the first of them
    grown: Ints | None  # how many; None: one each
    copying: list[tuple[Ints, Ints]]  # of each group: sequences that replace their last block by a copy, those blocks
    leaving: Leaving | None  # blocks that are given back first
    num_blocks: int  # to take, of all groups

    @property
    def freed(self) -> int:
        """Free blocks that there are more after what is given back."""
        return self.leaving.freed if self.leaving else 0


class Growth:
    """Extends rows of `requests` with blocks of `pool`, and numbers the steps, which speak of kernel blocks: `per` of them make a block.

    A batch first gives back what leaves the horizon of its groups, row after row and in a row group after group; then each row takes
    its blocks, group after group, in a group the block for a copy before those for growth.
    """

    def __init__(self, requests: Rows, pool: BlockPool, cache: PrefixCache | None, per: int) -> None:
        self._requests, self._pool, self._cache = requests, pool, cache
        self._groups, self._per = requests.groups, per
        self._limited = any(tables.limited for tables in requests.groups)
        self._no_copying = [_NO_COPYING] * len(self._groups)
        self.block_size = requests.block_size
        single = len(self._groups) == 1 and not self._limited
        self._decode = DecodeStep(requests, pool) if single else None
        self.origin = int.from_bytes(os.urandom(8))  # whose steps they are, in other processes too
        self.serial = 0  # of the newest step
        self.after = 0  # of the newest step with copies or swaps
        self.copies = 0  # of all steps

    def plan(self, rows: Ints, lengths: Ints, counts: Ints | None) -> Plan:
        """What `extend` will do; changes nothing."""
        column = lengths // self.block_size  # of the first new token
        if counts is None:
            total, have = lengths + 1, column
            fresh = column * self.block_size == lengths
            growing, grown = fresh.nonzero()[0], None
            num_blocks = len(growing)
        else:
            total, have = lengths + counts, self._groups[0].columns(lengths)
            fresh = self._groups[0].columns(total) - have
            growing = fresh.nonzero()[0]
            grown = fresh.take(growing)
            num_blocks = int(grown.sum())
        num_blocks *= len(self._groups)
        plan = Plan(column, total, growing, have.take(growing), grown, self._no_copying, None, num_blocks)
        if self._limited:
            plan.leaving = find_leaving(self._groups, self._pool, rows, lengths, counts)
        if self._pool.sharing:
            writing = ((column * self.block_size != lengths) & (total > lengths)).nonzero()[0]
            plan.copying = [self._copying(tables, plan, rows, writing) for tables in self._groups]
            plan.num_blocks += sum(len(at) for at, _ in plan.copying)
        return plan

    def _copying(self, tables: BlockTables, plan: Plan, rows: Ints, writing: Ints) -> tuple[Ints, Ints]:
        """Of the sequences `writing` into their last block those whose block stays with others, and the blocks."""
        tails = tables.at(rows.take(writing), plan.column.take(writing))
        references = self._pool.ref_count.take(tails)
        if plan.leaving:
            references -= self._pool.occurrences(plan.leaving.blocks, tails)
        shared = (references > 1).nonzero()[0]
        sources = tails.take(shared).astype(np.int64)
        copied = (self._pool.occurrences(sources) < references.take(shared)) | ~self._pool.last_of_each(sources)
        return writing.take(shared)[copied], sources[copied]

    def extend(self, rows: Ints, lengths: Ints, counts: Ints | None, reserve: int = 0) -> Step:
        """`counts` more tokens (None: one each) for `rows`, which have `lengths`; leaves `reserve` blocks free."""
        requests, pool = self._requests, self._pool
        if (
            self._decode
            and counts is None
            and len(rows)
            and not pool.sharing
            and not (self._cache and self._cache.tokens.cut)
        ):
            step, blocks = self._decode.extend(rows, lengths)
            if self._cache:
                self._cache.tokens.filled[blocks] = 0
            self.serial += 1
            self._sign(step, self._groups[0], lengths, _NONE)
            return step
        plan = self.plan(rows, lengths, counts)
        left = pool.num_free + plan.freed - reserve
        if plan.num_blocks > max(left, 0):
            raise OutOfBlocks(plan.num_blocks, max(left, 0))
        longest = int(plan.total.max(initial=1))
        if longest > MAX_TOKENS:
            raise ValueError(f"n: a sequence holds at most 2**31 - 1 tokens, not {longest}")
        columns = -(-longest // self.block_size)
        requests.widen(columns)
        num_tokens = len(rows) if counts is None else int(counts.sum())
        steps = [Step(tables, rows, columns, num_tokens) for tables in self._groups]
        drop = (plan.leaving.blocks, plan.leaving.tables) if plan.leaving else None
        blocks = pool.take(plan.num_blocks, drop=drop)  # the last thing that can fail; from here on, state changes

        if self._cache:
            self._cache.tokens.filled[blocks] = 0
        if plan.leaving:
            plan.leaving.unmap(self._groups, steps)
        for g, (tables, step) in enumerate(zip(self._groups, steps, strict=True)):
            self._fill(tables, step, plan, plan.copying[g], self._share(plan, blocks, len(rows), g))
        if self._cache and self._cache.tokens.cut:
            writing = ((plan.column * self.block_size != lengths) & (plan.total > lengths)).nonzero()[0]
            column = plan.column.take(writing)
            for tables in self._groups:
                tails = tables.at(rows.take(writing), column).astype(np.int64)
                self._cache.write(tails, lengths.take(writing) - column * self.block_size)
        requests.lengths[rows] = plan.total
        return self._finish(steps, plan, lengths, counts)

    def rehearse(self, rehearsal: Rehearsal, plan: Plan, rows: Ints, lengths: Ints) -> None:
        """Note what `extend`, of which this is the plan, would do."""
        if plan.leaving:
            named = self._cache.serial.take(plan.leaving.blocks) > 0 if self._cache else np.zeros(0, np.bool_)
            rehearsal.drop(plan.leaving.blocks, plan.leaving.tables, named)
        rehearsal.take(plan.num_blocks, _NONE)
        writing = (plan.column * self.block_size != lengths) & (plan.total > lengths)
        for tables, (copying, _) in zip(self._groups, plan.copying, strict=True):
            in_place = writing.copy()
            in_place[copying] = False
            rehearsal.gone[tables.at(rows[in_place], plan.column[in_place])] = True

    def attach(self, row: Ints, root: int, found: Attachment, num_tokens: int) -> Step:
        """The first tokens of a new row: what was found of its `num_tokens`, and slots for more."""
        requests, pool, cache, size = self._requests, self._pool, self._cache, self.block_size
        assert cache is not None
        cached, total = found.cached, found.total
        if total > MAX_TOKENS:
            raise ValueError(f"token_ids: a sequence holds at most 2**31 - 1 tokens, not {total}")
        columns = max(1, -(-total // size))
        requests.widen(columns)
        steps = [Step(tables, row, columns, total - cached) for tables in self._groups]
        blocks = pool.take(found.fresh, found.held)  # the last thing that can fail; from here on, state changes

        cache.tokens.filled[blocks.astype(np.int64)] = 0
        for tables, step, hits, fresh in zip(
            self._groups, steps, found.hits, blocks.reshape(len(self._groups), -1), strict=True
        ):
            begin, end = found.columns - len(hits), found.columns + len(fresh)
            table = step.block_tables[0]
            table[begin : found.columns], table[found.columns : end] = hits, fresh
            tables.tables[row[0], begin:end] = table[begin:end]
            tables.begin[row] = begin
            tables.mark(row, 0)
        if found.source >= 0:
            steps[0].copies = np.array([[found.source, blocks[0]]], np.int32)
            cache.tokens.copy(steps[0].copies[:, 0], steps[0].copies[:, 1])
            cache.write(blocks[:1].astype(np.int64), np.array([found.common]))
            pool.release([found.source])
            self.copies += 1
        cache.queried_tokens += num_tokens
        cache.hit_tokens += cached
        requests.lengths[row], requests.known[row], requests.root[row] = total, cached, root
        before, counts = np.array([cached]), np.array([total - cached])
        plan = Plan(before // size, before + counts, _NONE, _NONE, None, self._no_copying, None, 0)
        return self._finish(steps, plan, before, counts, cached)

    def finish_still(self, steps: list[Step], lengths: Ints) -> Step:
        """Finish a step without new tokens, whose sequences had no blocks before and have `lengths` now."""
        none = np.zeros_like(lengths)
        plan = Plan(none, lengths, _NONE, _NONE, None, self._no_copying, None, 0)
        step = self._finish(steps, plan, none, none)
        if len(step.swap_out) or len(step.swap_in):
            self.after = self.serial
        return step

    def _share(self, plan: Plan, blocks: Blocks, n: int, g: int) -> Blocks:
        """Those of the blocks taken that go to group `g`, row after row."""
        if len(self._groups) == 1:
            return blocks
        needs = np.zeros((n, len(self._groups)), np.int64)
        needs[plan.growing] = 1 if plan.grown is None else plan.grown[:, None]
        for group, (copying, _) in enumerate(plan.copying):
            needs[copying, group] += 1
        group_of = np.repeat(np.tile(np.arange(len(self._groups)), n), needs.reshape(-1))
        share: Blocks = blocks[group_of == g]
        return share

    def _fill(self, tables: BlockTables, step: Step, plan: Plan, copying: tuple[Ints, Ints], blocks: Blocks) -> None:
        """Map a group's `blocks`: copies of shared tails, and new columns."""
        if len(copying[0]):
            blocks = self._copy_on_write(tables, step, plan, *copying, blocks)
        if len(blocks):
            growing, column = plan.growing, plan.growing_column
            if plan.grown is not None:
                growing, column = np.repeat(growing, plan.grown), ranges(column, plan.grown)
            tables.map(step.rows.take(growing), column, blocks)
            step.block_tables.reshape(-1)[growing * step.block_tables.shape[1] + column] = blocks

    def _copy_on_write(
        self, tables: BlockTables, step: Step, plan: Plan, copying: Ints, sources: Ints, blocks: Blocks
    ) -> Blocks:
        """Replace the shared tails; returns the blocks that are left for growth."""
        needs = np.zeros(len(step.rows), np.int64)
        needs[plan.growing] = 1 if plan.grown is None else plan.grown
        needs[copying] += 1
        # a sequence takes the block for its copy before those for growth
        first = (needs.cumsum() - needs).take(copying)
        column = plan.column.take(copying)
        step.copies = np.empty((len(first), 2), np.int32)
        step.copies[:, 0], step.copies[:, 1] = sources, blocks.take(first)
        tables.map(step.rows.take(copying), column, step.copies[:, 1])
        step.block_tables[copying, column] = step.copies[:, 1]
        if self._cache:
            self._cache.tokens.copy(sources, step.copies[:, 1])
        self._pool.release(sources)
        self.copies += len(first)
        left = np.ones(len(blocks), np.bool_)
        left[first] = False
        return blocks[left]

    def _finish(self, steps: list[Step], plan: Plan, lengths: Ints, counts: Ints | None, cached: int = 0) -> Step:
        """Fill in what follows from the tables, and number the step; returns that of the first group."""
        size, (n, columns) = self.block_size, steps[0].block_tables.shape
        if n == 1:
            total = int(plan.total[0])
            first, stop = int(lengths[0]) // size, -(-total // size)
            for step in steps:
                step.query_start_loc[:] = 0, len(step.slot_mapping)
                write_slots(step.slot_mapping, step.block_tables[0, first:stop], int(lengths[0]) - first * size, size)
                step.seq_lens[:] = total
            return self._number(steps, lengths, plan.copying, cached)
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
            step.seq_lens[:] = plan.total
        return self._number(steps, lengths, plan.copying, cached)

    def _number(self, steps: list[Step], lengths: Ints, copying: list[tuple[Ints, Ints]], cached: int = 0) -> Step:
        """Make one step of the groups' steps, the next one; returns that of the first group."""
        self.serial += 1
        copies = 0
        for g, step in enumerate(steps):
            self._sign(step, self._groups[g], lengths, copying[g][0])
            copies += len(step.copies)
            if cached:
                step.num_cached.fill(cached)
        if copies:
            self.after = self.serial
        if len(steps) > 1:
            steps[0].other_groups = tuple(steps[1:])
        return steps[0]

    def _sign(self, step: Step, tables: BlockTables, lengths: Ints, copied: Ints) -> None:
        """Give a group's step its number, and what it says of the pool and of changed tables."""
        pool = self._pool
        step.num_cached = np.zeros(len(lengths), np.int32)
        step.block_size, step.num_blocks = self.block_size, pool.num_blocks
        step.sharing = not tables.limited and pool.sharing  # a table with holes has no beginning to share
        step.origin, step.serial, step.after = self.origin, self.serial, self.after
        step.keep_changes(tables, self._requests.lengths, lengths, copied, self._per)
        if self._per > 1:
            step.to_kernel_blocks(self._per)
