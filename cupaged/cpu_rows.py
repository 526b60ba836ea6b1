"""A worker's memory in `cpu_prefill`, and what happens to rows before their first tile of keys and after the last one.

float32 unless said, for each row tile of an item where [tiles] stands:
    queries, output [tiles, head_dim, lanes]   keys [tokens, head_dim]   values in panels, see `cpu_lanes`   scores [KEYS, lanes]
    largest logit, sum, alpha, slope [tiles, lanes]   first key, end of keys, position [tiles, lanes] int32
    tokens that some row sees: first, end; that every row sees: first, end [tiles, 4] int32
    addresses of K, V [KEYS + 8] int64   token positions [KEYS + 8] int32
"""

from __future__ import annotations

import math
from typing import Any

from .cpu_functions import exp_or_zero
from .cpu_lanes import height as panel_rows
from .cpu_lanes import lanes_to_rows, rows_to_lanes
from .cpu_products import LINE
from .cpu_tiles import pack_query
from .cpu_vector import (
    WIDTH,
    compiled,
    fma,
    load,
    maximum,
    peek_float,
    poke_float,
    poke_int,
    select_finite,
    splat,
    store,
    subtract,
)
from .cpu_work import (
    ITEM_ROWS,
    MOST_VECTORS,
    SCRATCH_BYTES,
    end_of_keys,
    first_key,
    read_query,
    write_result,
)

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
def begin_rows(p: Any, mine: int, number: int, lanes: int, begin: int, rows: int, m: int, n: int, h: int) -> None:
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
def read_rows(p: Any, mine: int, queries: int, lanes: int, begin: int, rows: int, first: int, h: int) -> None:
    """Queries of a row tile as float32; lanes without a row repeat the sequence's first one."""
    for v in range(0, lanes, WIDTH):
        for lane in range(WIDTH):
            r = begin + v + lane if begin + v + lane < rows else 0
            read_query(p, first + r // p.group, h * p.group + r % p.group, mine + ROWS + 4 * p.head_dim * lane)
        rows_to_lanes(mine + ROWS, queries + 4 * v, 4 * lanes, p.head_dim)


@compiled
def pack_rows(p: Any, queries: int, lanes: int, begin: int, rows: int, first: int, h: int) -> bool:
    """Queries of a row tile for `tile_scores`; False when they must go the usual way."""
    good = True
    for lane in range(lanes):
        r = begin + lane if begin + lane < rows else 0
        source = p.q + (first + r // p.group) * p.q_token + (h * p.group + r % p.group) * p.q_head
        good &= pack_query(source, queries + 32 * p.head_dim * (lane // WIDTH) + 4 * (lane % WIDTH), p.head_dim)
    return good


@compiled
def write_rows(
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
def save_partial(mine: int, number: int, lanes: int, head_dim: int, state: int) -> None:
    """A row tile's output [head_dim, lanes], largest logits and sums [lanes] as a partial result."""
    output, at = mine + OUTPUT + 4 * lanes * head_dim * number, mine + 4 * lanes * number
    for x in range(0, 4 * lanes * head_dim, 4 * WIDTH):
        store(state + x, load(output + x))
    for v in range(0, 4 * lanes, 4 * WIDTH):
        store(state + 4 * lanes * head_dim + v, load(at + TOP + v))
        store(state + 4 * lanes * (head_dim + 1) + v, load(at + SUM + v))


@compiled
def merge_partials(mine: int, number: int, lanes: int, head_dim: int, partial: int, chunks: int) -> None:
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
