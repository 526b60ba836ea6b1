"""Attention on a CUDA device: choose kernels, pack their parameter struct, launch them on the current stream.

Host metadata are plain `numpy.ndarray`; they go to the device with the schedule, by one copy (`device_work`). Nothing synchronises.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import Array, Attention
from .call_form import remember
from .cuda_structs import (
    ATTENTION,
    MERGE,
    attention_pieces,
    byte_strides,
    decode_defines,
    division_by,
    dtype_of,
    merge_defines,
    pack_attention,
    power_of_two,
)
from .cuda_upload import DeviceSide
from .device_work import DeviceWork
from .kernel_config import KernelConfig, attention_kernels
from .kernels import debug
from .launcher import Launcher
from .plan import Plan, PlanOptions
from .schedule import MIN_SHARE


class AttentionKernels(DeviceSide):
    """Launches of decode.cu, decode_mma.cu, prefill.cu and merge.cu."""

    def __init__(self, launcher: Launcher) -> None:
        super().__init__(launcher)
        self._workspaces: dict[Hashable, Workspace] = {}
        # Kernels by what a call knows: putting their constants together takes longer.
        self._functions: dict[Any, Any] = {}

    def prepare(self, plan: Plan) -> None:
        """Compile what the plan's calls need and put its work on the device, with a workspace of its own."""
        assert plan.options is not None
        work = self._work(plan, plan.options)
        work.workspace = Workspace(self.launcher)
        work.workspace.reserve(work.num_states + work.num_shared_states, plan.options.head_dim, work.num_tickets)
        work.ready()
        for part in work.parts:
            self._kernel(part.config, 16, plan.block_size, planned=True)

    def place(self, plan: Plan, options: PlanOptions) -> None:
        """Put the work of calls with these options on the device before the first of them: the plan's slots come with it."""
        with self._ring.lock:
            self._work(plan, options)

    def paged_attention(self, call: Attention) -> None:
        """One launch for each kernel that the sequences need (`kernel_config`).

        Over a plan's schedule where metadata are on the host, else over splits whose edges the device finds.
        """
        with self._ring.lock:
            pointer, form, lse = self.launcher.pointer, call.form, call.lse
            plan = call.plan
            if plan is None:
                launches, states, tickets = self._unplanned(call)
                tables_at, lens_at, starts_at = (
                    pointer(call.block_tables),
                    pointer(call.seq_lens),
                    pointer(call.query_start_loc),
                )
                workspace = self._stream_workspace()
            else:
                work = self._work(plan, form.options)
                if plan.options is not None:  # others are of one stream alone
                    work.arrive()
                launches, states, tickets = work.launches.get(form) or self._planned(call, work)
                tables_at, lens_at, starts_at = work.metadata
                workspace = work.workspace or self._stream_workspace()
            partials, partial_states, tickets = workspace.reserve(states, form.options.head_dim, tickets)
            k, v = pointer(call.k_pages), pointer(call.v_pages)
            addresses = (
                k, v, tables_at, pointer(call.q), pointer(call.out), 0 if lse is None else pointer(lse),
                0 if call.alibi_slopes is None else pointer(call.alibi_slopes), 0 if call.sinks is None else pointer(call.sinks),
                pointer(call.k_scale), pointer(call.v_scale), lens_at, starts_at, partials, partial_states, tickets,
            )  # fmt: skip
            shared = 0, 0
            if plan is not None and work.shared is not None:  # the end of the workspace is theirs
                shared = partials + 4 * form.options.head_dim * work.num_states, partial_states + 8 * work.num_states
            for one in launches:
                vec = power_of_two(k, v, one.vec)
                function = one.functions.get(vec)
                if function is None:
                    function = one.functions[vec] = self._kernel(
                        one.config,
                        vec,
                        call.k_pages.shape[2],
                        planned=plan is not None,
                        softcap=form.softcap is not None,
                        alibi=call.alibi_slopes is not None,
                    )
                self.launcher.launch(
                    function,
                    one.grid,
                    (one.config.threads, 1, 1),
                    pack_attention(one.pieces, *addresses, *shared),
                    one.config.shared_bytes,
                )

    def _planned(self, call: Attention, work: DeviceWork) -> _Launches:
        """What a call launches for a plan, with the partial states and tickets it needs."""
        constants = call.form.made.get("constants")
        if constants is None:
            constants = call.form.made["constants"] = _constants(call)
        p, vec = {**constants[0], **work.parameters}, constants[1]
        launches = []
        for part in work.parts:
            p.update(part.addresses)
            launches.append(_Launch.of(part.config, part.shares, p, vec))
        found = tuple(launches), work.num_states + work.num_shared_states, work.num_tickets
        remember(work.launches, call.form, found, 64)
        return found

    def _unplanned(self, call: Attention) -> _Launches:
        """The same for lengths that only the device knows: as many equal splits a sequence as may fill the device.

        Kernels number units themselves.
        """
        num_seqs, max_blocks = call.block_tables.shape
        key = (self, num_seqs, max_blocks, debug())
        found: _Launches | None = call.form.made.get(key)
        if found is not None:
            return found
        options, info = call.form.options, self.launcher.info
        p, vec = _constants(call)
        p["table_row"] = p["max_blocks"] = max_blocks
        p["num_seqs"] = num_seqs
        num_tokens, group = len(call.q), options.num_heads // options.num_kv_heads
        most = group * (1 if num_tokens <= num_seqs else num_tokens)
        launches, states, most_units = [], 0, 0
        for config in attention_kernels(
            info, options.head_dim, options.dtype, options.kv_dtype, group, group * -(-num_tokens // num_seqs), most
        ):
            units = num_tokens * group // config.rows + num_seqs
            splits = options.num_splits
            if splits is None:
                enough = max_blocks * call.k_pages.shape[2] // MIN_SHARE
                splits = max(1, min(info.num_sms * config.resident // (num_seqs * options.num_kv_heads), enough))
            p["splits"] = splits
            launches.append(_Launch.of(config, units * splits, p, vec))
            states, most_units = max(states, units * splits * config.rows), max(most_units, units)
        found = tuple(launches), options.num_kv_heads * states, options.num_kv_heads * most_units
        remember(call.form.made, key, found, 64)
        return found

    def _kernel(
        self,
        config: KernelConfig,
        vec: int,
        block_size: int,
        *,
        planned: bool,
        softcap: bool = False,
        alibi: bool = False,
    ) -> Any:
        key = (config, vec, config.blocks(block_size), planned, softcap, alibi, debug())
        function = self._functions.get(key)
        if function is None:
            defines = decode_defines(config, vec, planned, softcap, alibi, block_size)
            function = self.launcher.get(config.kernel, config.kernel + ".cu", defines, config.shared_bytes)
            self._functions[key] = function
        return function

    def _work(self, plan: Plan, options: PlanOptions) -> DeviceWork:
        """The plan's work on this device; made at the first call that needs it.

        A plan that was made for its options serves every stream, as graphs need it; others have work of each stream, whose calls
        come after the copy to the device.
        """
        key: Any = self if plan.options is not None else (self, options, self.launcher.stream())
        work: DeviceWork | None = plan.device.get(key)
        if work is None:
            work = plan.device[key] = DeviceWork(self.launcher, self._ring, plan, options)
        return work

    def _stream_workspace(self) -> Workspace:
        if self.launcher.capturing():
            raise RuntimeError(
                "plan: attention in a CUDA graph needs memory of its own, and what a stream has, later calls use and replace; make a plan "
                "with cupaged.plan(..., device='cuda') before the capture and give it to the call"
            )
        stream = self.launcher.stream()
        found = self._workspaces.get(stream)
        if found is None:
            found = self._workspaces[stream] = Workspace(self.launcher)
        return found

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


@dataclass(frozen=True, slots=True)
class _Launch:
    """One launch of the calls of a form, but for addresses."""

    config: KernelConfig
    grid: tuple[int, int, int]
    pieces: tuple[bytes, ...]
    vec: int  # the widest access to pages that strides allow, in bytes
    functions: dict[int, Any]  # by the widest access that addresses allow too

    @classmethod
    def of(cls, config: KernelConfig, across: int, p: dict[str, Any], vec: int) -> _Launch:
        return cls(config, (across, p["num_kv_heads"], 1), attention_pieces(p), vec, {})


_Launches = tuple[tuple[_Launch, ...], int, int]  # launches, partial states, tickets


def _constants(call: Attention) -> tuple[dict[str, Any], int]:
    """Parameters of attention that follow from the call's form, 0 elsewhere, and the access to pages that strides allow."""
    p: dict[str, Any] = dict.fromkeys(ATTENTION.names or (), 0)
    q, k, lse, item = call.q, call.k_pages, call.lse, call.q.itemsize
    strides = byte_strides(k)[:3] + byte_strides(call.v_pages)[:3]
    p["k_block"], p["k_head"], p["k_slot"], p["v_block"], p["v_head"], p["v_slot"] = strides
    p["num_blocks"], p["num_kv_heads"], p["block_size"] = k.shape[:3]
    p["magic"], p["shift"] = division_by(k.shape[2])
    p["num_tokens"], p["group"] = len(q), q.shape[1] // k.shape[1]
    p["q_token"], p["q_head"] = (s // item for s in byte_strides(q)[:2])
    p["out_token"], p["out_head"] = (s // item for s in byte_strides(call.out)[:2])
    if lse is not None:
        p["lse_token"] = byte_strides(lse)[0] // 4
    p["causal"], p["window"], p["chunk"] = call.causal, call.window or 0, call.chunk or 0
    p["scale"], p["softcap"] = call.scale, call.softcap or 0.0
    return p, power_of_two(k.shape[3] * k.itemsize, *strides)


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
            self._tickets.fill(0)  # which CuPy does without a kernel
        base = self._launcher.pointer(self._floats)
        return base + 8 * num_states, base, self._launcher.pointer(self._tickets)


# ------------------------------------------------------------------------------------------------------------- devices
