"""Attention of many query rows: prefill, append, and decode with many query heads on one KV head.

Bound by arithmetic. Query rows lie in the lanes of vectors, `lanes` of them in a tile, and everything is computed transposed, so that
no sum runs across a vector and no row needs a branch of its own: S^T = K Q^T, softmax down the columns, O^T = alpha O^T + V^T P^T.
A tile of up to KEYS tokens is first copied from its pages as float32, which also puts zeros in place of what must not be read; then all the
row tiles of an item use it, each of them up to the last token that it sees. Items of one head follow one another, so that its
keys and values stay in cache.

A worker's memory, float32 unless said, for each row tile of an item where [tiles] stands:
    queries, output [tiles, head_dim, lanes]   keys [tokens, head_dim]   values in panels, see `cpu_lanes`   scores [KEYS, lanes]
    largest logit, sum, alpha, slope [tiles, lanes]   first key, end of keys, position [tiles, lanes] int32
    tokens that some row sees: first, end; that every row sees: first, end [tiles, 4] int32
    addresses of K, V [KEYS + 8] int64   token positions [KEYS + 8] int32
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from .cpu_formats import BF16, READ_FACTOR, widen_row
from .cpu_lanes import PART, keys_by_queries, lanes_to_rows, rows_to_lanes, to_panels, values_by_weights
from .cpu_lanes import height as panel_rows
from .cpu_products import LINE
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
    exp_or_zero,
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
    ITEM_ROWS,
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
    tiles_of_item,
    view,
    write_result,
)  # fmt: skip

KEYS = 96 if WIDTH == 16 else 192  # tokens of a tile at most: its scores stay in L1
ELEMENTS = 96 * 256  # of a tile's keys, and of its values: both stay in L2
_BLOCK = 4 * ITEM_ROWS
QUERIES = 0
OUTPUT = QUERIES + 256 * _BLOCK
KEY_TILE = OUTPUT + 256 * _BLOCK
VALUE_TILE = KEY_TILE + 4 * ELEMENTS
SCORES = VALUE_TILE + 4 * ELEMENTS + 256 // panel_rows(MOST_VECTORS) * LINE
TOP = SCORES + 4 * WIDTH * MOST_VECTORS * KEYS
SUM, ALPHA, SLOPE, LOW, HIGH, PLACE, SEEN = (TOP + _BLOCK * n for n in range(1, 8))
KEY_ROWS = SEEN + 16 * ITEM_ROWS // WIDTH
VALUE_ROWS = KEY_ROWS + 8 * (KEYS + 8)
POSITIONS = VALUE_ROWS + 8 * (KEYS + 8)
# With `cpu_tiles` the same memory holds bfloat16: queries packed, in place of the keys' tile copies of keys and weights, values transposed.
COPIES, WEIGHTS = KEY_TILE, KEY_TILE + 2 * ELEMENTS
PLACES = POSITIONS + 4 * (KEYS + 8)
CONFIGURATION = PLACES + KEYS
assert CONFIGURATION + 64 <= SCRATCH_BYTES
ROWS = KEY_TILE  # rows [WIDTH, head_dim], before the first tile of keys and after the last


@compiled
def _begin_rows(
    p: Any, mine: int, number: int, lanes: int, begin: int, rows: int, first: int, m: int, n: int, h: int
) -> None:
    """Bounds, slopes and an empty state in each lane of a row tile; a lane without a row sees nothing."""
    seen_first, seen_end, all_first, all_end = n, 0, 0, n
    for lane in range(lanes):
        at = mine + 4 * (lanes * number + lane)
        r = begin + lane
        query, head = (r // p.group, h * p.group + r % p.group) if r < rows else (0, h * p.group)
        i = n - m + query
        sees = i >= 0 and r < rows
        low, high = (first_key(p, i), end_of_keys(p, i, n)) if sees else (0, 0)
        if r < rows:
            all_first, all_end = max(all_first, low), min(all_end, high)
        if low < high:
            seen_first, seen_end = min(seen_first, low), max(seen_end, high)
        poke_int(at + PLACE, i)
        poke_int(at + LOW, low)
        poke_int(at + HIGH, high)
        poke_float(at + SLOPE, peek_float(p.slopes + 4 * head) if p.slopes else 0.0)
        poke_float(at + TOP, -math.inf)
        poke_float(at + SUM, 0.0)
    seen = mine + SEEN + 16 * number
    poke_int(seen, seen_first)
    poke_int(seen + 4, seen_end)
    poke_int(seen + 8, all_first)
    poke_int(seen + 12, all_end)
    for x in range(0, lanes * p.head_dim, WIDTH):
        store(mine + OUTPUT + 4 * (lanes * p.head_dim * number + x), splat(0.0))


@compiled
def _read_rows(p: Any, mine: int, queries: int, lanes: int, begin: int, rows: int, first: int, h: int) -> None:
    """Queries of a row tile as float32; lanes without a row repeat the sequence's first one."""
    for v in range(0, lanes, WIDTH):
        for lane in range(WIDTH):
            r = begin + v + lane if begin + v + lane < rows else 0
            read_query(p, first + r // p.group, h * p.group + r % p.group, mine + ROWS + 4 * p.head_dim * lane)
        rows_to_lanes(mine + ROWS, queries + 4 * v, 4 * lanes, p.head_dim)


@compiled
def _pack_rows(p: Any, queries: int, lanes: int, begin: int, rows: int, first: int, h: int) -> bool:
    """Queries of a row tile for `tile_scores`; False when they must go the usual way."""
    good = True
    for lane in range(lanes):
        r = begin + lane if begin + lane < rows else 0
        source = p.q + (first + r // p.group) * p.q_token + (h * p.group + r % p.group) * p.q_head
        good &= pack_query(source, queries + 32 * p.head_dim * (lane // WIDTH) + 4 * (lane % WIDTH), p.head_dim)
    return good


@compiled
def _write_rows(
    p: Any, mine: int, number: int, lanes: int, begin: int, rows: int, first: int, h: int, gain: float
) -> None:
    """The finished rows of a row tile."""
    output = mine + OUTPUT + 4 * lanes * p.head_dim * number
    for v in range(0, min(lanes, rows - begin), WIDTH):
        lanes_to_rows(output + 4 * v, 4 * lanes, mine + ROWS, p.head_dim)
        for lane in range(min(WIDTH, rows - begin - v)):
            r = begin + v + lane
            at = mine + 4 * (lanes * number + v + lane)
            write_result(
                p, first + r // p.group, h * p.group + r % p.group, mine + ROWS + 4 * p.head_dim * lane,
                peek_float(at + TOP), peek_float(at + SUM), gain,
            )  # fmt: skip


@compiled
def _rescale(output: int, alphas: int, lanes: int, head_dim: int) -> None:
    """What `values_by_weights` does to the old output on its way."""
    for v in range(0, lanes, WIDTH):
        alpha = load(alphas + 4 * v)
        for d in range(head_dim):
            where = output + 4 * (lanes * d + v)
            store(where, multiply(load(where), alpha))


@compiled
def _softmax(p: Any, scores: int, at: int, lanes: int, positions: int, count: int, factor: float, edge: bool) -> None:
    """Scores in one vector of lanes become weights; their largest logits, alphas and sums move on."""
    old = load(at + TOP)
    top = splat(-math.inf)
    if edge or p.softcap or p.slopes or not factor > 0.0:
        low, high, place = load_ints(at + LOW), load_ints(at + HIGH), load_ints(at + PLACE)
        slope = load(at + SLOPE)
        for t in range(count):
            where = scores + 4 * lanes * t
            s = multiply(load(where), splat(factor))
            if p.softcap:
                s = multiply(tanh(divide(s, splat(p.softcap))), splat(p.softcap))
            if p.slopes:
                s = fma(slope, to_float(subtract_int(splat_int(peek_int(positions + 4 * t)), place)), s)
            if edge:
                s = choose(within(splat_int(peek_int(positions + 4 * t)), low, high), s, splat(-math.inf))
            store(where, s)
            top = maximum(s, top)
        factor = 1.0
    else:  # a product with a positive number and its rounding keep the order
        for t in range(count):
            top = maximum(load(scores + 4 * lanes * t), top)
        top = multiply(top, splat(factor))
    top = maximum(old, top)
    base = select_finite(top)
    alpha = exp_or_zero(subtract(old, base))
    sums = multiply(load(at + SUM), alpha)
    for t in range(count):
        where = scores + 4 * lanes * t
        weight = exp_or_zero(subtract(multiply(load(where), splat(factor)), base))
        store(where, weight)
        sums = add(sums, weight)
    store(at + SUM, sums)
    store(at + ALPHA, alpha)
    store(at + TOP, top)


@compiled
def _save(mine: int, number: int, lanes: int, head_dim: int, state: int) -> None:
    """A row tile's output [head_dim, lanes], largest logits and sums [lanes] as a partial result."""
    output, at = mine + OUTPUT + 4 * lanes * head_dim * number, mine + 4 * lanes * number
    for x in range(0, 4 * lanes * head_dim, 4 * WIDTH):
        store(state + x, load(output + x))
    for v in range(0, 4 * lanes, 4 * WIDTH):
        store(state + 4 * lanes * head_dim + v, load(at + TOP + v))
        store(state + 4 * lanes * (head_dim + 1) + v, load(at + SUM + v))


@compiled
def _merge(mine: int, number: int, lanes: int, head_dim: int, partial: int, chunks: int) -> None:
    """Combine the partial results of all chunks, in order, into the state of a row tile."""
    D = head_dim
    size = 4 * lanes * (D + 2)
    for v in range(0, lanes, WIDTH):
        output, at = mine + OUTPUT + 4 * (lanes * D * number + v), mine + 4 * (lanes * number + v)
        top = splat(-math.inf)
        for c in range(chunks):
            top = maximum(load(partial + c * size + 4 * (lanes * D + v)), top)
        base = select_finite(top)
        sums = splat(0.0)
        for d in range(D):
            store(output + 4 * lanes * d, splat(0.0))
        for c in range(chunks):
            state = partial + c * size + 4 * v
            weight = exp_or_zero(subtract(load(state + 4 * lanes * D), base))
            sums = fma(weight, load(state + 4 * lanes * (D + 1)), sums)
            for d in range(D):
                where = output + 4 * lanes * d
                store(where, fma(weight, load(state + 4 * lanes * d), load(where)))
        store(at + TOP, top)
        store(at + SUM, sums)


@cache
def prefill_kernel(kv: int, shift: int) -> Any:
    """The worker for keys of format `kv` and row tiles of 2 ** shift vectors."""
    source, gain, vectors = SOURCE, READ_FACTOR[kv], 1 << shift
    lanes = vectors * WIDTH
    panel_row = 4 * panel_rows(vectors)

    def prefill(params: int, number: int) -> None:
        source  # noqa: B018 - part of the cache key
        p = view(params)[0]
        mine = p.scratch + number * SCRATCH_BYTES
        D = p.head_dim
        row_tile = 4 * lanes * D  # bytes of queries or output
        keys = min(KEYS, ELEMENTS // D // SLICE * SLICE)
        panel = panel_row * keys + LINE
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
            all_tiles = -(-rows // lanes)
            several = tiles_of_item(p, 5 + shift, rows)
            items = -(-all_tiles // several)
            # items of one head after another; in each the latest rows, which see the most keys, first
            first_tile = (items - 1 - item % items) * several
            item //= items
            c = item % chunks
            h = item // chunks
            tiles = min(several, all_tiles - first_tile)
            begin_row = first_tile * lanes
            factor = p.scale * peek_float(p.k_scale + 4 * h) * gain
            by_tiles = tiles_wanted and abs(factor) < 2.0**30
            begin, end = n, 0
            for tile in range(tiles):
                row = begin_row + lanes * tile
                _begin_rows(p, mine, tile, lanes, row, rows, first, m, n, h)
                begin = min(begin, peek_int(mine + SEEN + 16 * tile))
                end = max(end, peek_int(mine + SEEN + 16 * tile + 4))
                by_tiles = by_tiles and _pack_rows(p, mine + QUERIES + row_tile * tile, lanes, row, rows, first, h)
            if not by_tiles:
                for tile in range(tiles):
                    row = begin_row + lanes * tile
                    _read_rows(p, mine, mine + QUERIES + row_tile * tile, lanes, row, rows, first, h)

            begin, end = max(begin, (first_chunk + c) * length), min(end, (first_chunk + c + 1) * length)
            for j in range(begin, end, keys):
                count = min(keys, end - j)
                padded = -(-count // SLICE) * SLICE
                holes = find_tile(p, s, h, j, count, mine + KEY_ROWS, mine + VALUE_ROWS, mine + POSITIONS, padded)
                transposed = False
                if by_tiles:
                    find_places(mine + PLACES, mine + KEY_ROWS, count, p.k_token, D, p.block_size, mine + COPIES)
                    transposed = transpose_values(mine + VALUE_ROWS, mine + VALUE_TILE, D, padded, 2 * KEYS) == 0
                copied = -(-count // PART) * PART
                for t in range(copied):
                    if not by_tiles:
                        widen_row(kv, peek_long(mine + KEY_ROWS + 8 * t), mine + KEY_TILE + 4 * D * t, D)
                    if not transposed:
                        value = mine + VALUE_TILE + panel_row * t
                        to_panels(kv, vectors, peek_long(mine + VALUE_ROWS + 8 * t), value, panel, D)

                for tile in range(tiles):
                    seen = mine + SEEN + 16 * tile
                    visible = min(count, peek_int(seen + 4) - j)
                    if visible <= 0 or j + count <= peek_int(seen):
                        continue
                    visible = -(-visible // PART) * PART
                    queries, output = mine + QUERIES + row_tile * tile, mine + OUTPUT + row_tile * tile
                    state, weights = mine + 4 * lanes * tile, mine + SCORES
                    if by_tiles:
                        tile_scores(vectors, queries, mine + PLACES, -(-visible // GROUP), weights, D)
                    else:
                        keys_by_queries(vectors, mine + KEY_TILE, queries, weights, visible, D)
                    edge = holes or peek_int(seen + 8) > j or peek_int(seen + 12) < j + visible
                    for v in range(vectors):
                        at = 4 * WIDTH * v
                        _softmax(p, weights + at, state + at, lanes, mine + POSITIONS, visible, factor, edge)
                    if transposed:
                        whole = -(-visible // SLICE) * SLICE
                        for x in range(lanes * visible, lanes * whole, WIDTH):
                            store(weights + 4 * x, splat(0.0))
                        pack_weights(vectors, weights, mine + WEIGHTS, whole)
                        _rescale(output, state + ALPHA, lanes, D)
                        tile_weigh(vectors, mine + VALUE_TILE, mine + WEIGHTS, output, D, whole, 2 * KEYS)
                    else:
                        values_by_weights(vectors, mine + VALUE_TILE, panel, weights, output, state + ALPHA, D, visible)

            for tile in range(tiles):
                nth = h * all_tiles + first_tile + tile
                done = True
                if chunks > 1:
                    size = 4 * lanes * (D + 2)
                    partial = p.partials + 4 * peek_long(p.work + 24 * s + 8) + nth * chunks * size
                    _save(mine, tile, lanes, D, partial + c * size)
                    ticket = p.tickets + 8 * (peek_long(p.work + 24 * s + 16) + nth)
                    done = fetch_add(ticket, 1) == chunks - 1
                    if done:
                        fetch_add(ticket, -chunks)
                        _merge(mine, tile, lanes, D, partial, chunks)
                if done:
                    _write_rows(p, mine, tile, lanes, begin_row + lanes * tile, rows, first, h, gain)
        if tiles_wanted:
            release()

    return worker(prefill)
