"""The two products of attention, blocked so that their sums stay in registers; LLVM IR is written out by Python loops.

    few rows   `scores`  S[r, t] = q[r] . K[t]             WIDTH sums at a time, reduced to one vector of scores
               `weigh`   O[r] = alpha[r] O[r] + p[r] V     rows of V are loaded once for all query rows
    many rows  `outer`   C[i] = alpha C[i] + sum_k A[i, k] B[k]   lanes are query rows: S^T = K Q^T and O^T = V^T P^T, no reduction

K and V rows are found through arrays of 64-bit addresses, one a token, so a product never sees a page, and any stride or block
size costs the same. Addresses past the last token are only prefetched: they may be anything. Scores of few rows lie in vectors of
[row, token]: WIDTH / 4 tokens for 3 or 4 rows, WIDTH / 2 for 2. With bfloat16 pages `scores` takes each whole 32 elements of a query,
and `weigh` leaves each whole 2 * WIDTH of its output, in the order of `emit_load_pair`.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .cpu_formats import BF16, F32, ITEM_BYTES, emit_load, emit_load_pair
from .cpu_vector import (
    LANES,
    WIDTH,
    const,
    emit_fma,
    emit_maximum,
    emit_prefetch,
    emit_shuffle,
    emit_splat,
    floats,
    int64,
    ints,
    loop,
    operation,
    pointer,
)

LINE = 64  # bytes of a cache line
AHEAD = 16  # tokens between a row that is read and the row that is prefetched then
SUMS = 16 if WIDTH == 16 else 8  # vectors of sums that fit in registers beside their operands

_f32, _i64 = ir.FloatType(), ir.IntType(64)


def _at(b: ir.IRBuilder, address: ir.Value, index: ir.Value | int, size: int) -> ir.Value:
    offset = int64(index * size) if isinstance(index, int) else b.mul(index, int64(size))
    return b.add(address, offset)


def _read(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return b.load(pointer(b, address, kind), align=4)


def tokens_of(rows: int) -> int:
    """Tokens of a block: a vector of scores is [rows, padded to a power of two; tokens]."""
    return WIDTH // (1 << (rows - 1).bit_length())


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
    keys: ir.Value,  # int64 [count, padded to whole blocks, + AHEAD]
    scores: ir.Value,  # float32 [blocks, rows, tokens]: a vector a block of tokens, as `tokens_of(rows)` says
    head_dim: ir.Value,
    count: ir.Value,
) -> None:
    size, tokens = ITEM_BYTES[kv], tokens_of(rows)
    row_bytes = b.mul(head_dim, int64(4))
    unroll = max(1, LINE // (size * WIDTH))

    def block(t: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        k, following = (
            [_read(b, _at(b, keys, b.add(t, int64(first + u)), 8), _i64) for u in range(tokens)] for first in (0, AHEAD)
        )

        def add_products(d: ir.Value, sums: list[ir.Value], width: int) -> list[ir.Value]:
            def vector(address: ir.Value, kind: int) -> ir.Value:
                x = emit_load(b, address, kind, width)
                return x if width == WIDTH else emit_shuffle(b, x, const(0.0, width), range(WIDTH))

            loaded = [vector(_at(b, address, d, size), kv) for address in k]
            result = []
            for r in range(rows):
                query = vector(_at(b, b.add(q, b.mul(row_bytes, int64(r))), d, 4), F32)
                result += [emit_fma(b, query, x, total) for x, total in zip(loaded, sums[r * tokens :], strict=False)]
            return result

        def line(d: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            for address in following:
                emit_prefetch(b, _at(b, address, d, size))
            if kv != BF16:
                for part in range(unroll):
                    sums = add_products(b.add(d, int64(part * WIDTH)), sums, WIDTH)
                return sums
            for part in range(0, unroll, 2):
                at = b.add(d, int64(part * WIDTH))
                pairs = [emit_load_pair(b, _at(b, address, at, size)) for address in k]
                for side in range(2):
                    for r in range(rows):
                        row = b.add(q, b.mul(row_bytes, int64(r)))
                        query = emit_load(b, _at(b, row, b.add(at, int64(side * WIDTH)), 4))
                        for u, pair in enumerate(pairs):
                            sums[r * tokens + u] = emit_fma(b, query, pair[side], sums[r * tokens + u])
            return sums

        sums = [const(0.0)] * (rows * tokens)
        step = unroll * WIDTH
        d, sums = loop(b, int64(0), b.sub(head_dim, int64(step - 1)), step, sums, line)
        for width in (WIDTH,) * (unroll > 1) + (8,) * (WIDTH > 8):

            def rest(d: ir.Value, sums: list[ir.Value], width: int = width) -> list[ir.Value]:
                return add_products(d, sums, width)

            d, sums = loop(b, d, b.sub(head_dim, int64(width - 1)), width, sums, rest)
        sums += [const(0.0)] * (WIDTH - len(sums))
        place = _at(b, scores, b.mul(t, int64(WIDTH // tokens)), 4)
        b.store(_transposed_sums(b, sums), pointer(b, place, LANES), align=4)
        return []

    loop(b, int64(0), count, tokens, [], block)


def emit_weigh(
    b: ir.IRBuilder,
    kv: int,
    rows: int,
    weights: ir.Value,  # float32, as `scores`
    values: ir.Value,  # int64 [count + AHEAD]
    out: ir.Value,  # float32 [rows, head_dim]
    alpha: ir.Value,  # float32 [rows, tokens]: what the old output is worth now, the same for all tokens
    head_dim: ir.Value,
    count: ir.Value,
) -> None:
    size, tokens = ITEM_BYTES[kv], tokens_of(rows)
    row_bytes = b.mul(head_dim, int64(4))
    most = max(1, min(8, SUMS // rows))

    def columns(d: ir.Value, vectors: int, width: int) -> None:
        kind = ir.VectorType(_f32, width)
        places = [
            _at(b, b.add(out, b.mul(row_bytes, int64(r))), b.add(d, int64(v * width)), 4)
            for r in range(rows)
            for v in range(vectors)
        ]
        sums = []
        for r in range(rows):
            factor = emit_splat(b, _read(b, _at(b, alpha, r * tokens, 4), _f32), width)
            sums += [b.fmul(_read(b, place, kind), factor) for place in places[r * vectors : (r + 1) * vectors]]

        def token(t: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            value = _at(b, _read(b, _at(b, values, t, 8), _i64), d, size)
            if kv == BF16 and vectors > 1:
                starts = [b.add(value, int64(v * width * size)) for v in range(0, vectors, 2)]
                loaded = [x for start in starts for x in emit_load_pair(b, start)]
            else:
                loaded = [emit_load(b, b.add(value, int64(v * width * size)), kv, width) for v in range(vectors)]
            following = _at(b, _read(b, _at(b, values, b.add(t, int64(AHEAD)), 8), _i64), d, size)
            for offset in range(0, vectors * width * size, LINE):
                emit_prefetch(b, b.add(following, int64(offset)))
            before = b.mul(
                b.and_(t, int64(-tokens)), int64(WIDTH // tokens - 1)
            )  # lanes of other rows in earlier blocks
            weight_of = _at(b, weights, b.add(t, before), 4)
            result = []
            for r in range(rows):
                weight = emit_splat(b, _read(b, b.add(weight_of, int64(4 * r * tokens)), _f32), width)
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
    height = max(4, min(8, SUMS // vectors))
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


def _largest_of_rows(b: ir.IRBuilder, rows: int, x: ir.Value) -> ir.Value:
    distance = tokens_of(rows) // 2
    while distance:
        x = emit_maximum(b, x, emit_shuffle(b, x, x, [i ^ distance for i in range(WIDTH)]))
        distance //= 2
    return x


def _load_positions(b: ir.IRBuilder, rows: int, address: ir.Value) -> ir.Value:
    tokens = tokens_of(rows)
    x = b.load(pointer(b, address, ir.VectorType(ir.IntType(32), tokens)), align=4)
    return emit_shuffle(b, x, x, [i % tokens for i in range(WIDTH)])


# Functions of compiled code; kv, rows, vectors and keep are literals.
scores = operation(types.void, [types.int64] * 5, emit_scores, 2)  # (kv, rows, q, keys, scores, head_dim, count)
weigh = operation(
    types.void, [types.int64] * 6, emit_weigh, 2
)  # (kv, rows, weights, values, out, alpha, head_dim, count)
outer = operation(
    types.void, [types.int64] * 8, emit_outer, 2
)  # (vectors, keep, a, a_row, a_step, right, c, alpha, rows, depth)
largest_of_rows = operation(floats, [floats], _largest_of_rows, 1)  # (rows, x): in every lane the largest of its row
load_positions = operation(
    ints, [types.int64], _load_positions, 1
)  # (rows, address): of one block of tokens, for every row
