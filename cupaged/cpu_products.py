"""The two products of attention of few query rows, blocked so that their sums stay in registers; LLVM IR is written out by Python loops.

    `scores`  S[r, t] = q[r] . K[t]   WIDTH sums at a time, reduced to one vector of scores
    `weigh`   O[r] += p[r] V          rows of V are loaded once for all query rows

K and V rows are found through arrays of 64-bit addresses, one a token, and a distance from there to the rows of the head, so a product
never sees a page, and any stride or block size costs the same. The caller names the rows that are read next, which are prefetched
meanwhile; those addresses may be anything. Scores lie in vectors of [row, token]: WIDTH / 4 tokens for 3 or 4 rows,
WIDTH / 2 for 2. With PAIRED formats `scores` takes each whole line of a query's elements, and `weigh` leaves each whole 2 * WIDTH
of its output, in the order of `emit_load_pair`.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from .cpu_formats import F32, ITEM_BYTES, PAIRED, emit_load, emit_load_pair
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
SUMS = 16 if WIDTH == 16 else 8  # vectors of sums that fit in registers beside their operands

_f32, _i64 = ir.FloatType(), ir.IntType(64)


def _at(b: ir.IRBuilder, address: ir.Value, index: ir.Value | int, size: int) -> ir.Value:
    offset = int64(index * size) if isinstance(index, int) else b.mul(index, int64(size))
    return b.add(address, offset)


def _read(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return b.load(pointer(b, address, kind), align=4)


def _rows(b: ir.IRBuilder, places: ir.Value, offset: ir.Value, t: ir.Value, count: int) -> list[ir.Value]:
    """Addresses of the rows of `count` tokens from t on."""
    return [b.add(_read(b, _at(b, places, b.add(t, int64(u)), 8), _i64), offset) for u in range(count)]


def _together(kv: int, rows: int) -> int:
    """Rows of K that are read side by side.

    With 32 registers a whole block. With 16 few: as many as give sums enough; where there is less to multiply for each byte, as in
    float32, one row after another if that gives enough, which the streams of the hardware follow best.
    """
    if WIDTH == 16:
        return tokens_of(rows)
    if kv == F32:
        return 2 if rows == 3 else 1
    return 2 if rows <= 2 else 4


def _near(kv: int, rows: int) -> int:
    """How many bytes further on lies what is prefetched, in a stream of float32 rows that are read for one query row; 0: what the caller
    names is. There is so little to do that the processor looks far ahead by itself, and follows one stream better than two."""
    return 512 if WIDTH == 8 and kv == F32 and rows == 1 else 0


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
    keys: ir.Value,  # int64 [count, padded to whole blocks]: rows of the first head
    offset: ir.Value,  # bytes from there to the rows of this head
    ahead: ir.Value,  # int64 [count, padded]: rows to prefetch meanwhile
    ahead_offset: ir.Value,
    scores: ir.Value,  # float32 [blocks, rows, tokens]: a vector a block of tokens, as `tokens_of(rows)` says
    head_dim: ir.Value,
    count: ir.Value,
) -> None:
    size, tokens = ITEM_BYTES[kv], tokens_of(rows)
    row_bytes = b.mul(head_dim, int64(4))
    unroll = max(1, LINE // (size * WIDTH))
    together = min(tokens, _together(kv, rows))
    spread = min(unroll, SUMS // (rows * together))  # sums of one product

    def products(t: ir.Value) -> list[ir.Value]:
        k = _rows(b, keys, offset, t, together)
        near = _near(kv, rows)
        following = [b.add(x, int64(near)) for x in k] if near else _rows(b, ahead, ahead_offset, t, together)

        def add_products(
            d: ir.Value, sums: list[ir.Value], loaded: list[ir.Value], width: int = WIDTH, part: int = 0
        ) -> list[ir.Value]:
            sums = list(sums)
            for r in range(rows):
                query = widened(emit_load(b, _at(b, b.add(q, b.mul(row_bytes, int64(r))), d, 4), F32, width))
                for u, x in enumerate(loaded):
                    n = (part % spread * rows + r) * together + u
                    sums[n] = emit_fma(b, query, x, sums[n])
            return sums

        def widened(x: ir.Value) -> ir.Value:
            return x if x.type.count == WIDTH else emit_shuffle(b, x, const(0.0, x.type.count), range(WIDTH))

        def line(d: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            for address in following:
                emit_prefetch(b, _at(b, address, d, size))
            for part in range(0, unroll, 2 if kv in PAIRED else 1):
                at = b.add(d, int64(part * WIDTH))
                if kv in PAIRED:
                    pairs = [emit_load_pair(b, _at(b, address, at, size), kv) for address in k]
                    for side in range(2):
                        there = b.add(at, int64(side * WIDTH))
                        sums = add_products(there, sums, [pair[side] for pair in pairs], part=side)
                else:
                    sums = add_products(at, sums, [emit_load(b, _at(b, x, at, size), kv) for x in k], part=part)
            return sums

        sums = [const(0.0)] * (spread * rows * together)
        step = unroll * WIDTH
        d, sums = loop(b, int64(0), b.sub(head_dim, int64(step - 1)), step, sums, line)
        for width in (WIDTH,) * (unroll > 1) + (8,) * (WIDTH > 8):

            def rest(d: ir.Value, sums: list[ir.Value], width: int = width) -> list[ir.Value]:
                loaded = [widened(emit_load(b, _at(b, x, d, size), kv, width)) for x in k]
                return add_products(d, sums, loaded, width)

            d, sums = loop(b, d, b.sub(head_dim, int64(width - 1)), width, sums, rest)
        while len(sums) > rows * together:
            half = len(sums) // 2
            sums = [b.fadd(x, y) for x, y in zip(sums[:half], sums[half:], strict=True)]
        return sums

    def block(t: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        parts = [products(b.add(t, int64(u))) for u in range(0, tokens, together)]
        sums = [x for r in range(rows) for part in parts for x in part[r * together : (r + 1) * together]]
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
    values: ir.Value,  # int64 [count]: rows of the first head
    offset: ir.Value,
    ahead: ir.Value,  # as `scores`
    ahead_offset: ir.Value,
    out: ir.Value,  # float32 [rows, head_dim]
    head_dim: ir.Value,
    count: ir.Value,
) -> None:
    """Columns of the output stay in registers over all tokens; every element of V is converted once.

    Rows of V are read a piece at a time, in an order that no stream of the hardware follows, but they come from the caches: what is
    prefetched for the next product is a run of rows in order, from the first line to the last, a few with each token.
    """
    size, tokens = ITEM_BYTES[kv], tokens_of(rows)
    row_bytes = b.mul(head_dim, int64(4))
    most = max(1, min(8, SUMS // rows))

    def columns(d: ir.Value, vectors: int, width: int, lines: int, cursor: list[ir.Value]) -> list[ir.Value]:
        """`vectors` columns over all tokens, and with each token `lines` lines prefetched from `cursor` on, a row and a place in it."""
        kind = ir.VectorType(_f32, width)
        places = [
            _at(b, b.add(out, b.mul(row_bytes, int64(r))), b.add(d, int64(v * width)), 4)
            for r in range(rows)
            for v in range(vectors)
        ]

        def token(t: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            sums, cursor = carried[: len(places)], carried[len(places) :]
            value = _at(b, _rows(b, values, offset, t, 1)[0], d, size)
            if kv in PAIRED and vectors > 1:
                pairs = [b.add(value, int64(v * width * size)) for v in range(0, vectors, 2)]
                loaded = [x for pair in pairs for x in emit_load_pair(b, pair, kv)]
            else:
                loaded = [emit_load(b, b.add(value, int64(v * width * size)), kv, width) for v in range(vectors)]
            if lines:
                row, place = cursor
                near = _near(kv, rows)
                following = (
                    b.add(value, int64(near)) if near else b.add(b.add(_read(b, row, _i64), ahead_offset), place)
                )
                for n in range(lines):
                    emit_prefetch(b, b.add(following, int64(LINE * n)))
                place = b.add(place, int64(LINE * lines))
                done = b.icmp_signed(">=", place, b.mul(head_dim, int64(size)))
                cursor = [b.select(done, b.add(row, int64(8)), row), b.select(done, int64(0), place)]
            weight_of = _weight(b, rows, weights, t)
            result = []
            for r in range(rows):
                weight = emit_splat(b, _read(b, b.add(weight_of, int64(4 * r * tokens)), _f32), width)
                result += [emit_fma(b, weight, x, total) for x, total in zip(loaded, sums[r * vectors :], strict=False)]
            return result + cursor

        _, carried = loop(b, int64(0), count, 1, [_read(b, place, kind) for place in places] + cursor, token)
        for place, total in zip(places, carried, strict=False):
            b.store(total, pointer(b, place, kind), align=4)
        return carried[len(places) :]

    d: ir.Value = int64(0)
    cursor = [ahead, int64(0)]
    for vectors in [1 << n for n in range(most.bit_length())][::-1]:
        step = vectors * WIDTH
        for whole in dict.fromkeys((max(step, LINE // size), step)):  # whole lines first: as many are prefetched

            def body(
                d: ir.Value, cursor: list[ir.Value], vectors: int = vectors, step: int = step, whole: int = whole
            ) -> list[ir.Value]:
                for part in range(0, whole, step):
                    cursor = columns(b.add(d, int64(part)), vectors, WIDTH, 0 if part else whole * size // LINE, cursor)
                return cursor

            d, cursor = loop(b, d, b.sub(head_dim, int64(whole - 1)), whole, cursor, body)
    if WIDTH > 8:
        with b.if_then(b.icmp_signed("<", d, head_dim)):
            columns(d, 1, 8, 0, cursor)


def _weight(b: ir.IRBuilder, rows: int, weights: ir.Value, t: ir.Value) -> ir.Value:
    """Where the weight of token t for the first row stands; those of other rows follow at distances of `tokens_of(rows)`."""
    tokens = tokens_of(rows)
    before = b.mul(b.and_(t, int64(-tokens)), int64(WIDTH // tokens - 1))  # lanes of other rows in earlier blocks
    return _at(b, weights, b.add(t, before), 4)


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


# Functions of compiled code; kv and rows are literals.
scores = operation(types.void, [types.int64] * 8, emit_scores, 2)  # (kv, rows, q, keys, scores, head_dim, count)
weigh = operation(types.void, [types.int64] * 8, emit_weigh, 2)  # (kv, rows, weights, values, out, head_dim, count)
largest_of_rows = operation(floats, [floats], _largest_of_rows, 1)  # (rows, x): in every lane the largest of its row
load_positions = operation(
    ints, [types.int64], _load_positions, 1
)  # (rows, address): of one block of tokens, for every row
