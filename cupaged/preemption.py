"""Requests whose blocks went to host memory, to make room for others, and come back: evict and restore.

A second `BlockPool` numbers the host blocks. Leaving, what several requests share among themselves is kept once, so that they share
it again when they come back together. Coming back, a block that the prefix cache still has is shared in place of being swapped in.
With several groups of layers the tables of all of them go and come, row after row and in a row group after group.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .adopt import Adoption
from .arguments import flag
from .array_types import Blocks, Flags, Ints
from .block_pool import BlockPool
from .errors import OutOfBlocks, require
from .held_swaps import HeldSwaps
from .prefix_cache import PrefixCache
from .prefix_match import find, match
from .rehearsal import Rehearsal
from .rows import Rows
from .step_maker import StepMaker
from .steps import Step
from .tables import cut, laid_by_row, ranges

_HINT = "free evicted requests, or make the host pool larger (host_blocks)"


@dataclass(frozen=True, slots=True)
class HostTables:
    """Where the content of an evicted request is."""

    blocks: Blocks  # host blocks, group after group
    begins: list[int]  # first mapped column of each group's table
    length: int  # tokens


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What evicted requests need to come back. Their tables are laid end to end; `m` is the sum of their mapped columns."""

    host: Blocks  # [m] host blocks
    begins: Ints  # [n, groups] first mapped column of each table
    sizes: Ints  # [n, groups] mapped columns of each table
    lengths: Ints  # [n] tokens of each request
    cached: Ints  # [m] block of the prefix cache that has the same content, -1: none
    fresh: Flags  # [m] whether a block must be taken for this entry; it serves all entries of the host block
    first: Ints  # [n] columns from `first[i]` to `stop[i]` had identities that the cache may lack
    stop: Ints  # [n]


class Preemption:
    """Host blocks, and the tables of evicted requests, which name them. Arguments `rows [n]` were checked by the caller."""

    def __init__(
        self, requests: Rows, pool: BlockPool, cache: PrefixCache | None, steps: StepMaker, host_blocks: int
    ) -> None:
        self._requests, self._device, self._cache, self._steps = requests, pool, cache, steps
        self._groups = requests.groups
        self.pool = BlockPool(host_blocks)
        self.swapped_out = self.swapped_in = 0  # blocks of all steps
        self.host_tables: dict[int, HostTables] = {}  # by row
        self.held = HeldSwaps()
        known = host_blocks if cache else 0
        self._tokens = np.zeros((known, requests.block_size), np.int32)  # of each host block, as in the prefix cache
        self._filled = np.zeros(known, np.int32)
        self._named = np.zeros(known, np.bool_)  # whether the block had an identity

    def select(self, ids: Iterable[Hashable] | None, rows: npt.ArrayLike | None) -> Ints:
        """Rows `[n]` of evicted requests; raises like `Rows.select`, and ValueError for one that is not evicted."""
        selected = self._requests.select_any(ids, rows)
        present = self._requests.lengths.take(selected) >= 0
        if present.any():
            name = self._requests.names[selected[np.argmax(present)]]
            raise ValueError(f"request {name!r} is not evicted; restore takes what `evict` sent away")
        return selected

    def evict(self, rows: Ints, hold: bool) -> Step:
        """Send the blocks of `rows` to host blocks. All or nothing: raises OutOfBlocks when too few of those are free."""
        flag(hold, "hold")
        requests, device = self._requests, self._device
        lengths = requests.lengths.take(rows)
        columns = self._groups[0].columns(lengths)
        begins = [tables.begin.take(rows) for tables in self._groups]
        parts = [
            tables.flat.take(tables.entries(rows, begin, columns))
            for tables, begin in zip(self._groups, begins, strict=True)
        ]
        blocks, sizes = laid_by_row(parts, [columns - begin for begin in begins])
        first = device.last_of_each(blocks[::-1])[::-1]  # one of each block, where it stands first
        leaving = blocks[first]
        steps = self._steps.begin(rows, 1, 0)
        for step in steps:
            step.block_tables.fill(-1)
        if len(leaving) > self.pool.num_free:
            raise OutOfBlocks(len(leaving), self.pool.num_free, _HINT)
        host = self.pool.take(len(leaving))  # the last thing that can fail; from here on, state changes

        place = np.empty(device.num_blocks, np.int32)
        place[leaving] = host
        table = place.take(blocks)
        self.pool.acquire(table[~first])
        if self._cache:
            self._tokens[host] = self._cache.tokens.ids.take(leaving, 0)
            self._filled[host] = self._cache.tokens.filled.take(leaving)
            self._named[host] = self._cache.serial.take(leaving) > 0
        ends = sizes.reshape(-1, len(self._groups)).sum(1).cumsum()
        tables = np.split(table, ends)[:-1]
        self.host_tables.update(
            zip(rows.tolist(), map(HostTables, tables, np.stack(begins, 1).tolist(), lengths.tolist()), strict=True)
        )
        none = np.zeros_like(lengths)
        steps[0].swap_out = np.stack((leaving, host), 1).astype(np.int32)
        self.swapped_out += len(host)
        released = cut(self._groups, rows, none, lengths)
        requests.suspend(rows)
        step = self._steps.finish(steps, none, none, none)
        if hold:
            self.held.hold(step, device, leaving, first, sizes)
        device.release(*released)
        return step

    def rehearse(self, rehearsal: Rehearsal, rows: Ints) -> None:
        """Note what `restore` would do."""
        plan = self._plan(rows, rehearsal.gone)
        rehearsal.take(int(np.count_nonzero(plan.fresh)), plan.cached[plan.cached >= 0])

    def _plan(self, rows: Ints, gone: Flags | None = None) -> RestorePlan:
        away = [self.host_tables[row] for row in rows.tolist()]
        host = np.concatenate([np.zeros(0, np.int32), *(tables.blocks for tables in away)])
        lengths = np.array([tables.length for tables in away], np.int64)
        begins = np.array([tables.begins for tables in away], np.int64).reshape(-1, len(self._groups))
        sizes = self._groups[0].columns(lengths)[:, None] - begins
        first, stop = np.zeros_like(lengths), np.zeros_like(lengths)
        place = np.full(self.pool.num_blocks, -1, np.int64)
        if self._cache:
            for i, row in enumerate(rows.tolist()):
                parts = np.split(away[i].blocks, sizes[i].cumsum()[:-1])
                first[i], stop[i] = self._find(row, parts, begins[i], place, gone)
        cached = place.take(host)
        fresh = self.pool.last_of_each(host[::-1])[::-1] & (cached < 0)
        return RestorePlan(host, begins, sizes, lengths, cached, fresh, first, stop)

    def _find(self, row: int, tables: list[Blocks], begins: Ints, place: Ints, gone: Flags | None) -> tuple[int, int]:
        """Look for the content of a row's host blocks in the cache, and note in `place` what has it.

        Returns the columns from the first to before the second of which had identities and may need new ones.
        """
        assert self._cache
        anchor = tables[self._cache.anchor]
        named = self._named.take(anchor)
        known = len(named) if named.all() else int(named.argmin())
        words = self._tokens.take(anchor[:known], 0)
        found, _, _ = match(self._cache, int(self._requests.root[row]), words.reshape(-1), words.size, gone)
        place[anchor[: len(found)]] = found
        companions = self._cache.companions
        if not companions:
            return len(found), known
        for g in companions.others:
            columns = np.arange(begins[g], len(found))
            beside = find(
                self._cache, companions.parents(g, found.take(columns)), columns, words.take(columns, 0), gone
            )
            place[tables[g][: len(columns)]] = beside
        return 0, known

    def restore(self, rows: Ints, hold: bool) -> Step:
        """Bring `rows` back into blocks of the device. All or nothing: raises OutOfBlocks when too few of those are free."""
        flag(hold, "hold")
        requests, device = self._requests, self._device
        plan = self._plan(rows)
        count, width = len(self._groups), max(int(self._groups[0].columns(plan.lengths).max(initial=0)), 1)
        requests.widen(width)
        steps = self._steps.begin(rows, width, 0)
        shared = plan.cached >= 0
        taken = device.take(int(np.count_nonzero(plan.fresh)), plan.cached[shared])  # the last thing that can fail

        moved = plan.host[plan.fresh]
        place = np.empty(self.pool.num_blocks, np.int32)
        place[moved] = taken
        blocks = np.where(shared, plan.cached, place.take(plan.host)).astype(np.int32)
        device.acquire(blocks[~shared & ~plan.fresh])
        sizes = plan.sizes.reshape(-1)
        owner, column = np.repeat(np.arange(len(sizes)), sizes), ranges(plan.begins.reshape(-1), sizes)
        for g, (tables, step) in enumerate(zip(self._groups, steps, strict=True)):
            mine = (owner % count == g).nonzero()[0]
            of, at = owner.take(mine) // count, column.take(mine)
            tables.map(rows.take(of), at, blocks.take(mine))
            tables.begin[rows] = plan.begins[:, g]
            step.block_tables.reshape(-1)[of * width + at] = blocks.take(mine)
        requests.resume(rows, plan.lengths)
        if self._cache:
            self._cache.tokens.ids[taken] = self._tokens.take(moved, 0)
            self._cache.tokens.filled[taken] = self._filled.take(moved)
            lost = (plan.first < plan.stop).nonzero()[0]
            if len(lost):
                first, stop = plan.first.take(lost), plan.stop.take(lost)
                Adoption(requests, device, self._cache).adopt(rows.take(lost), first, stop, replace=False)
        steps[0].swap_in = np.stack((moved, taken), 1)
        self.swapped_in += len(taken)
        none = np.zeros_like(plan.lengths)  # no request had a block before, and none gets a token
        step = self._steps.finish(steps, none, none, plan.lengths)
        if hold:
            self.held.hold(step, self.pool, moved, plan.fresh, sizes)
        self.free(rows)
        return step

    def free(self, rows: Ints) -> None:
        """Forget the host blocks of `rows`."""
        tables = [self.host_tables.pop(row).blocks for row in rows.tolist()]
        if tables:
            self.pool.release(np.concatenate(tables), np.array([len(table) for table in tables]))

    def forget_identities(self) -> None:
        """No host block has an identity any more."""
        self._named.fill(False)

    def check(self) -> None:
        """Verify the host side; raises AssertionError that says what broke."""
        self.pool.check()
        requests = self._requests
        rows = sorted(requests.evicted.values())
        require(rows == sorted(self.host_tables), "evicted rows {} have tables {}", rows, self.host_tables)
        counted = self.held.references(self.pool)
        for name, row in requests.evicted.items():
            table, length = self.host_tables[row].blocks, self.host_tables[row].length
            require(
                requests.names[row] == name and name not in requests.row_of, "row {} is not that of {!r}", row, name
            )
            columns = -(-length // requests.block_size) * len(self._groups) - sum(self.host_tables[row].begins)
            require(len(table) == columns, "evicted row {}: {} tokens in blocks {}", row, length, table)
            require(len(np.unique(table)) == len(table), "evicted row {} holds a host block twice: {}", row, table)
            np.add.at(counted, table, 1)
        require(
            np.array_equal(counted, self.pool.ref_count),
            "evicted tables hold {} host blocks, reference counts are {}",
            counted,
            self.pool.ref_count,
        )
        if self._cache:
            used = self._named & (self.pool.ref_count > 0)
            require(
                np.all(self._filled[used] == requests.block_size), "a host block with identity is not full: {}", used
            )
