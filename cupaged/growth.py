"""How requests get longer: find what a batch needs, take it at once, and hand out the step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .block_pool import BlockPool, Ints
from .decode_step import DecodeStep
from .errors import OutOfBlocks
from .free_queues import Blocks
from .prefix_cache import PrefixCache, Tokens
from .rehearsal import Rehearsal
from .rows import MAX_TOKENS, Rows
from .steps import Step, write_slots
from .tables import ranges

_NONE: Ints = np.zeros(0, np.int64)


@dataclass(slots=True)
class Plan:
    """What an extension needs. `growing`, `copying` are positions in the batch."""

    column: Ints  # [n] column of the first new token
    total: Ints  # [n] lengths afterwards
    growing: Ints  # sequences that get new columns
    growing_column: Ints  # the first of them
    grown: Ints | None  # how many; None: one each
    copying: Ints  # sequences that replace their last block by a copy
    sources: Ints  # those blocks
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Attachment:
    """What the prefix cache has for a new request."""

    hits: Ints  # blocks that are equal as a whole
    source: int  # the block that goes on equal for some tokens, -1: none
    common: int  # how many
    held: Ints  # all of them
    fresh: int  # blocks to take
    cached: int  # tokens found
    total: int  # tokens of the request, found or with new slots


class Growth:
    """Extends rows of `requests` with blocks of `pool`, and numbers the steps."""

    def __init__(self, requests: Rows, pool: BlockPool, cache: PrefixCache | None) -> None:
        self._requests, self._pool, self._cache = requests, pool, cache
        self._tables = requests.groups[0]
        self.block_size = requests.block_size
        self._decode = DecodeStep(requests, pool)
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
            total, have = lengths + counts, self._tables.columns(lengths)
            fresh = self._tables.columns(total) - have
            growing = fresh.nonzero()[0]
            grown = fresh.take(growing)
            num_blocks = int(grown.sum())
        plan = Plan(column, total, growing, have.take(growing), grown, _NONE, _NONE, num_blocks)
        if self._pool.sharing:
            self._plan_copies(plan, rows, lengths)
        return plan

    def _plan_copies(self, plan: Plan, rows: Ints, lengths: Ints) -> None:
        """Find the sequences that write into a block which stays with others."""
        writing = ((plan.column * self.block_size != lengths) & (plan.total > lengths)).nonzero()[0]
        tails = self._tables.at(rows.take(writing), plan.column.take(writing))
        references = self._pool.ref_count.take(tails)
        shared = (references > 1).nonzero()[0]
        sources = tails.take(shared).astype(np.int64)
        copied = (self._pool.occurrences(sources) < references.take(shared)) | ~self._pool.last_of_each(sources)
        plan.copying, plan.sources = writing.take(shared)[copied], sources[copied]
        plan.num_blocks += len(plan.copying)

    def extend(self, rows: Ints, lengths: Ints, counts: Ints | None, reserve: int = 0) -> Step:
        """`counts` more tokens (None: one each) for `rows`, which have `lengths`; leaves `reserve` blocks free."""
        requests, pool = self._requests, self._pool
        if counts is None and len(rows) and not pool.sharing and not (self._cache and self._cache.cut):
            step, blocks = self._decode.extend(rows, lengths)
            if self._cache:
                self._cache.filled[blocks] = 0
            self._number(step, lengths, _NONE)
            return step
        plan = self.plan(rows, lengths, counts)
        if plan.num_blocks and plan.num_blocks + reserve > pool.num_free:
            raise OutOfBlocks(plan.num_blocks, max(pool.num_free - reserve, 0))
        longest = int(plan.total.max(initial=1))
        if longest > MAX_TOKENS:
            raise ValueError(f"n: a sequence holds at most 2**31 - 1 tokens, not {longest}")
        columns = -(-longest // self.block_size)
        requests.widen(columns)
        step = Step(self._tables, rows, columns, len(rows) if counts is None else int(counts.sum()))
        blocks = pool.take(plan.num_blocks)  # the last thing that can fail; from here on, state changes

        if len(plan.copying):
            step.copies, blocks = self._copy_on_write(plan, step, blocks)
        if len(blocks):
            growing, column = plan.growing, plan.growing_column
            if plan.grown is not None:
                growing, column = np.repeat(growing, plan.grown), ranges(column, plan.grown)
            self._tables.map(rows.take(growing), column, blocks)
            step.block_tables.reshape(-1)[growing * columns + column] = blocks
        if self._cache:
            self._cache.filled[blocks] = 0
            if self._cache.cut:
                writing = ((plan.column * self.block_size != lengths) & (plan.total > lengths)).nonzero()[0]
                column = plan.column.take(writing)
                tails = self._tables.at(rows.take(writing), column).astype(np.int64)
                self._cache.write(tails, lengths.take(writing) - column * self.block_size)
        requests.lengths[rows] = plan.total
        self._finish(step, plan, lengths, counts)
        return step

    def look_up(
        self, root: int, tokens: Tokens, n: int, reserve: int, rehearsal: Rehearsal | None = None
    ) -> Attachment:
        """What a new request of `tokens` can have from the cache when up to `n` others get slots; changes nothing.

        With a `rehearsal`, after the calls that were rehearsed. Raises OutOfBlocks when there are too few blocks beside `reserve`.
        """
        pool, cache, size = rehearsal or self._pool, self._cache, self.block_size
        assert cache is not None
        most = max(len(tokens) - 1, 0)  # one token at least is left to compute
        hits, source, common = cache.match(root, tokens, most, rehearsal.gone if rehearsal else None)
        if not n:
            source, common = -1, 0  # a copy takes a block, and without new tokens none is taken
        while True:
            cached = len(hits) * size + common
            total = min(len(tokens), cached + n)
            fresh = -(-total // size) - len(hits)
            held = hits if source < 0 else np.append(hits, source)
            needed = fresh + int(np.count_nonzero(pool.ref_count.take(hits) == 0))
            idle = needed - fresh if source < 0 else int(np.count_nonzero(pool.ref_count.take(held) == 0))
            if (not needed or needed + reserve <= pool.num_free) and fresh + idle <= pool.num_free:
                return Attachment(hits, source, common, held, fresh, cached, total)
            if source < 0:
                raise OutOfBlocks(needed, max(pool.num_free - reserve, 0))
            source, common = -1, 0  # without the block that was to be copied, it may be enough

    def rehearse(self, rehearsal: Rehearsal, plan: Plan, rows: Ints, lengths: Ints) -> None:
        """Note what `extend`, of which this is the plan, would do."""
        rehearsal.take(plan.num_blocks, _NONE)
        writing = (plan.column * self.block_size != lengths) & (plan.total > lengths)
        writing[plan.copying] = False
        rehearsal.gone[self._tables.at(rows[writing], plan.column[writing])] = True

    def rehearse_attach(self, rehearsal: Rehearsal, root: int, tokens: Tokens, n: int, reserve: int) -> None:
        """Note what `attach` would do; where it would raise, only how many blocks it needs."""
        try:
            found = self.look_up(root, tokens, n, reserve, rehearsal)
        except OutOfBlocks as error:
            rehearsal.num_free -= error.needed
            return
        rehearsal.take(found.fresh, found.held)
        if found.source >= 0:
            rehearsal.release(found.source)

    def attach(self, row: Ints, root: int, tokens: Tokens, n: int, reserve: int) -> Step:
        """The first tokens of a new row: those that the cache has, and slots for up to `n` of the others; leaves `reserve` blocks free."""
        requests, pool, cache, size = self._requests, self._pool, self._cache, self.block_size
        assert cache is not None
        found = self.look_up(root, tokens, n, reserve)
        cached, total = found.cached, found.total
        if total > MAX_TOKENS:
            raise ValueError(f"token_ids: a sequence holds at most 2**31 - 1 tokens, not {total}")
        columns = max(1, -(-total // size))
        requests.widen(columns)
        step = Step(self._tables, row, columns, total - cached)
        blocks = pool.take(found.fresh, found.held)  # the last thing that can fail; from here on, state changes

        table = np.concatenate((found.hits, blocks)).astype(np.int32)
        self._tables.tables[row[0], : len(table)] = step.block_tables[0, : len(table)] = table
        cache.filled[blocks] = 0
        if found.source >= 0:
            step.copies = np.array([[found.source, blocks[0]]], np.int32)
            cache.copy(step.copies[:, 0], step.copies[:, 1])
            cache.write(blocks[:1].astype(np.int64), np.array([found.common]))
            pool.release([found.source])
            self.copies += 1
        cache.queried_tokens += len(tokens)
        cache.hit_tokens += cached
        requests.lengths[row], requests.known[row], requests.root[row] = total, cached, root
        self._tables.mark(row, 0)
        before, counts = np.array([cached]), np.array([total - cached])
        self._finish(step, Plan(before // size, before + counts, _NONE, _NONE, None, _NONE, _NONE, 0), before, counts)
        step.num_cached[0] = cached
        return step

    def finish_still(self, step: Step, lengths: Ints) -> None:
        """Finish a step without new tokens, whose sequences had no blocks before and have `lengths` now."""
        none = np.zeros_like(lengths)
        self._finish(step, Plan(none, lengths, _NONE, _NONE, None, _NONE, _NONE, 0), none, none)
        if len(step.swap_out) or len(step.swap_in):
            self.after = self.serial

    def _copy_on_write(self, plan: Plan, step: Step, blocks: Blocks) -> tuple[Blocks, Blocks]:
        """Replace the shared tails; returns (src, dst) of each and the blocks that are left for growth."""
        needs = np.zeros(len(step.rows), np.int64)
        needs[plan.growing] = 1 if plan.grown is None else plan.grown
        needs[plan.copying] += 1
        # a sequence takes the block for its copy before those for growth
        first = (needs.cumsum() - needs).take(plan.copying)
        column = plan.column.take(plan.copying)
        copies = np.empty((len(first), 2), np.int32)
        copies[:, 0], copies[:, 1] = plan.sources, blocks.take(first)
        self._tables.map(step.rows.take(plan.copying), column, copies[:, 1])
        step.block_tables[plan.copying, column] = copies[:, 1]
        if self._cache:
            self._cache.copy(plan.sources, copies[:, 1])
        self._pool.release(plan.sources)
        self.copies += len(copies)
        left = np.ones(len(blocks), np.bool_)
        left[first] = False
        return copies, blocks[left]

    def _finish(self, step: Step, plan: Plan, lengths: Ints, counts: Ints | None) -> None:
        """Fill in what follows from the tables, and number the step."""
        size, (n, columns) = self.block_size, step.block_tables.shape
        if n == 1:
            total = int(plan.total[0])
            step.query_start_loc[:] = 0, len(step.slot_mapping)
            first, stop = int(lengths[0]) // size, -(-total // size)
            write_slots(step.slot_mapping, step.block_tables[0, first:stop], int(lengths[0]) - first * size, size)
            step.seq_lens[:] = total
            self._number(step, lengths, plan.copying)
            return
        base = np.arange(n) * (columns * size)  # token 0 of each sequence, the tables laid end to end
        if counts is None:
            token = base + lengths
            step.query_start_loc[:] = np.arange(n + 1)
        else:
            ends = counts.cumsum()
            token = np.repeat(base + (lengths - ends + counts), counts) + np.arange(len(step.slot_mapping))
            step.query_start_loc[0] = 0
            step.query_start_loc[1:] = ends
        entry = token // size
        np.multiply(step.block_tables.reshape(-1).take(entry) - entry, size, out=step.slot_mapping)
        step.slot_mapping += token
        step.seq_lens[:] = plan.total
        self._number(step, lengths, plan.copying)

    def _number(self, step: Step, lengths: Ints, copying: Ints) -> None:
        step.num_cached = np.zeros(len(lengths), np.int32)
        step.block_size, step.num_blocks, step.sharing = self.block_size, self._pool.num_blocks, self._pool.sharing
        self.serial += 1
        step.serial, step.after = self.serial, self.after
        if len(step.copies):
            self.after = self.serial
        step.keep_changes(self._tables, self._requests.lengths, lengths, copying)
