"""From a call's record to its workers, in one piece of compiled code: finding the addresses, laying out the items, running them.

Between the layers of a model a call finds none of its memory in the caches, and then every function and array that it touches costs
as much as many instructions. So Python hands over one record, or the address of one made at an earlier call alike, and nothing
else happens there.

A Python thread's parameters are the record, and then for each name of ROOMS the address and size in bytes of memory that outlives
a call.
"""

from __future__ import annotations

from typing import Any

import numba

from .cpu_cache import WRITE_COUNTER, WRITE_FIELDS
from .cpu_formats import copy_bytes
from .cpu_vector import call_worker, compiled, parallel_entry, peek_long, poke_long
from .cpu_work import ARRAYS, CALL, HEAD, QUEUE_BYTES, SCRATCH_BYTES, SOURCE, kernels_needed, plan, resolve, view

ROOMS = ("zeros", "work", "partials", "tickets", "scratch", "queues")
STEP = (
    "tables",
    "lens",
    "starts",
    "table_row",
    "num_seqs",
)  # int64 each: addresses, bytes of a row of the tables, rows
RECORD_BYTES = CALL.itemsize
WRITE_BYTES = 8 * len(WRITE_FIELDS)
PARAMS = RECORD_BYTES // 8 + 2 * len(ROOMS)  # int64 of a thread's parameters
_ROOM = {name: RECORD_BYTES + 16 * n for n, name in enumerate(ROOMS)}
_ZEROS, _WORK, _PARTIALS, _TICKETS, _SCRATCH, _QUEUES = _ROOM.values()
_K, _V, _SLOTS, _NUM_SLOTS = (8 * WRITE_FIELDS.index(name) for name in ("k", "v", "slots", "num_slots"))


@compiled
def _room(own: int, room: int, size: int) -> int:
    """The address of a thread's memory, 0 when it is smaller than `size`."""
    return int(peek_long(own + room)) if peek_long(own + room + 8) >= size else 0


@compiled
def _lay_out(own: int, kernels: int, threads: int, serial: int) -> tuple[int, int]:
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
    kernel = peek_long(kernels + 8 * number)
    if kernel == 0:
        return 0, 0
    items, cost, floats, tickets = plan(own, number, threads)
    p.partials, p.tickets = _room(own, _PARTIALS, 4 * floats), _room(own, _TICKETS, 8 * tickets)
    if tickets and not (p.partials and p.tickets):
        return 0, 0
    p.workers = 1 if cost < serial else min(threads, items)
    return kernel, p.workers


def _entries(source: str) -> tuple[Any, Any]:
    @parallel_entry
    def attend(
        own: int, record: int, step: int, q: int, out: int, kernels: int, threads: int, serial: int, nothing: int
    ) -> int:
        """Run the call in the parameters `own`, whose arrays are ids yet; or, if given, the one of `record` on other queries and `step`.

        `q` and `out` are ids of arrays, `nothing` that of None. `kernels` is a row of addresses, 0 where none is compiled; a call of
        less than `serial` products stays on this thread. Returns how many workers ran; 0: none, and all addresses are in `own`.
        """
        source  # noqa: B018 - part of the cache key
        if record:
            copy_bytes(record, own, RECORD_BYTES)
            p = view(own)[0]
            p.q, p.out = peek_long(q + HEAD), peek_long(out + HEAD)
            p.tables, p.lens, p.starts = peek_long(step), peek_long(step + 8), peek_long(step + 16)
            p.table_row, p.num_seqs = peek_long(step + 24), peek_long(step + 32)
        else:
            resolve(own, ARRAYS, nothing)
        kernel, workers = _lay_out(own, kernels, threads, serial)
        if workers > 1:
            for number in numba.prange(workers):
                call_worker(kernel, own, number)
        elif workers == 1:
            call_worker(kernel, own, 0)
        return workers

    @parallel_entry
    def write(own: int, record: int, k: int, v: int, slots: int, num_slots: int, kernel: int, workers: int) -> None:
        """Run the write of `record` on other rows, ids of arrays, and `slots`, an address."""
        source  # noqa: B018 - part of the cache key
        copy_bytes(record, own, WRITE_BYTES)
        poke_long(own + _K, peek_long(k + HEAD))
        poke_long(own + _V, peek_long(v + HEAD))
        poke_long(own + _SLOTS, slots)
        poke_long(own + _NUM_SLOTS, num_slots)
        poke_long(own + WRITE_COUNTER, 0)
        if workers > 1:
            for number in numba.prange(workers):
                call_worker(kernel, own, number)
        else:
            call_worker(kernel, own, 0)

    return attend, write


attend, write = _entries(SOURCE)
