"""Requests over a pool of blocks: grow, fork, reorder, truncate, free, for whole batches at once.

Every mutating call happens whole, or raises and leaves everything as it was, the order of the free queue included: it plans on
arrays, takes all its blocks in one call, and only then changes tables. A batch leaves exactly the state that its single calls
would leave one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from .block_pool import BlockPool, Blocks, Ints, integer, integers, require
from .errors import OutOfBlocks
from .rows import Rows, ranges
from .steps import Step

T = TypeVar("T")
_MAX_TOKENS = 2**31 - 1  # of a sequence: lengths go to kernels as int32
_NONE: Ints = np.zeros(0, np.int64)
_NO_COPIES: Blocks = np.zeros((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class Stats:
    """Use of the pool. A slot holds one token of every layer."""

    blocks_free: int
    blocks_used: int
    blocks_shared: int  # with more than one reference
    slots_used: int  # distinct slots that hold a token
    slots_wasted: int  # in used blocks, holding none
    utilization: float  # used blocks over all blocks
    fragmentation: float  # wasted slots over the slots of used blocks
    copies: int  # copy-on-write copies of all steps so far


class BlockAllocator:
    """Block tables of requests, over one pool of `num_blocks` blocks of `block_size` token slots.

    Ids are any hashable values; `rows` gives ints in their place, which are faster. `watermark` is the share of the pool that
    `add_request` leaves free for the growth of those that are there; growth itself may use it.

    Errors, with nothing changed: OutOfBlocks (a MemoryError) when blocks run out, KeyError for an unknown id or a new one in use,
    ValueError for a request named twice in one call and for counts and lengths out of range, TypeError for wrong types.
    """

    def __init__(self, num_blocks: int, block_size: int, watermark: float = 0.0) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = integer(block_size, "block_size", 1)
        if not 0.0 <= watermark <= 1.0:
            raise ValueError(f"watermark: expected a share of the pool from 0.0 to 1.0, got {watermark}")
        self.watermark = watermark
        self._reserve = math.ceil(watermark * self.num_blocks)
        self._requests = Rows(self.block_size)
        self._serial = 0  # of the newest step
        self._after = 0  # of the newest step with copies
        self._copies = 0

    # ---- what is there ----

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, free and used."""
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Free blocks."""
        return self.pool.num_free

    @property
    def free(self) -> list[int]:
        """Ids of the free blocks in the order in which they will be handed out."""
        blocks: list[int] = self.pool.free().tolist()
        return blocks

    @property
    def tables(self) -> Mapping[Hashable, list[int]]:
        """Block ids of each request, by id, read when looked up."""
        return _View(self._requests, self._table)

    @property
    def lengths(self) -> Mapping[Hashable, int]:
        """Tokens of each request, by id, read when looked up."""
        return _View(self._requests, lambda row: int(self._requests.lengths[row]))

    def rows(self, ids: Iterable[Hashable]) -> Ints:
        """Rows `[n] int64` of `ids`: stable until the request is freed, accepted as `rows=` in place of ids."""
        return self._requests.of(ids)

    def physical_slot(self, id: Hashable, position: int) -> int:
        """`block * block_size + offset` of token `position`; raises IndexError outside `[0, length)`."""
        row = self._requests.row(id)
        length = int(self._requests.lengths[row])
        if not 0 <= position < length:
            raise IndexError(
                f"position: expected 0 to {length - 1}, request {id!r} has {length} tokens, got {position}"
            )
        column, offset = divmod(int(position), self.block_size)
        return int(self._requests.tables[row, column]) * self.block_size + offset

    def stats(self) -> Stats:
        """How the pool is used, at the cost of a few operations on the lengths of all requests."""
        used, slots = self.pool.num_used, self.pool.num_used * self.block_size
        wasted = self._wasted_slots()
        return Stats(
            blocks_free=self.num_free,
            blocks_used=used,
            blocks_shared=int(np.count_nonzero(self.pool.ref_count > 1)) if self.pool.sharing else 0,
            slots_used=slots - wasted,
            slots_wasted=wasted,
            utilization=used / self.num_blocks if self.num_blocks else 0.0,
            fragmentation=wasted / slots if slots else 0.0,
            copies=self._copies,
        )

    # ---- growth ----

    def add_request(self, id: Hashable, n: int) -> Step:
        """A new request of `n` tokens (0 is allowed); the step has one sequence. Leaves the watermark free."""
        self._requests.check_new([id])
        row = self._requests.vacant(1)
        step = self._extend(row, np.zeros(1, np.int64), _counts(n, 1), self._reserve)
        self._requests.bind([id], row)
        return step

    def grow(self, id: Hashable, n: int = 1) -> Step:
        """Slots for `n` more tokens of one request: `grow_batch([id], n)`."""
        return self.grow_batch([id], n)

    def grow_batch(
        self, ids: Iterable[Hashable] | None = None, n: int | npt.ArrayLike = 1, *, rows: npt.ArrayLike | None = None
    ) -> Step:
        """Slots for `n` more tokens of each request, all or nothing; `n` is one count or a count for each, 0 allowed.

        A request that writes into a partly filled block which others hold too gets a fresh block for it (step.copies), unless it is
        the last of them to write; then come blocks for its growth. Returns the step, row i for request i.
        """
        selected = self._requests.select(ids, rows)
        counts = None if isinstance(n, int) and n == 1 and n is not True else _counts(n, len(selected))
        return self._extend(selected, self._requests.lengths.take(selected), counts)

    def blocks_needed(
        self, ids: Iterable[Hashable] | None = None, n: int | npt.ArrayLike = 1, *, rows: npt.ArrayLike | None = None
    ) -> int:
        """How many blocks `grow_batch` with these arguments would take."""
        selected = self._requests.select(ids, rows)
        plan = self._plan(selected, self._requests.lengths.take(selected), _counts(n, len(selected)))
        return plan.num_blocks

    # ---- sharing ----

    def fork_request(self, id: Hashable, children: Sequence[Hashable]) -> None:
        """New requests `children` with the tokens of `id`. Takes no block: all are shared, a partly filled one too."""
        if isinstance(children, (str, bytes)):
            raise TypeError(f"children: expected a list of ids, got {children!r}; write [{children!r}]")
        self.fork_batch([id] * len(children), children)

    def fork_batch(self, parents: Sequence[Hashable], children: Sequence[Hashable]) -> None:
        """New requests: `children[i]` with the tokens of `parents[i]`, which may repeat. All or nothing; takes no block."""
        requests = self._requests
        sources = requests.of(parents)
        if len(sources) != len(children):
            raise ValueError(f"children: expected one for each of {len(sources)} parents, got {len(children)}")
        requests.check_new(children)
        targets = requests.vacant(len(children))
        lengths = requests.lengths.take(sources)
        columns = requests.columns(lengths)
        self.pool.acquire(requests.flat.take(requests.entries(sources, np.zeros_like(columns), columns)))
        requests.tables[targets] = requests.tables.take(sources, 0)
        requests.lengths[targets] = lengths
        requests.mark(targets, 0)
        requests.bind(children, targets)

    def reorder(
        self, ids: Iterable[Hashable] | None = None, parents: npt.ArrayLike = (), *, rows: npt.ArrayLike | None = None
    ) -> None:
        """`ids[i]` becomes a fork of the old `ids[parents[i]]`, for every i at once: the step of a beam search.

        `parents [n]` are indices into `ids`; repeats share, what no one has as parent is dropped. Takes no block. Blocks that lose
        their last owner enter the free queue as if all new tables were made first and the old ones freed in the order of `ids`.
        """
        requests = self._requests
        selected = requests.select(ids, rows)
        sources = integers(parents, "parents")
        if len(sources) != len(selected):
            raise ValueError(f"parents: expected one index for each of {len(selected)} requests, got {len(sources)}")
        if len(sources) and (sources.min() < 0 or sources.max() >= len(selected)):
            raise ValueError(
                f"parents: expected indices from 0 to {len(selected) - 1}, got {sources.min()} to {sources.max()}"
            )
        moved = (sources != np.arange(len(sources))).nonzero()[0]
        if not len(moved):
            return
        targets, origins = selected.take(moved), selected.take(sources.take(moved))
        lengths = requests.lengths.take(selected)
        window = requests.window(int(requests.columns(lengths).max()) or 1)
        old, new = window[targets], window[origins]
        before, after = old.view(np.int32), new.view(np.int32)
        differs = (before != after).nonzero()[0]  # sharing leaves most entries as they are
        gained, lost = after.take(differs), before.take(differs)
        self.pool.acquire(gained[gained >= 0])
        self.pool.release(lost[lost >= 0])
        window[targets] = new
        requests.lengths[targets] = lengths.take(sources.take(moved))
        requests.mark(targets, 0)

    # ---- shrinking ----

    def truncate(self, id: Hashable, length: int) -> None:
        """Forget all tokens of a request from `length` on: `truncate_batch([id], [length])`."""
        self.truncate_batch([id], length)

    def truncate_batch(
        self,
        ids: Iterable[Hashable] | None = None,
        lengths: int | npt.ArrayLike = 0,
        *,
        rows: npt.ArrayLike | None = None,
    ) -> None:
        """Cut each request to `lengths[i]` tokens (absolute, at most what it has) and release the blocks behind them."""
        requests = self._requests
        selected = requests.select(ids, rows)
        new = _counts(lengths, len(selected), "lengths")
        old = requests.lengths.take(selected)
        if (new > old).any():
            i = int(np.argmax(new > old))
            raise ValueError(
                f"lengths: expected at most the {old[i]} tokens of request {requests.names[selected[i]]!r}, got {new[i]}"
            )
        self._release(selected, new, old)
        requests.lengths[selected] = new

    def free_request(self, id: Hashable) -> None:
        """Forget a request; its blocks that no one else holds enter the free queue in table order."""
        self.free_batch([id])

    def free_batch(self, ids: Iterable[Hashable] | None = None, *, rows: npt.ArrayLike | None = None) -> None:
        """Forget requests, as `free_request` would one after the other: a block enters the queue at its last release."""
        requests = self._requests
        selected = requests.select(ids, rows)
        lengths = requests.lengths.take(selected)
        self._release(selected, np.zeros_like(lengths), lengths)
        requests.unbind(selected)

    def check(self) -> None:
        """Verify every invariant of tables, lengths, references and free queue; raises AssertionError that says what broke."""
        requests = self._requests
        self.pool.check()
        live = np.array(sorted(requests.row_of.values()), np.int64)
        require(len(np.unique(live)) == len(live), f"two ids have one row: {requests.row_of}")
        require(
            np.array_equal((requests.lengths >= 0).nonzero()[0], live),
            f"rows with a length and no id: {requests.lengths}, {live}",
        )
        mapped = np.arange(requests.tables.shape[1]) < requests.columns(np.maximum(requests.lengths, 0))[:, None]
        require(
            np.array_equal(mapped, requests.tables >= 0),
            f"tables and lengths disagree: {requests.tables}, {requests.lengths}",
        )
        held = np.bincount(requests.tables[mapped], minlength=self.num_blocks)
        require(
            np.array_equal(held, self.pool.ref_count), f"tables hold {held}, reference counts are {self.pool.ref_count}"
        )
        for row in live:
            table = requests.tables[row][mapped[row]]
            require(len(np.unique(table)) == len(table), f"row {row} holds a block twice: {table}")

    # ---- inside ----

    def _plan(self, rows: Ints, lengths: Ints, counts: Ints | None) -> _Plan:
        """What `_extend` will do; changes nothing."""
        column = lengths // self.block_size  # of the first new token
        if counts is None:
            total, have = lengths + 1, column
            fresh = column * self.block_size == lengths
            growing, grown = fresh.nonzero()[0], None
            num_blocks = len(growing)
        else:
            total, have = lengths + counts, self._requests.columns(lengths)
            fresh = self._requests.columns(total) - have
            growing = fresh.nonzero()[0]
            grown = fresh.take(growing)
            num_blocks = int(grown.sum())
        plan = _Plan(column, total, growing, have.take(growing), grown, _NONE, _NONE, num_blocks)
        if self.pool.sharing:
            self._plan_copies(plan, rows, lengths)
        return plan

    def _plan_copies(self, plan: _Plan, rows: Ints, lengths: Ints) -> None:
        """Find the sequences that write into a block which stays with others."""
        writing = ((plan.column * self.block_size != lengths) & (plan.total > lengths)).nonzero()[0]
        tails = self._requests.at(rows.take(writing), plan.column.take(writing))
        references = self.pool.ref_count.take(tails)
        shared = (references > 1).nonzero()[0]
        sources = tails.take(shared).astype(np.int64)
        copied = (self.pool.occurrences(sources) < references.take(shared)) | ~self.pool.last_of_each(sources)
        plan.copying, plan.sources = writing.take(shared)[copied], sources[copied]
        plan.num_blocks += len(plan.copying)

    def _extend(self, rows: Ints, lengths: Ints, counts: Ints | None, reserve: int = 0) -> Step:
        """`counts` more tokens (None: one each) for `rows`, which have `lengths`; leaves `reserve` blocks free."""
        requests, pool = self._requests, self.pool
        plan = self._plan(rows, lengths, counts)
        if plan.num_blocks and plan.num_blocks + reserve > pool.num_free:
            raise OutOfBlocks(plan.num_blocks, max(pool.num_free - reserve, 0))
        longest = int(plan.total.max(initial=1))
        if longest > _MAX_TOKENS:
            raise ValueError(f"n: a sequence holds at most 2**31 - 1 tokens, not {longest}")
        columns = -(-longest // self.block_size)
        requests.widen(columns)
        step = Step(requests, rows, columns, len(rows) if counts is None else int(counts.sum()))
        blocks = pool.take(plan.num_blocks)  # the last thing that can fail; from here on, state changes

        step.copies = _NO_COPIES
        if len(plan.copying):
            step.copies, blocks = self._copy_on_write(plan, step, blocks)
        if len(blocks):
            growing, column = plan.growing, plan.growing_column
            if plan.grown is not None:
                growing, column = np.repeat(growing, plan.grown), ranges(column, plan.grown)
            requests.map(rows.take(growing), column, blocks)
            step.block_tables[growing, column] = blocks
        requests.lengths[rows] = plan.total
        self._finish(step, plan, lengths, counts)
        return step

    def _copy_on_write(self, plan: _Plan, step: Step, blocks: Blocks) -> tuple[Blocks, Blocks]:
        """Replace the shared tails; returns (src, dst) of each and the blocks that are left for growth."""
        needs = np.zeros(len(step.rows), np.int64)
        needs[plan.growing] = 1 if plan.grown is None else plan.grown
        needs[plan.copying] += 1
        # a sequence takes the block for its copy before those for growth
        first = (needs.cumsum() - needs).take(plan.copying)
        column = plan.column.take(plan.copying)
        copies = np.empty((len(first), 2), np.int32)
        copies[:, 0], copies[:, 1] = plan.sources, blocks.take(first)
        self._requests.map(step.rows.take(plan.copying), column, copies[:, 1])
        step.block_tables[plan.copying, column] = copies[:, 1]
        self.pool.release(plan.sources)
        self._copies += len(copies)
        left = np.ones(len(blocks), np.bool_)
        left[first] = False
        return copies, blocks[left]

    def _finish(self, step: Step, plan: _Plan, lengths: Ints, counts: Ints | None) -> None:
        """Fill in what follows from the tables, and number the step."""
        size, (n, columns) = self.block_size, step.block_tables.shape
        base = np.arange(0, n * columns * size, columns * size)  # token 0 of each sequence, the tables laid end to end
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
        step.num_cached = np.zeros(n, np.int32)
        step.block_size, step.num_blocks = size, self.num_blocks
        self._serial += 1
        step.serial, step.after = self._serial, self._after
        if len(step.copies):
            self._after = self._serial
        step.keep_changes(self._requests, lengths, plan.copying)

    def _release(self, rows: Ints, lengths: Ints, old: Ints) -> None:
        """Unmap and release the blocks behind `lengths`."""
        requests = self._requests
        first, stop = requests.columns(lengths), requests.columns(old)
        cut = (first < stop).nonzero()[0]
        if len(cut):
            entries = requests.entries(rows.take(cut), first.take(cut), stop.take(cut))
            self.pool.release(requests.flat.take(entries))
            requests.flat[entries] = -1
        requests.mark(rows, first)

    def _table(self, row: int) -> list[int]:
        columns = -(-int(self._requests.lengths[row]) // self.block_size)
        result: list[int] = self._requests.tables[row, :columns].tolist()
        return result

    def _wasted_slots(self) -> int:
        """Slots in used blocks that hold no token: only last blocks have such, and only where no one holds the block as a full one."""
        requests = self._requests
        rows = (requests.lengths > 0).nonzero()[0]
        lengths = requests.lengths.take(rows)
        column = (lengths - 1) // self.block_size
        tails = requests.at(rows, column).astype(np.int64)
        filled = lengths - column * self.block_size
        if self.pool.sharing:
            order = np.argsort(filled, kind="stable")  # of several owners the one with the most tokens counts
            tails, filled = tails.take(order), filled.take(order)
            counted = self.pool.last_of_each(tails) & (self.pool.occurrences(tails) == self.pool.ref_count.take(tails))
            filled = filled[counted]
        return int(len(filled) * self.block_size - filled.sum())


@dataclass(slots=True)
class _Plan:
    """What an extension needs. `growing`, `copying` are positions in the batch."""

    column: Ints  # [n] column of the first new token
    total: Ints  # [n] lengths afterwards
    growing: Ints  # sequences that get new columns
    growing_column: Ints  # the first of them
    grown: Ints | None  # how many; None: one each
    copying: Ints  # sequences that replace their last block by a copy
    sources: Ints  # those blocks
    num_blocks: int


class _View(Mapping[Hashable, T], Generic[T]):
    """Requests by id, each value read when it is looked up."""

    def __init__(self, requests: Rows, read: Callable[[int], T]) -> None:
        self._requests, self._read = requests, read

    def __getitem__(self, id: Hashable) -> T:
        return self._read(self._requests.row(id))

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._requests.row_of)

    def __len__(self) -> int:
        return len(self._requests.row_of)

    def __repr__(self) -> str:
        return repr(dict(self))


def _counts(n: int | npt.ArrayLike, size: int, name: str = "n") -> Ints:
    """`n` as `[size] int64`, none negative; what no pool could hold is cut to 2**40."""
    if isinstance(n, (int, np.integer)):
        return np.full(size, min(integer(n, name, 0), 2**40))
    counts = integers(n, name)
    if len(counts) != size:
        raise ValueError(f"{name}: expected one for each of {size} requests, got {len(counts)}")
    if size and counts.min() < 0:
        raise ValueError(f"{name}: expected integers of at least 0, got {counts.min()}")
    return np.minimum(counts, 2**40)
