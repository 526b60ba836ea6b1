"""The CPU backend: checked calls become one record of addresses and strides, and compiled workers take its items from a counter.

Numba compiles a kernel when a call first needs it and keeps it on disk. Threads are Numba's (`numba.set_num_threads` is respected); a
lock lets one call at a time use them, since not all of Numba's threading layers may be entered twice. Small calls run on the
calling thread alone. Results do not depend on the number of threads.
"""

from __future__ import annotations

import math
import struct
import threading
from functools import cache
from typing import Any

import numpy as np

from .arrays import Array, Attention, WriteKV

try:
    import numba
except ImportError:
    raise ImportError("numba is not installed: pip install 'cupaged[cpu]'") from None

from .cpu_cache import WRITE_ARRAYS, WRITE_FIELDS, copy_kernel, write_kernel
from .cpu_decode import decode_kernel
from .cpu_formats import KV_CODES
from .cpu_prefill import prefill_kernel
from .cpu_tiles import allowed
from .cpu_vector import call_worker, entry
from .cpu_work import ARRAYS, FIELDS, PACKING, SCRATCH_BYTES, kernels_needed, plan, resolve

_SERIAL_COST = 1 << 16  # products of a query with a key element; waking threads costs about as much
_SERIAL_ELEMENTS = 1 << 15  # the same for elements to write
_KINDS = {"f": 0, "e": 1, "E": 2}  # by the dtype's char: float32, float16, bfloat16
_PARTIALS, _TICKETS, _WORKERS = (FIELDS.index(name) for name in ("partials", "tickets", "workers"))
_call, _write = struct.Struct(PACKING), struct.Struct("q" * len(WRITE_FIELDS))
_threads_free = threading.Lock()


@numba.njit(parallel=True, nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _run_parallel(kernel: int, params: int, workers: int) -> None:
    for number in numba.prange(workers):
        call_worker(kernel, params, number)


@entry
def _run_serial(kernel: int, params: int) -> None:
    call_worker(kernel, params, 0)


def run(kernel: int, params: int, workers: int) -> None:
    """Run a compiled worker on the record at `params`, on so many threads."""
    if workers <= 1:
        _run_serial(kernel, params)
        return
    with _threads_free:
        _run_parallel(kernel, params, workers)


def address(x: Array) -> int:
    return int(x.ctypes.data)


class _Workspace(threading.local):
    """Memory that outlives a call, one set for each Python thread."""

    def __init__(self) -> None:
        self.params: Any = np.zeros(max(_call.size, _write.size) // 8, np.int64)
        self.where = address(self.params)
        self.zeros = np.zeros(256, np.float32)  # the row of a key that is not there
        self.no_key = address(self.zeros)
        self._rooms: dict[str, tuple[Array, int, int]] = {}

    def room(self, name: str, size: int) -> int:
        """The address of at least `size` bytes, aligned to a cache line; twice as much as before when that was too small.

        New memory is zero: tickets rely on it, and whoever takes the last one sets it back.
        """
        _, held, begin = self._rooms.get(name, (None, 0, 0))
        if held < size:
            held = max(size, 2 * held)
            array = np.zeros(held + 64, np.uint8)
            begin = address(array) + -address(array) % 64
            self._rooms[name] = array, held, begin
        return begin


_workspace = _Workspace()


@cache
def _kernel(kv: int, kernel: int) -> int:
    """The address of a compiled worker."""
    return int((decode_kernel(kv, kernel) if kernel < 5 else prefill_kernel(kv, kernel - 5)).address)


@cache
def _write_kernel(kind: int, kv: int) -> int:
    return int(write_kernel(kind, kv).address)


def paged_attention(call: Attention) -> None:
    """Attention of a checked call on NumPy arrays, classic layout excepted. Every row of `call.out` and `call.lse` is written."""
    q, out, lse, k, v, tables = call.q, call.out, call.lse, call.k_pages, call.v_pages, call.block_tables
    num_seqs = len(tables)
    num_heads, head_dim = q.shape[1:]
    _, num_kv_heads, block_size, _ = k.shape
    own, threads = _workspace, numba.get_num_threads()
    params, where = own.params, own.where
    _call.pack_into(
        params, 0,
        id(q), id(out), id(lse), id(k), id(v), id(tables), id(call.seq_lens), id(call.query_start_loc), id(call.alibi_slopes),
        id(call.sinks), id(call.k_scale), id(call.v_scale),
        own.no_key, own.room("work", 24 * num_seqs), 0, 0, own.room("scratch", threads * SCRATCH_BYTES),
        *q.strides[:2], *out.strides[:2], *((0, 0) if lse is None else lse.strides), *k.strides[:3], *v.strides[:3], tables.strides[0],
        num_seqs, num_heads // num_kv_heads, num_kv_heads, head_dim, block_size, call.causal, call.window or 0, call.chunk or 0,
        call.num_splits or 0, _KINDS[q.dtype.char], allowed(), 0, 0, 0, own.room("queues", 64 * threads),
        call.scale, call.softcap or 0.0,
    )  # fmt: skip
    resolve(where, ARRAYS, id(None))
    needed = kernels_needed(where)
    kernel = 0
    while needed >> kernel:
        if needed >> kernel & 1:
            items, cost, floats, tickets = plan(where, kernel, threads)
            workers = 1 if cost < _SERIAL_COST else min(threads, items)
            params[_PARTIALS], params[_TICKETS] = own.room("partials", 4 * floats), own.room("tickets", 8 * tickets)
            params[_WORKERS] = workers
            run(_kernel(KV_CODES[call.kv_dtype], kernel), where, workers)
        kernel += 1


def write_kv(call: WriteKV) -> None:
    """Store rows at their slots, checked beforehand; layout "HND" only."""
    k, v, k_pages, v_pages = call.k, call.v, call.k_pages, call.v_pages
    slots = call.slot_mapping.astype(np.int64, copy=False)
    _, num_kv_heads, block_size, head_dim = k_pages.shape
    own = _workspace
    _write.pack_into(
        own.params, 0,
        id(k), id(v), id(k_pages), id(v_pages), id(slots), id(call.k_scale), id(call.v_scale),
        *k.strides[:2], *v.strides[:2], *k_pages.strides[:3], *v_pages.strides[:3],
        len(slots), num_kv_heads, block_size, head_dim, 0,
    )  # fmt: skip
    resolve(own.where, WRITE_ARRAYS, id(None))
    elements = len(slots) * num_kv_heads * head_dim
    kernel = _write_kernel(_KINDS[k.dtype.char], KV_CODES[call.kv_dtype])
    run(kernel, own.where, 1 if elements < _SERIAL_ELEMENTS else numba.get_num_threads())


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
    run(int(copy_kernel().address), address(params), 1 if len(copies) == 1 else numba.get_num_threads())


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
    flat = np.ascontiguousarray(outs, np.float32).reshape(parts, -1, head_dim)
    merged = np.empty(flat.shape[1:], np.float32)
    merged_lse = np.empty(len(merged), np.float32)
    no_sinks = np.zeros(0, np.float32)
    _merge(
        flat, np.ascontiguousarray(lses).reshape(parts, -1), no_sinks if sinks is None else sinks, merged, merged_lse
    )
    out[...], lse[...] = merged.reshape(out.shape), merged_lse.reshape(lse.shape)


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
