"""Attention of many query rows: prefill, append, and decode with many query heads on one KV head.

Bound by arithmetic. Query rows lie in the lanes of vectors, `lanes` of them in a tile, and everything is computed transposed, so that
no sum runs across a vector and no row needs a branch of its own: S^T = K Q^T, softmax down the columns, O^T = alpha O^T + V^T P^T.
A tile of up to KEYS tokens is first copied from its pages as float32, which also puts zeros in place of what must not be read; then all the
row tiles of an item use it, each of them up to the last token that it sees. Items of one head follow one another, so that its
keys and values stay in cache.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from .cpu_formats import BF16, READ_FACTOR, widen_row
from .cpu_functions import exp_or_zero, tanh
from .cpu_lanes import PART, keys_by_queries, to_panels, values_by_weights
from .cpu_lanes import height as panel_rows
from .cpu_products import LINE
from .cpu_rows import (
    ALPHA,
    CONFIGURATION,
    COPIES,
    ELEMENTS,
    HIGH,
    KEY_ROWS,
    KEY_TILE,
    KEYS,
    LOW,
    OUTPUT,
    PLACE,
    PLACES,
    POSITIONS,
    QUERIES,
    SCORES,
    SEEN,
    SLOPE,
    SUM,
    TOP,
    VALUE_ROWS,
    VALUE_TILE,
    WEIGHTS,
    begin_rows,
    merge_partials,
    pack_rows,
    read_rows,
    save_partial,
    write_rows,
)
from .cpu_tiles import (
    GROUP,
    SLICE,
    configure,
    find_places,
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
    fetch_add,
    fma,
    load,
    load_ints,
    maximum,
    multiply,
    peek_float,
    peek_int,
    peek_long,
    select_finite,
    splat,
    splat_int,
    store,
    subtract,
    subtract_int,
    to_float,
    within,
    worker,
)
from .cpu_work import (
    SCRATCH_BYTES,
    SOURCE,
    chunks_of,
    find_tile,
    next_item,
    sequence,
    sequence_of,
    tiles_of_item,
    view,
)


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
                begin_rows(p, mine, tile, lanes, row, rows, m, n, h)
                begin = min(begin, peek_int(mine + SEEN + 16 * tile))
                end = max(end, peek_int(mine + SEEN + 16 * tile + 4))
                by_tiles = by_tiles and pack_rows(p, mine + QUERIES + row_tile * tile, lanes, row, rows, first, h)
            if not by_tiles:
                for tile in range(tiles):
                    row = begin_row + lanes * tile
                    read_rows(p, mine, mine + QUERIES + row_tile * tile, lanes, row, rows, first, h)

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
                    # a chunk that begins inside a vector may end inside one too, before keys that every row sees
                    edge = holes or peek_int(seen + 8) > j or min(end, peek_int(seen + 12)) < j + visible
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
                    save_partial(mine, tile, lanes, D, partial + c * size)
                    ticket = p.tickets + 8 * (peek_long(p.work + 24 * s + 16) + nth)
                    done = fetch_add(ticket, 1) == chunks - 1
                    if done:
                        fetch_add(ticket, -chunks)
                        merge_partials(mine, tile, lanes, D, partial, chunks)
                if done:
                    write_rows(p, mine, tile, lanes, begin_row + lanes * tile, rows, first, h, gain)
        if tiles_wanted:
            release()

    return worker(prefill)
