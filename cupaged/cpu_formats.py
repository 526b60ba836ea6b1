"""Number formats: how the elements of pages, queries and results become float32 lanes and back.

fp8 codes and float16 are read exactly, and every format is written rounded to nearest even. A format is named by its number, which
is a literal in compiled code.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .cpu_vector import (
    HOST_FEATURES,
    LANES,
    WIDTH,
    call,
    const,
    const_int,
    emit_fma,
    emit_shuffle,
    emit_splat,
    emit_store,
    int64,
    loop,
    operation,
    pointer,
)

KV_CODES = {"float32": 0, "float16": 1, "bfloat16": 2, "fp8_e4m3": 3, "fp8_e5m2": 4}
F32, F16, BF16, E4M3, E5M2 = range(5)
PAIRED = (BF16, E4M3, E5M2)  # what `emit_load_pair` reads
ITEM_BYTES = (4, 2, 2, 1, 1)
# e4m3 codes are read as float16 numbers 2^8 too small; whoever reads them multiplies their scale by this.
READ_FACTOR = (1.0, 1.0, 1.0, 256.0, 1.0)
# Without an instruction for float16 LLVM would call a function that Numba does not link.
_CONVERTS_HALF = bool(HOST_FEATURES.get("f16c")) or platform.machine().lower() in ("aarch64", "arm64")

_f32, _i32, _i16, _i8 = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_address = types.int64


def emit_load(b: ir.IRBuilder, address: ir.Value, kv: int = F32, width: int = WIDTH) -> ir.Value:
    """`width` consecutive elements of format `kv` as float32. e4m3 comes without its READ_FACTOR."""
    stored = [_f32, _i16, _i16, _i8, _i8][kv]
    raw = b.load(pointer(b, address, ir.VectorType(stored, width)), align=ITEM_BYTES[kv])
    wide = ir.VectorType(_f32, width)
    if kv == F32:
        return raw
    if kv == F16:
        return emit_half(b, raw)
    if kv == BF16:
        bits = b.shl(b.zext(raw, ir.VectorType(_i32, width)), const_int(16, 32, width))
        return b.bitcast(bits, wide)
    words = b.shl(b.zext(raw, ir.VectorType(_i16, width)), const_int(8, 16, width))
    return emit_half(b, _half_of_code(b, words, kv))


def _half_of_code(b: ir.IRBuilder, words: ir.Value, kv: int) -> ir.Value:
    """fp8 codes in the upper bytes of 16-bit lanes as the bits of float16; of e4m3 without its READ_FACTOR."""

    def fixed(value: int) -> ir.Constant:
        return const_int(value, 16, words.type.count)

    if kv == E5M2:
        return b.and_(words, fixed(0xFF00))
    # Exponent and mantissa one bit lower are in a float16's place, where they mean 2^-8 of the value. All ones are NaN: added to, they
    # reach the bit before, which makes the exponent that of NaN.
    half = b.and_(b.ashr(words, fixed(1)), fixed(0xBF80))
    return b.or_(half, b.and_(b.add(half, fixed(0x80)), fixed(0x4000)))


def emit_load_pair(b: ir.IRBuilder, address: ir.Value, kv: int) -> list[ir.Value]:
    """2 * WIDTH consecutive elements of one of the formats PAIRED as two vectors, even elements and odd ones: fewer instructions than
    two loads in order."""
    if kv == BF16:
        words = b.load(pointer(b, address, ir.VectorType(_i32, WIDTH)), align=2)
        even, odd = b.shl(words, const_int(16, 32)), b.and_(words, const_int(0xFFFF0000, 32))
        return [b.bitcast(even, LANES), b.bitcast(odd, LANES)]
    words = b.load(pointer(b, address, ir.VectorType(_i16, WIDTH)), align=1)
    return [emit_half(b, _half_of_code(b, x, kv)) for x in (b.shl(words, const_int(8, 16)), words)]


def emit_half(b: ir.IRBuilder, half: ir.Value) -> ir.Value:
    """The bits of float16 lanes as float32."""
    width = half.type.count
    wide, bits = ir.VectorType(_f32, width), ir.VectorType(_i32, width)
    if _CONVERTS_HALF:
        return b.fpext(b.bitcast(half, ir.VectorType(ir.HalfType(), width)), wide)
    code = b.zext(half, bits)
    body = b.shl(b.and_(code, const_int(0x7FFF, 32, width)), const_int(13, 32, width))
    finite = b.fmul(b.bitcast(body, wide), const(2.0**112, width))  # exponents are 112 apart; denormals come right too
    special = b.icmp_unsigned(">=", body, const_int(0x7C00 << 13, 32, width))
    magnitude = b.select(special, b.or_(body, const_int(0x7F800000, 32, width)), b.bitcast(finite, bits))
    sign = b.shl(b.and_(code, const_int(0x8000, 32, width)), const_int(16, 32, width))
    return b.bitcast(b.or_(magnitude, sign), wide)


def _encode(b: ir.IRBuilder, x: ir.Value, size: int, mantissa: int, bias: int, largest: float, nan: int) -> ir.Value:
    """float32 lanes rounded to nearest even in a format of `size` bits, saturated at `largest`; NaN stays NaN."""
    width = x.type.count

    def fixed(value: int) -> ir.Constant:
        return const_int(value, 32, width)

    a = call(b, "fabs", x.type, [x])
    a = b.select(b.fcmp_ordered(">", a, const(largest, width)), const(largest, width), a)
    bits, drop = b.bitcast(a, ir.VectorType(_i32, width)), 23 - mantissa
    odd = b.and_(b.lshr(bits, fixed(drop)), fixed(1))
    normal = b.lshr(b.add(bits, b.add(odd, fixed((1 << drop - 1) - 1))), fixed(drop))
    normal = b.sub(normal, fixed(127 - bias << mantissa))
    is_small = b.fcmp_ordered(
        "<", a, const(2.0 ** (1 - bias), width)
    )  # below the smallest normal: a fixed-point number
    smaller = b.select(is_small, a, const(0.0, width))
    unit = const(2.0 ** (bias - 1 + mantissa), width)
    small = b.fptosi(call(b, "rint", x.type, [b.fmul(smaller, unit)]), bits.type)
    code = b.select(is_small, small, b.select(b.fcmp_unordered("uno", a, a), fixed(nan), normal))
    sign = b.and_(b.lshr(b.bitcast(x, bits.type), fixed(32 - size)), fixed(1 << size - 1))
    return b.trunc(b.or_(code, sign), ir.VectorType(ir.IntType(size), width))


def _round(b: ir.IRBuilder, x: ir.Value, kind: int) -> ir.Value:
    """float32 lanes rounded to nearest even in a format; fp8 saturates at its largest finite value."""
    width = x.type.count
    if kind == F32:
        return x
    if kind == F16 and _CONVERTS_HALF:
        return b.fptrunc(x, ir.VectorType(ir.HalfType(), width))
    if kind == F16:
        return _encode(b, x, 16, mantissa=10, bias=15, largest=65536.0, nan=0x7E00)  # 65536 is written as infinity
    if kind == E4M3:
        return _encode(b, x, 8, mantissa=3, bias=7, largest=448.0, nan=0x7F)
    if kind == E5M2:
        return _encode(b, x, 8, mantissa=2, bias=15, largest=57344.0, nan=0x7E)
    # bfloat16 by hand: the machine's own instruction flushes denormals
    bits = b.bitcast(x, ir.VectorType(_i32, width))
    odd = b.and_(b.lshr(bits, const_int(16, 32, width)), const_int(1, 32, width))
    rounded = b.lshr(b.add(bits, b.add(odd, const_int(0x7FFF, 32, width))), const_int(16, 32, width))
    quiet = b.or_(b.lshr(bits, const_int(16, 32, width)), const_int(0x40, 32, width))
    return b.trunc(b.select(b.fcmp_unordered("uno", x, x), quiet, rounded), ir.VectorType(_i16, width))


def emit_elements(
    b: ir.IRBuilder,
    count: ir.Value,
    body: Callable[[ir.Value, int], None],
    widths: tuple[int, ...] = (WIDTH, min(WIDTH, 8)),
) -> None:
    """`body(first, width)` over `count` elements, a multiple of the last of the falling `widths`."""
    i: ir.Value = int64(0)
    for width in dict.fromkeys(widths):

        def run(i: ir.Value, _: list[ir.Value], width: int = width) -> list[ir.Value]:
            body(i, width)
            return []

        i, _ = loop(b, i, b.sub(count, int64(width - 1)), width, [], run)


def _reorder(lanes: Sequence[int]) -> Any:
    """An operation on each whole pair of vectors of a row: (row, count)."""

    def emit(b: ir.IRBuilder, row: ir.Value, count: ir.Value) -> None:
        def body(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            places = [b.add(row, b.mul(b.add(i, int64(n)), int64(4))) for n in (0, WIDTH)]
            x, y = (emit_load(b, place) for place in places)
            emit_store(b, places[0], emit_shuffle(b, x, y, lanes[:WIDTH]))
            emit_store(b, places[1], emit_shuffle(b, x, y, lanes[WIDTH:]))
            return []

        loop(b, int64(0), b.sub(count, int64(2 * WIDTH - 1)), 2 * WIDTH, [], body)

    return operation(types.void, [_address, types.int64], emit)


split_pairs = _reorder([*range(0, 2 * WIDTH, 2), *range(1, 2 * WIDTH, 2)])  # into the order of `emit_load_pair`
join_pairs = _reorder([i // 2 + WIDTH * (i % 2) for i in range(2 * WIDTH)])  # and back


def emit_widen(b: ir.IRBuilder, kv: int, source: ir.Value, target: ir.Value, count: ir.Value) -> None:
    """`count` elements of format `kv` copied as float32."""

    def body(i: ir.Value, width: int) -> None:
        x = emit_load(b, b.add(source, b.mul(i, int64(ITEM_BYTES[kv]))), kv, width)
        emit_store(b, b.add(target, b.mul(i, int64(4))), x)

    emit_elements(b, count, body)


# (kv, source, target, count): elements of a format as float32; kv is a literal
widen_row = operation(types.void, [_address, _address, types.int64], emit_widen, literals=1)


def _narrow_row(
    b: ir.IRBuilder, kind: int, source: ir.Value, target: ir.Value, count: ir.Value, factor: ir.Value
) -> None:
    def body(i: ir.Value, width: int) -> None:
        x = emit_load(b, b.add(source, b.mul(i, int64(4))), F32, width)
        x = b.fmul(x, emit_splat(b, factor, width))
        x = _round(b, x, kind)
        place = pointer(b, b.add(target, b.mul(i, int64(ITEM_BYTES[kind]))), x.type)
        b.store(x, place, align=ITEM_BYTES[kind])

    emit_elements(b, count, body)


# (kind, source, target, count, factor): float32 times factor, rounded to a format; kind is a literal
narrow_row = operation(types.void, [_address, _address, types.int64, types.float32], _narrow_row, literals=1)


def _accumulate(b: ir.IRBuilder, source: ir.Value, target: ir.Value, count: ir.Value, factor: ir.Value) -> None:
    def body(i: ir.Value, width: int) -> None:
        offset = b.mul(i, int64(4))
        place = b.add(target, offset)
        x = emit_load(b, b.add(source, offset), F32, width)
        emit_store(b, place, emit_fma(b, x, emit_splat(b, factor, width), emit_load(b, place, F32, width)))

    emit_elements(b, count, body)


# (source, target, count, factor): target += factor * source, float32
accumulate = operation(types.void, [_address, _address, types.int64, types.float32], _accumulate)


def _multiply_row(b: ir.IRBuilder, row: ir.Value, count: ir.Value, factor: ir.Value) -> None:
    def body(i: ir.Value, width: int) -> None:
        place = b.add(row, b.mul(i, int64(4)))
        emit_store(b, place, b.fmul(emit_load(b, place, F32, width), emit_splat(b, factor, width)))

    emit_elements(b, count, body)


# (row, count, factor): row *= factor, float32
multiply_row = operation(types.void, [_address, types.int64, types.float32], _multiply_row)


def _store_row(
    b: ir.IRBuilder, kind: int, kv: int, source: ir.Value, target: ir.Value, count: ir.Value, scale: ir.Value
) -> None:
    def body(i: ir.Value, width: int) -> None:
        x = emit_load(b, b.add(source, b.mul(i, int64(ITEM_BYTES[kind]))), kind, width)
        x = b.fdiv(x, emit_splat(b, scale, width))
        x = _round(b, x, kv)
        place = pointer(b, b.add(target, b.mul(i, int64(ITEM_BYTES[kv]))), x.type)
        b.store(x, place, align=ITEM_BYTES[kv])

    emit_elements(b, count, body, (WIDTH, 1))


# (kind, kv, source, target, count, scale): any number of elements of format `kind` stored as value / scale in format `kv`; two literals
store_row = operation(types.void, [_address, _address, types.int64, types.float32], _store_row, literals=2)


def _copy_bytes(b: ir.IRBuilder, source: ir.Value, target: ir.Value, count: ir.Value) -> None:
    cgutils.raw_memcpy(b, pointer(b, target, _i8), pointer(b, source, _i8), count, 1)


copy_bytes = operation(types.void, [_address, _address, types.int64], _copy_bytes)
