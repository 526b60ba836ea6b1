"""Planning: every check that reads metadata values, and the work of one step, once for all layers.

A `Plan` holds one step's metadata on the host, checked. The CUDA backend keeps beside it what the step needs on a device: the
metadata and the schedule of thread blocks (`decode_work`), made for the `PlanOptions` of a call. With `Bounds` a plan is a graph
plan: its device buffers and grid are fixed, so that a captured graph stays right for every later step within the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import choice, count, flag, host_array
from .arrays import DTYPES, FP8_DTYPES, Array
from .shared_prefix import SharedPrefix, find_shared_prefix

if TYPE_CHECKING:
    from .steps import Step


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What a schedule depends on besides the metadata."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    window: int | None
    chunk: int | None
    num_splits: int | None
    causal: bool
    share_prefix: bool = True


@lru_cache(maxsize=1024)
def same_options(*values: Any) -> PlanOptions:
    """`PlanOptions(*values)`, one object for equal values: telling that two are equal is then telling that they are one."""
    return PlanOptions(*values)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest step that a graph plan has room for."""

    max_seqs: int
    max_tokens: int  # query rows
    max_blocks: int  # columns of block_tables


@dataclass(slots=True, eq=False)
class Plan:
    """Metadata of one step, checked: what `paged_attention(plan=...)` reads instead of checking again."""

    block_tables: Array  # [num_seqs, max_blocks] int32
    seq_lens: Array  # [num_seqs] int32
    query_start_loc: Array  # [num_seqs + 1] int32
    block_size: int
    num_blocks: int  # a pool needs at least this many
    slot_mapping: Array | None = None  # [num_tokens] int64
    options: PlanOptions | None = None  # None: any call may use the plan
    bounds: Bounds | None = None
    device: dict[Any, Any] = field(default_factory=dict)  # a backend's work for this step
    step: Step | None = None  # the allocator's, which knows what its tables share
    host: Any = None  # the CPU backend's addresses of the arrays above
    repeated: Any = None  # a call with this plan that was checked, see `call_form.RepeatedCall`
    _shared_prefix: SharedPrefix | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])

    @property
    def shared_prefix(self) -> SharedPrefix:
        """Sequences whose tables begin with the same blocks, found when it is first asked for."""
        if self._shared_prefix is None:
            if self.step is not None:
                self._shared_prefix = self.step.shared_prefix
            else:
                where = (self.block_tables, self.seq_lens, self.query_start_loc)
                self._shared_prefix = find_shared_prefix(*where, self.block_size)
        return self._shared_prefix

    @property
    def write_slots(self) -> Array | None:
        """`slot_mapping` for `write_kv`: on the device once the plan is prepared there (`[max_tokens]`, -1 padded, with bounds)."""
        if self.slot_mapping is not None or self.bounds is not None:
            for work in self.device.values():
                return work.slot_mapping
        return self.slot_mapping

    def check_rows(self, num_tokens: int) -> None:
        """Raise ValueError when a call has another number of query rows than the plan."""
        if self.bounds is None:
            if num_tokens != self.num_tokens:
                raise ValueError(
                    f"q: expected {self.num_tokens} rows, one for each new token of the step, got {num_tokens}"
                )
        elif not self.num_tokens <= num_tokens <= self.bounds.max_tokens:
            raise ValueError(
                f"q: expected {self.num_tokens} (the plan's rows now) to max_tokens = {self.bounds.max_tokens} rows, got {num_tokens}"
            )

    def check_options(self, options: PlanOptions) -> None:
        """Raise ValueError when a call has other options than the plan was made for."""
        if self.options is options or self.options == options:
            return
        for name in PlanOptions.__slots__:
            planned, called = getattr(self.options, name), getattr(options, name)
            if planned != called:
                raise ValueError(
                    f"plan: made for {name}={planned!r}, but the call has {name}={called!r}; give plan() the same value"
                )

    def update(self, step: Step) -> None:
        """Take over the metadata of `step`; a graph plan refills its device buffers on the current stream, by one copy.

        All or nothing. Raises ValueError when the step does not fit the bounds.
        """
        if not hasattr(step, "slot_mapping"):
            raise TypeError(f"step: expected the Step that a BlockAllocator gave, got {type(step).__name__}")
        if step.block_size != self.block_size:
            raise ValueError(f"step: expected block_size {self.block_size} as the plan has, got {step.block_size}")
        fresh = Plan(
            step.block_tables, step.seq_lens, step.query_start_loc, self.block_size, step.num_blocks, step.slot_mapping,
            self.options, self.bounds, self.device,
        )  # fmt: skip
        if self.bounds is not None:
            _check_bounds(fresh, self.bounds)
        for key in list(self.device):
            if self.bounds is None:
                del self.device[key]  # made again by the next call
            else:
                self.device[key].update(fresh)
        self.block_tables, self.seq_lens, self.query_start_loc = (
            fresh.block_tables,
            fresh.seq_lens,
            fresh.query_start_loc,
        )
        self.slot_mapping, self.num_blocks = fresh.slot_mapping, fresh.num_blocks
        self.step = self._shared_prefix = self.host = self.repeated = None


def plan(
    seq_lens: Array,
    block_tables: Array,
    *,
    query_start_loc: Array | None = None,
    slot_mapping: Array | None = None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: str,
    kv_dtype: str | None = None,
    window: int | None = None,
    chunk: int | None = None,
    num_splits: int | None = None,
    causal: bool = True,
    share_prefix: bool = True,
    device: str | None = None,
    max_seqs: int | None = None,
    max_tokens: int | None = None,
    max_blocks: int | None = None,
) -> Plan:
    """Check one step's metadata and prepare its work, once for all layers.

    Args:
        seq_lens, block_tables, query_start_loc, window, chunk, num_splits, causal, share_prefix: host arrays and options as in
            `paged_attention`.
        slot_mapping: `[num_tokens]`, kept beside the rest; `plan.write_slots` is what to give to `write_kv`.
        num_heads, num_kv_heads, head_dim, block_size, dtype, kv_dtype: of the calls that will use the plan; `kv_dtype` is what the
            pages hold, by default `dtype`.
        device: "cuda" prepares CuPy's current device at once; None and "cpu" prepare nothing (a GPU call still may use the plan,
            and prepares what it needs then).
        max_seqs, max_tokens, max_blocks: all three or none. With them the plan is a graph plan: a call allocates nothing, its grid is
            fixed, and `update` brings later steps into the same buffers. `q` and `out` of a call may have up to `max_tokens` rows;
            rows past the step's own come out empty. `max_tokens == max_seqs` is tuned for one query row a sequence. Prefixes are
            never shared: which launches there are is fixed.

    A plan serves one thread and one stream at a time: its calls share its memory for partial results. A graph keeps its addresses.

    Raises:
        TypeError, ValueError: naming argument, row and value, what was expected, and the fix.
    """
    options = plan_options(
        num_heads, num_kv_heads, head_dim, dtype, kv_dtype, window, chunk, num_splits, causal, share_prefix
    )
    count(block_size, "block_size")
    choice(device, "device", (None, "cpu", "cuda"))
    tokens = check_metadata(
        block_tables, seq_lens, query_start_loc, block_size=block_size, num_blocks=2**31 - 1, window=window, chunk=chunk
    )
    used = np.arange(tokens.block_tables.shape[1]) < -(-tokens.seq_lens // block_size)[:, None]
    result = Plan(
        tokens.block_tables, tokens.seq_lens, tokens.query_start_loc, block_size,
        int(tokens.block_tables.max(initial=-1, where=used)) + 1,
        None if slot_mapping is None else _slots(slot_mapping, tokens.num_tokens),
        options, _bounds(max_seqs, max_tokens, max_blocks),
    )  # fmt: skip
    if result.bounds is not None:
        if device != "cuda":
            raise ValueError(
                f"device: expected 'cuda' for a plan with bounds, got {device!r}; only CUDA graphs need bounds"
            )
        _check_bounds(result, result.bounds)
    if device == "cuda":
        from . import cuda

        cuda.current_backend().prepare(result)
    return result


def plan_options(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: str, kv_dtype: str | None, window: int | None, chunk: int | None,
    num_splits: int | None, causal: bool, share_prefix: bool,
) -> PlanOptions:  # fmt: skip
    """The options of calls, checked. Raises ValueError naming the one that is wrong."""
    for name, value in (
        ("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim), ("window", window), ("chunk", chunk),
        ("num_splits", num_splits),
    ):  # fmt: skip
        count(value, name, optional=name in ("window", "chunk", "num_splits"))
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")
    if head_dim % 8 or head_dim > 256:
        raise ValueError(f"head_dim: expected a multiple of 8 from 8 to 256, got {head_dim}; pad head_dim with zeros")
    choice(dtype, "dtype", DTYPES)
    choice(kv_dtype, "kv_dtype", (None, *DTYPES, *FP8_DTYPES))
    return same_options(
        num_heads,
        num_kv_heads,
        head_dim,
        dtype,
        kv_dtype or dtype,
        window,
        chunk,
        num_splits,
        flag(causal, "causal"),
        flag(share_prefix, "share_prefix"),
    )


def _bounds(max_seqs: int | None, max_tokens: int | None, max_blocks: int | None) -> Bounds | None:
    given = {"max_seqs": max_seqs, "max_tokens": max_tokens, "max_blocks": max_blocks}
    for name, value in given.items():
        count(value, name, optional=True)
    sizes = [int(value) for value in given.values() if value is not None]
    if not sizes:
        return None
    if len(sizes) < len(given):
        name = next(name for name, value in given.items() if value is None)
        raise ValueError(
            f"{name}: expected an integer of at least 1, got None; max_seqs, max_tokens and max_blocks go together"
        )
    return Bounds(*sizes)


def _check_bounds(plan: Plan, bounds: Bounds) -> None:
    columns = -(-int(plan.seq_lens.max(initial=0)) // plan.block_size)
    for name, got, most in (
        ("max_seqs", len(plan.seq_lens), bounds.max_seqs),
        ("max_tokens", plan.num_tokens, bounds.max_tokens),
        ("max_blocks", columns, bounds.max_blocks),
    ):
        if got > most:
            raise ValueError(
                f"{name}: the plan has room for {most}, the step needs {got}; make the plan with a larger {name}"
            )


def _slots(slot_mapping: object, num_tokens: int) -> Array:
    slots = host_array(slot_mapping, "slot_mapping")
    if slots.dtype.kind not in "iu" or slots.shape != (num_tokens,):
        raise ValueError(f"slot_mapping: expected integers of shape ({num_tokens},), got {slots.dtype} {slots.shape}")
    return np.ascontiguousarray(slots, np.int64)


def host_int32(x: object, name: str, ndim: int) -> Array:
    """Host metadata as a contiguous int32 array; other integer types are converted when every value fits."""
    a = host_array(x, name)
    if a.dtype.kind not in "iu" and a.size:  # an empty list has no dtype of its own
        raise TypeError(f"{name}: expected an int32 array, got dtype {a.dtype}; pass integers")
    if a.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimension{'s' * (ndim > 1)}, got shape {a.shape}")
    if a.dtype != np.int32 and a.size and (a.min() < -(2**31) or a.max() >= 2**31):
        raise ValueError(f"{name}: expected values that fit int32, got {a.min()} to {a.max()}")
    return np.ascontiguousarray(a, np.int32)


def check_metadata(
    block_tables: object,
    seq_lens: object,
    query_start_loc: object | None,
    *,
    block_size: int,
    num_blocks: int,
    window: int | None = None,
    chunk: int | None = None,
) -> Plan:
    """Check everything that reads metadata values. Raises ValueError or TypeError naming argument, row and value.

    Entries after a row's last used column are never looked at. An unmapped entry (-1) below `seq_len` is an error unless a
    window or chunk explains it.
    """
    lens = host_int32(seq_lens, "seq_lens", 1)
    tables = host_int32(block_tables, "block_tables", 2)
    num_seqs, max_blocks = tables.shape
    if len(lens) != num_seqs:
        raise ValueError(f"seq_lens: expected {num_seqs} entries, one per row of block_tables, got {len(lens)}")
    if query_start_loc is None:
        starts = np.arange(num_seqs + 1, dtype=np.int32)
    else:
        starts = host_int32(query_start_loc, "query_start_loc", 1)
        if len(starts) != num_seqs + 1:
            raise ValueError(f"query_start_loc: expected num_seqs + 1 = {num_seqs + 1} entries, got {len(starts)}")
        if starts[0] != 0 or (starts[1:] < starts[:-1]).any():
            raise ValueError(
                f"query_start_loc: expected a rising sequence that starts at 0, got {_short(starts)}; "
                "row i's queries are [query_start_loc[i], query_start_loc[i + 1])"
            )
    if num_seqs:
        _check_lengths(lens, max_blocks, block_size)
        lowest = -1 if window is not None or chunk is not None else 0
        from_lowest = tables if lowest == 0 else tables + np.int32(1)
        bad = from_lowest.view(np.uint32) >= num_blocks - lowest  # both limits at once: what is too low wraps
        if bad.any():
            bad &= np.arange(max_blocks) < -(-lens[:, None] // block_size)
            if bad.any():
                _refuse_entry(tables, bad, num_blocks)
    return Plan(tables, lens, starts, block_size, num_blocks)


def _check_lengths(lens: Array, max_blocks: int, block_size: int) -> None:
    longest = max_blocks * block_size
    as_unsigned = lens.view(np.uint32)
    if as_unsigned[as_unsigned.argmax()] > longest:
        row = int(np.argmax((lens < 0) | (lens > longest)))
        raise ValueError(
            f"seq_lens: row {row} expected 0 to max_blocks * block_size = {max_blocks} * {block_size} = {longest}, "
            f"got {lens[row]}; widen block_tables or shorten the sequence"
        )


def _refuse_entry(tables: Array, bad: Array, num_blocks: int) -> None:
    row, column = (int(x) for x in np.argwhere(bad)[0])
    entry = tables[row, column]
    unmapped = "an unmapped entry below seq_len needs window= or chunk="
    fix = unmapped if entry == -1 else "the cache has fewer blocks than the table speaks of"
    raise ValueError(
        f"block_tables: row {row} column {column} expected a block id from 0 to {num_blocks - 1}, got {entry}; {fix}"
    )


def _short(a: Array) -> str:
    return np.array2string(a, threshold=8, edgeitems=3)
