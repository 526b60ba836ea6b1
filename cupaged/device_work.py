"""What one step's attention needs on the device: the buffers that hold its work.

`DeviceWork` holds lengths, tables, slots and the schedules of one step in one device buffer, filled by one copy from pinned memory;
with bounds the buffer is large enough for any step within them, so that a captured graph finds later steps' values at the same
addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import Array
from .cuda_upload import PinnedRing
from .kernel_config import FEW_ROWS, MANY, KernelConfig, attention_kernels
from .launcher import Launcher
from .plan import Bounds, Plan, PlanOptions
from .schedule import Schedule, make_schedule
from .shared_work import SharedWork, shared_work


@dataclass(frozen=True, slots=True)
class Part:
    """The sequences that one kernel takes, or the prefixes that sequences share: one launch."""

    config: KernelConfig
    sizes: _Sizes
    shares: int  # blocks per KV head
    offsets: dict[str, int]  # of its sections in the buffer: share_start, units, items
    addresses: dict[
        str, int
    ]  # the same on the device, and `shared_groups` where its sequences are over shared prefixes

    @property
    def states_per_head(self) -> int:
        """Partial rows of one KV head."""
        return self.sizes.partials * self.config.rows


class DeviceWork:
    """One plan's metadata and schedules on one device, for one set of options.

    Sections of the buffer, in order: seq_lens, query_start_loc, per part (share_start, units, items), slot_mapping, what prefixes
    need, block_tables; each aligned to 16 bytes. Tables come last, so that a copy ends with the last row in use. Parts are in the
    order of their launches: the one over shared prefixes, if there is one, comes first.
    """

    def __init__(self, launcher: Launcher, ring: PinnedRing, plan: Plan, options: PlanOptions) -> None:
        self._launcher, self._ring = launcher, ring
        self.options, self.bounds = options, plan.bounds
        self._group = options.num_heads // options.num_kv_heads
        kernels = self._kernels(plan)
        self.shared = shared_work(launcher.info, plan, options, kernels)
        if self.shared is not None:
            kernels = (self.shared.config, *kernels)
        self._capacity = [max(1, launcher.info.num_sms * c.resident // options.num_kv_heads) for c in kernels]
        schedules = self._schedules(plan, kernels)
        sizes = [self._sizes(plan, *each) for each in zip(kernels, self._capacity, schedules, strict=True)]
        self.sizes = sizes[0]  # what does not differ between parts
        self.offsets, part_offsets, num_bytes = _layout(sizes, self.shared)
        self.buffer = launcher.empty((num_bytes + 16,), np.uint8)  # no section is empty at the very end
        base = launcher.pointer(self.buffer)
        addresses = [{name: base + offset for name, offset in offsets.items()} for offsets in part_offsets]
        if self.shared is not None:
            for i, of_part in enumerate(addresses):
                of_part["shared_groups"] = base + self.offsets["shared_groups"] if i == 0 else 0
        self.parts = tuple(
            Part(config, size, size.shares, *where)
            for config, size, *where in zip(kernels, sizes, part_offsets, addresses, strict=True)
        )
        # what a kernel is told of the step
        self.metadata = tuple(base + self.offsets[name] for name in ("block_tables", "seq_lens", "query_start_loc"))
        of_prefixes = () if self.shared is None else ("shared_rows", "first_shared_row")
        self.parameters = {
            **{name: base + self.offsets[name] for name in of_prefixes},
            "table_row": self.sizes.columns, "max_blocks": self.sizes.columns, "num_seqs": self.sizes.seqs, "splits": 1,
        }  # fmt: skip
        # Launches follow one another and leave the tickets at 0: they share a workspace.
        self.num_states = options.num_kv_heads * max(part.states_per_head for part in self.parts)
        self.num_shared_states = 0 if self.shared is None else options.num_heads * len(self.shared.rows)
        self.num_tickets = options.num_kv_heads * max(part.sizes.units for part in self.parts)
        self.workspace: Any = None  # of this work alone; None: the stream's
        self.launches: dict[Any, Any] = {}  # what calls of a form launch
        self._fill(plan, schedules)

    def _kernels(self, plan: Plan) -> tuple[KernelConfig, ...]:
        """The kernels that the plan's sequences need; with bounds, that any step within them may need."""
        o, info = self.options, self._launcher.info
        if self.bounds is not None:
            most = 1 if self.bounds.max_tokens == self.bounds.max_seqs else self.bounds.max_tokens
            few = -(-self.bounds.max_tokens // max(self.bounds.max_seqs, 1))
            return attention_kernels(
                info, o.head_dim, o.dtype, o.kv_dtype, self._group, few * self._group, most * self._group
            )
        starts = plan.query_start_loc
        packed = (starts[1:] - starts[:-1]) * self._group
        most = few = int(packed.max(initial=1))
        if most > FEW_ROWS:
            few = int(packed[packed <= FEW_ROWS].max(initial=1))
        kernels = attention_kernels(info, o.head_dim, o.dtype, o.kv_dtype, self._group, few, most)
        if len(kernels) == 1:
            return kernels  # one launch even for no work: it clears padding
        needed = [c for c in kernels if ((packed >= max(c.takes[0], 1)) & (packed <= c.takes[1])).any()]
        return tuple(needed) or kernels[:1]

    def _sizes(self, plan: Plan, config: KernelConfig, capacity: int, schedule: Schedule) -> _Sizes:
        if self.bounds is None:
            return _Sizes.of(plan, schedule)
        return _Sizes.bound(self.bounds, self._group, config.rows, capacity, self.options.num_splits)

    @property
    def slot_mapping(self) -> Array:
        """`[num_tokens]` int64 on the device; `[max_tokens]`, padded with -1, with bounds."""
        with self._launcher.device():
            self.arrive()
        start = self.offsets["slot_mapping"]
        return self.buffer[start : start + 8 * self.sizes.slots].view(np.int64)

    def update(self, plan: Plan) -> None:
        """Refill the buffer on the current stream for the plan's present metadata, which lie within the bounds."""
        with self._launcher.device():
            self._fill(plan, self._schedules(plan, tuple(part.config for part in self.parts)))

    def _schedules(self, plan: Plan, kernels: tuple[KernelConfig, ...]) -> list[Schedule]:
        o, shared = self.options, self.shared
        schedules: list[Schedule] = []
        for config, shares in zip(kernels, self._capacity, strict=True):
            how: dict[str, Any] = {"group": self._group, "rows": config.rows, "tile": config.tile, "shares": shares}
            if shared is not None and not schedules:
                schedule = make_schedule(shared.lengths, shared.starts, causal=False, after=True, **how)
            else:
                schedule = make_schedule(
                    plan.seq_lens, plan.query_start_loc, causal=o.causal, window=o.window, chunk=o.chunk, num_splits=o.num_splits,
                    takes=None if config.takes == (0, MANY) else config.takes, skip=None if shared is None else shared.skip, **how,
                )  # fmt: skip
            schedules.append(schedule)
        return schedules

    def _fill(self, plan: Plan, schedules: list[Schedule]) -> None:
        sizes, offsets = self.sizes, self.offsets
        n = len(plan.seq_lens)
        columns = min(plan.block_tables.shape[1], sizes.columns)
        end = offsets["block_tables"] + 4 * n * sizes.columns
        with self._ring.lock:
            staged = self._ring.stage(end)

            words = {4: staged[: end // 4 * 4].view(np.int32), 8: staged[: end // 8 * 8].view(np.int64)}

            def put(offset: int, values: Array, room: int, filler: int) -> None:
                item, size = values.itemsize, values.size
                start, section = offset // item, words[item]
                assert size <= room
                section[start : start + size] = values if values.ndim == 1 else values.reshape(-1)
                if size < room:
                    section[start + size : start + room] = filler

            put(offsets["seq_lens"], plan.seq_lens, sizes.seqs, 0)
            put(offsets["query_start_loc"], plan.query_start_loc, sizes.seqs + 1, int(plan.query_start_loc[-1]))
            for part, schedule in zip(self.parts, schedules, strict=True):
                put(part.offsets["share_start"], schedule.share_start, part.shares + 1, len(schedule.items))
                put(part.offsets["units"], schedule.units, 4 * len(schedule.units), 0)
                put(part.offsets["items"], schedule.items, 4 * len(schedule.items), 0)
            slots = np.empty(0, np.int64) if plan.slot_mapping is None else plan.slot_mapping
            put(offsets["slot_mapping"], slots, sizes.slots, -1)
            for name, values in ({} if self.shared is None else self.shared.sections).items():
                put(offsets[name], values, values.size, 0)
            tables = staged[offsets["block_tables"] : end].view(np.int32).reshape(n, sizes.columns)
            tables[:, :columns] = plan.block_tables[:, :columns]
            self._filled = self._ring.send(self.buffer, end)
            self._streams = {self._launcher.stream()}

    def ready(self) -> None:
        """Other streams wait for all that is enqueued on the current one so far."""
        self._filled = self._launcher.record()

    def arrive(self) -> None:
        """Later work on the current stream finds what was filled on another one.

        A stream that is captured cannot wait for work outside the graph: it has used the plan before, or its replays come after the copy.
        """
        stream = self._launcher.stream()
        if stream not in self._streams and not self._launcher.capturing():
            self._launcher.wait(self._filled)
            self._streams.add(stream)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How many entries each section of the buffer has room for."""

    shares: int
    seqs: int
    units: int
    items: int
    partials: int
    slots: int
    columns: int

    @classmethod
    def of(cls, plan: Plan, schedule: Schedule) -> _Sizes:
        longest = int(plan.seq_lens.max(initial=0))
        return cls(
            shares=len(schedule.share_start) - 1, seqs=len(plan.seq_lens), units=len(schedule.units), items=len(schedule.items),
            partials=schedule.num_partials, slots=0 if plan.slot_mapping is None else len(plan.slot_mapping),
            columns=-(-longest // plan.block_size),
        )  # fmt: skip

    @classmethod
    def bound(cls, bounds: Bounds, group: int, rows: int, shares: int, num_splits: int | None) -> _Sizes:
        # Sequence i has ceil(m_i * group / rows) units; a cut between two shares adds an item, and splits at most two partials.
        units = -(-bounds.max_tokens * group // rows) + bounds.max_seqs
        items = units + shares if num_splits is None else units * num_splits
        return cls(
            shares=shares, seqs=bounds.max_seqs, units=units, items=items,
            partials=2 * shares if num_splits is None else items, slots=bounds.max_tokens, columns=bounds.max_blocks,
        )  # fmt: skip


def _layout(parts: list[_Sizes], shared: SharedWork | None) -> tuple[dict[str, int], list[dict[str, int]], int]:
    """Byte offset of each section, of each section of the parts, and the size of the whole."""
    end = 0

    def place(num_bytes: int) -> int:
        nonlocal end
        start, end = end, end + -(-num_bytes // 16) * 16
        return start

    first = parts[0]
    offsets = {"seq_lens": place(4 * first.seqs), "query_start_loc": place(4 * (first.seqs + 1))}
    part_offsets = [
        {"share_start": place(4 * (s.shares + 1)), "units": place(16 * s.units), "items": place(16 * s.items)}
        for s in parts
    ]
    offsets["slot_mapping"] = place(8 * first.slots)
    if shared is not None:
        offsets |= {name: place(values.nbytes) for name, values in shared.sections.items()}
    offsets["block_tables"] = place(4 * first.seqs * first.columns)
    return offsets, part_offsets, end
