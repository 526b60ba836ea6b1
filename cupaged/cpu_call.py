"""From a call's record to its workers, in one piece of compiled code: is it like the earlier call whose record it brings, where do its
arrays lie, what are the items; and then running them.

Between the layers of a model a call finds none of its memory in the caches, and then every function and array that it touches costs
as much as many instructions; in the caches a check in Python takes as long as hundreds of products. So Python hands over ids of arrays
and the address of a record made at an earlier call, and nothing else happens there.

The parameters are the record, then for each name of ROOMS the address and size in bytes of memory that outlives a call, and the most
threads that a call may use.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from .cpu_arrays import FORM_WORDS, can_be_written, data_of, has_form, lie_across, resolve, rows_of
from .cpu_cache import WRITE_ARRAYS, WRITE_FIELDS, view_write
from .cpu_formats import copy_bytes
from .cpu_vector import call_worker, compiled, operation, parallel_entry, peek_int, peek_long
from .cpu_work import ARRAYS, CALL, QUEUE_BYTES, SCRATCH_BYTES, SOURCE, kernels_needed, plan, view

ROOMS = ("zeros", "work", "partials", "tickets", "scratch", "queues")
# int64 each: addresses, bytes of a row of the tables, rows; address and number of slots
STEP = ("tables", "lens", "starts", "table_row", "num_seqs", "slots", "num_slots")
RECORD_BYTES = CALL.itemsize
WRITE_BYTES = 8 * len(WRITE_FIELDS)
PARAMS = RECORD_BYTES // 8 + 2 * len(ROOMS) + 1  # int64 of the parameters
# Behind the record of an earlier call: the forms of its arrays.
_Q, _OUT, _K_CACHE, _V_CACHE = (RECORD_BYTES + 8 * FORM_WORDS * n for n in range(4))
_K, _V = (WRITE_BYTES + 8 * FORM_WORDS * n for n in range(2))
_ROOM = {name: RECORD_BYTES + 16 * n for n, name in enumerate(ROOMS)}
_ZEROS, _WORK, _PARTIALS, _TICKETS, _SCRATCH, _QUEUES = _ROOM.values()
_MOST_THREADS = 8 * (PARAMS - 1)
_TABLES, _LENS, _STARTS, _TABLE_ROW, _NUM_SEQS, _SLOTS, _NUM_SLOTS = (8 * n for n in range(len(STEP)))


def _num_threads(b: ir.IRBuilder) -> ir.Value:
    """As Numba's code for `prange` asks for it; `numba.get_num_threads` takes a microsecond in Python, and cannot be cached here."""
    i64 = ir.IntType(64)
    asked = cgutils.get_or_insert_function(b.module, ir.FunctionType(i64, []), "get_num_threads")
    return b.sext(b.trunc(b.call(asked, []), ir.IntType(32)), i64)  # a C int


_threads = operation(types.int64, [], _num_threads)


@compiled
def _is_like(record: int, step: int, q: int, out: int, k_cache: int, v_cache: int) -> bool:
    """Whether the checks of the call of `record` hold for one on these arrays too; without `v_cache` pages need none."""
    if v_cache and not (has_form(k_cache, record + _K_CACHE, 0) and has_form(v_cache, record + _V_CACHE, 0)):
        return False
    if not (has_form(q, record + _Q, 1) and has_form(out, record + _OUT, 1) and can_be_written(out)):
        return False
    rows = rows_of(q)
    planned = peek_int(peek_long(step + _STARTS) + 4 * peek_long(step + _NUM_SEQS))
    # arrays that lie in one another may share memory or not; the checks of a new call find out
    return rows > 0 and rows == planned and rows_of(out) == rows and not lie_across(q, out)


@compiled
def _is_like_write(record: int, step: int, k: int, v: int) -> bool:
    if not (has_form(k, record + _K, 1) and has_form(v, record + _V, 1)):
        return False
    return rows_of(k) == rows_of(v) and rows_of(k) >= peek_long(step + _NUM_SLOTS)


@compiled
def _take(own: int, record: int, step: int, q: int, out: int, k_cache: int, v_cache: int) -> None:
    """The call of `record` on these arrays, as a record in `own`."""
    copy_bytes(record, own, RECORD_BYTES)
    p = view(own)[0]
    p.q, p.out = data_of(q), data_of(out)
    if v_cache:
        p.k, p.v = data_of(k_cache), data_of(v_cache)
    else:
        p.k, p.v = peek_long(k_cache), peek_long(k_cache + 8)
    p.tables, p.lens, p.starts = peek_long(step + _TABLES), peek_long(step + _LENS), peek_long(step + _STARTS)
    p.table_row, p.num_seqs = peek_long(step + _TABLE_ROW), peek_long(step + _NUM_SEQS)


@compiled
def _room(own: int, room: int, size: int) -> int:
    """The address of memory that outlives a call, 0 when it is smaller than `size`."""
    return int(peek_long(own + room)) if peek_long(own + room + 8) >= size else 0


@compiled
def _lay_out(own: int, threads: int) -> tuple[int, int]:
    """The worker that the record needs and how many of them; 0 of them when Python must do something first: compile, or make room."""
    p = view(own)[0]
    p.zeros = peek_long(own + _ZEROS)
    p.work = _room(own, _WORK, 24 * p.num_seqs)
    p.scratch = _room(own, _SCRATCH, SCRATCH_BYTES * threads)
    p.queues = _room(own, _QUEUES, QUEUE_BYTES * threads)
    if not (p.work and p.scratch and p.queues):
        return 0, 0
    needed = kernels_needed(own)
    if needed == 0 or needed & (needed - 1):
        return 0, 0
    number = 0
    while needed >> number != 1:
        number += 1
    kernel = peek_long(p.kernels + 8 * number)
    if kernel == 0:
        return 0, 0
    items, cost, floats, tickets = plan(own, number, threads)
    p.partials, p.tickets = _room(own, _PARTIALS, 4 * floats), _room(own, _TICKETS, 8 * tickets)
    if tickets and not (p.partials and p.tickets):
        return 0, 0
    p.workers = 1 if cost < p.serial else min(threads, items)
    return kernel, p.workers


def _entry(source: str) -> Any:
    @parallel_entry
    def call(
        own: int, record: int, step: int, q: int, out: int, k_cache: int, v_cache: int, written: int, k: int, v: int
    ) -> int:
        """Run a write, an attention, or the one and then the other.

        `written` is the record of an earlier write, to be done with `k` and `v` at the slots of `step`; `own`: the parameters hold a
        write whose arrays are ids yet; 0: none. `record` is that of an earlier attention, to be done with `q`, `out` and `step`; 0:
        the parameters hold one whose arrays are ids yet, if nothing is written. `k_cache` and `v_cache` are pages; or, without
        `v_cache`, the address of their two addresses. All but `own`, records and steps are ids of arrays.

        Returns how many workers ran last. 0: this is not like the earlier call, and nothing has happened; or something must be made
        first, rows are written, and the addresses of all arrays are in the parameters.
        """
        source  # noqa: B018 - part of the cache key
        threads = min(_threads(), peek_long(own + _MOST_THREADS))
        if record and not _is_like(record, step, q, out, k_cache, v_cache):
            return 0
        if written:
            if written == own:
                resolve(own, WRITE_ARRAYS)
            elif not _is_like_write(written, step, k, v):
                return 0
            w = view_write(own)[0]
            if written != own:
                copy_bytes(written, own, WRITE_BYTES)
                w.k, w.v, w.k_pages, w.v_pages = data_of(k), data_of(v), peek_long(k_cache), peek_long(k_cache + 8)
                w.slots, w.num_slots = peek_long(step + _SLOTS), peek_long(step + _NUM_SLOTS)
            if threads == 1 or w.num_slots * w.num_kv_heads * w.head_dim < w.serial:
                call_worker(w.kernel, own, 0)
            else:
                kernel = w.kernel
                for number in numba.prange(threads):
                    call_worker(kernel, own, number)
            if not record:
                return 1
        if record:
            _take(own, record, step, q, out, k_cache, v_cache)
        else:
            resolve(own, ARRAYS)
        kernel, workers = _lay_out(own, threads)
        if workers > 1:
            for number in numba.prange(workers):
                call_worker(kernel, own, number)
        elif workers == 1:
            call_worker(kernel, own, 0)
        return workers

    return call


call = _entry(SOURCE)
