"""Planning: one step's metadata, checked, and its work on a device, once for all layers.

A `Plan` holds the metadata on the host. The CUDA backend keeps beside it what the step needs on a device: the metadata and the schedule
of thread blocks (`device_work`), made for the `PlanOptions` of a call. With `Bounds` a plan is a graph plan: its device buffers and
grid are fixed, so that a captured graph stays right for every later step within the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import choice, count, flag, host_array
from .arrays import DTYPES, FP8_DTYPES, Array
from .errors import refuse_copies
from .metadata import host_metadata
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
    """`PlanOptions(*values)`, one object for equal values: telling that two are equal is then telling that they are one.

    Integers are Python's: those of NumPy overflow in their own width.
    """
    values = tuple(int(x) if isinstance(x, np.integer) else x for x in values)
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
    repeated: Any = None  # a call with this plan that was checked, see `repeated_calls.RepeatedCall`
    _shared_prefix: SharedPrefix | None = None

    __reduce_ex__ = refuse_copies  # what a backend keeps of it are addresses

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

        All or nothing. Raises ValueError when the step does not fit the bounds, or has tables with a window or chunk and the plan
        has none.
        """
        if not hasattr(step, "slot_mapping"):
            raise TypeError(f"step: expected the Step that a BlockAllocator gave, got {type(step).__name__}")
        if step.block_size != self.block_size:
            raise ValueError(f"step: expected block_size {self.block_size} as the plan has, got {step.block_size}")
        kind, options = getattr(step, "kind", None), self.options  # a step of someone else's making has no kind
        if kind is not None and kind.limited and options is not None and options.window is options.chunk is None:
            raise ValueError(
                f"step: expected tables of full attention, as the plan is for, got those of {kind}, which lose blocks; give the step of "
                "another group, or make the plan with window and chunk"
            )
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
    block_size = int(block_size)
    choice(device, "device", (None, "cpu", "cuda"))
    tables, lens, starts = host_metadata(
        block_tables, seq_lens, query_start_loc, block_size=block_size, num_blocks=2**31 - 1, window=window, chunk=chunk
    )
    used = np.arange(tables.shape[1]) < -(-lens // block_size)[:, None]
    result = Plan(  # copies: the caller's arrays may hold something else, unchecked, when the plan is used
        tables.copy(), lens.copy(), starts.copy(), block_size,
        int(tables.max(initial=-1, where=used)) + 1,
        None if slot_mapping is None else _slots(slot_mapping, int(starts[-1])),
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
