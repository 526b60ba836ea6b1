"""The pool's memory: layouts, dtypes, one layer's views, and what a step does to them.

The pool is page-major, `[num_blocks, num_layers, 2, ...one layer's block...]`: a block of all its layers is one contiguous piece,
so a copy-on-write copy moves one piece, and a layer is a strided view. `order="layer"` is `[num_layers, 2, num_blocks, ...]`.

With groups of layers a block belongs to one of them and holds its layers only, the i-th in place i; every block has as many places as
the largest group has layers, so that any group may use any block.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from .arguments import choice, integer, number
from .arrays import FP8_DTYPES, Array, as_array, device_of, empty_pages, numpy_dtype, pages_view
from .attention import OPTIONS, call_on_pages, run_attention, write_pages
from .backends import backend_of
from .checks import check_device, check_rows
from .errors import refuse_copies
from .groups import Group, checked
from .metadata import host_int32
from .plan import Plan, PlanOptions
from .repeated_calls import RepeatedLayer, cannot_change
from .steps import Step

_MOST_LAYERS = 2**16  # a number of blocks in the place of that of layers would fill all memory with names of layers


class KVCache:
    """Keys and values of every layer, in blocks that a `BlockAllocator` hands out.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: sizes; a block is `block_size` token slots of all layers.
        dtype: "float32", "float16", "bfloat16", "fp8_e4m3" or "fp8_e5m2".
        layout: "HND" or "NHD", the axes of one layer's pages.
        device: "cpu", "cuda" (the device that is current now), or "auto": "cuda" when CuPy is installed and finds a device.
        order: "page" or "layer", which of blocks and layers varies slowest in memory.
        host_blocks: blocks of host memory (pinned, when the device is "cuda") for `BlockAllocator.evict`.
        groups: the same `cupaged.Group` objects as the allocator's, which name each layer once; None: one group of all layers.

    Memory is taken at the first write, that of the host at the first swap. Steps run in the order they were made: `begin`, then
    for each layer `write` and `attend`.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: str = "float16",
        layout: str = "HND",
        device: str = "auto",
        order: str = "page",
        host_blocks: int = 0,
        groups: Iterable[Group] | None = None,
    ) -> None:
        # ints from now on: products of a NumPy integer's own width overflow
        self.num_layers = num_layers = integer(num_layers, "num_layers", 1, _MOST_LAYERS)
        self.num_blocks = integer(num_blocks, "num_blocks", 1, 2**31 - 1)
        self.block_size = integer(block_size, "block_size", 1)
        self.num_kv_heads = integer(num_kv_heads, "num_kv_heads", 1)
        self.head_dim = integer(head_dim, "head_dim", 1)
        if head_dim % 8 or head_dim > 256:
            raise ValueError(
                f"head_dim: expected a multiple of 8 from 8 to 256, got {head_dim}; pad the heads with zeros"
            )
        choice(layout, "layout", ("HND", "NHD"))
        choice(order, "order", ("page", "layer"))
        choice(device, "device", ("cpu", "cuda", "auto"))
        if not isinstance(dtype, str):
            raise TypeError(f"dtype: expected the name of a dtype, such as 'float16', got {dtype!r}")
        self.host_blocks = integer(host_blocks, "host_blocks", 0, 2**31 - 1)
        self.groups = [Group(range(num_layers))] if groups is None else checked(groups)
        self._own_groups = groups is not None
        named = sorted(layer for group in self.groups for layer in group.layers)
        if named != list(range(num_layers)):
            raise ValueError(
                f"groups: expected layers 0 to {num_layers - 1} (num_layers), each in one group, got {named}; give Group(layers=...)"
            )
        self._places = {
            layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)
        }  # of each layer: its group, and its place in a block
        self.layers_per_block = max(len(group.layers) for group in self.groups)
        self.dtype, self.layout, self.order = dtype, layout, order
        self.kv_dtype = dtype if dtype in FP8_DTYPES else None
        self._itemsize = numpy_dtype(dtype).itemsize
        self._xp = _array_module(device)
        self._home: Any = nullcontext() if self._xp is np else self._xp.cuda.Device()  # where the pool will lie
        self._origin: int | None = None  # the allocator of all steps
        self._begun = 0  # serial of the newest step that began
        self._repeated: dict[int, RepeatedLayer] = {}  # by layer
        # By group, of its last attention on a device: what steps are planned for.
        self._options: dict[int, PlanOptions] = {}
        self._step: Step | None = None  # the step that began last, and by group what the CPU backend keeps for it
        self._step_records: list[Any] = []
        self._copied = 0  # serial of the newest step whose copies or swaps ran

    __reduce_ex__ = refuse_copies

    @property
    def device(self) -> str:
        """ "cpu" or "cuda"."""
        return "cpu" if self._xp is np else "cuda"

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: K and V of `block_size` slots in every layer of the largest group."""
        return 2 * self.layers_per_block * self.num_kv_heads * self.block_size * self.head_dim * self._itemsize

    @cached_property
    def pool(self) -> Array:
        """All pages with the block id as axis 0: `[num_blocks, layers_per_block, 2, ...]`, strided when `order` is "layer"."""
        heads, slots = self.num_kv_heads, self.block_size
        block = (heads, slots, self.head_dim) if self.layout == "HND" else (slots, heads, self.head_dim)
        dtype = np.dtype(np.uint8) if self.kv_dtype else numpy_dtype(self.dtype)
        with self._home:
            if self.order == "page":
                return empty_pages(self._xp, (self.num_blocks, self.layers_per_block, 2, *block), dtype)
            pages = empty_pages(self._xp, (self.layers_per_block, 2, self.num_blocks, *block), dtype)
            return self._xp.moveaxis(pages, 2, 0)

    @cached_property
    def host_pool(self) -> Array:
        """Pages of evicted requests, `[host_blocks, layers_per_block, 2, ...]`: host memory that the device reaches."""
        pages: Array = backend_of(self.pool).host_pages((self.host_blocks, *self.pool.shape[1:]), self.pool.dtype)
        return pages

    @cached_property
    def _views(self) -> list[tuple[Array, Array]]:
        places = [self._places[layer][1] for layer in range(self.num_layers)]
        return [(self.pool[:, place, 0], self.pool[:, place, 1]) for place in places]

    @cached_property
    def _pages(self) -> list[tuple[Array, Array, str]]:
        """What `check_caches` would return for each layer: the cache made its own arrays, so they need no check."""
        return [(pages_view(k, self.layout), pages_view(v, self.layout), self.dtype) for k, v in self._views]

    def layer(self, layer: int) -> tuple[Array, Array]:
        """`(k_cache, v_cache)` of one layer: strided views in `self.layout`, for `write_kv` and `paged_attention`."""
        self._check_layer(layer)
        return self._views[layer]

    def _pages_of(self, layer: int) -> tuple[Array, Array, str]:
        self._check_layer(layer)
        return self._pages[layer]

    def _check_layer(self, layer: int) -> None:
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
            raise TypeError(f"layer: expected an integer, got {layer!r}")
        if not 0 <= layer < self.num_layers:
            raise IndexError(f"layer: expected 0 to {self.num_layers - 1}, got {layer}")

    def begin(self, step: Step) -> None:
        """Run the swaps and copies of `step`, before its writes. Repeated for the same step it does nothing.

        Everything is enqueued on the current stream. Raises RuntimeError, with nothing changed, when a later step has begun or the
        swaps or copies of an earlier one did not run, and ValueError when the step's allocator does not fit this cache, or is not
        that of the steps before.
        """
        _check_step(step)
        if step.origin != self._origin and self._origin is not None:
            raise ValueError(
                "step: another allocator made it than the steps before; one allocator alone hands out the blocks of a cache: make a cache "
                "for each"
            )
        if step.serial == self._begun:
            return
        if step.block_size != self.block_size or step.num_blocks > self.num_blocks:
            raise ValueError(
                f"step: its allocator has {step.num_blocks} blocks of {step.block_size} tokens, the cache {self.num_blocks} of "
                f"{self.block_size}; make both with the same sizes"
            )
        kinds = [(step.group(g).kind.window, step.group(g).kind.chunk) for g in range(len(step.other_groups) + 1)]
        if kinds != [(group.window, group.chunk) for group in self.groups]:
            raise ValueError(
                f"step: its allocator has groups with (window, chunk) {kinds}, the cache {[(g.window, g.chunk) for g in self.groups]}; "
                "give both the same groups"
            )
        if step.serial < self._begun:
            raise RuntimeError(f"step: number {step.serial} comes after number {self._begun} began; run steps in order")
        if step.after > self._copied:
            raise RuntimeError(
                f"step: number {step.serial} needs the copies or swaps of step number {step.after}, which did not run; "
                "call begin for every step that has some, in the order they were made"
            )
        if len(step.swap_out) or len(step.swap_in):
            self._swap(step)
        copies = step.copies
        if step.other_groups:
            copies = np.concatenate([step.copies, *(other.copies for other in step.other_groups)])
        if len(copies):
            backend_of(self.pool).copy_blocks(self.pool, copies)
            self._copied = step.serial
        self._origin, self._begun = step.origin, step.serial
        self._step, self._step_records = step, [None] * len(self.groups)

    def _swap(self, step: Step) -> None:
        highest = int(max(step.swap_out[:, 1].max(initial=-1), step.swap_in[:, 0].max(initial=-1)))
        if highest >= self.host_blocks:
            raise ValueError(
                f"step: its swaps use host block {highest}, the cache has {self.host_blocks}; give both the same host_blocks"
            )
        backend = backend_of(self.pool)
        backend.swap_blocks(self.pool, self.host_pool, step.swap_out)
        backend.swap_blocks(self.host_pool, self.pool, step.swap_in)
        self._copied = step.serial

    def write(
        self, layer: int, k: Array, v: Array, step: Step, *, k_scale: float | Array = 1.0, v_scale: float | Array = 1.0
    ) -> None:
        """Store this step's new keys and values of one layer, `[num_tokens, num_kv_heads, head_dim]`."""
        unscaled = type(k_scale) is type(v_scale) is float and k_scale == v_scale == 1.0
        known = self._repeated.get(layer) if type(layer) is int else None
        if unscaled and known is not None and known.write is not None:
            record = self._step_record(known.group, step)
            if known.write(known.pages, k, v, record.where):
                return
        pages = self._pages_of(layer)
        group = self._places[layer][0]
        plan = self._plan(step, group)
        if group in self._options and not plan.device:
            backend_of(self.pool).place(plan, self._options[group])
        slots: Array = plan.write_slots
        k, v = as_array(k, "k"), as_array(v, "v")
        check_rows(k, "k", "[num_tokens, num_kv_heads, head_dim]")
        check_device(k, "k", pages[0])
        check_device(v, "v", pages[0])
        if len(k) < len(slots):
            raise ValueError(f"k: expected {len(slots)} rows, as many tokens as the step has, got {len(k)}")
        call = write_pages(k, v, pages, slots, k_scale=k_scale, v_scale=v_scale)
        if self._backend is not None and unscaled:
            self._repeated_layer(layer).repeat_write(self._backend.RepeatedWrite(call), self._repeated.values())

    def attend(
        self, layer: int, q: Array, step: Step, *, k: Array | None = None, v: Array | None = None, **how: Any
    ) -> Any:
        """Attention of this step's queries `[num_tokens, num_heads, head_dim]`; keyword arguments as in `paged_attention`.

        `k` and `v`, both or none, are stored first, as `write` does: one call costs less than two. All that is wrong is found before.
        With groups `window` and `chunk` are those of the layer's group; raises ValueError for others.
        """
        known = self._repeated.get(layer) if type(layer) is int else None
        if known is not None and known.attend is not None and (not (how or known.options) or known.same_options(how)):
            record = self._step_records[known.group] if step is self._step else None
            if record is None:
                record = self._step_record(known.group, step)
            if k is None and v is None:
                out = known.attend(known.pages, q, record.where, 0, None, None)
            else:
                out = known.attend(known.pages, q, record.where, known.written, k, v) if known.written else None
            if out is not None:
                return out
        for name in how:
            if name not in OPTIONS:
                raise TypeError(_no_option(name))
        given = dict(how)
        pages = self._pages_of(layer)
        g = self._places[layer][0]
        plan = self._plan(step, g)
        if self._own_groups:
            for name in ("window", "chunk"):
                own = getattr(self.groups[g], name)
                if how.setdefault(name, own) != own:
                    raise ValueError(
                        f"{name}: expected {own}, that of group {g} with layer {layer}, got {how[name]}; leave it out"
                    )
        q = as_array(q, "q")
        check_device(q, "q", pages[0])
        call = call_on_pages(q, pages, plan, **how)
        if k is not None or v is not None:
            if k is None or v is None:
                raise TypeError(
                    f"{'k' if k is None else 'v'}: expected an array beside {'v' if k is None else 'k'}, got None; give both"
                )
            self.write(layer, k, v, step, k_scale=how.get("k_scale", 1.0), v_scale=how.get("v_scale", 1.0))
        run_attention(call)
        if plan.device:
            self._options[g] = call.form.options
        if self._backend is not None and call.lse is None and len(q) and cannot_change(*given.values()):
            made = self._backend.RepeatedAttention(call, *pages[:2])
            self._repeated_layer(layer).repeat_attention(made, given, self._repeated.values())
        return (call.out, call.lse) if how.get("return_lse") else call.out

    @cached_property
    def _backend(self) -> Any:
        """The CPU backend, which repeats calls without checking them again; None where another one works."""
        backend = backend_of(self.pool)
        return backend if hasattr(backend, "StepRecord") else None

    @cached_property
    def _addresses(self) -> Array:
        """`[num_layers, 2]` int64, where the CPU backend finds the pages of each layer."""
        addresses: Array = self._backend.page_addresses([pages[:2] for pages in self._pages])
        return addresses

    def _repeated_layer(self, layer: int) -> RepeatedLayer:
        if layer not in self._repeated:
            pages = self._backend.address(self._addresses) + 16 * int(layer)
            self._repeated[layer] = RepeatedLayer(self._places[layer][0], pages)
        return self._repeated[layer]

    def _step_record(self, group: int, step: Step) -> Any:
        """What the CPU backend keeps of a step for all layers of a group. Raises RuntimeError for a step that has not begun."""
        plan = self._plan(step, group)
        if plan.host is None:
            plan.host = self._backend.StepRecord(plan)
        if step is self._step:
            self._step_records[group] = plan.host
        return plan.host

    def _plan(self, step: Step, group: int) -> Plan:
        """One plan serves all layers of a step and a group. The allocator made its values, so they need no check."""
        _check_step(step)
        step = step.group(group)
        if step.serial != self._begun or step.origin != self._origin:
            raise RuntimeError(
                f"step: number {step.serial} has not begun (number {self._begun} has); call cache.begin(step) first"
            )
        plan: Plan | None = step.device.get(self)
        if plan is None:
            plan = step.device[self] = Plan(
                step.block_tables,
                step.seq_lens,
                step.query_start_loc,
                self.block_size,
                step.num_blocks,
                step.slot_mapping,
                step=step,
            )
        return plan

    def gather(self, layer: int, table_row: Array, seq_len: int, start: int = 0) -> tuple[Array, Array]:
        """Contiguous `(k, v)` of one sequence, `[seq_len - start, num_kv_heads, head_dim]`: for export and debugging.

        `table_row [max_blocks]` is a row of a block table of the layer's group; the tokens before `start` are left out, as those must
        be that left a window. fp8 pages come as uint8 codes.
        """
        seq_len, start = integer(seq_len, "seq_len", 0), integer(start, "start", 0)
        columns = -(-seq_len // self.block_size)
        table = host_int32(table_row, "table_row", 1)[:columns]
        if len(table) < columns:
            raise ValueError(
                f"seq_len: expected 0 to {len(table) * self.block_size}, what table_row holds, got {seq_len}"
            )
        if start > seq_len:
            raise ValueError(f"start: expected 0 to seq_len = {seq_len}, got {start}")
        first = start // self.block_size
        table = table[first:]
        if ((table < 0) | (table >= self.num_blocks)).any():
            raise ValueError(
                f"table_row: expected block ids from 0 to {self.num_blocks - 1}, got {table.tolist()}; blocks that left a window are -1, "
                "give start the first token that is still there"
            )
        k, v = self.layer(layer)
        here = slice(start - first * self.block_size, seq_len - first * self.block_size)
        with device_of(k):
            return self._contiguous(k[table], here), self._contiguous(v[table], here)

    def _contiguous(self, blocks: Array, here: slice) -> Array:
        tokens = blocks.swapaxes(1, 2) if self.layout == "HND" else blocks
        return self._xp.ascontiguousarray(tokens.reshape(-1, self.num_kv_heads, self.head_dim)[here])


def _check_step(step: Any) -> None:
    if not isinstance(step, Step):
        raise TypeError(f"step: expected the Step that a BlockAllocator gave, got {type(step).__name__}")


_OF_THE_CACHE = ("k_cache", "v_cache", "layout", "kv_dtype")
_OF_THE_STEP = ("block_tables", "seq_lens", "query_start_loc", "plan")


def _no_option(name: str) -> str:
    """What to say of a keyword that `KVCache.attend` does not take."""
    if name in _OF_THE_CACHE or name in _OF_THE_STEP:
        source = "cache" if name in _OF_THE_CACHE else "step"
        return f"{name}: KVCache.attend takes it from the {source}; leave it out"
    from difflib import get_close_matches  # what only a mistake needs costs no import

    near = get_close_matches(name, OPTIONS, 1)
    hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(OPTIONS)}"
    return f"{name}: KVCache.attend has no such option; {hint}"


def blocks_for(
    num_bytes: int,
    *,
    num_layers: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str = "float16",
    groups: Iterable[Group] | None = None,
) -> int:
    """How many blocks of a `KVCache` with these sizes fit into `num_bytes`. Raises ValueError below 0."""
    cache = KVCache(num_layers, 1, block_size, num_kv_heads, head_dim, dtype, device="cpu", groups=groups)
    return int(number(num_bytes, "num_bytes", 0, 2**63 - 1) // cache.bytes_per_block)


def _array_module(device: str) -> Any:
    if device == "cpu" or (device == "auto" and find_spec("cupy") is None):
        return np
    try:
        import cupy
    except ImportError as error:
        raise ModuleNotFoundError(
            "device: 'cuda' needs CuPy, which is not installed: pip install 'cupaged[cuda12x]' (or [cuda13x]), or use device='cpu'"
        ) from error
    if cupy.cuda.is_available():
        return cupy
    if device == "auto":
        return np
    raise RuntimeError(
        "device: 'cuda' found no GPU (CuPy is installed, but no CUDA device or driver is there); use device='cpu'"
    )
