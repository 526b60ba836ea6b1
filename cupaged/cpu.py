"""The CPU backend: checked calls become one record of addresses and strides, and compiled workers take its items from a counter.

Numba compiles a kernel when a call first needs it and keeps it on disk. Threads are Numba's (`numba.set_num_threads` is respected); a
lock lets one call at a time use them, since not all of Numba's threading layers may be entered twice. Small calls run on the
calling thread alone. Results do not depend on the number of threads.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy import empty, ndarray

from .arrays import Array, Attention, WriteKV

try:
    import numba
except ImportError:
    raise ImportError("numba is not installed: pip install 'cupaged[cpu]'") from None

from .cpu_arrays import FORM_WORDS, form_of
from .cpu_cache import WRITE_FIELDS, copy_kernel, write_kernel
from .cpu_call import PARAMS, RECORD_BYTES, ROOMS, WRITE_BYTES
from .cpu_call import call as run_call
from .cpu_decode import decode_kernel
from .cpu_formats import KV_CODES
from .cpu_prefill import prefill_kernel
from .cpu_tiles import allowed
from .cpu_vector import call_worker, entry, parallel_entry
from .cpu_work import FIELDS, PACKING, QUEUE_BYTES, SCRATCH_BYTES, kernels_needed, plan
from .plan import Plan

_SERIAL_COST = 1 << 17  # products of a query with a key element; below, waking threads costs more than they save
_SERIAL_ELEMENTS = 1 << 15  # the same for elements to write
_KINDS = {"f": 0, "e": 1, "E": 2}  # by the dtype's char: float32, float16, bfloat16
_ZEROS, _WORK, _PARTIALS, _TICKETS, _SCRATCH, _QUEUES, _WORKERS = (
    FIELDS.index(name) for name in ("zeros", "work", "partials", "tickets", "scratch", "queues", "workers")
)
_call, _write = struct.Struct(PACKING), struct.Struct("q" * len(WRITE_FIELDS))
_threads_free = threading.Lock()
_acquire, _release = _threads_free.acquire, _threads_free.release  # a `with` takes longer


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
    """Memory that outlives a call, for one call at a time: whoever holds `_threads_free`."""

    def __init__(self) -> None:
        self.params: Any = np.zeros(PARAMS, np.int64)
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


_workspace = _Workspace()
_parameters = _workspace.where
_kernels = np.zeros((len(KV_CODES), 8), np.int64)  # addresses of compiled workers, by the format of the pages
_kernels_of = {kv: address(row) for kv, row in enumerate(_kernels)}


@cache
def _kernel(kv: int, kernel: int) -> int:
    """The address of a compiled worker."""
    found = int((decode_kernel(kv, kernel) if kernel < 5 else prefill_kernel(kv, kernel - 5)).address)
    _kernels[kv, kernel] = found
    return found


@cache
def _write_kernel(kind: int, kv: int) -> int:
    return int(write_kernel(kind, kv).address)


def _id(x: Array | None) -> int:
    return 0 if x is None else id(x)


def _pack(params: Any, call: Attention) -> None:
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


def paged_attention(call: Attention) -> None:
    """Attention of a checked call on NumPy arrays, classic layout excepted. Every row of `call.out` and `call.lse` is written."""
    with _threads_free:
        _pack(_workspace.params, call)
        if not run_call(_parameters, 0, 0, 0, 0, 0, 0, 0, 0, 0):
            _run_step_by_step(call)


def _run_step_by_step(call: Attention) -> None:
    """Run the call in the parameters where room is too small, a worker is not compiled yet, or more than one is needed."""
    own, where = _workspace, _parameters
    params, threads, kv = own.params, numba.get_num_threads(), KV_CODES[call.kv_dtype]
    params[_ZEROS], params[_WORK] = own.no_key, own.room("work", 24 * len(call.block_tables))
    params[_SCRATCH] = own.room("scratch", threads * SCRATCH_BYTES)
    params[_QUEUES] = own.room("queues", threads * QUEUE_BYTES)
    needed = kernels_needed(where)
    kernel = 0
    while needed >> kernel:
        if needed >> kernel & 1:
            items, cost, floats, tickets = plan(where, kernel, threads)
            workers = 1 if cost < _SERIAL_COST else min(threads, items)
            params[_PARTIALS], params[_TICKETS] = own.room("partials", 4 * floats), own.room("tickets", 8 * tickets)
            params[_WORKERS] = workers
            run(_kernel(kv, kernel), where, workers)
        kernel += 1


def write_kv(call: WriteKV) -> None:
    """Store rows at their slots, checked beforehand; layout "HND" only."""
    slots = call.slot_mapping.astype(np.int64, copy=False)
    with _threads_free:
        _pack_write(_workspace.params, call, slots)
        run_call(_parameters, 0, 0, 0, 0, 0, 0, _parameters, 0, 0)


def _pack_write(params: Any, call: WriteKV, slots: Array) -> None:
    k, v, k_pages, v_pages = call.k, call.v, call.k_pages, call.v_pages
    _, num_kv_heads, block_size, head_dim = k_pages.shape
    _write.pack_into(
        params, 0,
        id(k), id(v), id(k_pages), id(v_pages), id(slots), id(call.k_scale), id(call.v_scale),
        *k.strides[:2], *v.strides[:2], *k_pages.strides[:3], *v_pages.strides[:3],
        len(slots), num_kv_heads, block_size, head_dim, 0, _write_kernel(_KINDS[k.dtype.char], KV_CODES[call.kv_dtype]), _SERIAL_ELEMENTS,
    )  # fmt: skip


class StepRecord:
    """What the calls of one step share."""

    __slots__ = ("arrays", "values", "where")

    def __init__(self, plan: Plan) -> None:
        tables, lens, starts = (
            np.ascontiguousarray(x) for x in (plan.block_tables, plan.seq_lens, plan.query_start_loc)
        )
        slots = (
            np.zeros(0, np.int64) if plan.slot_mapping is None else np.ascontiguousarray(plan.slot_mapping, np.int64)
        )
        self.arrays = tables, lens, starts, slots  # kept alive
        self.values = np.array(  # cpu_call.STEP
            [
                address(tables),
                address(lens),
                address(starts),
                tables.strides[0],
                len(tables),
                address(slots),
                len(slots),
            ]
        )
        self.where = address(self.values)


def page_addresses(pages: Sequence[tuple[Array, Array]]) -> Array:
    """The addresses of K and V of a cache's layers, `[layers, 2]` int64: what the calls below find the pages by."""
    return np.array([(address(k), address(v)) for k, v in pages], np.int64)


def _keep_scales(record: Array, fields: tuple[str, ...], call: Attention | WriteKV) -> None:
    """A record without addresses of arrays but those of the scales."""
    at = fields.index("k_scale")
    record[:at] = 0
    record[at : at + 2] = address(call.k_scale), address(call.v_scale)


class RepeatedWrite:
    """Writes like an earlier one, of other rows of the same form, to other layers and at other steps."""

    __slots__ = ("kept", "record", "where")

    def __init__(self, call: WriteKV) -> None:
        self.kept = call.k.dtype, call.k_scale, call.v_scale
        self.record = np.zeros(WRITE_BYTES // 8 + 2 * FORM_WORDS, np.int64)
        self.where = address(self.record)
        _pack_write(self.record, call, call.slot_mapping)
        _keep_scales(self.record, WRITE_FIELDS, call)
        self.record[WRITE_FIELDS.index("num_slots")] = 0
        forms = form_of(call.k), form_of(call.v)
        for form in forms:
            form[3] = 0  # any number of rows
        self.record[WRITE_BYTES // 8 :] = np.concatenate(forms)

    def same(self, other: RepeatedWrite) -> bool:
        """Whether both repeat the same."""
        return np.array_equal(self.record, other.record)

    def write(self, pages: int, k: Any, v: Any, step: int) -> bool:
        """Whether rows were written: to the pages whose two addresses stand at `pages`, in the step whose record is at `step`."""
        _acquire()
        try:
            return bool(run_call(_parameters, 0, step, 0, 0, pages, 0, self.where, id(k), id(v)))
        finally:
            _release()


class RepeatedAttention:
    """Attention like an earlier call without slopes, sinks and lse: whatever that call's checks found holds for these calls too."""

    __slots__ = ("kept", "record", "where")

    def __init__(self, call: Attention, k_cache: Array, v_cache: Array) -> None:
        self.kept = call.q.dtype, k_cache.dtype, call.k_scale, call.v_scale
        self.record = np.zeros(RECORD_BYTES // 8 + 4 * FORM_WORDS, np.int64)
        self.where = address(self.record)
        _pack(self.record, call)
        _keep_scales(self.record, FIELDS, call)
        for name in ("table_row", "num_seqs"):
            self.record[FIELDS.index(name)] = 0
        forms = [form_of(x) for x in (call.q, call.out, k_cache, v_cache)]
        for form in forms[:2]:
            form[3] = 0  # any number of rows
        self.record[RECORD_BYTES // 8 :] = np.concatenate(forms)

    def same(self, other: RepeatedAttention) -> bool:
        """Whether both repeat the same."""
        return np.array_equal(self.record, other.record)

    def attend(self, pages: int, q: Any, step: int, written: int, k: Any, v: Any) -> Array | None:
        """The result; `pages` and `step` as in `RepeatedWrite.write`. None for what is not like the earlier call, or not ready.

        If `written` is the address of a `RepeatedWrite`'s record and not 0, rows `k` and `v` are stored first.
        """
        if type(q) is not ndarray:
            return None
        out = empty(q.shape, q.dtype)
        _acquire()
        try:
            workers = run_call(_parameters, self.where, step, id(q), id(out), pages, 0, written, id(k), id(v))
        finally:
            _release()
        return out if workers else None

    def over(self, q: Any, k_cache: Any, v_cache: Any, step: int, out: Any) -> Array | None:
        """The same over pages of the caller's own, in `out` if given."""
        if out is None:
            if type(q) is not ndarray:
                return None
            out = empty(q.shape, q.dtype)
        _acquire()
        try:
            workers = run_call(_parameters, self.where, step, id(q), id(out), id(k_cache), id(v_cache), 0, 0, 0)
        finally:
            _release()
        return out if workers else None


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
    with _threads_free:
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
