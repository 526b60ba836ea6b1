"""Writing keys and values into pages, and copying blocks. Bound by memory; one worker call takes runs of tokens or blocks."""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import numpy as np

from .cpu_formats import ITEM_BYTES, copy_bytes, store_row
from .cpu_vector import as_pointer, compiled, fetch_add, peek_float, peek_long, worker
from .cpu_work import SOURCE

WRITE_FIELDS = (
    "k", "v", "k_pages", "v_pages", "slots", "k_scale", "v_scale", "k_token", "k_head", "v_token", "v_head", "k_block",
    "k_page_head", "k_slot", "v_block", "v_page_head", "v_slot", "num_slots", "num_kv_heads", "block_size", "head_dim", "counter",
    "kernel", "serial",
)  # fmt: skip
WRITE_ARRAYS = 7  # fields that first hold an array's id, see `cpu_arrays.resolve`
_WRITE = np.dtype([(name, "<i8") for name in WRITE_FIELDS])
WRITE_COUNTER = 8 * WRITE_FIELDS.index("counter")
COPY_FIELDS = ("pool", "block", "bytes", "copies", "num_copies", "counter")  # copies: int64 [num_copies, 2]
_COPY = np.dtype([(name, "<i8") for name in COPY_FIELDS])
_COPY_COUNTER = 8 * COPY_FIELDS.index("counter")
TOKENS = 16  # slots that a worker takes at a time


@compiled
def view_write(params: int) -> Any:
    return numba.carray(as_pointer(params), 1, _WRITE)


@compiled
def _view_copy(params: int) -> Any:
    return numba.carray(as_pointer(params), 1, _COPY)


@cache
def write_kernel(kind: int, kv: int) -> Any:
    """The worker that stores rows of format `kind` in pages of format `kv`, as value / scale."""
    source, size = SOURCE, ITEM_BYTES[kind]

    def write(params: int, number: int) -> None:
        source  # noqa: B018 - part of the cache key
        p = view_write(params)[0]
        while True:
            begin = fetch_add(params + WRITE_COUNTER, TOKENS)
            if begin >= p.num_slots:
                break
            for t in range(begin, min(begin + TOKENS, p.num_slots)):
                slot = peek_long(p.slots + 8 * t)
                if slot < 0:
                    continue
                block = slot // p.block_size
                offset = slot - block * p.block_size
                for h in range(p.num_kv_heads):
                    for side in range(2):
                        if side == 0:
                            row = p.k + t * p.k_token + h * p.k_head
                            place = p.k_pages + block * p.k_block + h * p.k_page_head + offset * p.k_slot
                            scale = peek_float(p.k_scale + 4 * h)
                        else:
                            row = p.v + t * p.v_token + h * p.v_head
                            place = p.v_pages + block * p.v_block + h * p.v_page_head + offset * p.v_slot
                            scale = peek_float(p.v_scale + 4 * h)
                        if kind == kv and scale == 1.0:
                            copy_bytes(row, place, size * p.head_dim)
                        else:
                            store_row(kind, kv, row, place, p.head_dim, scale)

    return worker(write)


@cache
def copy_kernel() -> Any:
    """The worker that copies whole blocks, each of them one piece of memory."""
    source = SOURCE

    def copy(params: int, number: int) -> None:
        source  # noqa: B018 - part of the cache key
        p = _view_copy(params)[0]
        while True:
            n = fetch_add(params + _COPY_COUNTER, 1)
            if n >= p.num_copies:
                break
            origin, target = peek_long(p.copies + 16 * n), peek_long(p.copies + 16 * n + 8)
            copy_bytes(p.pool + origin * p.block, p.pool + target * p.block, p.bytes)

    return worker(copy)
