"""Attention of many query rows: prefill, append, and decode with many query heads on one KV head.

Bound by arithmetic. Query rows lie in the lanes of vectors, `lanes` of them in a tile, and everything is computed transposed, so that
no sum runs across a vector and no row needs a branch of its own: S^T = K Q^T, softmax down the columns, O^T = alpha O^T + V^T P^T.
A tile of KEYS tokens is first copied from its pages as float32, which also puts zeros in place of what must not be read.

A worker's memory, float32 unless said:
    queries [head_dim, lanes]   output [head_dim, lanes]   keys, values [KEYS, head_dim]   scores [KEYS, lanes]
    largest logit, sum, alpha, slope [lanes]   first key, end of keys, position [lanes] int32
    addresses of K, V [KEYS + 8] int64   token positions [KEYS + 8] int32
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from .cpu_formats import BF16, READ_FACTOR, widen_row
from .cpu_products import outer
from .cpu_tiles import (
    GROUP,
    SLICE,
    configure,
    find_places,
    pack_query,
    pack_weights,
    release,
    tile_scores,
    tile_weigh,
    transpose_values,
)
from .cpu_vector import (
    WIDTH,
    add,
    choose,
    compiled,
    divide,
    exp,
    fetch_add,
    fma,
    load,
    load_ints,
    maximum,
    multiply,
    peek_float,
    peek_int,
    peek_long,
    poke_float,
    poke_int,
    select_finite,
    splat,
    splat_int,
    store,
    subtract,
    subtract_int,
    tanh,
    to_float,
    within,
    worker,
)
from .cpu_work import (
    MOST_VECTORS,
    SCRATCH_BYTES,
    SOURCE,
    chunks_of,
    end_of_keys,
    find_tile,
    first_key,
    next_item,
    read_query,
    sequence,
    sequence_of,
    view,
    write_result,
)  # fmt: skip

KEYS = 96  # tokens of a tile
_LANES = 4 * WIDTH * MOST_VECTORS
QUERIES = 0
OUTPUT = QUERIES + 256 * _LANES
KEY_TILE = OUTPUT + 256 * _LANES
VALUE_TILE = KEY_TILE + 4 * KEYS * 256
SCORES = VALUE_TILE + 4 * KEYS * 256
TOP, SUM, ALPHA, SLOPE, LOW, HIGH, PLACE = (SCORES + (KEYS + n) * _LANES for n in range(7))
KEY_ROWS = PLACE + _LANES
VALUE_ROWS = KEY_ROWS + 8 * (KEYS + 8)
POSITIONS = VALUE_ROWS + 8 * (KEYS + 8)
ROW = POSITIONS + 4 * (KEYS + 8)  # one row [head_dim], on its way in or out
# With `cpu_tiles` the same memory holds bfloat16: queries packed, in place of the keys' tile copies of keys and weights, values transposed.
COPIES, WEIGHTS = KEY_TILE, KEY_TILE + 2 * KEYS * 256
PLACES = ROW + 4 * 256
CONFIGURATION = PLACES + KEYS


@compiled
def _begin_rows(
    p: Any, mine: int, lanes: int, begin: int, rows: int, first: int, m: int, n: int, h: int, with_queries: bool
) -> None:
    """Bounds, slopes, an empty state and, unless they are packed, queries in each lane; a lane without a row sees nothing."""
    for lane in range(lanes):
        at = mine + 4 * lane
        r = begin + lane
        query, head = (r // p.group, h * p.group + r % p.group) if r < rows else (0, h * p.group)
        i = n - m + query
        sees = i >= 0 and r < rows
        poke_int(at + PLACE, i)
        poke_int(at + LOW, first_key(p, i) if sees else 0)
        poke_int(at + HIGH, end_of_keys(p, i, n) if sees else 0)
        poke_float(at + SLOPE, peek_float(p.slopes + 4 * head) if p.slopes else 0.0)
        poke_float(at + TOP, -math.inf)
        poke_float(at + SUM, 0.0)
        if with_queries:
            read_query(p, first + query, head, mine + ROW)
            for d in range(p.head_dim):
                poke_float(at + QUERIES + 4 * lanes * d, peek_float(mine + ROW + 4 * d))
    for x in range(0, lanes * p.head_dim, WIDTH):
        store(mine + OUTPUT + 4 * x, splat(0.0))


@compiled
def _pack_rows(p: Any, mine: int, lanes: int, begin: int, rows: int, first: int, h: int) -> bool:
    """Queries for `tile_scores`; False when they must go the usual way."""
    good = True
    for lane in range(lanes):
        r = begin + lane if begin + lane < rows else 0
        source = p.q + (first + r // p.group) * p.q_token + (h * p.group + r % p.group) * p.q_head
        good &= pack_query(source, mine + QUERIES + 32 * p.head_dim * (lane // WIDTH) + 4 * (lane % WIDTH), p.head_dim)
    return good


@compiled
def _rescale(mine: int, lanes: int, head_dim: int) -> None:
    """What `outer` does to the old output on its way."""
    for v in range(0, lanes, WIDTH):
        alpha = load(mine + ALPHA + 4 * v)
        for d in range(head_dim):
            where = mine + OUTPUT + 4 * (lanes * d + v)
            store(where, multiply(load(where), alpha))


@compiled
def _softmax(p: Any, at: int, lanes: int, positions: int, count: int, factor: float, edge: bool) -> None:
    """Scores in one vector of lanes become weights; their largest logits, alphas and sums move on."""
    low, high, place = load_ints(at + LOW), load_ints(at + HIGH), load_ints(at + PLACE)
    slope = load(at + SLOPE)
    old = load(at + TOP)
    top = old
    for t in range(count):
        where = at + SCORES + 4 * lanes * t
        s = multiply(load(where), splat(factor))
        if p.softcap:
            s = multiply(tanh(divide(s, splat(p.softcap))), splat(p.softcap))
        if p.slopes:
            s = fma(slope, to_float(subtract_int(splat_int(peek_int(positions + 4 * t)), place)), s)
        if edge:
            s = choose(within(splat_int(peek_int(positions + 4 * t)), low, high), s, splat(-math.inf))
        store(where, s)
        top = maximum(s, top)
    base = select_finite(top)
    alpha = exp(subtract(old, base))
    sums = multiply(load(at + SUM), alpha)
    for t in range(count):
        where = at + SCORES + 4 * lanes * t
        weight = exp(subtract(load(where), base))
        store(where, weight)
        sums = add(sums, weight)
    store(at + SUM, sums)
    store(at + ALPHA, alpha)
    store(at + TOP, top)


@compiled
def _merge(p: Any, mine: int, partial: int, lanes: int, chunks: int) -> None:
    """Combine the partial results of all chunks, in order, into the worker's state."""
    D = p.head_dim
    size = 4 * lanes * (D + 2)
    for v in range(0, lanes, WIDTH):
        at = mine + 4 * v
        top = splat(-math.inf)
        for c in range(chunks):
            top = maximum(load(partial + c * size + 4 * (lanes * D + v)), top)
        base = select_finite(top)
        sums = splat(0.0)
        for d in range(D):
            store(at + OUTPUT + 4 * lanes * d, splat(0.0))
        for c in range(chunks):
            state = partial + c * size + 4 * v
            weight = exp(subtract(load(state + 4 * lanes * D), base))
            sums = fma(weight, load(state + 4 * lanes * (D + 1)), sums)
            for d in range(D):
                where = at + OUTPUT + 4 * lanes * d
                store(where, fma(weight, load(state + 4 * lanes * d), load(where)))
        store(at + TOP, top)
        store(at + SUM, sums)


@cache
def prefill_kernel(kv: int, shift: int) -> Any:
    """The worker for keys of format `kv` and row tiles of 2 ** shift vectors."""
    source, gain, vectors = SOURCE, READ_FACTOR[kv], 1 << shift
    lanes = vectors * WIDTH

    def prefill(params: int, number: int) -> None:
        source  # noqa: B018 - part of the cache key
        p = view(params)[0]
        mine = p.scratch + number * SCRATCH_BYTES
        D = p.head_dim
        tiles_wanted = kv == BF16 and p.tiles != 0 and p.q_kind == BF16 and D % SLICE == 0
        if tiles_wanted:
            configure(mine + CONFIGURATION)
        while True:
            item = next_item(p, number)
            if item < 0:
                break
            s = sequence_of(p, item)
            item -= peek_long(p.work + 24 * s)
            first, m, n = sequence(p, s)
            rows = m * p.group
            length, first_chunk, chunks = chunks_of(p, m, n)
            tiles = -(-rows // lanes)
            h = item % p.num_kv_heads
            item //= p.num_kv_heads
            c = item % chunks
            tile = tiles - 1 - item // chunks  # the latest rows see the most keys: longest items first
            begin_row = tile * lanes
            end_row = min(rows, begin_row + lanes)
            factor = p.scale * peek_float(p.k_scale + 4 * h) * gain
            by_tiles = tiles_wanted and abs(factor) < 2.0**30 and _pack_rows(p, mine, lanes, begin_row, rows, first, h)
            _begin_rows(p, mine, lanes, begin_row, rows, first, m, n, h, not by_tiles)

            earliest = max(0, n - m + begin_row // p.group)
            latest = n - m + (end_row - 1) // p.group
            begin = max(first_key(p, earliest), (first_chunk + c) * length)
            end = min(end_of_keys(p, latest, n) if latest >= 0 else 0, (first_chunk + c + 1) * length)
            low, high = 0, n
            for lane in range(end_row - begin_row):
                low = max(low, peek_int(mine + LOW + 4 * lane))
                high = min(high, peek_int(mine + HIGH + 4 * lane))
            for j in range(begin, end, KEYS):
                count = min(KEYS, end - j)
                padded = -(-count // SLICE) * SLICE
                holes = find_tile(p, s, h, j, count, mine + KEY_ROWS, mine + VALUE_ROWS, mine + POSITIONS, padded)
                if by_tiles:
                    find_places(mine + PLACES, mine + KEY_ROWS, count, p.k_token, D, p.block_size, mine + COPIES)
                    tile_scores(vectors, mine + QUERIES, mine + PLACES, -(-count // GROUP), mine + SCORES, D)
                else:
                    for t in range(count):
                        widen_row(kv, peek_long(mine + KEY_ROWS + 8 * t), mine + KEY_TILE + 4 * D * t, D)
                    outer(
                        vectors, False, mine + KEY_TILE, 4 * D, 4, mine + QUERIES, mine + SCORES, mine + ALPHA, (count + 7) // 8 * 8, D
                    )  # fmt: skip
                edge = holes or low > j or high < j + count
                for v in range(vectors):
                    _softmax(p, mine + 4 * WIDTH * v, lanes, mine + POSITIONS, count, factor, edge)
                if by_tiles and transpose_values(mine + VALUE_ROWS, mine + VALUE_TILE, D, padded, 2 * KEYS) == 0:
                    for x in range(lanes * count, lanes * padded, WIDTH):
                        store(mine + SCORES + 4 * x, splat(0.0))
                    pack_weights(vectors, mine + SCORES, mine + WEIGHTS, padded)
                    _rescale(mine, lanes, D)
                    tile_weigh(vectors, mine + VALUE_TILE, mine + WEIGHTS, mine + OUTPUT, D, padded, 2 * KEYS)
                else:
                    for t in range(count):
                        widen_row(kv, peek_long(mine + VALUE_ROWS + 8 * t), mine + VALUE_TILE + 4 * D * t, D)
                    outer(
                        vectors, True, mine + VALUE_TILE, 4, 4 * D, mine + SCORES, mine + OUTPUT, mine + ALPHA, D, count
                    )

            done = True
            if chunks > 1:
                ticket = peek_long(p.work + 24 * s + 16) + h * tiles + tile
                size = 4 * lanes * (D + 2)
                partial = p.partials + 4 * peek_long(p.work + 24 * s + 8) + (h * tiles + tile) * chunks * size
                state = partial + c * size
                for x in range(0, lanes * D, WIDTH):
                    store(state + 4 * x, load(mine + OUTPUT + 4 * x))
                for v in range(0, lanes, WIDTH):
                    store(state + 4 * (lanes * D + v), load(mine + TOP + 4 * v))
                    store(state + 4 * (lanes * (D + 1) + v), load(mine + SUM + 4 * v))
                done = fetch_add(p.tickets + 8 * ticket, 1) == chunks - 1
                if done:
                    fetch_add(p.tickets + 8 * ticket, -chunks)
                    _merge(p, mine, partial, lanes, chunks)
            if done:
                for lane in range(end_row - begin_row):
                    for d in range(D):
                        poke_float(mine + ROW + 4 * d, peek_float(mine + OUTPUT + 4 * (lanes * d + lane)))
                    r = begin_row + lane
                    write_result(
                        p, first + r // p.group, h * p.group + r % p.group, mine + ROW, peek_float(mine + TOP + 4 * lane),
                        peek_float(mine + SUM + 4 * lane), gain,
                    )  # fmt: skip
        if tiles_wanted:
            release()

    return worker(prefill)
