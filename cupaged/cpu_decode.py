"""Attention of a few query rows over long keys: decode, and verification of a handful of drafted tokens.

Bound by memory: every K and V row is loaded once for all query rows of its KV head, in tiles of TILE tokens: S = Q K^T, softmax of all
rows at once with running maxima, O = alpha O + P V. Scores, maxima and sums are vectors of [row, token], see `cpu_products`.

A worker's memory, float32 unless said, with up to two tiles of rows:
    queries, output [8, 256]   scores [TILE, 4]   largest logit, sum, alpha, slope [2, WIDTH]
    first key, end of keys, position [2, WIDTH] int32
    addresses of K, V [SPAN + PAD] int64   token positions [SPAN + PAD] int32
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from numba import literally

from .cpu_formats import BF16, ITEM_BYTES, READ_FACTOR, accumulate, copy_bytes, join_pairs, split_pairs
from .cpu_products import largest_of_rows, load_positions, scores, weigh
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
    peek_long,
    poke_float,
    poke_int,
    prefetch,
    select_finite,
    splat,
    store,
    subtract,
    subtract_int,
    tanh,
    to_float,
    within,
    worker,
)
from .cpu_work import (
    FEW_ROWS,
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
)

TILE = 64  # tokens between two rescalings of the output
SPAN = 512  # tokens whose addresses are looked up at once
PAD = TILE + 16  # addresses past the end of a span
LINES = 4  # lines prefetched a tile ahead where a run of rows begins; there the hardware loses the stream it follows
_VECTOR = 4 * WIDTH
QUERIES = 0
OUTPUT = QUERIES + 4 * FEW_ROWS * 256
SCORES = OUTPUT + 4 * FEW_ROWS * 256
TOP, SUM, ALPHA, SLOPE, LOW, HIGH, PLACE = (SCORES + 16 * TILE + 2 * _VECTOR * n for n in range(7))
KEYS = PLACE + 2 * _VECTOR
VALUES = KEYS + 8 * (SPAN + PAD)
POSITIONS = VALUES + 8 * (SPAN + PAD)


@compiled
def _tokens(tile: int) -> int:
    """`tokens_of` in compiled code."""
    return WIDTH if tile == 1 else WIDTH // 2 if tile == 2 else WIDTH // 4


@compiled
def _row_sum(mine: int, tile: int, r: int) -> float:
    tokens = _tokens(tile)
    at = mine + SUM + _VECTOR * (r // tile) + 4 * tokens * (r % tile)
    total = 0.0
    for lane in range(tokens):
        total += peek_float(at + 4 * lane)
    return total


@compiled
def _row_top(mine: int, tile: int, r: int) -> float:
    return float(peek_float(mine + TOP + _VECTOR * (r // tile) + 4 * _tokens(tile) * (r % tile)))


@compiled
def _prefetch_runs(p: Any, rows: int, j: int, n: int, row_bytes: int, stride: int) -> None:
    """The first lines of each run of rows that lie one after the other, among the n whose addresses stand at `rows`."""
    size = p.block_size if stride == row_bytes else 1
    run = size - j % size
    t = 0
    while t < n:
        begin = peek_long(rows + 8 * t)
        for offset in range(0, min(64 * LINES, run * row_bytes), 64):
            prefetch(begin + offset)
        t += run
        run = size


@compiled
def _begin_rows(p: Any, mine: int, tile: int, rows: int, first: int, m: int, n: int, h: int) -> None:
    """Queries as float32, bounds, slopes and an empty state of each row; padding rows repeat the first row."""
    tokens = _tokens(tile)
    groups = WIDTH // tokens
    for n_tile in range(-(-rows // tile)):
        for row in range(groups):
            r = n_tile * tile + row
            if row >= tile or r >= rows:
                r = 0
            query, head = r // p.group, h * p.group + r % p.group
            i = n - m + query
            low = first_key(p, i) if i >= 0 else 0
            high = end_of_keys(p, i, n) if i >= 0 else 0
            slope = peek_float(p.slopes + 4 * head) if p.slopes else 0.0
            at = mine + _VECTOR * n_tile + 4 * tokens * row
            for lane in range(tokens):
                poke_int(at + PLACE + 4 * lane, i)
                poke_int(at + LOW + 4 * lane, low)
                poke_int(at + HIGH + 4 * lane, high)
                poke_float(at + SLOPE + 4 * lane, slope)
            if row < tile:
                read_query(p, first + query, head, mine + QUERIES + 4 * p.head_dim * (n_tile * tile + row))
        store(mine + _VECTOR * n_tile + TOP, splat(-math.inf))
        store(mine + _VECTOR * n_tile + SUM, splat(0.0))
    for x in range(-(-rows // tile) * tile * p.head_dim):
        poke_float(mine + OUTPUT + 4 * x, 0.0)


@compiled
def _softmax(tile: int, p: Any, mine: int, state: int, positions: int, blocks: int, factor: float, edge: bool) -> None:
    """Scores of a row tile become weights; its largest logits, alphas and sums move on."""
    literally(tile)
    tokens = _tokens(tile)
    old = load(state + TOP)
    top = old
    if p.softcap or p.slopes or edge:
        low, high, place = load_ints(state + LOW), load_ints(state + HIGH), load_ints(state + PLACE)
        for block in range(blocks):
            s = multiply(load(mine + SCORES + _VECTOR * block), splat(factor))
            if p.softcap:
                s = multiply(tanh(divide(s, splat(p.softcap))), splat(p.softcap))
            position = load_positions(tile, positions + 4 * tokens * block)
            if p.slopes:
                s = fma(load(state + SLOPE), to_float(subtract_int(position, place)), s)
            if edge:
                s = choose(within(position, low, high), s, splat(-math.inf))
            store(mine + SCORES + _VECTOR * block, s)
            top = maximum(s, top)
    else:
        for block in range(blocks):
            s = multiply(load(mine + SCORES + _VECTOR * block), splat(factor))
            store(mine + SCORES + _VECTOR * block, s)
            top = maximum(s, top)
    top = largest_of_rows(tile, top)
    base = select_finite(top)
    alpha = exp(subtract(old, base))
    sums = multiply(load(state + SUM), alpha)
    for block in range(blocks):
        weight = exp(subtract(load(mine + SCORES + _VECTOR * block), base))
        store(mine + SCORES + _VECTOR * block, weight)
        sums = add(sums, weight)
    store(state + SUM, sums)
    store(state + ALPHA, alpha)
    store(state + TOP, top)


@compiled
def _save(p: Any, mine: int, tile: int, rows: int, partial: int) -> None:
    """One chunk's output [FEW_ROWS, head_dim], largest logits and sums [FEW_ROWS] as a partial result."""
    copy_bytes(mine + OUTPUT, partial, 4 * rows * p.head_dim)
    for r in range(rows):
        at = partial + 4 * (FEW_ROWS * p.head_dim + r)
        poke_float(at, _row_top(mine, tile, r))
        poke_float(at + 4 * FEW_ROWS, _row_sum(mine, tile, r))


@compiled
def _merge(p: Any, mine: int, partial: int, r: int, chunks: int) -> tuple[float, float]:
    """Row r of all chunks, in order, into the worker's output; returns its largest logit and sum."""
    D = p.head_dim
    size = 4 * FEW_ROWS * (D + 2)
    top = -math.inf
    for c in range(chunks):
        top = max(top, peek_float(partial + c * size + 4 * (FEW_ROWS * D + r)))
    row = mine + OUTPUT + 4 * D * r
    total = 0.0
    for d in range(D):
        poke_float(row + 4 * d, 0.0)
    for c in range(chunks):
        state = partial + c * size
        part = peek_float(state + 4 * (FEW_ROWS * (D + 1) + r))
        if part != 0.0:
            weight = math.exp(peek_float(state + 4 * (FEW_ROWS * D + r)) - top)
            total += weight * part
            accumulate(state + 4 * D * r, row, D, weight)
    return top, total


@cache
def decode_kernel(kv: int, tile: int) -> Any:
    """The worker for keys of format `kv` and row tiles of `tile` rows, 1 to 4."""
    source, gain, item_bytes = SOURCE, READ_FACTOR[kv], ITEM_BYTES[kv]

    def decode(params: int, number: int) -> None:
        source  # noqa: B018 - part of the cache key
        p = view(params)[0]
        mine = p.scratch + number * SCRATCH_BYTES
        D = p.head_dim
        row_bytes = D * item_bytes
        tokens = _tokens(tile)
        while True:
            item = next_item(p, number)
            if item < 0:
                break
            s = sequence_of(p, item)
            item -= peek_long(p.work + 24 * s)
            h = item % p.num_kv_heads
            c = item // p.num_kv_heads
            first, m, n = sequence(p, s)
            length, first_chunk, chunks = chunks_of(p, m, n)
            rows = m * p.group
            _begin_rows(p, mine, tile, rows, first, m, n, h)
            if kv == BF16:
                for r in range(-(-rows // tile) * tile):
                    split_pairs(mine + QUERIES + 4 * D * r, D // 32 * 32)

            begin = max(first_key(p, max(0, n - m)), (first_chunk + c) * length)
            end = min(end_of_keys(p, n - 1, n), (first_chunk + c + 1) * length) if n > 0 else 0
            # tiles between these need no mask: the last row sees the latest first key, the first row the earliest end
            low = first_key(p, n - 1) if n > 0 else 0
            high = end_of_keys(p, n - m, n) if m <= n else 0
            factor = p.scale * peek_float(p.k_scale + 4 * h) * gain
            for span in range(begin, end, SPAN):
                known = min(SPAN + TILE, end - span)
                holes = find_tile(
                    p, s, h, span, known, mine + KEYS, mine + VALUES, mine + POSITIONS, (known + 15) // 16 * 16
                )
                for j in range(span, min(span + SPAN, end), TILE):
                    count = min(TILE, end - j)
                    edge = holes or count % tokens != 0 or low > j or high < j + count
                    keys, values = mine + KEYS + 8 * (j - span), mine + VALUES + 8 * (j - span)
                    positions = mine + POSITIONS + 4 * (j - span)
                    for r in range(0, rows, tile):
                        state = mine + _VECTOR * (r // tile)
                        if r == 0:
                            _prefetch_runs(p, values, j, count, row_bytes, p.v_token)
                        scores(kv, tile, mine + QUERIES + 4 * D * r, keys, mine + SCORES, D, count)
                        _softmax(tile, p, mine, state, positions, -(-count // tokens), factor, edge)
                        if r == 0:
                            following = min(TILE, end - j - TILE)
                            _prefetch_runs(p, keys + 8 * TILE, j + TILE, following, row_bytes, p.k_token)
                        weigh(kv, tile, mine + SCORES, values, mine + OUTPUT + 4 * D * r, state + ALPHA, D, count)

            done = True
            partial = p.partials + 4 * peek_long(p.work + 24 * s + 8)
            size = 4 * FEW_ROWS * (D + 2)
            if chunks > 1:
                partial += h * chunks * size
                _save(p, mine, tile, rows, partial + c * size)
                ticket = p.tickets + 8 * (peek_long(p.work + 24 * s + 16) + h)
                done = fetch_add(ticket, 1) == chunks - 1
                if done:
                    fetch_add(ticket, -chunks)
            if done:
                for r in range(rows):
                    if chunks > 1:
                        top, total = _merge(p, mine, partial, r, chunks)
                    else:
                        top, total = _row_top(mine, tile, r), _row_sum(mine, tile, r)
                    head = h * p.group + r % p.group
                    if kv == BF16:
                        join_pairs(mine + OUTPUT + 4 * D * r, D)
                    write_result(p, first + r // p.group, head, mine + OUTPUT + 4 * D * r, top, total, gain)

    return worker(decode)
