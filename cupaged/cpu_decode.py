"""Attention of a few query rows over long keys: decode, and verification of a handful of drafted tokens.

Bound by memory: every K and V row is loaded once for all query rows of its KV head. A tile of 64 tokens at a time:
S = Q K^T in registers, softmax with the running maximum of each row, O = alpha O + P V in registers.

A worker's memory, float32 unless said:
    queries [8, 256]   output [8, 256]   scores [8, TILE]   sums [8, WIDTH]   largest logit, alpha, slope [8]
    first key, end of keys, position [8] int32   addresses of K, V [2, TILE] int64   token positions [2, TILE] int32
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from .cpu_products import TILE, scores, weigh
from .cpu_vector import (
    READ_FACTOR,
    WIDTH,
    add,
    choose,
    divide,
    exp,
    fetch_add,
    fma,
    largest,
    load,
    load_ints,
    maximum,
    multiply,
    peek_float,
    peek_int,
    peek_long,
    poke_float,
    poke_int,
    splat,
    splat_int,
    store,
    subtract,
    subtract_int,
    tanh,
    to_float,
    total,
    within,
    worker,
)  # fmt: skip
from .cpu_vector import compiled
from .cpu_work import (
    COUNTER, FEW_ROWS, SCRATCH_BYTES, SOURCE, chunks_of, end_of_keys, find_tile, first_key, read_query, sequence, sequence_of, view,
    write_result,
)  # fmt: skip

_ROW = 4 * FEW_ROWS
QUERIES = 0
OUTPUT = QUERIES + _ROW * 256
SCORES = OUTPUT + _ROW * 256
SUMS = SCORES + _ROW * TILE
TOP, ALPHA, SLOPE, LOW, HIGH, PLACE = (SUMS + _ROW * WIDTH + _ROW * n for n in range(6))
KEYS = PLACE + _ROW
VALUES = KEYS + 2 * 8 * TILE
POSITIONS = VALUES + 2 * 8 * TILE


@compiled
def _begin_rows(p: Any, mine: int, padded: int, rows: int, first: int, m: int, n: int, h: int) -> None:
    """Queries as float32, bounds, slopes and an empty state of each row; padding rows have zero queries and row 0's bounds."""
    for r in range(padded):
        at = mine + 4 * r
        query, head = (r // p.group, h * p.group + r % p.group) if r < rows else (0, h * p.group)
        i = n - m + query
        poke_int(at + PLACE, i)
        poke_int(at + LOW, first_key(p, i) if i >= 0 else 0)
        poke_int(at + HIGH, end_of_keys(p, i, n) if i >= 0 else 0)
        poke_float(at + SLOPE, peek_float(p.slopes + 4 * head) if p.slopes else 0.0)
        poke_float(at + TOP, -math.inf)
        store(mine + SUMS + 4 * WIDTH * r, splat(0.0))
        place = mine + QUERIES + 4 * p.head_dim * r
        if r < rows:
            read_query(p, first + query, head, place)
        for d in range(p.head_dim):
            if r >= rows:
                poke_float(place + 4 * d, 0.0)
            poke_float(mine + OUTPUT + 4 * (p.head_dim * r + d), 0.0)


@compiled
def _softmax(p: Any, mine: int, r: int, positions: int, count: int, factor: float, edge: bool) -> None:
    """Scores of row r become weights; its largest logit, alpha and sums move on."""
    at = mine + 4 * r
    row = mine + SCORES + 4 * TILE * r
    top = splat(-math.inf)
    for t in range(0, count, WIDTH):
        s = multiply(load(row + 4 * t), splat(factor))
        if p.softcap:
            s = multiply(tanh(divide(s, splat(p.softcap))), splat(p.softcap))
        if p.slopes:
            distance = to_float(subtract_int(load_ints(positions + 4 * t), splat_int(peek_int(at + PLACE))))
            s = fma(splat(peek_float(at + SLOPE)), distance, s)
        if edge:
            seen = within(load_ints(positions + 4 * t), splat_int(peek_int(at + LOW)), splat_int(peek_int(at + HIGH)))
            s = choose(seen, s, splat(-math.inf))
        store(row + 4 * t, s)
        top = maximum(s, top)
    old = peek_float(at + TOP)
    new = max(old, largest(top))
    base = splat(new if new > -math.inf else 0.0)
    sums = load(mine + SUMS + 4 * WIDTH * r)
    if new > old:
        alpha = exp(subtract(splat(old), base))
        sums = multiply(sums, alpha)
        poke_float(at + ALPHA, largest(alpha))
        poke_float(at + TOP, new)
    else:
        poke_float(at + ALPHA, 1.0)
    for t in range(0, count, WIDTH):
        weight = exp(subtract(load(row + 4 * t), base))
        store(row + 4 * t, weight)
        sums = add(sums, weight)
    store(mine + SUMS + 4 * WIDTH * r, sums)


@compiled
def _merge(p: Any, mine: int, partial: int, rows: int, chunks: int) -> None:
    """Combine the partial results of all chunks, in order, into the worker's state."""
    D = p.head_dim
    size = 4 * FEW_ROWS * (D + 2)
    for r in range(rows):
        top = -math.inf
        for c in range(chunks):
            top = max(top, peek_float(partial + c * size + 4 * (FEW_ROWS * D + r)))
        poke_float(mine + TOP + 4 * r, top)
        row = mine + OUTPUT + 4 * D * r
        sums = 0.0
        for d in range(D):
            poke_float(row + 4 * d, 0.0)
        for c in range(chunks):
            state = partial + c * size
            part = peek_float(state + 4 * (FEW_ROWS * (D + 1) + r))
            if part > 0.0 or part != part:
                weight = peek_float(state + 4 * (FEW_ROWS * D + r)) - top
                factor = math.exp(weight)
                sums += factor * part
                for d in range(D):
                    poke_float(row + 4 * d, peek_float(row + 4 * d) + factor * peek_float(state + 4 * (D * r + d)))
        store(mine + SUMS + 4 * WIDTH * r, splat(0.0))
        poke_float(mine + SUMS + 4 * WIDTH * r, sums)


@lru_cache(maxsize=None)
def decode_kernel(kv: int, tile: int) -> Any:
    """The worker for keys of format `kv` and row tiles of `tile` rows, 1 to 4."""
    source, gain = SOURCE, READ_FACTOR[kv]

    def decode(params: int, number: int) -> None:
        source  # noqa: B018 - part of the cache key
        p = view(params)[0]
        mine = p.scratch + number * SCRATCH_BYTES
        while True:
            item = fetch_add(params + COUNTER, 1)
            if item >= p.num_items:
                break
            s = sequence_of(p, item)
            item -= peek_long(p.work + 24 * s)
            h = item % p.num_kv_heads
            c = item // p.num_kv_heads
            first, m, n = sequence(p, s)
            length, first_chunk, chunks = chunks_of(p, m, n)
            rows = m * p.group
            padded = -(-rows // tile) * tile
            _begin_rows(p, mine, padded, rows, first, m, n, h)

            begin = max(first_key(p, max(0, n - m)), (first_chunk + c) * length)
            end = min(peek_int(mine + HIGH + 4 * (rows - 1)), (first_chunk + c + 1) * length)
            low, high = begin, end
            for r in range(rows):
                low = max(low, peek_int(mine + LOW + 4 * r))
                high = min(high, peek_int(mine + HIGH + 4 * r))
            factor = p.scale * peek_float(p.k_scale + 4 * h) * gain
            count = max(0, min(TILE, end - begin))
            keys, values, positions = mine + KEYS, mine + VALUES, mine + POSITIONS
            holes = find_tile(p, s, h, begin, count, keys, values, positions)
            turn = 0
            j = begin
            while j < end:
                turn = 1 - turn
                following = max(0, min(TILE, end - j - TILE))
                keys2 = mine + KEYS + 8 * TILE * turn
                values2 = mine + VALUES + 8 * TILE * turn
                positions2 = mine + POSITIONS + 4 * TILE * turn
                holes2 = False
                if following:
                    holes2 = find_tile(p, s, h, j + TILE, following, keys2, values2, positions2)
                else:
                    keys2, values2 = keys, values
                edge = holes or count % WIDTH != 0 or low > j or high < j + count
                for r in range(0, rows, tile):
                    q = mine + QUERIES + 4 * p.head_dim * r
                    weights = mine + SCORES + 4 * TILE * r
                    scores(kv, tile, q, keys, keys2, weights, p.head_dim, count)
                    for row in range(r, r + tile):
                        _softmax(p, mine, row, positions, count, factor, edge)
                    weigh(
                        kv, tile, weights, values, values2, mine + OUTPUT + 4 * p.head_dim * r, mine + ALPHA + 4 * r,
                        p.head_dim, count,
                    )  # fmt: skip
                keys, values, positions, holes, count = keys2, values2, positions2, holes2, following
                j += TILE

            done = True
            if chunks > 1:
                ticket = peek_long(p.work + 24 * s + 16) + h
                partial = p.partials + 4 * peek_long(p.work + 24 * s + 8)
                size = 4 * FEW_ROWS * (p.head_dim + 2)
                partial += h * chunks * size
                state = partial + c * size
                for x in range(rows * p.head_dim):
                    poke_float(state + 4 * x, peek_float(mine + OUTPUT + 4 * x))
                for r in range(rows):
                    poke_float(state + 4 * (FEW_ROWS * p.head_dim + r), peek_float(mine + TOP + 4 * r))
                    poke_float(state + 4 * (FEW_ROWS * (p.head_dim + 1) + r), total(load(mine + SUMS + 4 * WIDTH * r)))
                done = fetch_add(p.tickets + 8 * ticket, 1) == chunks - 1
                if done:
                    fetch_add(p.tickets + 8 * ticket, -chunks)
                    _merge(p, mine, partial, rows, chunks)
            if done:
                for r in range(rows):
                    write_result(
                        p, first + r // p.group, h * p.group + r % p.group, mine + OUTPUT + 4 * p.head_dim * r,
                        peek_float(mine + TOP + 4 * r), total(load(mine + SUMS + 4 * WIDTH * r)), gain,
                    )  # fmt: skip

    return worker(decode)
