"""What a call on the CPU hands to compiled code: its record, the threads that run it, and memory that outlives it.

Threads are Numba's (`numba.set_num_threads` is respected); a lock lets one call at a time use them, since not all of Numba's threading
layers may be entered twice.
"""

from __future__ import annotations

import os
import struct
import threading
from functools import cache
from typing import Any

import numba
import numpy as np

from .arrays import Array, Attention, WriteKV
from .cpu_cache import WRITE_FIELDS, write_kernel
from .cpu_call import PARAMS, RECORD_BYTES, ROOMS
from .cpu_formats import KV_CODES
from .cpu_tiles import allowed
from .cpu_vector import call_worker, entry, parallel_entry
from .cpu_work import PACKING

_SERIAL_COST = 1 << 17  # products of a query with a key element; below, waking threads costs more than they save
_SERIAL_ELEMENTS = 1 << 15  # the same for elements to write
_KINDS = {"f": 0, "e": 1, "E": 2}  # by the dtype's char: float32, float16, bfloat16
_call, _write = struct.Struct(PACKING), struct.Struct("q" * len(WRITE_FIELDS))
threads_free = threading.Lock()


@parallel_entry
def _run_parallel(kernel: int, params: int, workers: int) -> None:
    for number in numba.prange(workers):
        call_worker(kernel, params, number)


@entry
def _run_serial(kernel: int, params: int) -> None:
    call_worker(kernel, params, 0)


def run(kernel: int, params: int, workers: int) -> None:
    """Run a compiled worker on the record at `params`, on so many threads, of which no other call has any."""
    if workers <= 1:
        _run_serial(kernel, params)
    else:
        _run_parallel(kernel, params, workers)


def address(x: Array) -> int:
    return int(x.ctypes.data)


class _Workspace:
    """Memory that outlives a call, for one call at a time: whoever holds `threads_free`."""

    def __init__(self) -> None:
        self.params: Any = np.zeros(PARAMS, np.int64)
        self.params[-1] = numba.config.NUMBA_NUM_THREADS
        self.where = address(self.params)
        self._rooms: dict[str, Array] = {}
        self.no_key = self.room("zeros", 1024)  # the row of a key that is not there

    def room(self, name: str, size: int) -> int:
        """The address of at least `size` bytes, aligned to a cache line; twice as much as before when that was too small.

        New memory is zero: tickets rely on it, and whoever takes the last one sets it back. Compiled code finds it in `params`.
        """
        at = RECORD_BYTES // 8 + 2 * ROOMS.index(name)
        begin, held = self.params[at : at + 2].tolist()
        if held < size:
            held = max(size, 2 * held)
            self._rooms[name] = array = np.zeros(held + 64, np.uint8)
            begin = address(array) + -address(array) % 64
            self.params[at : at + 2] = begin, held
        return int(begin)


workspace = _Workspace()
parameters = workspace.where
kernels = np.zeros((len(KV_CODES), 8), np.int64)  # addresses of compiled workers, by the format of the pages
_kernels_of = {kv: address(row) for kv, row in enumerate(kernels)}


def num_threads() -> int:
    """How many threads a call may use."""
    return int(min(numba.get_num_threads(), workspace.params[-1]))


def _begin_child() -> None:
    """In a forked process: GNU OpenMP, once it runs, would end it at the first call on several threads."""
    try:
        if numba.threading_layer() == "omp":
            workspace.params[-1] = 1
    except ValueError:  # none runs yet
        pass
    threads_free.release()


if hasattr(os, "register_at_fork"):  # a fork waits until the memory above is at rest
    os.register_at_fork(before=threads_free.acquire, after_in_parent=threads_free.release, after_in_child=_begin_child)


@cache
def _write_kernel(kind: int, kv: int) -> int:
    return int(write_kernel(kind, kv).address)


def _id(x: Array | None) -> int:
    return 0 if x is None else id(x)


def pack_attention(params: Any, call: Attention) -> None:
    """The record of a call, in which arrays are ids yet."""
    q, out, lse, k, v, tables = call.q, call.out, call.lse, call.k_pages, call.v_pages, call.block_tables
    num_heads, head_dim = q.shape[1:]
    _, num_kv_heads, block_size, _ = k.shape
    _call.pack_into(
        params, 0,
        id(q), id(out), _id(lse), id(k), id(v), id(tables), id(call.seq_lens), id(call.query_start_loc), _id(call.alibi_slopes),
        _id(call.sinks), id(call.k_scale), id(call.v_scale), 0, 0, 0, 0, 0,
        *q.strides[:2], *out.strides[:2], *((0, 0) if lse is None else lse.strides), *k.strides[:3], *v.strides[:3], tables.strides[0],
        len(tables), num_heads // num_kv_heads, num_kv_heads, head_dim, block_size, call.causal, call.window or 0, call.chunk or 0,
        call.num_splits or 0, _KINDS[q.dtype.char], allowed(), 0, 0, 0, 0, _kernels_of[KV_CODES[call.kv_dtype]], _SERIAL_COST,
        call.scale, call.softcap or 0.0,
    )  # fmt: skip


def pack_write(params: Any, call: WriteKV, slots: Array) -> None:
    """The record of a write, in which arrays are ids yet."""
    k, v, k_pages, v_pages = call.k, call.v, call.k_pages, call.v_pages
    _, num_kv_heads, block_size, head_dim = k_pages.shape
    _write.pack_into(
        params, 0,
        id(k), id(v), id(k_pages), id(v_pages), id(slots), id(call.k_scale), id(call.v_scale),
        *k.strides[:2], *v.strides[:2], *k_pages.strides[:3], *v_pages.strides[:3],
        len(slots), num_kv_heads, block_size, head_dim, 0, _write_kernel(_KINDS[k.dtype.char], KV_CODES[call.kv_dtype]), _SERIAL_ELEMENTS,
    )  # fmt: skip
