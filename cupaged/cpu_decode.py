"""Attention of a few query rows over long keys: decode, and verification of a handful of drafted tokens.

Every K and V row is loaded once for all query rows of its KV head, in tiles of TILE tokens: S = Q K^T, softmax of all rows at once
with running maxima, O = alpha O + P V. Scores, maxima and sums are vectors of [row, token], see `cpu_products`.

What bounds it: the memory, beyond the caches, as long as reads go on while products are computed; else each waits for the other. Pages
lie anywhere, and the hardware's streams of reads break where a run of rows ends. So rows are prefetched a run ahead, in the order in
which they are read: while a run of K is multiplied, the head's next run comes (with one query row, the next head's; in float32 it is
the rows that follow), after the last one its first run of V, and so on to K of the next tile. An item is several KV heads, whose rows
of one block lie side by side in layout "HND", and within a tile the heads of a block are read one after another before the next
block. With AVX-512 an item is one head.

A worker's memory, float32 unless said; padded rows are whole row tiles of each head:
    queries, output [heads * padded rows, head_dim]   scores [heads * row tiles, TILE, 4]
    largest logit, sum, alpha, slope [heads * row tiles, WIDTH]   first key, end of keys, position [heads * row tiles, WIDTH] int32
    addresses of K, V of the first head, token positions [TILE + PAD] int64, int64, int32
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from numba import literally

from .cpu_formats import ITEM_BYTES, PAIRED, READ_FACTOR, accumulate, copy_bytes, join_pairs, multiply_row, split_pairs
from .cpu_functions import exp, exp_or_zero, tanh
from .cpu_products import LINE, largest_of_rows, load_positions, scores, weigh
from .cpu_vector import (
    WIDTH,
    add,
    choose,
    compiled,
    count_up_int,
    count_up_long,
    differs,
    divide,
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
    select_finite,
    splat,
    store,
    subtract,
    subtract_int,
    to_float,
    within,
    worker,
)
from .cpu_work import (
    FEW_ROWS,
    MOST_HEADS,
    MOST_ROWS,
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
PAD = TILE + 16  # addresses past the end of a tile: a run of the next one, which is prefetched, and padding
_ROW_TILES = MOST_HEADS * 2
_VECTOR = 4 * WIDTH
QUERIES = 0
OUTPUT = QUERIES + 4 * MOST_ROWS * 256
SCORES = OUTPUT + 4 * MOST_ROWS * 256
_SCORES_BYTES = 16 * TILE
TOP, SUM, ALPHA, SLOPE, LOW, HIGH, PLACE = (SCORES + _ROW_TILES * (_SCORES_BYTES + _VECTOR * n) for n in range(7))
KEYS = PLACE + _ROW_TILES * _VECTOR
VALUES = KEYS + 8 * (TILE + PAD)
POSITIONS = VALUES + 8 * (TILE + PAD)


@compiled
def _tokens(tile: int) -> int:
    """`tokens_of` in compiled code."""
    return WIDTH if tile == 1 else WIDTH // 2 if tile == 2 else WIDTH // 4


@compiled
def _row_sum(state: int, tile: int, r: int) -> float:
    tokens = _tokens(tile)
    at = state + SUM + _VECTOR * (r // tile) + 4 * tokens * (r % tile)
    total = 0.0
    for lane in range(tokens):
        total += peek_float(at + 4 * lane)
    return total


@compiled
def _row_top(state: int, tile: int, r: int) -> float:
    return float(peek_float(state + TOP + _VECTOR * (r // tile) + 4 * _tokens(tile) * (r % tile)))


@compiled
def _tokens_of_run(p: Any) -> int:
    """How many tokens of one head are read before the next head's: a block where that divides a tile."""
    size = p.block_size
    return TILE if size >= TILE else 32 if size == 32 else 16


@compiled
def _ahead(tile: int, h: int, heads: int, at: int, apart: int, following: int, there: int) -> tuple[int, int]:
    """Which rows are prefetched while head h's are multiplied, as addresses and an offset to them: with one query row a head, which
    takes little time, those of the next head; else the head's own in the run that follows. Heads are so many bytes apart."""
    if tile > 1:
        return following, there * h
    return (at, apart * (h + 1)) if h + 1 < heads else (following, 0)


@compiled
def _begin_rows(p: Any, state: int, queries: int, tile: int, rows: int, first: int, m: int, n: int, h: int) -> None:
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
            at = state + _VECTOR * n_tile + 4 * tokens * row
            for lane in range(tokens):
                poke_int(at + PLACE + 4 * lane, i)
                poke_int(at + LOW + 4 * lane, low)
                poke_int(at + HIGH + 4 * lane, high)
                poke_float(at + SLOPE + 4 * lane, slope)
            if row < tile:
                read_query(p, first + query, head, queries + 4 * p.head_dim * (n_tile * tile + row))
        store(state + _VECTOR * n_tile + TOP, splat(-math.inf))
        store(state + _VECTOR * n_tile + SUM, splat(0.0))
    for x in range(-(-rows // tile) * tile * p.head_dim):
        poke_float(queries + OUTPUT - QUERIES + 4 * x, 0.0)


@compiled
def _rescale(tile: int, alphas: int, out: int, head_dim: int) -> None:
    """What the output of a row tile is worth now: nothing to do while the largest logits stay."""
    tokens = _tokens(tile)
    if differs(load(alphas), splat(1.0)):
        for r in range(tile):
            multiply_row(out + 4 * head_dim * r, head_dim, peek_float(alphas + 4 * tokens * r))


@compiled
def _softmax(
    tile: int, p: Any, scores: int, state: int, positions: int, blocks: int, factor: float, edge: bool
) -> None:
    """Scores of a row tile become weights; its largest logits, alphas and sums move on."""
    literally(tile)
    tokens = _tokens(tile)
    old = load(state + TOP)
    top = old
    scale = splat(factor)
    if p.softcap or p.slopes or edge:
        low, high, place = load_ints(state + LOW), load_ints(state + HIGH), load_ints(state + PLACE)
        for block in range(blocks):
            s = multiply(load(scores + _VECTOR * block), scale)
            if p.softcap:
                s = multiply(tanh(divide(s, splat(p.softcap))), splat(p.softcap))
            position = load_positions(tile, positions + 4 * tokens * block)
            if p.slopes:
                s = fma(load(state + SLOPE), to_float(subtract_int(position, place)), s)
            if edge:
                s = choose(within(position, low, high), s, splat(-math.inf))
            store(scores + _VECTOR * block, s)
            top = maximum(s, top)
        scale = splat(1.0)
    else:
        for block in range(blocks):
            top = maximum(multiply(load(scores + _VECTOR * block), scale), top)
    top = largest_of_rows(tile, top)
    base = select_finite(top)
    sums = splat(0.0)
    for block in range(blocks):
        weight = exp_or_zero(subtract(multiply(load(scores + _VECTOR * block), scale), base))
        store(scores + _VECTOR * block, weight)
        sums = add(sums, weight)
    alpha = exp(subtract(old, base))
    store(state + SUM, fma(load(state + SUM), alpha, sums))
    store(state + ALPHA, alpha)
    store(state + TOP, top)


@compiled
def _save(p: Any, state: int, out: int, tile: int, rows: int, partial: int) -> None:
    """One chunk's output [FEW_ROWS, head_dim], largest logits and sums [FEW_ROWS] as a partial result."""
    copy_bytes(out, partial, 4 * rows * p.head_dim)
    for r in range(rows):
        at = partial + 4 * (FEW_ROWS * p.head_dim + r)
        poke_float(at, _row_top(state, tile, r))
        poke_float(at + 4 * FEW_ROWS, _row_sum(state, tile, r))


@compiled
def _merge(p: Any, row: int, partial: int, r: int, chunks: int) -> tuple[float, float]:
    """Row r of all chunks, in order, into the output at `row`; returns its largest logit and sum."""
    D = p.head_dim
    size = 4 * FEW_ROWS * (D + 2)
    top = -math.inf
    for c in range(chunks):
        top = max(top, peek_float(partial + c * size + 4 * (FEW_ROWS * D + r)))
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


@compiled
def _finish(
    p: Any,
    s: int,
    h: int,
    c: int,
    chunks: int,
    tile: int,
    rows: int,
    first: int,
    state: int,
    out: int,
    gain: float,
    paired: bool,
) -> None:
    """Results of one head and chunk: written if it is the only chunk, else saved, and merged by whoever saves the last one."""
    D = p.head_dim
    partial = p.partials + 4 * peek_long(p.work + 24 * s + 8)
    if chunks > 1:
        size = 4 * FEW_ROWS * (D + 2)
        partial += h * chunks * size
        _save(p, state, out, tile, rows, partial + c * size)
        ticket = p.tickets + 8 * (peek_long(p.work + 24 * s + 16) + h)
        if fetch_add(ticket, 1) != chunks - 1:
            return
        fetch_add(ticket, -chunks)
    for r in range(rows):
        row = out + 4 * D * r
        if chunks > 1:
            top, total = _merge(p, row, partial, r, chunks)
        else:
            top, total = _row_top(state, tile, r), _row_sum(state, tile, r)
        if paired:
            join_pairs(row, D)
        write_result(p, first + r // p.group, h * p.group + r % p.group, row, top, total, gain)


@cache
def decode_kernel(kv: int, tile: int) -> Any:
    """The worker for keys of format `kv` and row tiles of `tile` rows, 1 to 4."""
    source, gain, paired, in_line = SOURCE, READ_FACTOR[kv], kv in PAIRED, LINE // ITEM_BYTES[kv]

    def decode(params: int, number: int) -> None:
        source  # noqa: B018 - part of the cache key
        p = view(params)[0]
        mine = p.scratch + number * SCRATCH_BYTES
        D = p.head_dim
        tokens = _tokens(tile)
        run = _tokens_of_run(p)
        keys, values, positions = mine + KEYS, mine + VALUES, mine + POSITIONS
        groups = -(-p.num_kv_heads // p.heads)
        while True:
            item = next_item(p, number)
            if item < 0:
                break
            s = sequence_of(p, item)
            item -= peek_long(p.work + 24 * s)
            head = item % groups * p.heads
            heads = min(p.heads, p.num_kv_heads - head)
            c = item // groups
            first, m, n = sequence(p, s)
            length, first_chunk, chunks = chunks_of(p, m, n)
            rows = m * p.group
            row_tiles = -(-rows // tile)
            head_bytes = 4 * D * row_tiles * tile  # of queries and output
            for h in range(heads):
                queries = mine + QUERIES + head_bytes * h
                _begin_rows(p, mine + _VECTOR * row_tiles * h, queries, tile, rows, first, m, n, head + h)
                if paired:
                    for r in range(row_tiles * tile):
                        split_pairs(queries + 4 * D * r, D // in_line * in_line)

            begin = max(first_key(p, max(0, n - m)), (first_chunk + c) * length)
            end = min(end_of_keys(p, n - 1, n), (first_chunk + c + 1) * length) if n > 0 else 0
            # tiles between these need no mask: the last row sees the latest first key, the first row the earliest end
            low = first_key(p, n - 1) if n > 0 else 0
            high = end_of_keys(p, n - m, n) if m <= n else 0
            for j in range(begin, end, TILE):
                count, known = min(TILE, end - j), min(TILE + run, end - j)
                holes = find_tile(p, s, head, j, known, keys, values, positions, known)
                count_up_long(keys + 8 * known, peek_long(keys + 8 * known - 8), 0, PAD - TILE)
                count_up_int(positions + 4 * known, -1, 0, PAD - TILE)
                # rows of other heads lie as far apart as the heads, but those that are not mapped
                k_head, v_head = (0, 0) if holes else (p.k_head, p.v_head)
                edge = holes or count % tokens != 0 or low > j or high < j + count
                for t in range(0, count, run):
                    several = min(run, count - t)
                    for h in range(heads):
                        if holes:
                            find_tile(
                                p, s, head + h, j + t, several, keys + 8 * t, values + 8 * t, positions + 4 * t, run
                            )
                        for r in range(row_tiles):
                            queries = mine + QUERIES + head_bytes * h + 4 * D * tile * r
                            target = mine + SCORES + _SCORES_BYTES * (row_tiles * h + r) + _VECTOR * (t // tokens)
                            at, following, there = keys + 8 * t, values, v_head
                            if t + run < count:
                                following, there = at + 8 * run, k_head
                            ahead, offset = _ahead(tile, h, heads, at, k_head, following, there)
                            if r or holes:
                                ahead, offset = at, k_head * h
                            scores(kv, tile, queries, at, k_head * h, ahead, offset, target, D, several)
                for h in range(heads):
                    factor = p.scale * peek_float(p.k_scale + 4 * (head + h)) * gain
                    for r in range(row_tiles):
                        state, n_tile = mine + _VECTOR * (row_tiles * h + r), row_tiles * h + r
                        weights = mine + SCORES + _SCORES_BYTES * n_tile
                        _softmax(tile, p, weights, state, positions, -(-count // tokens), factor, edge)
                        _rescale(tile, state + ALPHA, mine + OUTPUT + 4 * D * tile * n_tile, D)
                for t in range(0, count, run):
                    several = min(run, count - t)
                    for h in range(heads):
                        if holes:
                            find_tile(
                                p, s, head + h, j + t, several, keys + 8 * t, values + 8 * t, positions + 4 * t, run
                            )
                        for r in range(row_tiles):
                            n_tile = row_tiles * h + r
                            weights = mine + SCORES + _SCORES_BYTES * n_tile + _VECTOR * (t // tokens)
                            target = mine + OUTPUT + 4 * D * tile * n_tile
                            at, following, there = values + 8 * t, keys + 8 * TILE, k_head
                            if t + run < count:
                                following, there = at + 8 * run, v_head
                            ahead, offset = _ahead(tile, h, heads, at, v_head, following, there)
                            if r or holes:
                                ahead, offset = at, v_head * h
                            weigh(kv, tile, weights, at, v_head * h, ahead, offset, target, D, several)

            for h in range(heads):
                state, out = mine + _VECTOR * row_tiles * h, mine + OUTPUT + head_bytes * h
                _finish(p, s, head + h, c, chunks, tile, rows, first, state, out, gain, paired)

    return worker(decode)
