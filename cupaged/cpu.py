"""The CPU backend: checked calls become one record of addresses and strides, and compiled workers take its items from a counter.

Numba compiles a kernel when a call first needs it and keeps it on disk. Small calls run on the calling thread alone. Results do not
depend on the number of threads.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from .arrays import Array, Attention, WriteKV

try:
    import numba
except ImportError:
    raise ImportError("numba is not installed: pip install 'cupaged[cpu]'") from None
if numba.config.DISABLE_JIT:
    raise ImportError("numba compiles nothing while NUMBA_DISABLE_JIT is set: unset it")

from .cpu_cache import copy_kernel
from .cpu_call import call as run_call
from .cpu_decode import decode_kernel
from .cpu_formats import KV_CODES
from .cpu_prefill import prefill_kernel
from .cpu_records import (
    address,
    kernels,
    num_threads,
    pack_attention,
    pack_write,
    parameters,
    run,
    threads_free,
    workspace,
)
from .cpu_repeat import RepeatedAttention, RepeatedWrite, StepRecord, page_addresses
from .cpu_vector import entry
from .cpu_work import FIELDS, QUEUE_BYTES, SCRATCH_BYTES, kernels_needed, plan

__all__ = [
    "RepeatedAttention",
    "RepeatedWrite",
    "StepRecord",
    "address",
    "copy_blocks",
    "host_pages",
    "merge_states",
    "page_addresses",
    "paged_attention",
    "run",
    "swap_blocks",
    "write_kv",
]

_ZEROS, _WORK, _PARTIALS, _TICKETS, _SCRATCH, _QUEUES, _WORKERS, _SERIAL = (
    FIELDS.index(name) for name in ("zeros", "work", "partials", "tickets", "scratch", "queues", "workers", "serial")
)


@cache
def _kernel(kv: int, kernel: int) -> int:
    """The address of a compiled worker."""
    found = int((decode_kernel(kv, kernel) if kernel < 5 else prefill_kernel(kv, kernel - 5)).address)
    kernels[kv, kernel] = found
    return found


def paged_attention(call: Attention) -> None:
    """Attention of a checked call on NumPy arrays, classic layout excepted. Every row of `call.out` and `call.lse` is written."""
    with threads_free:
        pack_attention(workspace.params, call)
        if not run_call(parameters, 0, 0, 0, 0, 0, 0, 0, 0, 0):
            _run_step_by_step(call)


def _run_step_by_step(call: Attention) -> None:
    """Run the call in the parameters where room is too small, a worker is not compiled yet, or more than one is needed."""
    own, where = workspace, parameters
    params, threads, kv = own.params, num_threads(), KV_CODES[call.kv_dtype]
    params[_ZEROS], params[_WORK] = own.no_key, own.room("work", 24 * len(call.block_tables))
    params[_SCRATCH] = own.room("scratch", threads * SCRATCH_BYTES)
    params[_QUEUES] = own.room("queues", threads * QUEUE_BYTES)
    needed = kernels_needed(where)
    kernel = 0
    while needed >> kernel:
        if needed >> kernel & 1:
            items, cost, floats, tickets = plan(where, kernel, threads)
            workers = 1 if cost < params[_SERIAL] else min(threads, items)
            params[_PARTIALS], params[_TICKETS] = own.room("partials", 4 * floats), own.room("tickets", 8 * tickets)
            params[_WORKERS] = workers
            run(_kernel(kv, kernel), where, workers)
        kernel += 1


def write_kv(call: WriteKV) -> None:
    """Store rows at their slots, checked beforehand; layout "HND" only."""
    slots = call.slot_mapping.astype(np.int64, copy=False)
    with threads_free:
        pack_write(workspace.params, call, slots)
        run_call(parameters, 0, 0, 0, 0, 0, 0, parameters, 0, 0)


def copy_blocks(pool: Array, copies: Array) -> None:
    """`pool[copies[n, 1]] = pool[copies[n, 0]]` for all n; no block is both source and destination, no destination repeats."""
    if not len(copies):
        return
    if not pool[0].flags.c_contiguous:
        for source, target in copies:
            pool[target] = pool[source]
        return
    copies = np.ascontiguousarray(copies, np.int64)
    params = np.array([address(pool), pool.strides[0], pool[0].nbytes, address(copies), len(copies), 0])
    with threads_free:
        run(int(copy_kernel().address), address(params), 1 if len(copies) == 1 else num_threads())


def host_pages(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Memory for swapped blocks."""
    return np.empty(shape, dtype)


def swap_blocks(src: Array, dst: Array, pairs: Array) -> None:
    """`dst[pairs[n, 1]] = src[pairs[n, 0]]` for all n; no destination repeats."""
    for source, target in pairs.tolist():
        dst[target] = src[source]


def merge_states(outs: Array, lses: Array, sinks: Array | None, out: Array, lse: Array) -> None:
    """Combine partial results `outs [parts, tokens, heads, head_dim]`, `lses [parts, tokens, heads]` into `out`, `lse`."""
    parts, head_dim = len(outs), outs.shape[-1]
    flat = _read_only(outs).reshape(parts, lse.size, head_dim)
    merged = np.empty(flat.shape[1:], np.float32)
    merged_lse = np.empty(len(merged), np.float32)
    _merge(flat, _read_only(lses).reshape(parts, -1), _read_only(() if sinks is None else sinks), merged, merged_lse)
    out[...], lse[...] = merged.reshape(out.shape), merged_lse.reshape(lse.shape)


def _read_only(x: Any) -> Array:
    """Contiguous float32 that may not be written, whatever `x` is: compiled code has one form of argument."""
    view = np.require(x, np.float32, ["C", "A"]).view()
    view.flags.writeable = False
    return view


@entry
def _merge(outs: Array, lses: Array, sinks: Array, out: Array, lse: Array) -> None:
    parts, rows, head_dim = outs.shape
    for r in range(rows):
        top = -math.inf
        for n in range(parts):
            top = max(top, lses[n, r])
        total = 0.0
        out[r] = 0
        for n in range(parts):
            if lses[n, r] > -math.inf or math.isnan(lses[n, r]):
                weight = math.exp(lses[n, r] - top)
                total += weight
                for d in range(head_dim):
                    out[r, d] += np.float32(weight) * outs[n, r, d]
        lse[r] = top + math.log(total) if total > 0 else -math.inf
        if total > 0:
            keep = 1.0
            if len(sinks):
                keep = 1.0 / (1.0 + math.exp(sinks[r % len(sinks)] - lse[r]))
            out[r] *= np.float32(keep / total)
