"""What one call on the CPU is made of: the record that compiled code reads, its division into items, and the tiles of an item.

An item is (sequence, KV heads, tiles of query rows, chunk of keys). Rows of a sequence are packed: row r is query row r // group
of query head r % group of that KV head. Few rows go to `cpu_decode`, many to `cpu_prefill`; the choice, the tile and the chunk
edges follow from the sequence's own length and rows alone, so no bit depends on threads or on other sequences. Threads take items
from each other when their own are done; who finishes the last chunk of a (sequence, KV head, row tile), by an integer ticket,
merges all of them in order.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import numba
import numpy as np

from .cpu_formats import narrow_row, widen_row
from .cpu_vector import (
    WIDTH,
    as_pointer,
    compiled,
    count_up_int,
    count_up_long,
    entry,
    fetch_add,
    peek_float,
    peek_int,
    peek_long,
    poke_float,
    poke_long,
)

_ADDRESSES = (
    "q", "out", "lse", "k", "v", "tables", "lens", "starts", "slopes", "sinks", "k_scale", "v_scale", "zeros", "work", "partials",
    "tickets", "scratch",
)  # fmt: skip
_STRIDES = (  # bytes
    "q_token", "q_head", "out_token", "out_head", "lse_token", "lse_head", "k_block", "k_head", "k_token", "v_block", "v_head",
    "v_token", "table_row",
)  # fmt: skip
_SIZES = (
    "num_seqs", "group", "num_kv_heads", "head_dim", "block_size", "causal", "window", "chunk", "num_splits", "q_kind", "tiles",
    "num_items", "heads", "workers", "queues", "kernels", "serial",
)  # fmt: skip
ARRAYS = 12  # the first fields, which hold an array's id until `cpu_arrays.resolve`
FIELDS = _ADDRESSES + _STRIDES + _SIZES  # int64 each; an absent array, window, chunk or num_splits is 0
CALL = np.dtype([(name, "<i8") for name in FIELDS] + [("scale", "<f8"), ("softcap", "<f8")])
PACKING = "q" * len(FIELDS) + "dd"

FEW_ROWS = 8  # up to here one sequence's packed rows are worked on by cpu_decode
CHUNK = 256  # keys of a chunk, at least
MOST_HEADS, MOST_ROWS = 16, 32  # of one item of cpu_decode; rows of all its heads, padded
RUN_BYTES = 0 if WIDTH == 16 else 1 << 16  # what the heads of an item should have side by side in one block
ITEMS = 2  # of a worker, at least: heads are put together only as far as that leaves so many
SCRATCH_BYTES = 512 * 1024  # a worker's own memory
QUEUE_BYTES = 64  # bytes between the counters of two workers' queues
MOST_VECTORS = 4 if WIDTH == 16 else 2  # vectors of query rows in a tile of cpu_prefill
ITEM_ROWS = (
    128  # query rows of an item of cpu_prefill at most: they, their results, and a tile of keys and values fit in L2
)
ENOUGH_ITEMS = 32  # of one sequence in cpu_prefill: tiles are put together only as far as that leaves so many

# Part of each kernel's key in Numba's disk cache, which by itself only watches the file a kernel stands in.
SOURCE = hashlib.sha256(b"".join(f.read_bytes() for f in sorted(Path(__file__).parent.glob("cpu*.py")))).hexdigest()


@compiled
def view(params: int) -> Any:
    return numba.carray(as_pointer(params), 1, CALL)


@compiled
def kernel_of(rows: int) -> int:
    """Which kernel works on a sequence of so many packed rows: 0 none, 1 to 4 decode in tiles of so many rows, from 5 prefill
    in tiles of 1, 2, 4 vectors."""
    if rows == 0:
        return 0
    if rows <= FEW_ROWS:
        tiles = (rows + 3) // 4
        return (rows + tiles - 1) // tiles
    vectors = (rows + WIDTH - 1) // WIDTH
    return 5 if vectors == 1 else 6 if vectors == 2 or MOST_VECTORS == 2 else 7


@compiled
def rows_per_tile(kernel: int) -> int:
    return FEW_ROWS if kernel < 5 else WIDTH << (kernel - 5)


@compiled
def first_key(p: Any, i: int) -> int:
    """The first key that the row at position i >= 0 may see."""
    low = 0
    if p.window:
        low = max(low, i - p.window + 1)
    if p.chunk:
        low = max(low, i // p.chunk * p.chunk)
    return low


@compiled
def end_of_keys(p: Any, i: int, n: int) -> int:
    """One past the last key that the row at position i >= 0 of n may see."""
    high = n
    if p.causal:
        high = min(high, i + 1)
    if p.chunk:
        high = min(high, (i // p.chunk + 1) * p.chunk)
    return high


@compiled
def sequence(p: Any, s: int) -> tuple[int, int, int]:
    """First query row, number of query rows and length of sequence s."""
    first = peek_int(p.starts + 4 * s)
    return first, peek_int(p.starts + 4 * s + 4) - first, peek_int(p.lens + 4 * s)


@compiled
def chunks_of(p: Any, m: int, n: int) -> tuple[int, int, int]:
    """Length of a chunk, the first one that any row sees, and how many (at least one, which writes an empty result)."""
    if n <= 0:
        return 1, 0, 1
    rows = m * p.group
    length = CHUNK if n < 4 * CHUNK else 2 * CHUNK if n < 32 * CHUNK else 4 * CHUNK
    if rows > 4 * FEW_ROWS:  # keeps partial results small beside the keys and values they stand for
        length = max(length, 8 * rows)
    if p.num_splits:
        length = -(-n // p.num_splits)
    length = -(-length // WIDTH) * WIDTH
    low = first_key(p, max(0, n - m)) // length
    high = -(-end_of_keys(p, n - 1, n) // length)
    return length, low, max(1, high - low)


@compiled
def tiles_of_item(p: Any, kernel: int, rows: int) -> int:
    """How many tiles of a sequence's packed rows one item covers: depends on nothing else, since bits may."""
    if kernel < 5:
        return 1
    size = rows_per_tile(kernel)
    return int(max(1, min(ITEM_ROWS // size, -(-rows // size) * p.num_kv_heads // ENOUGH_ITEMS)))


@compiled
def heads_of_item(p: Any, kernel: int, workers: int) -> int:
    """How many KV heads one item of a kernel covers: no result depends on it."""
    if kernel >= 5 or RUN_BYTES == 0:
        return 1
    chunks, rows = 0, 0
    for s in range(p.num_seqs):
        _, m, n = sequence(p, s)
        if kernel_of(m * p.group) == kernel:
            chunks += chunks_of(p, m, n)[2]
            rows = max(rows, m * p.group)
    padded = -(-rows // kernel) * kernel
    most = min(MOST_HEADS, MOST_ROWS // padded, -(-RUN_BYTES // abs(p.k_head)) if p.k_head else 1)
    # a group of heads is worth less than an idle thread
    groups = max(-(-p.num_kv_heads // most), min(p.num_kv_heads, -(-ITEMS * workers // chunks)))
    return int(-(-p.num_kv_heads // groups))


def _planner(source: str) -> tuple[Any, Any]:
    @entry
    def kernels_needed(params: int) -> int:
        """A bit for each kernel that some sequence needs."""
        source  # noqa: B018 - part of the cache key
        p = view(params)[0]
        needed = 0
        for s in range(p.num_seqs):
            needed |= 1 << kernel_of(sequence(p, s)[1] * p.group)
        return needed >> 1 << 1

    @entry
    def plan(params: int, kernel: int, workers: int) -> tuple[int, int, int, int]:
        """Lay out the items of one kernel in `work` (per sequence: first item, first partial, first ticket), empty the workers' queues.

        Returns how many items, how many products of a query with a key element at most, and what room they need: float32 of partial
        results, tickets.
        """
        source  # noqa: B018 - part of the cache key
        p = view(params)[0]
        items, cost, floats, tickets = 0, 0, 0, 0
        tile = rows_per_tile(kernel)
        p.heads = heads_of_item(p, kernel, workers)
        groups = -(-p.num_kv_heads // p.heads)
        for s in range(p.num_seqs):
            poke_long(p.work + 24 * s, items)
            poke_long(p.work + 24 * s + 8, floats)
            poke_long(p.work + 24 * s + 16, tickets)
            _, m, n = sequence(p, s)
            rows = m * p.group
            if kernel_of(rows) == kernel:
                tiles = -(-rows // tile) * p.num_kv_heads
                _, _, chunks = chunks_of(p, m, n)
                items += -(-rows // (tile * tiles_of_item(p, kernel, rows))) * groups * chunks
                cost += rows * p.num_kv_heads * n * p.head_dim
                if chunks > 1:
                    floats += tiles * chunks * tile * (p.head_dim + 2)
                    tickets += tiles
        p.num_items = items
        for worker in range(workers):
            poke_long(p.queues + QUEUE_BYTES * worker, 0)
        return items, cost, floats, tickets

    return kernels_needed, plan


kernels_needed, plan = _planner(SOURCE)


@compiled
def next_item(p: Any, worker: int) -> int:
    """An item that no worker has taken, -1 when there is none.

    Every worker has an equal share of the items, the same in each call of the same shape, so that what it reads may still be in
    its own cache; who is done goes on with the others' shares.
    """
    for n in range(p.workers):
        owner = (worker + n) % p.workers
        begin, end = p.num_items * owner // p.workers, p.num_items * (owner + 1) // p.workers
        item = begin + fetch_add(p.queues + QUEUE_BYTES * owner, 1)
        if item < end:
            return int(item)
    return -1


@compiled
def sequence_of(p: Any, item: int) -> int:
    """The last sequence whose first item is not after `item`: the one it belongs to, since sequences without items repeat the number."""
    low, high = 0, p.num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if peek_long(p.work + 24 * middle) <= item:
            low = middle
        else:
            high = middle
    return low


@compiled
def find_tile(p: Any, s: int, h: int, j: int, n: int, keys: int, values: int, positions: int, padded: int) -> bool:
    """Write addresses and positions of tokens j to j + n of sequence s, of `padded` in all; True if some are not mapped.

    A padded or unmapped token has position -1, which no row sees, and rows of zeros for key and value, so that nothing of what lies
    in its slot is read. Each array has room for 8 more.
    """
    table, size, zeros = p.tables + s * p.table_row, p.block_size, p.zeros
    k_base, k_block, k_token = p.k + h * p.k_head, p.k_block, p.k_token
    v_base, v_block, v_token = p.v + h * p.v_head, p.v_block, p.v_token
    block = j // size
    offset = j - block * size
    holes = False
    t = 0
    while t < n:
        run = min(size - offset, n - t)
        page = peek_int(table + 4 * block)
        k, k_step = k_base + page * k_block + offset * k_token, k_token
        v, v_step = v_base + page * v_block + offset * v_token, v_token
        position, step = j + t, 1
        if page < 0:
            holes = True
            k, k_step, v, v_step, position, step = zeros, 0, zeros, 0, -1, 0
        count_up_long(keys + 8 * t, k, k_step, run)
        count_up_long(values + 8 * t, v, v_step, run)
        count_up_int(positions + 4 * t, position, step, run)
        t += run
        block += 1
        offset = 0
    count_up_long(keys + 8 * n, zeros, 0, padded - n)
    count_up_long(values + 8 * n, zeros, 0, padded - n)
    count_up_int(positions + 4 * n, -1, 0, padded - n)
    return holes


@compiled
def denominator(p: Any, head: int, top: float, total: float) -> tuple[float, float]:
    """What the sum of values is multiplied by, and lse if anyone asks for it, from the largest logit and the sum of exp(logit - top)."""
    if total == 0.0:
        return 0.0, -math.inf
    lse = top + math.log(total) if p.lse or p.sinks else 0.0
    keep = 1.0
    if p.sinks:
        keep = 1.0 / (1.0 + math.exp(peek_float(p.sinks + 4 * head) - lse))
    return keep / total, lse


@compiled
def read_query(p: Any, token: int, head: int, target: int) -> None:
    """One query row as float32."""
    source = p.q + token * p.q_token + head * p.q_head
    if p.q_kind == 0:
        widen_row(0, source, target, p.head_dim)
    elif p.q_kind == 1:
        widen_row(1, source, target, p.head_dim)
    else:
        widen_row(2, source, target, p.head_dim)


@compiled
def write_result(p: Any, token: int, head: int, source: int, top: float, total: float, gain: float) -> None:
    """One finished row: divided by its denominator, scaled, rounded to the dtype of the queries; and its lse. `gain` is READ_FACTOR."""
    keep, lse = denominator(p, head, top, total)
    factor = keep * gain * peek_float(p.v_scale + 4 * (head // p.group))
    target = p.out + token * p.out_token + head * p.out_head
    if p.q_kind == 0:
        narrow_row(0, source, target, p.head_dim, factor)
    elif p.q_kind == 1:
        narrow_row(1, source, target, p.head_dim, factor)
    else:
        narrow_row(2, source, target, p.head_dim, factor)
    if p.lse:
        poke_float(p.lse + token * p.lse_token + head * p.lse_head, lse)
