"""Attention on a CUDA device: choose kernels, pack their parameter struct, launch them on the current stream.

Host metadata are plain `numpy.ndarray`; they go to the device with the schedule, by one copy (`decode_work`). Nothing synchronises.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .arrays import Array, Attention
from .cuda_structs import (
    ATTENTION,
    MERGE,
    byte_strides,
    decode_defines,
    division_by,
    dtype_of,
    meaningful,
    merge_defines,
    pack,
    power_of_two,
)
from .cuda_upload import DeviceSide
from .decode_work import DeviceWork
from .kernel_config import KernelConfig, attention_kernels
from .kernels import debug
from .launcher import Launcher
from .plan import Plan, PlanOptions
from .schedule import MIN_SHARE


class AttentionKernels(DeviceSide):
    """Launches of decode.cu, decode_mma.cu, prefill.cu and merge.cu."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher)
        self._workspaces: dict[int, Workspace] = {}
        # Kernels by what a call knows: putting their constants together takes longer.
        self._functions: dict[Any, Any] = {}

    def prepare(self, plan: Plan) -> None:
        """Compile what the plan's calls need and put its work on the device, with a workspace of its own."""
        assert plan.options is not None
        work = self._work(plan, plan.options)
        work.workspace = Workspace(self.launcher)
        work.workspace.reserve(work.num_states + work.num_shared_states, plan.options.head_dim, work.num_tickets)
        for part in work.parts:
            self._kernel(part.config, 16, planned=True)

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
