"""What one step's attention needs on the device: how the decode kernel is specialised, and the buffers that hold its work.

`DecodeConfig` follows from shapes and the device alone. `DeviceWork` holds lengths, tables, slots and the schedule of one step in
one device buffer, filled by one copy from pinned memory; with bounds the buffer is large enough for any step within them, so that
a captured graph finds later steps' values at the same addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .arrays import Array, numpy_dtype
from .kernels import CUDA_TYPES
from .launcher import DeviceInfo, Launcher
from .plan import Bounds, Plan, PlanOptions
from .schedule import Schedule, make_schedule


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Tile sizes of decode.cu. `tile` and `warps` do not depend on `rows`, so neither do the bits of a row."""

    rows: int  # packed query rows of a unit
    tile: int  # tokens a warp takes at once
    warps: int
    shared_bytes: int
    resident: int  # blocks that one multiprocessor holds
    defines: tuple[tuple[str, int | str], ...]

    @property
    def threads(self) -> int:
        return 32 * self.warps


def most_rows(head_dim: int) -> int:
    """How many packed rows of float32 sums a warp keeps in registers: 64 values a lane."""
    return 8 if head_dim > 128 else 16


def rows_for(head_dim: int, group: int, num_queries: int) -> int:
    """Rows of a unit for sequences of at most `num_queries` query rows: a power of two."""
    return min(1 << max(group * num_queries - 1, 0).bit_length(), most_rows(head_dim))


@cache
def decode_config(info: DeviceInfo, head_dim: int, dtype: str, kv_dtype: str, rows: int) -> DecodeConfig:
    """The constants of decode.cu and what they cost; decode.cu asserts `kSharedBytes`."""
    item = numpy_dtype(kv_dtype).itemsize
    tile = 32
    while tile > 8 and 2 * tile * head_dim * item > 8192:
        tile //= 2
    warps = 4
    while warps > 1 and _shared_bytes(head_dim, item, most_rows(head_dim), tile, warps) > info.shared_per_block:
        warps //= 2
    shared = _shared_bytes(head_dim, item, rows, tile, warps)
    elements = 4 if head_dim >= 128 else 2
    sums = rows * -(-head_dim // (32 * elements)) * elements
    by_registers = 3 if sums <= 32 else 2  # decode.cu's kMinBlocks
    resident = max(1, min(by_registers, info.shared_per_sm // (shared + 1024)))  # the system takes 1 KiB a block
    defines: dict[str, int | str] = {
        "kHeadDim": head_dim, "kQueryType": CUDA_TYPES[dtype], "kCacheType": CUDA_TYPES[kv_dtype],
        "kRows": rows, "kTokens": tile, "kWarps": warps, "kSharedBytes": shared,
    }  # fmt: skip
    return DecodeConfig(rows, tile, warps, shared, resident, tuple(defines.items()))


def _shared_bytes(head_dim: int, item: int, rows: int, tile: int, warps: int) -> int:
    row = ((head_dim * item + 15) // 16 | 1) * 16
    stage = max(2 * tile * row, rows * head_dim * 4)
    row_floats = rows if rows <= 2 else (rows // 4 | 1) * 4
    warp = stage + -(-tile * row_floats * 4 // 16) * 16
    fixed = rows * head_dim * 4 + rows * 16 + warps * rows * 8 + 16
    return -(-fixed // 128) * 128 + warps * warp


class PinnedRing:
    """Page-locked buffers that are refilled in turn, each only after the copy out of it has run."""

    def __init__(self, launcher: Launcher, slots: int = 4) -> None:
        self._launcher = launcher
        self._buffers: list[Array | None] = [None] * slots
        self._events: list[Any] = [None] * slots
        self._next = 0

    def stage(self, num_bytes: int) -> Array:
        """A uint8 buffer of at least `num_bytes`, free to be filled."""
        if self._events[self._next] is not None:
            self._launcher.synchronize(self._events[self._next])
            self._events[self._next] = None
        buffer = self._buffers[self._next]
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers[self._next] = self._launcher.pinned(max(2 * num_bytes, 4096))
        return buffer

    def send(self, to: Array, num_bytes: int) -> None:
        """Copy the staged bytes to the start of the device buffer `to`, on the current stream."""
        buffer = self._buffers[self._next]
        assert buffer is not None
        self._launcher.copy_async(to[:num_bytes], buffer[:num_bytes])
        self._events[self._next] = self._launcher.record()
        self._next = (self._next + 1) % len(self._buffers)


class DeviceWork:
    """One plan's metadata and schedule on one device, for one set of options.

    Sections of the buffer, in order: share_start, seq_lens, query_start_loc, units, items, slot_mapping, block_tables; each
    aligned to 16 bytes. Tables come last, so that a copy ends with the last row in use.
    """

    def __init__(self, launcher: Launcher, ring: PinnedRing, plan: Plan, options: PlanOptions) -> None:
        self._launcher, self._ring = launcher, ring
        self.options, self.bounds = options, plan.bounds
        group = options.num_heads // options.num_kv_heads
        if self.bounds is not None:
            most = 1 if self.bounds.max_tokens == self.bounds.max_seqs else self.bounds.max_tokens
        else:
            most = int(np.diff(plan.query_start_loc).max(initial=1))
        rows = rows_for(options.head_dim, group, most)
        self.config = decode_config(launcher.info, options.head_dim, options.dtype, options.kv_dtype, rows)
        self.capacity = max(
            1, launcher.info.num_sms * self.config.resident // options.num_kv_heads
        )  # shares of a KV head
        self._group = group
        schedule = self._schedule(plan)
        if self.bounds is None:
            sizes = _Sizes.of(plan, schedule)
        else:
            sizes = _Sizes.bound(self.bounds, group, rows, self.capacity, options.num_splits)
        self.sizes = sizes
        self.offsets, num_bytes = sizes.layout()
        self.buffer = launcher.empty((num_bytes + 16,), np.uint8)  # no section is empty at the very end
        base = launcher.pointer(self.buffer)
        self.addresses = {name: base + offset for name, offset in self.offsets.items()}
        self.shares = self.capacity if self.bounds is not None else len(schedule.share_start) - 1
        self.num_states = sizes.partials * options.num_kv_heads * rows  # partial rows
        self.num_tickets = sizes.units * options.num_kv_heads
        self.workspace: Any = None  # of this work alone; None: the stream's
        self._fill(plan, schedule)

    @property
    def slot_mapping(self) -> Array:
        """`[num_tokens]` int64 on the device; `[max_tokens]`, padded with -1, with bounds."""
        start = self.offsets["slot_mapping"]
        return self.buffer[start : start + 8 * self.sizes.slots].view(np.int64)

    def update(self, plan: Plan) -> None:
        """Refill the buffer on the current stream for the plan's present metadata, which lie within the bounds."""
        self._fill(plan, self._schedule(plan))

    def _schedule(self, plan: Plan) -> Schedule:
        o = self.options
        return make_schedule(
            plan.seq_lens, plan.query_start_loc, group=self._group, rows=self.config.rows, tile=self.config.tile,
            shares=self.capacity, causal=o.causal, window=o.window, chunk=o.chunk, num_splits=o.num_splits,
        )  # fmt: skip

    def _fill(self, plan: Plan, schedule: Schedule) -> None:
        sizes, offsets = self.sizes, self.offsets
        n = len(plan.seq_lens)
        columns = min(plan.block_tables.shape[1], sizes.columns)
        end = offsets["block_tables"] + 4 * n * sizes.columns
        staged = self._ring.stage(end)

        def put(name: str, values: Array, room: int, filler: int) -> None:
            section = staged[offsets[name] : offsets[name] + room * values.itemsize].view(values.dtype)
            section[: values.size] = values.reshape(-1)
            section[values.size :] = filler

        put("share_start", schedule.share_start, sizes.shares + 1, len(schedule.items))
        put("seq_lens", plan.seq_lens, sizes.seqs, 0)
        put("query_start_loc", plan.query_start_loc, sizes.seqs + 1, int(plan.query_start_loc[-1]))
        put("units", schedule.units, 4 * len(schedule.units), 0)
        put("items", schedule.items, 4 * len(schedule.items), 0)
        slots = np.empty(0, np.int64) if plan.slot_mapping is None else plan.slot_mapping
        put("slot_mapping", slots, sizes.slots, -1)
        tables = staged[offsets["block_tables"] : end].view(np.int32).reshape(n, sizes.columns)
        tables[:, :columns] = plan.block_tables[:, :columns]
        self._ring.send(self.buffer, end)


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

    def layout(self) -> tuple[dict[str, int], int]:
        """Byte offset of each section, and the size of the whole."""
        offset, offsets = 0, {}
        for name, num_bytes in (
            ("share_start", 4 * (self.shares + 1)),
            ("seq_lens", 4 * self.seqs),
            ("query_start_loc", 4 * (self.seqs + 1)),
            ("units", 16 * self.units),
            ("items", 16 * self.items),
            ("slot_mapping", 8 * self.slots),
            ("block_tables", 4 * self.seqs * self.columns),
        ):
            offsets[name] = offset
            offset += -(-num_bytes // 16) * 16
        return offsets, offset
