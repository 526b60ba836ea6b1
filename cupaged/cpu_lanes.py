"""Products and copies of many query rows, which lie in the lanes of vectors; LLVM IR is written out by Python loops.

    `outer`   C[i] = sum_k A[i, k] B[k]    S^T = K Q^T, and O^T = alpha O^T + V^T P^T: no sum runs across a vector

A is read one element at a time, each spread over a vector. Keys are rows of float32, each of them read from end to end. Of values
every element of HEIGHT outputs is wanted at each token, so they are copied in panels [tokens, HEIGHT], in the order in which they are
read. From one panel to the next it should be an odd number of cache lines, so that one token's values do not all fall into the same
few sets of the cache.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .cpu_formats import ITEM_BYTES, emit_load
from .cpu_products import SUMS
from .cpu_vector import (
    LANES,
    WIDTH,
    const,
    emit_fma,
    emit_shuffle,
    emit_splat,
    emit_store,
    emit_transpose,
    int64,
    loop,
    operation,
    pointer,
)

PART = 8  # elements of a row that change places with as many rows; a head_dim is a multiple of it

_f32 = ir.FloatType()


def height(vectors: int) -> int:
    """Rows of A whose sums fit in registers, for so many vectors of lanes."""
    return max(4, min(PART, SUMS // vectors))


def _plus(b: ir.IRBuilder, address: ir.Value, index: ir.Value, size: ir.Value | int) -> ir.Value:
    return b.add(address, b.mul(index, int64(size) if isinstance(size, int) else size))


def _read(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return b.load(pointer(b, address, kind), align=4)


def emit_outer(
    b: ir.IRBuilder,
    vectors: int,
    a: list[ir.Value],  # addresses of A[i, 0], of `height` rows
    a_step: int,  # bytes from A[i, k] to A[i, k + 1]
    right: ir.Value,  # B, float32 [depth, vectors * WIDTH]
    c: ir.Value,  # float32 [height, vectors * WIDTH]
    factors: list[ir.Value],  # of what is in C already; none: nothing is
    depth: ir.Value,
) -> None:
    stride = 4 * WIDTH * vectors
    places = [b.add(c, int64(stride * r + 4 * WIDTH * v)) for r in range(len(a)) for v in range(vectors)]
    sums = [const(0.0)] * len(places)
    if factors:
        sums = [b.fmul(_read(b, place, LANES), factors[n % vectors]) for n, place in enumerate(places)]

    def step(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        line = _plus(b, right, k, stride)
        loaded = [_read(b, b.add(line, int64(4 * WIDTH * v)), LANES) for v in range(vectors)]
        result = []
        for r, row in enumerate(a):
            x = emit_splat(b, _read(b, _plus(b, row, k, a_step), _f32))
            result += [emit_fma(b, x, y, total) for y, total in zip(loaded, sums[r * vectors :], strict=False)]
        return result

    _, sums = loop(b, int64(0), depth, 1, sums, step)
    for place, total in zip(places, sums, strict=True):
        emit_store(b, place, total)


def _keys_by_queries(
    b: ir.IRBuilder,
    vectors: int,
    keys: ir.Value,  # float32 [tokens, head_dim]
    queries: ir.Value,  # float32 [head_dim, vectors * WIDTH]
    scores: ir.Value,  # float32 [tokens, vectors * WIDTH]
    tokens: ir.Value,  # a multiple of PART
    head_dim: ir.Value,
) -> None:
    row_bytes, rows = b.mul(head_dim, int64(4)), height(vectors)

    def block(t: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        first = _plus(b, keys, t, row_bytes)
        a = [_plus(b, first, int64(r), row_bytes) for r in range(rows)]
        emit_outer(b, vectors, a, 4, queries, _plus(b, scores, t, 4 * WIDTH * vectors), [], head_dim)
        return []

    loop(b, int64(0), tokens, rows, [], block)


def _values_by_weights(
    b: ir.IRBuilder,
    vectors: int,
    values: ir.Value,  # panels
    panel: ir.Value,  # bytes from one panel to the next
    weights: ir.Value,  # float32 [tokens, vectors * WIDTH]
    out: ir.Value,  # float32 [head_dim, vectors * WIDTH]
    alpha: ir.Value,  # float32 [vectors * WIDTH]
    head_dim: ir.Value,
    tokens: ir.Value,
) -> None:
    rows = height(vectors)
    factors = [_read(b, b.add(alpha, int64(4 * WIDTH * v)), LANES) for v in range(vectors)]

    def block(d: ir.Value, place: list[ir.Value]) -> list[ir.Value]:
        a = [b.add(place[0], int64(4 * r)) for r in range(rows)]
        emit_outer(b, vectors, a, 4 * rows, weights, _plus(b, out, d, 4 * WIDTH * vectors), factors, tokens)
        return [b.add(place[0], panel)]

    loop(b, int64(0), head_dim, rows, [values], block)


def _to_panels(
    b: ir.IRBuilder,
    kv: int,
    vectors: int,
    row: ir.Value,  # one token's values, format kv
    target: ir.Value,  # its place in the first panel
    panel: ir.Value,  # bytes from one panel to the next
    head_dim: ir.Value,
) -> None:
    rows = height(vectors)

    def part(d: ir.Value, place: list[ir.Value]) -> list[ir.Value]:
        x = emit_load(b, _plus(b, row, d, ITEM_BYTES[kv]), kv, PART)
        at = place[0]
        for first in range(0, PART, rows):
            emit_store(b, at, emit_shuffle(b, x, x, range(first, first + rows)))
            at = b.add(at, panel)
        return [at]

    loop(b, int64(0), head_dim, PART, [target], part)


def _rows_to_lanes(
    b: ir.IRBuilder,
    rows: ir.Value,  # float32 [WIDTH, head_dim]
    lanes: ir.Value,  # float32: row r's element d at lanes + stride * d + 4 * r
    stride: ir.Value,
    head_dim: ir.Value,
) -> None:
    row_bytes = b.mul(head_dim, int64(4))

    def part(d: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        first = _plus(b, rows, d, 4)
        loaded = [emit_load(b, _plus(b, first, int64(r), row_bytes), width=PART) for r in range(WIDTH)]
        groups = [loaded[i::PART] for i in range(PART)]  # rows as far apart as groups of lanes
        joined = [x[0] if WIDTH == PART else emit_shuffle(b, x[0], x[1], range(WIDTH)) for x in groups]
        for i, x in enumerate(emit_transpose(b, joined)):
            emit_store(b, _plus(b, lanes, b.add(d, int64(i)), stride), x)
        return []

    loop(b, int64(0), head_dim, PART, [], part)


def _lanes_to_rows(
    b: ir.IRBuilder,
    lanes: ir.Value,  # as `_rows_to_lanes`
    stride: ir.Value,
    rows: ir.Value,
    head_dim: ir.Value,
) -> None:
    row_bytes = b.mul(head_dim, int64(4))

    def part(d: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        first = _plus(b, rows, d, 4)
        loaded = [_read(b, _plus(b, lanes, b.add(d, int64(i)), stride), LANES) for i in range(PART)]
        for i, x in enumerate(emit_transpose(b, loaded)):
            for group in range(0, WIDTH, PART):
                piece = emit_shuffle(b, x, x, range(group, group + PART))
                emit_store(b, _plus(b, first, int64(group + i), row_bytes), piece)
        return []

    loop(b, int64(0), head_dim, PART, [], part)


# Functions of compiled code; kv and vectors are literals.
keys_by_queries = operation(
    types.void, [types.int64] * 5, _keys_by_queries, 1
)  # (vectors, keys, queries, scores, tokens, head_dim)
values_by_weights = operation(
    types.void, [types.int64] * 7, _values_by_weights, 1
)  # (vectors, values, panel, weights, out, alpha, head_dim, tokens)
to_panels = operation(types.void, [types.int64] * 4, _to_panels, 2)  # (kv, vectors, row, target, panel, head_dim)
rows_to_lanes = operation(types.void, [types.int64] * 4, _rows_to_lanes)  # (rows, lanes, stride, head_dim)
lanes_to_rows = operation(types.void, [types.int64] * 4, _lanes_to_rows)  # (lanes, stride, rows, head_dim)
