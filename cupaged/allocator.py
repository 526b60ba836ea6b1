"""Requests over a pool of blocks: grow, fork, reorder, truncate, free, for whole batches at once.

Every mutating call happens whole, or raises and leaves everything as it was, the order of the free queue included: it plans on
arrays, takes all its blocks in one call, and only then changes tables. A batch leaves exactly the state that its single calls
would leave one after the other, but for two things with several groups of layers: `grow_batch` gives back what leaves a horizon
before it takes a block for any request, and `commit` goes group by group.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .arguments import counts_of, flag, integer, integers, listed, new_requests, new_tokens, number
from .array_types import Ints, Tokens
from .block_pool import BlockPool
from .commit import Commits, open_tokens
from .companions import Companions
from .errors import OutOfBlocks, refuse_copies
from .forks import fork, reorder
from .groups import Group, checked
from .growth import Growth
from .horizon import check_horizon
from .invariants import check
from .preemption import Preemption
from .prefix_cache import CacheEvent, PrefixCache
from .prompts import Prompts
from .rehearsal import Rehearsal
from .rows import MAX_TOKENS, Rows, View
from .stats import Stats, read_stats
from .step_maker import StepMaker
from .steps import Step
from .tables import BlockTables, cut


class BlockAllocator:
    """Block tables of requests, over one pool of `num_blocks` blocks of `block_size` token slots.

    Ids are any hashable values; `rows` gives ints in their place, which are faster. `watermark` is the share of the pool that
    `add_request` leaves free for the growth of those that are there; growth itself may use it. With `prefix_caching` a request that
    comes with its token ids finds the blocks of those that `commit` made known; `record_events` keeps `take_events` informed.
    `host_blocks` is how many blocks `evict` can keep in host memory.

    `groups` are kinds of layers (`cupaged.Group`), each with block tables of its own over the one pool: a request of n tokens has
    ceil(n / block_size) blocks in each. Blocks that left the window or chunk of their group are given back at the next growth, and
    their entries become -1. A prompt is found up to where every group can serve it, in whole blocks; the cache needs a group of full
    attention among several. `tables` and `physical_slot` speak of the first group unless told otherwise.

    With `kernel_block_size`, a divisor of `block_size`, steps and their deltas speak of the smaller blocks that kernels and the
    `KVCache` use: block b is their blocks `b * m` to `b * m + m - 1`, with m = block_size / kernel_block_size. Everything else
    (`tables`, `free`, stats) speaks of the allocator's blocks.

    Errors, with nothing changed: OutOfBlocks (a MemoryError) when blocks run out, KeyError for an unknown id or a new one in use,
    ValueError for a request named twice in one call, for an evicted one, and for counts and lengths out of range, TypeError for
    wrong types.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: Iterable[Group] | None = None,
        *,
        kernel_block_size: int | None = None,
        prefix_caching: bool = False,
        watermark: float = 0.0,
        record_events: bool = False,
        host_blocks: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = integer(block_size, "block_size", 1, MAX_TOKENS)
        self.watermark = number(watermark, "watermark", 0.0, 1.0)
        self._reserve = math.ceil(watermark * self.num_blocks)
        self.kernel_block_size = self.block_size
        if kernel_block_size is not None:
            self.kernel_block_size = integer(kernel_block_size, "kernel_block_size", 1)
            if self.block_size % self.kernel_block_size:
                raise ValueError(
                    f"kernel_block_size: expected a divisor of block_size = {self.block_size}, got {kernel_block_size}"
                )
        per, host_blocks = self.block_size // self.kernel_block_size, integer(host_blocks, "host_blocks", 0, 2**31 - 1)
        if max(self.num_blocks, host_blocks) * per >= 2**31:
            raise ValueError(
                f"kernel_block_size: expected at most 2**31 - 1 kernel blocks, got {max(self.num_blocks, host_blocks)} blocks of {per}; "
                "make it larger"
            )
        self.groups = checked(groups)
        self._requests = Rows(self.block_size, self.groups)
        self._steps = StepMaker(self._requests, self.pool, per)
        record_events = flag(record_events, "record_events")
        self._cache: PrefixCache | None = None
        self._prompts: Prompts | None = None
        self._commits: Commits | None = None
        if flag(prefix_caching, "prefix_caching"):
            self._cache = PrefixCache(self.pool, self.block_size, record_events)
            if len(self.groups) > 1 or self.groups[0].limited:
                self._cache.companions = Companions(self._cache, self.groups)
            self._commits = Commits(self._requests, self.pool, self._cache)
            self._prompts = Prompts(self._requests, self.pool, self._cache, self._steps)
        self._growth = Growth(self._requests, self.pool, self._cache, self._steps)
        self._preemption = Preemption(self._requests, self.pool, self._cache, self._steps, host_blocks)

    __reduce_ex__ = refuse_copies

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
        """Block ids of each request in the first group, by id, read when looked up; none of an evicted one."""
        return self.group_tables(0)

    def group_tables(self, group: int) -> Mapping[Hashable, list[int]]:
        """`tables` of any group, -1 where a block left its horizon. Raises IndexError for a group that is not there."""
        return View(self._requests, partial(self._table, self._tables_of(group)))

    @property
    def lengths(self) -> Mapping[Hashable, int]:
        """Tokens of each request, by id, read when looked up."""
        return View(self._requests, self._length)

    @property
    def evicted(self) -> list[Hashable]:
        """Ids of the evicted requests, the one that was evicted first at the front."""
        return list(self._requests.evicted)

    @property
    def host_pool(self) -> BlockPool:
        """The host blocks that `evict` fills."""
        return self._preemption.pool

    def rows(self, ids: Iterable[Hashable]) -> Ints:
        """Rows `[n] int64` of `ids`: stable until the request is freed, accepted as `rows=` in place of ids."""
        return self._requests.of_any(ids)

    def physical_slot(self, id: Hashable, position: int, group: int = 0) -> int:
        """`block * block_size + offset` of token `position`; raises IndexError outside `[0, length)` and before the group's horizon."""
        row, tables = self._requests.row(id), self._tables_of(group)
        length = int(self._requests.lengths[row])
        if isinstance(position, bool) or not isinstance(position, (int, np.integer)):
            raise TypeError(f"position: expected an integer, got {position!r}")
        if not 0 <= position < length:
            raise IndexError(
                f"position: expected 0 to {length - 1}, request {id!r} has {length} tokens, got {position}"
            )
        column, offset = divmod(int(position), self.block_size)
        block = int(tables.tables[row, column])
        if block < 0:
            raise IndexError(f"position: token {position} of request {id!r} has left the horizon of group {group}")
        return block * self.block_size + offset

    def stats(self) -> Stats:
        """How the pool is used, at the cost of a few operations on the lengths of all requests."""
        return read_stats(self._requests, self.pool, self._steps.copies, self._cache, self._preemption)

    def add_request(
        self,
        id: Hashable,
        n: int | None = None,
        *,
        token_ids: npt.ArrayLike | None = None,
        extra_key: Hashable | Mapping[str, Hashable] = None,
    ) -> Step:
        """A new request of `n` tokens (0 is allowed); the step has one sequence. Leaves the watermark free.

        With `token_ids` what the prefix cache knows of them is attached first (`step.num_cached` tokens, always fewer than all), and at
        most `n` of the others (None: all) get slots. A request shares only with those of an equal `extra_key`; a mapping names the
        kinds of its parts, as in `{"adapter": "x", "salt": "y"}`.
        """
        requests = self._requests
        requests.check_new([id])
        row = requests.vacant(1)
        root, count, tokens = self._wanted(n, token_ids=token_ids, extra_key=extra_key)
        if self._prompts is None or tokens is None:
            step = self._growth.extend(row, np.zeros(1, np.int64), np.array([count]), self._reserve)
            requests.known[row] = 0
        else:
            found = self._prompts.find(root, tokens, count, self._reserve)
            step = self._prompts.attach(row, root, found, len(tokens))
        if self._cache:
            requests.root[row] = root or self._cache.root(extra_key, requests.root)
        requests.bind([id], row)
        return step

    def can_allocate(
        self,
        n: int | None = None,
        *,
        token_ids: npt.ArrayLike | None = None,
        extra_key: Hashable | Mapping[str, Hashable] = None,
    ) -> bool:
        """Whether `add_request` with these arguments would find its blocks now, cached ones and the watermark counted; changes nothing."""
        root, count, tokens = self._wanted(n, token_ids=token_ids, extra_key=extra_key)
        if self._prompts is None or tokens is None:
            needed = -(-count // self.block_size) * len(self.groups)
            return needed == 0 or needed + self._reserve <= self.num_free
        try:
            self._prompts.find(root, tokens, count, self._reserve)
        except OutOfBlocks:
            return False
        return True

    def grow(self, id: Hashable, n: int = 1) -> Step:
        """Slots for `n` more tokens of one request: `grow_batch([id], n)`."""
        return self.grow_batch([id], n)

    def grow_batch(
        self, ids: Iterable[Hashable] | None = None, n: int | npt.ArrayLike = 1, *, rows: npt.ArrayLike | None = None
    ) -> Step:
        """Slots for `n` more tokens of each request, all or nothing; `n` is one count or a count for each, 0 allowed.

        A request that writes into a partly filled block which others hold too gets a fresh block for it (step.copies), unless it is
        the last of them to write; then come blocks for its growth. Returns the step, row i for request i.

        Before all that, requests that get tokens give back the blocks which lie wholly before the horizon of the first of them; a
        request can be truncated to the length it had, then.
        """
        selected = self._requests.select(ids, rows)
        counts = None if isinstance(n, int) and n == 1 and n is not True else counts_of(n, len(selected))
        return self._growth.extend(selected, self._requests.lengths.take(selected), counts)

    def blocks_needed(
        self,
        ids: Iterable[Hashable] | None = None,
        n: int | npt.ArrayLike = 1,
        *,
        rows: npt.ArrayLike | None = None,
        new: Iterable[Mapping[str, Any]] = (),
        restore: Iterable[Hashable] = (),
    ) -> int:
        """How many free blocks a batch of calls would use up, exactly; changes nothing.

        The calls are `grow_batch` of `ids` (or `rows`) by `n`, `add_request` of each of `new`, and `restore(restore)`, in this order;
        each may be left out. What they share, find in the prefix cache and drive out of it is counted, the watermark is not. Blocks
        that leave a horizon are given back first and count less: the calls succeed when as many as this are free. `new` are
        arguments of `add_request`: `[{"n": 5}, {"token_ids": [1, 2, 3], "extra_key": "x"}]`.
        """
        requests = self._requests
        selected = requests.select(() if ids is None and rows is None else ids, rows)
        lengths = requests.lengths.take(selected)
        plan = self._growth.plan(selected, lengths, counts_of(n, len(selected)))
        returning, calls = self._preemption.select(listed(restore, "restore"), None), new_requests(new)
        if not calls and not len(returning):
            return max(plan.num_blocks - plan.freed, 0)
        rehearsal = Rehearsal(self.pool)
        self._growth.rehearse(rehearsal, plan, selected, lengths)
        for arguments in calls:
            root, count, tokens = self._wanted(**arguments)
            if self._prompts is None or tokens is None:
                rehearsal.take(-(-count // self.block_size) * len(self.groups), np.zeros(0, np.int64))
            else:
                self._prompts.rehearse(rehearsal, root, tokens, count, self._reserve)
        self._preemption.rehearse(rehearsal, returning)
        return max(self.num_free - rehearsal.num_free, 0)

    def commit(
        self,
        ids: Iterable[Hashable] | None = None,
        token_ids: npt.ArrayLike | Sequence[npt.ArrayLike] = (),
        *,
        rows: npt.ArrayLike | None = None,
    ) -> None:
        """The next tokens of each request are `token_ids`, and the step that computes them is under way: they can be found from now on.

        `token_ids` is a list with the tokens of each request, or a flat array with all tokens that were not committed yet, request
        after request. A block whose tokens are all known gets an identity. When another block has that identity, it takes the place
        of this one, which is freed, unless the request has tokens in later steps already or shares the block. Blocks of a group that
        left its horizon before stay unknown: commit after every step.

        Raises ValueError, with nothing changed, for more tokens than there are, and for tokens that differ from those which another
        request committed in a block that both hold. Without prefix caching it only checks its arguments.
        """
        selected = self._requests.select(ids, rows)
        if self._commits:
            self._commits.commit(selected, token_ids)
        else:
            open_tokens(self._requests, selected, token_ids)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content, as when weights change; what running requests hold is never found again either."""
        if self._cache:
            self._cache.clear()
            self.pool.forsake()
            self._requests.root.fill(0)
            self._preemption.forget_identities()

    def take_events(self) -> list[CacheEvent]:
        """What the prefix cache stored, removed and cleared since the last call, in order (`record_events=True`)."""
        if self._cache is None or self._cache.events is None:
            raise RuntimeError("take_events: make the allocator with prefix_caching=True and record_events=True")
        events, self._cache.events = self._cache.events, []
        return events

    def fork_request(self, id: Hashable, children: Iterable[Hashable]) -> None:
        """New requests `children` with the tokens of `id`. Takes no block: all are shared, a partly filled one too."""
        children = listed(children, "children")
        self.fork_batch([id] * len(children), children)

    def fork_batch(self, parents: Iterable[Hashable], children: Iterable[Hashable]) -> None:
        """New requests: `children[i]` with the tokens of `parents[i]`, which may repeat. All or nothing; takes no block."""
        requests, children = self._requests, listed(children, "children")
        sources = requests.of(listed(parents, "parents"))
        if len(sources) != len(children):
            raise ValueError(f"children: expected one for each of {len(sources)} parents, got {len(children)}")
        requests.check_new(children)
        targets = requests.vacant(len(children))
        fork(requests, self.pool, sources, targets)
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
        reorder(requests, self.pool, selected, sources)

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
        """Cut each request to `lengths[i]` tokens (absolute, at most what it has) and release the blocks behind them.

        Raises ValueError for a length whose next token would look back at blocks that left a horizon. 0 is always possible, and so is
        the length before the request last grew.
        """
        requests = self._requests
        selected = requests.select(ids, rows)
        new = counts_of(lengths, len(selected), "lengths")
        old = requests.lengths.take(selected)
        if (new > old).any():
            i = int(np.argmax(new > old))
            raise ValueError(
                f"lengths: expected at most the {old[i]} tokens of request {requests.names[selected[i]]!r}, got {new[i]}"
            )
        check_horizon(requests, selected, new)
        self._release(selected, new, old)
        requests.lengths[selected] = new
        if self._cache:
            requests.known[selected] = np.minimum(requests.known.take(selected), new)
            column = new // self.block_size
            inside = ((column * self.block_size < new) & (new < old)).nonzero()[0]
            for tables in requests.groups:
                tails = tables.at(selected.take(inside), column.take(inside))
                self._cache.tokens.truncated(tails, new.take(inside) - column.take(inside) * self.block_size)

    def free_request(self, id: Hashable) -> None:
        """Forget a request; its blocks that no one else holds enter the free queue in table order."""
        self.free_batch([id])

    def free_batch(self, ids: Iterable[Hashable] | None = None, *, rows: npt.ArrayLike | None = None) -> None:
        """Forget requests, as `free_request` would one after the other: a block enters the queue at its last release."""
        requests = self._requests
        selected = requests.select_any(ids, rows)
        lengths = requests.lengths.take(selected)
        if requests.evicted:
            away = lengths < 0
            self._preemption.free(selected[away])
            lengths[away] = 0
        self._release(selected, np.zeros(len(lengths), np.int64), lengths)
        requests.unbind(selected)

    def evict(
        self, ids: Iterable[Hashable] | None = None, *, rows: npt.ArrayLike | None = None, hold: bool = False
    ) -> Step:
        """Send the blocks of requests to host blocks (step.swap_out) and release them, all or nothing, until `restore` or a free.

        What these requests share among themselves is kept once, and is shared again if they are restored in one call; what they
        share with others stays with those. The step has a row without tokens for each request. It runs like any other, after the
        writes of the steps before it, so that later steps may use the blocks at once. For swaps on another stream, `hold` keeps
        the blocks out of the pool until `release_swapped`. Raises OutOfBlocks when too few host blocks are free.
        """
        return self._preemption.evict(self._requests.select(ids, rows), hold)

    def restore(
        self, ids: Iterable[Hashable] | None = None, *, rows: npt.ArrayLike | None = None, hold: bool = False
    ) -> Step:
        """Bring evicted requests back, all or nothing: blocks are taken and filled from the host (step.swap_in).

        Blocks whose content the prefix cache has are shared instead, and those that had an identity have one again. The step is
        that of `grow_batch(ids, 0)`. The watermark does not count. `hold` keeps the host blocks until `release_swapped`.
        Raises OutOfBlocks when too few blocks are free, ValueError for a request that is not evicted.
        """
        return self._preemption.restore(self._preemption.select(ids, rows), hold)

    def release_swapped(self, step: Step) -> None:
        """The swaps of `step`, made by `evict` or `restore` with `hold=True`, are done: their sources go back to their pool.

        Call it when the event after `cache.begin(step)` on the other stream has happened. Raises ValueError when the step holds nothing.
        """
        self._preemption.held.release(step)

    def check(self) -> None:
        """Verify every invariant of tables, lengths, references and free queue; raises AssertionError that says what broke."""
        check(self._requests, self.pool, self._cache, self._preemption)

    def _wanted(
        self,
        n: int | None = None,
        *,
        token_ids: npt.ArrayLike | None = None,
        extra_key: Hashable | Mapping[str, Hashable] = None,
    ) -> tuple[int, int, Tokens | None]:
        """Root, number of new tokens at most, and tokens, if given, of a new request."""
        count, tokens = new_tokens(n, token_ids)
        root = self._cache.roots.find(extra_key) if self._cache else 0
        return root, count, tokens

    def _release(self, rows: Ints, lengths: Ints, old: Ints) -> None:
        """Unmap and release the blocks behind `lengths`, row after row and in a row group after group."""
        self.pool.release(*cut(self._requests.groups, rows, lengths, old))

    def _length(self, row: int) -> int:
        length = int(self._requests.lengths[row])
        return length if length >= 0 else self._preemption.host_tables[row].length

    def _tables_of(self, group: int) -> BlockTables:
        if not isinstance(group, (int, np.integer)) or not 0 <= group < len(self.groups):
            raise IndexError(f"group: expected 0 to {len(self.groups) - 1}, got {group!r}")
        return self._requests.groups[group]

    def _table(self, tables: BlockTables, row: int) -> list[int]:
        columns = -(-max(int(self._requests.lengths[row]), 0) // self.block_size)
        result: list[int] = tables.tables[row, :columns].tolist()
        return result
