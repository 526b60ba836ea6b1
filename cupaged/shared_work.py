"""Which shared prefixes are attended to once for all their sequences, by counting bytes, and what the kernels need to know of them.

A group's prefix is read once for as many packed rows as a unit takes, in a launch before the others; each row's state and sums go
through memory as float32, and the launches after it read only what is a sequence's own. In return a prefix is not read once a
sequence. Windows and chunks hide most of a prefix from each row, so there nothing is shared; with `num_splits` a row's bits must not
depend on its neighbours; a graph plan has a fixed set of launches.

Source: Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes" (2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Array, numpy_dtype
from .kernel_config import MANY, KernelConfig, decode_config, on_tensor_cores, prefill_config, rows_for
from .launcher import DeviceInfo
from .plan import Plan, PlanOptions
from .schedule import MIN_SHARE

LAUNCH_BYTES_PER_SM = 65536  # what a multiprocessor reads in the 2 to 4 us that one more launch takes (A100 to H200)
SUM_BYTES = 4  # of an entry of a row that goes through memory


@dataclass(frozen=True, slots=True)
class SharedWork:
    """The groups of one step whose prefixes are attended to once."""

    config: KernelConfig
    groups: Array  # [num_groups, 4] int32: a sequence (its table is read), first row, number of rows, tokens
    rows: Array  # [num_rows, 2] int32: token and position of each query row
    first_row: Array  # [num_seqs] int32, -1: the sequence is in no group
    skip: Array  # [num_seqs] int64: tokens of the sequence that its group attends to

    @property
    def lengths(self) -> Array:
        """`[num_groups]`: tokens, as `seq_lens` of a schedule."""
        return self.groups[:, 3]

    @property
    def starts(self) -> Array:
        """`[num_groups + 1]`: rows, as `query_start_loc` of a schedule."""
        return np.append(self.groups[:, 1], len(self.rows))

    @property
    def sections(self) -> dict[str, Array]:
        """What the device reads."""
        return {"shared_groups": self.groups, "shared_rows": self.rows, "first_shared_row": self.first_row}


def shared_work(
    info: DeviceInfo, plan: Plan, options: PlanOptions, kernels: tuple[KernelConfig, ...]
) -> SharedWork | None:
    """The groups of the plan that pay when `kernels` attend to the rest; None where nothing does or nothing may be shared."""
    o = options
    if not o.share_prefix or plan.bounds is not None or (o.window, o.chunk, o.num_splits) != (None, None, None):
        return None
    found = plan.shared_prefix
    if not found.num_groups:
        return None
    group = o.num_heads // o.num_kv_heads
    queries = np.diff(plan.query_start_loc).astype(np.int64)
    members, starts = found.members, found.starts[:-1]
    packed = queries[members] * group
    config = _config(info, o, int(np.add.reduceat(packed, starts).max()))

    # Sequences with rows enough for units of their own read no less in company.
    units = np.zeros(len(members), np.int64)  # each reads a sequence's keys once
    for kernel in kernels:
        taken = (packed >= kernel.takes[0]) & (packed <= kernel.takes[1])
        units = np.where(taken, -(-packed // kernel.rows), units)
    inside = packed < config.rows
    group_packed = np.add.reduceat(np.where(inside, packed, 0), starts)
    tokens = found.blocks * plan.block_size
    reads = np.add.reduceat(np.where(inside, units, 0), starts) + group_packed // -config.rows  # fewer by so many
    row_bytes = SUM_BYTES * (o.head_dim + 2)
    gain = reads * tokens * (2 * o.head_dim * numpy_dtype(o.kv_dtype).itemsize) - 2 * group_packed * row_bytes
    pays = gain > 0
    cuts = min(info.num_sms * config.resident // o.num_kv_heads, int(tokens[pays].sum()) // MIN_SHARE)
    gain_of_all = (int(gain[pays].sum()) - 2 * cuts * config.rows * row_bytes) * o.num_kv_heads
    if not pays.any() or gain_of_all <= LAUNCH_BYTES_PER_SM * info.num_sms:
        return None

    kept = np.repeat(pays, np.diff(found.starts)) & inside
    members = members[kept]
    of = np.repeat(np.arange(len(pays)), np.diff(found.starts))[kept]
    return _lay_out(plan, config, members, of, tokens)


def prefix_kernels(info: DeviceInfo, options: PlanOptions) -> set[KernelConfig]:
    """Every kernel that may attend to prefixes in calls with these options."""
    group = options.num_heads // options.num_kv_heads
    return {_config(info, options, max(2 * group, 1 << i)) for i in range(1, 9)}


def _config(info: DeviceInfo, o: PlanOptions, most: int) -> KernelConfig:
    """The kernel that attends to prefixes, for groups of up to `most` packed rows: the one that has most rows in a unit."""
    if on_tensor_cores(info, o.dtype):
        return prefill_config(info, o.head_dim, o.dtype, o.kv_dtype, most, (0, MANY))
    return decode_config(info, o.head_dim, o.dtype, o.kv_dtype, rows_for(o.head_dim, most, 1))


def _lay_out(plan: Plan, config: KernelConfig, members: Array, of: Array, tokens: Array) -> SharedWork:
    """The rows of the `members` end to end, a group's next to one another; `of` are their groups, of `tokens` each."""
    starts, lens = plan.query_start_loc.astype(np.int64), plan.seq_lens.astype(np.int64)
    queries = np.diff(starts)[members]
    ends = queries.cumsum()
    first = ends - queries
    nth = np.arange(ends[-1]) - np.repeat(first, queries)
    rows = np.empty((len(nth), 2), np.int32)
    rows[:, 0] = np.repeat(starts[members], queries) + nth
    rows[:, 1] = np.repeat(lens[members] - queries, queries) + nth
    leaders = np.flatnonzero(np.append(True, of[1:] != of[:-1]))
    groups = np.empty((len(leaders), 4), np.int32)
    groups[:, 0], groups[:, 1], groups[:, 3] = members[leaders], first[leaders], tokens[of[leaders]]
    groups[:, 2] = np.diff(np.append(first[leaders], ends[-1]))
    first_row = np.full(len(lens), -1, np.int32)
    first_row[members] = first
    skip = np.zeros(len(lens), np.int64)
    skip[members] = tokens[of]
    return SharedWork(config, groups, rows, first_row, skip)
