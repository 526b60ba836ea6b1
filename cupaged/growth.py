"""How requests get longer: find what a batch needs, take it at once, and hand out the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .array_types import Blocks, Ints
from .block_pool import BlockPool
from .decode_step import DecodeStep
from .errors import OutOfBlocks
from .horizon import Leaving, find_leaving
from .prefix_cache import PrefixCache
from .rehearsal import Rehearsal
from .rows import MAX_TOKENS, Rows
from .step_maker import StepMaker
from .steps import Step
from .tables import BlockTables, ranges

_NONE: Ints = np.zeros(0, np.int64)
_NO_COPYING = (_NONE, _NONE)


@dataclass(slots=True)
class GrowthPlan:
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
    """Extends rows of `requests` with blocks of `pool`.

    A batch first gives back what leaves the horizon of its groups, row after row and in a row group after group; then each row takes
    its blocks, group after group, in a group the block for a copy before those for growth.
    """

    def __init__(self, requests: Rows, pool: BlockPool, cache: PrefixCache | None, steps: StepMaker) -> None:
        self._requests, self._pool, self._cache, self._steps = requests, pool, cache, steps
        self._groups = requests.groups
        self._limited = any(tables.limited for tables in requests.groups)
        self._no_copying = [_NO_COPYING] * len(self._groups)
        self.block_size = requests.block_size
        single = len(self._groups) == 1 and not self._limited
        self._decode = DecodeStep(requests, pool) if single else None

    def plan(self, rows: Ints, lengths: Ints, counts: Ints | None) -> GrowthPlan:
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
        plan = GrowthPlan(column, total, growing, have.take(growing), grown, self._no_copying, None, num_blocks)
        if self._limited:
            plan.leaving = find_leaving(self._groups, self._pool, rows, lengths, counts)
        if self._pool.sharing:
            writing = self._writing(plan, lengths)
            plan.copying = [self._copying(tables, plan, rows, writing) for tables in self._groups]
            plan.num_blocks += sum(len(at) for at, _ in plan.copying)
        return plan

    def _writing(self, plan: GrowthPlan, lengths: Ints) -> Ints:
        """Sequences whose first new token goes into a block that is partly filled."""
        writing: Ints = ((plan.column * self.block_size != lengths) & (plan.total > lengths)).nonzero()[0]
        return writing

    def _copying(self, tables: BlockTables, plan: GrowthPlan, rows: Ints, writing: Ints) -> tuple[Ints, Ints]:
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
            self._steps.number(step, 0, lengths)
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
        steps = self._steps.begin(rows, columns, num_tokens)
        drop = (plan.leaving.blocks, plan.leaving.tables) if plan.leaving else None
        blocks = pool.take(plan.num_blocks, drop=drop)  # the last thing that can fail; from here on, state changes

        if self._cache:
            self._cache.tokens.filled[blocks] = 0
        if plan.leaving:
            plan.leaving.unmap(self._groups, steps)
        for g, (tables, step) in enumerate(zip(self._groups, steps, strict=True)):
            self._fill(tables, step, plan, plan.copying[g], self._share(plan, blocks, len(rows), g))
        if self._cache and self._cache.tokens.cut:
            writing = self._writing(plan, lengths)
            column = plan.column.take(writing)
            for tables in self._groups:
                tails = tables.at(rows.take(writing), column).astype(np.int64)
                self._cache.write(tails, lengths.take(writing) - column * self.block_size)
        requests.lengths[rows] = plan.total
        return self._steps.finish(steps, lengths, counts, plan.total, [at for at, _ in plan.copying])

    def rehearse(self, rehearsal: Rehearsal, plan: GrowthPlan, rows: Ints, lengths: Ints) -> None:
        """Note what `extend`, of which this is the plan, would do."""
        if plan.leaving:
            named = self._cache.serial.take(plan.leaving.blocks) > 0 if self._cache else np.zeros(0, np.bool_)
            rehearsal.drop(plan.leaving.blocks, plan.leaving.tables, named)
        rehearsal.take(plan.num_blocks, _NONE)
        writing = self._writing(plan, lengths)
        for tables, (copying, _) in zip(self._groups, plan.copying, strict=True):
            in_place = np.setdiff1d(writing, copying)
            rehearsal.gone[tables.at(rows[in_place], plan.column[in_place])] = True

    def _share(self, plan: GrowthPlan, blocks: Blocks, n: int, g: int) -> Blocks:
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

    def _fill(
        self, tables: BlockTables, step: Step, plan: GrowthPlan, copying: tuple[Ints, Ints], blocks: Blocks
    ) -> None:
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
        self, tables: BlockTables, step: Step, plan: GrowthPlan, copying: Ints, sources: Ints, blocks: Blocks
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
        left = np.ones(len(blocks), np.bool_)
        left[first] = False
        return blocks[left]
