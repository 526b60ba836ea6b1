"""The two products of attention, blocked so that their sums stay in registers; LLVM IR is written out by Python loops.

    few rows   `scores`  S[r, t] = q[r] . K[t]             one vector of sums per (row, token), 16 of them reduced to scores at once
               `weigh`   O[r] = alpha[r] O[r] + p[r] V     rows of V are loaded once for all query rows
    many rows  `outer`   C[i] = alpha C[i] + sum_k A[i, k] B[k]   lanes are query rows: S^T = K Q^T and O^T = V^T P^T, no reduction

K and V rows are found through arrays of 64-bit addresses, one per token of a tile of TILE tokens, so a product never sees a page,
and any stride or block size costs the same. `ahead` holds the addresses of the next tile, prefetched meanwhile: block tables
scatter pages over memory, where no hardware prefetcher follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .cpu_vector import (
    ITEM_BYTES,
    LANES,
    REGISTERS,
    WIDTH,
    const,
    emit_fma,
    emit_load,
    emit_shuffle,
    emit_splat,
    int64,
    loop,
    pointer,
)

TILE = 64  # tokens whose scores are computed before their softmax, few rows
LINE = 64  # bytes of a cache line
ACCUMULATORS = max(WIDTH, REGISTERS // 2)

_f32, _i64 = ir.FloatType(), ir.IntType(64)


def _at(b: ir.IRBuilder, address: ir.Value, index: ir.Value | int, size: int) -> ir.Value:
    offset = int64(index * size) if isinstance(index, int) else b.mul(index, int64(size))
    return b.add(address, offset)


def _read(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return b.load(pointer(b, address, kind), align=4)


def _prefetch(b: ir.IRBuilder, address: ir.Value) -> None:
    i8, i32 = ir.IntType(8), ir.IntType(32)
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [i8.as_pointer(), i32, i32, i32]), "llvm.prefetch.p0"
    )
    b.call(function, [pointer(b, address, i8), *(ir.Constant(i32, x) for x in (0, 3, 1))])


def _transposed_sums(b: ir.IRBuilder, vectors: list[ir.Value]) -> ir.Value:
    """The lane sums of WIDTH vectors as one vector, in order: a tree of WIDTH - 1 additions, a blend and a shuffle before each."""
    span = WIDTH
    while len(vectors) > 1:
        half, count = span // 2, len(vectors) // 2
        keep = [i if i % span < half else WIDTH + i for i in range(WIDTH)]
        swap = [i + half if i % span < half else WIDTH + i - half for i in range(WIDTH)]
        vectors = [
            b.fadd(emit_shuffle(b, x, y, keep), emit_shuffle(b, x, y, swap))
            for x, y in zip(vectors[:count], vectors[count:], strict=True)
        ]
        span = half
    return vectors[0]


def emit_scores(
    b: ir.IRBuilder,
    kv: int,
    rows: int,
    q: ir.Value,  # float32 [rows, head_dim]
    keys: ir.Value,  # int64 [TILE]
    ahead: ir.Value,  # int64 [TILE]
    scores: ir.Value,  # float32 [rows, TILE]
    head_dim: ir.Value,
    count: ir.Value,  # tokens; scores are written up to the next multiple of a vector
) -> None:
    size = ITEM_BYTES[kv]
    tokens = ACCUMULATORS // (1 << (rows - 1).bit_length())
    row_bytes = b.mul(head_dim, int64(4))

    def block(t: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        k = [_read(b, _at(b, keys, b.add(t, int64(u)), 8), _i64) for u in range(tokens)]
        following = [_read(b, _at(b, ahead, b.add(t, int64(u)), 8), _i64) for u in range(tokens)]

        def add_products(d: ir.Value, sums: list[ir.Value], width: int) -> list[ir.Value]:
            def vector(address: ir.Value, kind: int) -> ir.Value:
                x = emit_load(b, address, kind, width)
                return x if width == WIDTH else emit_shuffle(b, x, const(0.0, width), range(WIDTH))

            loaded = [vector(_at(b, address, d, size), kv) for address in k]
            result = []
            for r in range(rows):
                query = vector(_at(b, b.add(q, b.mul(row_bytes, int64(r))), d, 4), 0)
                result += [emit_fma(b, query, x, total) for x, total in zip(loaded, sums[r * tokens :], strict=False)]
            return result

        def line(d: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            for address in following:
                _prefetch(b, _at(b, address, d, size))
            for part in range(0, LINE // size, WIDTH):
                sums = add_products(b.add(d, int64(part)), sums, WIDTH)
            return sums

        sums = [const(0.0)] * (rows * tokens)
        d, sums = loop(b, int64(0), b.sub(head_dim, int64(LINE // size - 1)), LINE // size, sums, line)
        for width in (WIDTH, 8):
            stop = b.sub(head_dim, int64(width - 1))
            if width <= WIDTH and (size < 4 or width < WIDTH):
                d, sums = loop(b, d, stop, width, sums, lambda d, sums, w=width: add_products(d, sums, w))
        sums += [const(0.0)] * (ACCUMULATORS - len(sums))
        piece = min(tokens, WIDTH)
        for first in range(0, ACCUMULATORS, WIDTH):
            total = _transposed_sums(b, sums[first : first + WIDTH])
            for n in range(first, first + WIDTH, piece):
                row, token = divmod(n, tokens)
                if row < rows:
                    part = emit_shuffle(b, total, total, range(n - first, n - first + piece))
                    place = _at(b, scores, b.add(t, int64(row * TILE + token)), 4)
                    b.store(part, pointer(b, place, part.type), align=4)
        return []

    padded = b.and_(b.add(count, int64(WIDTH - 1)), int64(-WIDTH))
    loop(b, int64(0), padded, tokens, [], block)


def emit_weigh(
    b: ir.IRBuilder,
    kv: int,
    rows: int,
    weights: ir.Value,  # float32 [rows, TILE]
    values: ir.Value,  # int64 [TILE]
    ahead: ir.Value,  # int64 [TILE]
    out: ir.Value,  # float32 [rows, head_dim]
    alpha: ir.Value,  # float32 [rows]: what the old output is worth now
    head_dim: ir.Value,
    count: ir.Value,
) -> None:
    size = ITEM_BYTES[kv]
    row_bytes = b.mul(head_dim, int64(4))
    most = max(1, min(8, ACCUMULATORS // rows))

    def columns(d: ir.Value, vectors: int, width: int) -> None:
        kind = ir.VectorType(_f32, width)
        places = [
            _at(b, b.add(out, b.mul(row_bytes, int64(r))), b.add(d, int64(v * width)), 4)
            for r in range(rows)
            for v in range(vectors)
        ]
        sums = []
        for r in range(rows):
            factor = emit_splat(b, _read(b, _at(b, alpha, r, 4), _f32), width)
            sums += [b.fmul(_read(b, place, kind), factor) for place in places[r * vectors : (r + 1) * vectors]]

        def token(t: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            value = _at(b, _read(b, _at(b, values, t, 8), _i64), d, size)
            following = _at(b, _read(b, _at(b, ahead, t, 8), _i64), d, size)
            for offset in range(0, vectors * width * size, LINE):
                _prefetch(b, b.add(following, int64(offset)))
            loaded = [emit_load(b, b.add(value, int64(v * width * size)), kv, width) for v in range(vectors)]
            result = []
            for r in range(rows):
                weight = emit_splat(b, _read(b, _at(b, weights, b.add(t, int64(r * TILE)), 4), _f32), width)
                result += [emit_fma(b, weight, x, total) for x, total in zip(loaded, sums[r * vectors :], strict=False)]
            return result

        _, sums = loop(b, int64(0), count, 1, sums, token)
        for place, total in zip(places, sums, strict=True):
            b.store(total, pointer(b, place, kind), align=4)

    d: ir.Value = int64(0)
    vectors = 1 << (most.bit_length() - 1)
    while vectors:
        step = vectors * WIDTH

        def body(d: ir.Value, _: list[ir.Value], vectors: int = vectors) -> list[ir.Value]:
            columns(d, vectors, WIDTH)
            return []

        d, _ = loop(b, d, b.sub(head_dim, int64(step - 1)), step, [], body)
        vectors //= 2
    if WIDTH > 8:
        with b.if_then(b.icmp_signed("<", d, head_dim)):
            columns(d, 1, 8)


def emit_outer(
    b: ir.IRBuilder,
    vectors: int,
    keep: bool,  # C = alpha C + A B, else C = A B
    a: ir.Value,
    a_row: ir.Value,  # bytes from one row of A to the next
    a_step: ir.Value,  # bytes from A[i, k] to A[i, k + 1]
    right: ir.Value,  # B, float32 [depth, vectors * WIDTH]
    c: ir.Value,  # float32 [rows, vectors * WIDTH]
    alpha: ir.Value,  # float32 [vectors * WIDTH]
    rows: ir.Value,  # a multiple of 8
    depth: ir.Value,
) -> None:
    height = max(4, min(8, ACCUMULATORS // vectors))
    stride = vectors * WIDTH * 4
    factors = [_read(b, _at(b, alpha, v * WIDTH, 4), LANES) for v in range(vectors)] if keep else []

    def block(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        row = b.add(a, b.mul(i, a_row))
        lefts = [b.add(row, b.mul(a_row, int64(r))) for r in range(height)]
        target = _at(b, c, i, stride)
        places = [b.add(target, int64(r * stride + v * WIDTH * 4)) for r in range(height) for v in range(vectors)]
        if keep:
            sums = [b.fmul(_read(b, place, LANES), factors[n % vectors]) for n, place in enumerate(places)]
        else:
            sums = [const(0.0)] * len(places)

        def step(k: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            line = _at(b, right, k, stride)
            loaded = [_read(b, b.add(line, int64(v * WIDTH * 4)), LANES) for v in range(vectors)]
            offset = b.mul(k, a_step)
            result = []
            for r, left in enumerate(lefts):
                x = emit_splat(b, _read(b, b.add(left, offset), _f32))
                result += [emit_fma(b, x, y, total) for y, total in zip(loaded, sums[r * vectors :], strict=False)]
            return result

        _, sums = loop(b, int64(0), depth, 1, sums, step)
        for place, total in zip(places, sums, strict=True):
            b.store(total, pointer(b, place, LANES), align=4)
        return []

    loop(b, int64(0), rows, height, [], block)


def _product(emit: Callable[..., None], addresses: int) -> Any:
    """An operation of compiled code: two literal settings, then integers."""

    def typing(settings: Sequence[Any]) -> Any:
        if not all(isinstance(s, (types.IntegerLiteral, types.BooleanLiteral)) for s in settings):
            return None
        literals = [s.literal_value for s in settings]

        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            emit(b, *literals, *args[2:])
            return context.get_dummy_value()

        return types.void(*settings, *[types.int64] * addresses), generate

    if addresses == 6:
        return intrinsic(prefer_literal=True)(lambda ctx, x, y, a, b, c, d, e, f: typing([x, y]))
    if addresses == 7:
        return intrinsic(prefer_literal=True)(lambda ctx, x, y, a, b, c, d, e, f, g: typing([x, y]))
    return intrinsic(prefer_literal=True)(lambda ctx, x, y, a, b, c, d, e, f, g, h: typing([x, y]))


scores = _product(emit_scores, 6)  # (kv, rows, q, keys, ahead, scores, head_dim, count)
weigh = _product(emit_weigh, 7)  # (kv, rows, weights, values, ahead, out, alpha, head_dim, count)
outer = _product(emit_outer, 8)  # (vectors, keep, a, a_row, a_step, right, c, alpha, rows, depth)
