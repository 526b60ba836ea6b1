"""The CUDA backend: choose a kernel, pack its parameter struct, launch it on the current stream.

Every function here gets checked arguments. Device arrays are whatever the launcher's arrays are (CuPy's, or NumPy's on the CPU
executor of the tests); host metadata are plain `numpy.ndarray` and are uploaded through pinned memory. Nothing synchronises.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import Array, Attention, WriteKV, numpy_dtype
from .cuda_structs import (
    ATTENTION,
    CLASSIC,
    CLASSIC_PARTITION,
    COPY,
    COPY_PER_THREAD,
    MAX_PAIRS,
    MERGE,
    OUTER_AXES,
    WRITE,
    byte_strides,
    classic_defines,
    copy_defines,
    decode_defines,
    division_by,
    dtype_of,
    elements_per_access,
    meaningful,
    merge_defines,
    merged_axes,
    pack,
    power_of_two,
    write_defines,
)  # fmt: skip
from .decode_work import DeviceWork, PinnedRing
from .kernel_config import KernelConfig, attention_kernels
from .kernels import debug
from .launcher import CupyLauncher, Launcher
from .plan import Plan, PlanOptions, plan_options
from .schedule import MIN_SHARE
from .shared_work import prefix_kernels

if TYPE_CHECKING:
    from .classic import ClassicAttention


class Backend:
    """The operations on one device."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._ring = PinnedRing(launcher)
        self._workspaces: dict[int, Workspace] = {}
        self._functions: dict[
            Any, Any
        ] = {}  # attention kernels by what a call knows: putting constants together takes longer

    # ------------------------------------------------------------------------------------------------------ writes

    def write_kv(self, call: WriteKV) -> None:
        """Launch write_kv.cu: a thread moves one piece of K and of V of one token."""
        slots = self._upload(call.slot_mapping)
        classic = call.layout == "classic"
        num_heads, head_dim = call.k.shape[1:]
        block_size = call.v_pages.shape[3 if classic else 2]
        pointer = self.launcher.pointer
        params = np.zeros(1, WRITE)
        for side, rows, pages, scale in (
            ("k", call.k, call.k_pages, call.k_scale),
            ("v", call.v, call.v_pages, call.v_scale),
        ):
            strides = [s // pages.itemsize for s in byte_strides(pages)]
            if not classic:
                block, head, slot, chunk = *strides[:3], 0
            elif side == "k":  # [num_blocks, num_kv_heads, head_dim // x, block_size, x]
                block, head, chunk, slot = strides[:4]
            else:  # [num_blocks, num_kv_heads, head_dim, block_size]
                block, head, chunk, slot = strides
            token, row_head = (s // rows.itemsize for s in byte_strides(rows)[:2])
            params[side] = (pointer(rows), pointer(pages), pointer(scale), token, row_head, block, head, slot, chunk)
        item, cache_item = call.k.itemsize, call.k_pages.itemsize
        vec = elements_per_access(head_dim, item, (call.k, call.v), pointer)
        if classic:
            vec = min(vec, elements_per_access(call.k_pages.shape[4], cache_item, (call.k_pages,), pointer))
        else:
            vec = min(vec, elements_per_access(head_dim, cache_item, (call.k_pages, call.v_pages), pointer))
        params["slot_mapping"], params["num_slots"] = pointer(slots), len(slots)
        params["pool_slots"], params["num_heads"], params["block_size"] = (
            call.k_pages.shape[0] * block_size,
            num_heads,
            block_size,
        )
        function = self.launcher.get(
            "write_kv",
            "write_kv.cu",
            write_defines(dtype_of(call.k), call.kv_dtype, head_dim, vec, classic, slots.dtype),
        )
        pieces = num_heads * (head_dim // vec)
        across = min(1 << (pieces - 1).bit_length(), 256)
        down = 256 // across
        self.launcher.launch(function, (-(-len(slots) // down), 1, 1), (across, down, 1), params)

    # ------------------------------------------------------------------------------------------------------ copies

    def copy_blocks(self, pool: Array, copies: Array) -> None:
        """`pool[dst] = pool[src]` for every row (src, dst) of the host array `copies`, in one launch for up to 448 of them."""
        self._copy(pool, pool, np.asarray(copies))

    def host_pages(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Pinned host memory for swapped blocks."""
        return self.launcher.pinned(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def swap_blocks(self, src: Array, dst: Array, pairs: Array) -> None:
        """`dst[to] = src[from]` between a pool on the device and one in pinned host memory, in either direction.

        Both have the block id as axis 0 and blocks of equal shape. Contiguous blocks go through the copy engines, runs of
        neighbouring ids as one piece; others through the copy kernel, which reads and writes pinned memory itself.
        """
        pairs = np.asarray(pairs)
        if not (
            src[:1].flags.c_contiguous
            and dst[:1].flags.c_contiguous
            and src.flags.c_contiguous
            and dst.flags.c_contiguous
        ):
            self._copy(src, dst, pairs)
            return
        breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
        for run in np.split(pairs, breaks):
            if len(run):
                (a, b), n = run[0], len(run)
                self.launcher.copy_async(dst[b : b + n], src[a : a + n])

    def _copy(self, src: Array, dst: Array, pairs: Array) -> None:
        axes = merged_axes(src, dst)
        if 0 in src.shape[1:]:
            return
        run = axes.pop()[0] if axes and axes[-1][1:] == (src.itemsize, src.itemsize) else 1
        run_bytes = run * src.itemsize
        if len(axes) > OUTER_AXES:
            raise ValueError(
                f"pool: expected blocks of at most {OUTER_AXES} strided axes, got strides {src.strides}; make it contiguous"
            )
        pointer = self.launcher.pointer
        steps = [
            pointer(src),
            pointer(dst),
            byte_strides(src)[0],
            byte_strides(dst)[0],
            run_bytes,
            *(s for axis in axes for s in axis[1:]),
        ]
        vec = power_of_two(*steps)
        params = np.zeros(1, COPY)
        params["src"], params["dst"], params["src_block"], params["dst_block"] = steps[:4]
        size, src_stride, dst_stride = (
            np.ones(OUTER_AXES, np.uint32),
            np.zeros(OUTER_AXES, np.int64),
            np.zeros(OUTER_AXES, np.int64),
        )
        for i, (n, a, b) in enumerate(reversed(axes)):
            size[i], src_stride[i], dst_stride[i] = n, a, b
        params["size"], params["src_stride"], params["dst_stride"] = size, src_stride, dst_stride
        params["run"] = run_bytes // vec
        params["pieces"] = pieces = run_bytes // vec * int(size.prod(dtype=np.int64))
        function = self.launcher.get("copy_blocks", "copy_blocks.cu", copy_defines(vec))
        for start in range(0, len(pairs), MAX_PAIRS):
            some = pairs[start : start + MAX_PAIRS]
            params["pairs"][0, : len(some)] = some
            self.launcher.launch(function, (-(-pieces // (256 * COPY_PER_THREAD)), len(some), 1), (256, 1, 1), params)

    # ------------------------------------------------------------------------------------------------------- merge

    def merge_states(self, outs: Array, lses: Array, sinks: Array | None, out: Array, lse: Array) -> None:
        """Launch merge.cu: a warp is one (row, head)."""
        pointer = self.launcher.pointer
        parts, rows, heads, head_dim = outs.shape
        params = np.zeros(1, MERGE)
        params["outs"], params["lses"], params["out"], params["lse"] = (
            pointer(outs),
            pointer(lses),
            pointer(out),
            pointer(lse),
        )
        params["sinks"] = 0 if sinks is None else pointer(sinks)
        for prefix, x in (("out", outs), ("lse", lses)):
            for axis, stride in zip(("part", "row", "head", "dim"), byte_strides(x), strict=False):
                params[f"{prefix}_{axis}"] = stride // x.itemsize
        params["num_states"], params["parts"], params["heads"], params["head_dim"] = (
            rows * heads,
            parts,
            heads,
            head_dim,
        )
        function = self.launcher.get("merge", "merge.cu", merge_defines(dtype_of(outs)))
        self.launcher.launch(function, (-(-rows * heads // 4), 1, 1), (128, 1, 1), params)

    # ------------------------------------------------------------------------------------------- the original kernels

    def classic_attention(self, call: ClassicAttention) -> None:
        """Launch classic.cu: a block is one query head of one sequence, and with partials one partition of its keys."""
        pointer, info = self.launcher.pointer, self.launcher.info
        num_seqs, num_heads, head_dim = call.q.shape
        num_kv_heads, _, block_size = call.v_cache.shape[1:]
        tables, lens = self._upload(call.block_tables), self._upload(call.seq_lens)
        params = np.zeros(1, CLASSIC)
        p = params[0]
        p["q"], p["k_cache"], p["v_cache"], p["out"] = (
            pointer(call.q),
            pointer(call.k_cache),
            pointer(call.v_cache),
            pointer(call.out),
        )
        p["block_tables"], p["seq_lens"] = pointer(tables), pointer(lens)
        p["alibi_slopes"] = 0 if call.alibi_slopes is None else pointer(call.alibi_slopes)
        p["k_scale"], p["v_scale"] = pointer(call.k_scale), pointer(call.v_scale)
        for name, x in (("q", call.q), ("out", call.out)):
            p[f"{name}_seq"], p[f"{name}_head"] = (s // x.itemsize for s in byte_strides(x)[:2])
        strides = [*byte_strides(call.k_cache)[:2], *byte_strides(call.v_cache)[:2]]
        if power_of_two(int(p["k_cache"]), int(p["v_cache"]), *strides) < 16 or not (
            call.k_cache[0, 0].flags.c_contiguous and call.v_cache[0, 0].flags.c_contiguous
        ):
            raise ValueError(
                f"key_cache, value_cache: expected the block of one head to be contiguous and aligned to 16 bytes, got strides "
                f"{call.k_cache.strides} and {call.v_cache.strides}; make the caches contiguous"
            )
        p["k_block"], p["k_head"], p["v_block"], p["v_head"] = strides
        p["table_row"] = p["max_blocks"] = tables.shape[1]
        p["num_heads"], p["group"], p["num_blocks"], p["scale"] = (
            num_heads,
            num_heads // num_kv_heads,
            len(call.k_cache),
            call.scale,
        )
        if call.sparse is not None:
            s = call.sparse
            p["local_blocks"], p["vert_stride"], p["sparse_block"] = s.local_blocks, s.vert_stride, s.block_size
            p["head_step"], p["first_head"] = s.head_step, s.first_head
        partition, parts = 0, 1
        if call.partials is not None:
            partition = CLASSIC_PARTITION
            p["exp_sums"], p["max_logits"], p["partials"] = (pointer(x) for x in call.partials)
            p["max_partitions"] = call.partials[0].shape[2]
            parts = max(-(-call.max_seq_len // partition), 1)
        padded = min(-(-call.max_seq_len // block_size) * block_size, partition or 2**31)
        shared = 4 * (5 * head_dim + 8 + padded)
        if shared > info.shared_per_block:
            most = (info.shared_per_block // 4 - 5 * head_dim - 8) // block_size * block_size
            raise ValueError(
                f"max_seq_len: a single pass takes at most {most} tokens on {info.name}, got {call.max_seq_len}; use paged_attention_v2"
            )
        defines = classic_defines(dtype_of(call.q), call.kv_dtype, head_dim, block_size, partition)
        # one function for every length: compiled once, allowed all the shared memory there is
        most_shared = info.shared_per_block if partition == 0 else shared
        function = self.launcher.get("classic_attention", "classic.cu", defines, most_shared)
        self.launcher.launch(function, (num_heads, num_seqs, parts), (128, 1, 1), params, shared)
        if partition:
            reduce = self.launcher.get("classic_reduce", "classic.cu", defines)
            self.launcher.launch(reduce, (num_heads, num_seqs, 1), (128, 1, 1), params)

    # --------------------------------------------------------------------------------------------------- attention

    def prepare(self, plan: Plan) -> None:
        """Compile what the plan's calls need and put its work on the device, with a workspace of its own."""
        assert plan.options is not None
        work = self._work(plan, plan.options)
        work.workspace = Workspace(self.launcher)
        work.workspace.reserve(work.num_states + work.num_shared_states, plan.options.head_dim, work.num_tickets)
        for part in work.parts:
            self._kernel(part.config, 16, planned=True)

    def warmup(self, options: PlanOptions, max_queries: int, softcap: bool, alibi: bool) -> None:
        """Compile the kernels of such calls, for arrays whose rows allow the widest accesses."""
        o = options
        group, itemsize, cache_itemsize = (
            o.num_heads // o.num_kv_heads,
            numpy_dtype(o.dtype).itemsize,
            numpy_dtype(o.kv_dtype).itemsize,
        )
        row = o.head_dim * cache_itemsize
        counts = {min(1 << i, max_queries) for i in range(max_queries.bit_length())} | {max_queries}
        configs = {
            config: None  # in order, each once
            for few in sorted({1, max_queries})
            for most in sorted(counts)
            for config in attention_kernels(
                self.launcher.info, o.head_dim, o.dtype, o.kv_dtype, group, group * min(few, most), group * most
            )
        }
        for config in configs:
            for planned in (True, False):
                self._kernel(config, power_of_two(row), planned=planned, softcap=softcap, alibi=alibi)
        for config in prefix_kernels(self.launcher.info, o) if o.share_prefix else ():
            self._kernel(config, power_of_two(row), planned=True, softcap=softcap, alibi=alibi)
        pieces = min(power_of_two(o.head_dim * itemsize) // itemsize, power_of_two(row) // cache_itemsize)
        for slots in (np.int64, np.int32):
            defines = write_defines(o.dtype, o.kv_dtype, o.head_dim, pieces, False, np.dtype(slots))
            self.launcher.get("write_kv", "write_kv.cu", defines)
        self.launcher.get("copy_blocks", "copy_blocks.cu", copy_defines(16))
        self.launcher.get("merge", "merge.cu", merge_defines(o.dtype))

    def paged_attention(self, call: Attention) -> None:
        """One launch for each kernel that the sequences need (`kernel_config`).

        Over a schedule where lengths are on the host, else over splits whose edges the device finds.
        """
        num_heads, head_dim = call.q.shape[1:]
        num_blocks, num_kv_heads, block_size, _ = call.k_pages.shape
        if call.plan is not None and call.plan.options is not None:
            options = call.plan.options  # the call's own: that has been checked
        else:
            options = PlanOptions(
                num_heads, num_kv_heads, head_dim, dtype_of(call.q), call.kv_dtype, call.window, call.chunk, call.num_splits,
                call.causal, call.share_prefix,
            )  # fmt: skip
        p, vec = self._describe(call)

        def launch(config: KernelConfig, across: int, planned: bool) -> None:
            function = self._kernel(
                config, vec, planned=planned, softcap=call.softcap is not None, alibi=call.alibi_slopes is not None
            )
            self.launcher.launch(
                function, (across, num_kv_heads, 1), (config.threads, 1, 1), pack(ATTENTION, p), config.shared_bytes
            )

        if call.plan is not None or type(call.seq_lens) is np.ndarray:
            plan = call.plan or Plan(call.block_tables, call.seq_lens, call.query_start_loc, block_size, num_blocks)
            work = self._planned(plan, options, p)
            for part in work.parts:
                p.update(part.addresses)
                launch(part.config, part.shares, planned=True)
        else:
            for config, units, splits in self._unplanned(call, options, p):
                p["splits"] = splits
                launch(config, units * splits, planned=False)

    def _planned(self, plan: Plan, options: PlanOptions, p: dict[str, Any]) -> DeviceWork:
        """Point the parameters at the plan's metadata and at a workspace."""
        work = self._work(plan, options)
        p.update(work.parameters)
        workspace = work.workspace or self._stream_workspace()
        p["partials"], p["partial_states"], p["tickets"] = workspace.reserve(
            work.num_states + work.num_shared_states, options.head_dim, work.num_tickets
        )
        if work.shared is not None:  # the end of the workspace is theirs
            p["shared_states"] = p["partial_states"] + 8 * work.num_states
            p["shared_sums"] = p["partials"] + 4 * options.head_dim * work.num_states
        return work

    def _unplanned(
        self, call: Attention, options: PlanOptions, p: dict[str, Any]
    ) -> list[tuple[KernelConfig, int, int]]:
        """The same for lengths that only the device knows: as many equal splits a sequence as may fill the device.

        Returns kernels with their units, numbered as the kernels number them, and splits of each.
        """
        num_tokens, (num_seqs, max_blocks) = len(call.q), call.block_tables.shape
        group = options.num_heads // options.num_kv_heads
        most = group * (1 if num_tokens <= num_seqs else num_tokens)
        info = self.launcher.info
        launches = []
        for config in attention_kernels(
            info, options.head_dim, options.dtype, options.kv_dtype, group, group * -(-num_tokens // num_seqs), most
        ):
            units = num_tokens * group // config.rows + num_seqs
            splits = options.num_splits
            if splits is None:
                enough = max_blocks * call.k_pages.shape[2] // MIN_SHARE
                splits = max(1, min(info.num_sms * config.resident // (num_seqs * options.num_kv_heads), enough))
            launches.append((config, units, splits))
        for name in ("seq_lens", "query_start_loc", "block_tables"):
            p[name] = self.launcher.pointer(getattr(call, name))
        p["table_row"] = p["max_blocks"] = max_blocks
        p["num_seqs"] = num_seqs
        states = options.num_kv_heads * max(units * splits * config.rows for config, units, splits in launches)
        p["partials"], p["partial_states"], p["tickets"] = self._stream_workspace().reserve(
            states, options.head_dim, options.num_kv_heads * max(units for _, units, _ in launches)
        )
        return launches

    def _describe(self, call: Attention) -> tuple[dict[str, Any], int]:
        """The parameters with arrays and options of the call, and the widest access to pages that all addresses allow, in bytes."""
        pointer, q, k, v, lse = self.launcher.pointer, call.q, call.k_pages, call.v_pages, call.lse
        constants, vec = _constants(
            q.shape, q.strides, call.out.strides, None if lse is None else lse.strides, q.itemsize, k.shape, k.strides, v.strides,
            k.itemsize, call.causal, call.window, call.chunk, call.scale, call.softcap,
        )  # fmt: skip
        p = constants.copy()
        p["k"], p["v"] = k_address, v_address = pointer(k), pointer(v)
        p["q"], p["out"] = pointer(q), pointer(call.out)
        p["k_scale"], p["v_scale"] = pointer(call.k_scale), pointer(call.v_scale)
        if lse is not None:
            p["lse"] = pointer(lse)
        if call.alibi_slopes is not None:
            p["alibi_slopes"] = pointer(call.alibi_slopes)
        if call.sinks is not None:
            p["sinks"] = pointer(call.sinks)
        return p, power_of_two(k_address, v_address, vec)

    def _kernel(
        self, config: KernelConfig, vec: int, *, planned: bool, softcap: bool = False, alibi: bool = False
    ) -> Any:
        key = (config, vec, planned, softcap, alibi, debug())
        function = self._functions.get(key)
        if function is None:
            defines = decode_defines(config, vec, planned, softcap, alibi)
            function = self.launcher.get(config.kernel, config.kernel + ".cu", defines, config.shared_bytes)
            self._functions[key] = function
        return function

    def _work(self, plan: Plan, options: PlanOptions) -> DeviceWork:
        """The plan's work on this device; made at the first call that needs it."""
        key = (self, options)
        if key not in plan.device:
            plan.device[key] = DeviceWork(self.launcher, self._ring, plan, options)
        work: DeviceWork = plan.device[key]
        return work

    def _stream_workspace(self) -> Workspace:
        return self._workspaces.setdefault(self.launcher.stream(), Workspace(self.launcher))

    def _upload(self, x: Array) -> Array:
        """A host array on the device; a device array as it is."""
        if type(x) is not np.ndarray:
            return x
        there = self.launcher.empty(x.shape, x.dtype)
        self._ring.stage(x.nbytes)[: x.nbytes].view(x.dtype)[:] = x.reshape(-1)
        self._ring.send(there.reshape(-1).view(np.uint8), x.nbytes)
        return there


@lru_cache(maxsize=256)
def _constants(
    q_shape: tuple[int, ...], q_strides: tuple[int, ...], out_strides: tuple[int, ...], lse_strides: tuple[int, ...] | None, item: int,
    shape: tuple[int, ...], k_strides: tuple[int, ...], v_strides: tuple[int, ...], cache_item: int,
    causal: bool, window: int | None, chunk: int | None, scale: float, softcap: float | None,
) -> tuple[dict[str, Any], int]:  # fmt: skip
    """Parameters of attention that follow from shapes and options, 0 elsewhere, and the access to pages that strides allow.

    The layers of a step differ in addresses only, so this is put together once for all of them.
    """
    p: dict[str, Any] = dict.fromkeys(ATTENTION.names or (), 0)
    strides = meaningful(shape, k_strides)[:3] + meaningful(shape, v_strides)[:3]
    p["k_block"], p["k_head"], p["k_slot"], p["v_block"], p["v_head"], p["v_slot"] = strides
    p["num_blocks"], p["num_kv_heads"], p["block_size"] = shape[:3]
    p["magic"], p["shift"] = division_by(shape[2])
    p["num_tokens"], p["group"] = q_shape[0], q_shape[1] // shape[1]
    p["q_token"], p["q_head"] = (s // item for s in meaningful(q_shape, q_strides)[:2])
    p["out_token"], p["out_head"] = (s // item for s in meaningful(q_shape, out_strides)[:2])
    if lse_strides is not None:
        p["lse_token"] = meaningful(q_shape[:2], lse_strides)[0] // 4
    p["causal"], p["window"], p["chunk"] = causal, window or 0, chunk or 0
    p["scale"], p["softcap"] = scale, softcap or 0.0
    return p, power_of_two(shape[3] * cache_item, *strides)


class Workspace:
    """Partial results and tickets of split sequences, grown on demand. Tickets are 0 between launches."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._floats: Array = np.empty(0, np.float32)
        self._tickets: Array = np.empty(0, np.uint32)

    def reserve(self, num_states: int, head_dim: int, num_tickets: int) -> tuple[int, int, int]:
        """Addresses of room for so many partial rows, their states (max and sum), and so many tickets; 0 for nothing."""
        if num_states == 0:
            return 0, 0, 0
        if num_states * (head_dim + 2) > self._floats.size:
            self._floats = self._launcher.empty((num_states * (head_dim + 2),), np.float32)
        if num_tickets > self._tickets.size:
            self._tickets = self._launcher.empty((num_tickets,), np.uint32)
            self._tickets[...] = 0
        base = self._launcher.pointer(self._floats)
        return base + 8 * num_states, base, self._launcher.pointer(self._tickets)


# ------------------------------------------------------------------------------------------------------------- devices


@cache
def backend(device_id: int) -> Backend:
    """The backend of one CUDA device. Raises RuntimeError for a device older than the kernels support."""
    return Backend(CupyLauncher(device_id))


def current_backend() -> Backend:
    """The backend of CuPy's current device. Raises ModuleNotFoundError without CuPy, RuntimeError without a GPU."""
    try:
        import cupy
    except ImportError as error:
        raise ModuleNotFoundError(
            "device: 'cuda' needs CuPy, which is not installed: pip install 'cupaged[cuda12x]' (or [cuda13x])"
        ) from error
    if not cupy.cuda.is_available():
        raise RuntimeError("device: 'cuda' found no GPU (CuPy is installed, but no CUDA device or driver is there)")
    return backend(cupy.cuda.Device().id)


def warmup(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str = "float16",
    kv_dtype: str | None = None,
    max_queries: int = 1,
    softcap: bool = False,
    alibi: bool = False,
    share_prefix: bool = True,
) -> None:
    """Compile what a configuration needs on CuPy's current device, before the first request waits for it.

    Args:
        num_heads, num_kv_heads, head_dim, dtype, kv_dtype: as in `cupaged.plan`.
        max_queries: the most query rows that one sequence will have in a step: 1 for decode alone, the chunk size with prefill.
        softcap, alibi, share_prefix: whether calls will use them; each prefix that is shared needs kernels for more rows.

    Compiled code stays in CuPy's cache on disk, so that a second process only loads it. Raises what `cupaged.plan` raises for
    wrong sizes, ModuleNotFoundError without CuPy and RuntimeError without a GPU.
    """
    options = plan_options(num_heads, num_kv_heads, head_dim, dtype, kv_dtype, None, None, None, True, share_prefix)
    if isinstance(max_queries, bool) or not isinstance(max_queries, (int, np.integer)) or max_queries < 1:
        raise ValueError(f"max_queries: expected an integer of at least 1, got {max_queries!r}")
    current_backend().warmup(options, int(max_queries), softcap, alibi)


def backend_for(x: Array) -> Any:
    """The backend of the device that holds the CuPy array `x`, whatever device is current."""
    import cupy

    if x.device.id == cupy.cuda.Device().id:
        return backend(x.device.id)
    return _Elsewhere(x.device)


class _Elsewhere:
    """A backend of a device that is not the current one: makes it current for the length of each call."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, operation: str) -> Any:
        def run(*arguments: Any) -> None:
            with self._device:
                getattr(backend(self._device.id), operation)(*arguments)

        return run
