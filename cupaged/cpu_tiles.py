"""The two products of prefill on the matrix unit of recent x86 processors (AMX), for bfloat16, where Linux lets us use it.

One instruction adds the products of 16 rows and 16 columns over 32 elements; sums are float32. Layouts are those of `cpu_prefill`,
transposed, so that either path can go on where the other stopped:
    S^T [tokens, lanes] = K Q^T      K is read as it lies in its pages; queries are packed in pairs once a row tile
    O^T [head_dim, lanes] += V^T P^T     V is transposed in blocks of 32 tokens by 32 elements; weights are rounded to bfloat16

The unit takes denormal numbers for 0. What could make that matter goes the usual way: queries that are denormal or above 2^60
(what is lost of a logit is under 256 * 2^60 * 2^-126, times the scale), and tiles with values below 2^-60.

Tile registers: 0 to 3 sums, one for each vector of lanes, 4 the left operand, 5 the right. Source: Intel, "Architecture Instruction
Set Extensions Programming Reference", chapter 3 (tile configuration, TDPBF16PS).
"""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .cpu_formats import copy_bytes
from .cpu_vector import (
    HOST_FEATURES,
    LANES,
    WIDTH,
    compiled,
    const_int,
    emit_shuffle,
    emit_transpose,
    int64,
    loop,
    operation,
    peek_int,
    peek_long,
    pointer,
    poke_int,
    poke_long,
)

BUILT = WIDTH == 16 and all(HOST_FEATURES.get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16"))
SLICE = 32  # elements that one instruction sums over
GROUP = 16  # rows of a tile
_ROW = 64  # bytes of a tile's row
_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_WORDS = ir.VectorType(_i16, SLICE)


@cache
def allowed() -> bool:
    """Whether tiles can be used; asks Linux for them at the first call."""
    if not BUILT or sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def _tile(b: ir.IRBuilder, name: str, *args: ir.Value | int) -> None:
    """An instruction on tiles; numbers name registers, the second value of a load or store is its stride."""
    values = [ir.Constant(_i8, x) if isinstance(x, int) else x for x in args]
    if len(values) == 3 and isinstance(args[1], ir.Value):
        values[1] = b.inttoptr(values[1], _i8.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [x.type for x in values])
    b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.x86.{name}"), values)


def _configure(b: ir.IRBuilder, memory: ir.Value) -> None:
    if not BUILT:
        return
    table = bytearray(64)
    table[0] = 1  # palette
    for tile in range(6):
        table[16 + 2 * tile] = _ROW
        table[48 + tile] = GROUP
    kind = ir.ArrayType(_i8, 64)
    b.store(ir.Constant(kind, table), pointer(b, memory, kind), align=1)
    load = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [_i8.as_pointer()]), "llvm.x86.ldtilecfg"
    )
    b.call(load, [pointer(b, memory, _i8)])


def _release(b: ir.IRBuilder) -> None:
    if BUILT:
        _tile(b, "tilerelease")


def _tile_scores(
    b: ir.IRBuilder,
    vectors: int,
    queries: ir.Value,  # [vectors, head_dim / 2, 16] pairs of bfloat16
    places: ir.Value,  # int64 [groups, 2]: address and stride of 16 rows of K
    groups: ir.Value,
    scores: ir.Value,  # float32 [groups * 16, vectors * 16]
    head_dim: ir.Value,
) -> None:
    if not BUILT:
        return
    stride = int64(_ROW * vectors)
    query_bytes = b.mul(head_dim, int64(_ROW // 2))

    def group(g: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        at = b.add(places, b.mul(g, int64(16)))
        place, step = (b.load(pointer(b, b.add(at, int64(n)), _i64)) for n in (0, 8))
        for v in range(vectors):
            _tile(b, "tilezero", v)

        def part(d: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            _tile(b, "tileloadd64", 4, b.add(place, b.mul(d, int64(2))), step)
            for v in range(vectors):
                pairs = b.add(b.add(queries, b.mul(query_bytes, int64(v))), b.mul(d, int64(_ROW // 2)))
                _tile(b, "tileloadd64", 5, pairs, int64(_ROW))
                _tile(b, "tdpbf16ps", v, 4, 5)
            return []

        loop(b, int64(0), head_dim, SLICE, [], part)
        target = b.add(scores, b.mul(b.mul(g, int64(GROUP)), stride))
        for v in range(vectors):
            _tile(b, "tilestored64", v, b.add(target, int64(_ROW * v)), stride)
        return []

    loop(b, int64(0), groups, 1, [], group)


def _tile_weigh(
    b: ir.IRBuilder,
    vectors: int,
    values: ir.Value,  # bfloat16 [head_dim, tokens]
    weights: ir.Value,  # [tokens / 2, vectors * 16] pairs of bfloat16
    out: ir.Value,  # float32 [head_dim, vectors * 16]
    head_dim: ir.Value,
    tokens: ir.Value,  # a multiple of SLICE
    value_stride: ir.Value,
) -> None:
    if not BUILT:
        return
    stride = int64(_ROW * vectors)

    def rows(d: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        target = b.add(out, b.mul(d, stride))
        left = b.add(values, b.mul(d, value_stride))
        for v in range(vectors):
            _tile(b, "tileloadd64", v, b.add(target, int64(_ROW * v)), stride)

        def part(t: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
            _tile(b, "tileloadd64", 4, b.add(left, b.mul(t, int64(2))), value_stride)
            right = b.add(weights, b.mul(b.lshr(t, int64(1)), stride))
            for v in range(vectors):
                _tile(b, "tileloadd64", 5, b.add(right, int64(_ROW * v)), stride)
                _tile(b, "tdpbf16ps", v, 4, 5)
            return []

        loop(b, int64(0), tokens, SLICE, [], part)
        for v in range(vectors):
            _tile(b, "tilestored64", v, b.add(target, int64(_ROW * v)), stride)
        return []

    loop(b, int64(0), head_dim, GROUP, [], rows)


def _transpose_values(
    b: ir.IRBuilder,
    addresses: ir.Value,  # int64 [tokens]: rows of V, bfloat16
    values: ir.Value,  # bfloat16 [head_dim, tokens]
    head_dim: ir.Value,
    tokens: ir.Value,  # a multiple of SLICE
    value_stride: ir.Value,
) -> ir.Value:
    """Returns 0 unless a value other than 0 is below 2^-60, which the products of tiles could lose."""
    if not BUILT:
        return int64(0)

    def block(t: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
        first = b.add(addresses, b.mul(t, int64(8)))
        sources = [b.load(pointer(b, b.add(first, int64(8 * n)), _i64)) for n in range(SLICE)]

        def columns(d: ir.Value, found: list[ir.Value]) -> list[ir.Value]:
            small = found[0]
            for half in range(2):  # 16 elements of 32 tokens; registers hold no more
                pairs = []
                for n in range(0, SLICE, 2):
                    both = [
                        b.load(pointer(b, b.add(source, b.mul(d, int64(2))), _WORDS), align=2)
                        for source in sources[n : n + 2]
                    ]
                    if half == 0:
                        for x in both:
                            magnitude = b.and_(x, const_int(0x7FFF, 16, SLICE))
                            tiny = b.icmp_unsigned(
                                "<", b.sub(magnitude, const_int(1, 16, SLICE)), const_int((67 << 7) - 1, 16, SLICE)
                            )
                            small = b.or_(small, tiny)
                    lanes = [SLICE * side + 16 * half + i for i in range(16) for side in range(2)]
                    pairs.append(b.bitcast(emit_shuffle(b, both[0], both[1], lanes), ir.VectorType(_i32, 16)))
                target = b.add(b.add(values, b.mul(b.add(d, int64(16 * half)), value_stride)), b.mul(t, int64(2)))
                for i, row in enumerate(emit_transpose(b, pairs)):
                    place = b.add(target, b.mul(value_stride, int64(i)))
                    b.store(row, pointer(b, place, row.type), align=4)
            return [small]

        return loop(b, int64(0), head_dim, SLICE, found, columns)[1]

    nothing = ir.Constant(ir.VectorType(ir.IntType(1), SLICE), [False] * SLICE)
    _, found = loop(b, int64(0), tokens, SLICE, [nothing], block)
    return b.zext(b.bitcast(found[0], _i32), _i64)


def _pack_weights(
    b: ir.IRBuilder,
    vectors: int,
    scores: ir.Value,  # float32 [tokens, vectors * 16]
    weights: ir.Value,  # [tokens / 2, vectors * 16] pairs of bfloat16
    tokens: ir.Value,
) -> None:
    if not BUILT:
        return
    words = ir.VectorType(ir.IntType(16), SLICE)
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    narrow = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VectorType(_BFloat(), SLICE), [LANES, LANES]), name
    )

    def pair(t: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        for v in range(vectors):
            first = b.add(scores, b.mul(t, int64(_ROW * vectors)))
            x, y = (b.load(pointer(b, b.add(first, int64(_ROW * n)), LANES), align=4) for n in (v, v + vectors))
            both = b.bitcast(b.call(narrow, [y, x]), words)  # the second argument comes first
            packed = emit_shuffle(b, both, both, [16 * side + i for i in range(16) for side in range(2)])
            place = b.add(weights, b.mul(b.lshr(t, int64(1)), int64(_ROW * vectors)))
            b.store(packed, pointer(b, b.add(place, int64(_ROW * v)), words), align=4)
        return []

    loop(b, int64(0), tokens, 2, [], pair)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


# Functions of compiled code; vectors is a literal.
configure = operation(types.void, [types.int64], _configure)  # (memory of 64 bytes)
release = operation(types.void, [], _release)
tile_scores = operation(
    types.void, [types.int64] * 5, _tile_scores, 1
)  # (vectors, queries, places, groups, scores, head_dim)
tile_weigh = operation(
    types.void, [types.int64] * 6, _tile_weigh, 1
)  # (vectors, values, weights, out, head_dim, tokens, stride)
transpose_values = operation(
    types.int64, [types.int64] * 5, _transpose_values
)  # (addresses, values, head_dim, tokens, stride)
pack_weights = operation(types.void, [types.int64] * 3, _pack_weights, 1)  # (vectors, scores, weights, tokens)


@compiled
def pack_query(source: int, target: int, head_dim: int) -> bool:
    """Lay one bfloat16 query row into a lane of tiles; False when a product with a denormal number could matter."""
    good = True
    for pair in range(head_dim // 2):
        x = peek_int(source + 4 * pair)
        poke_int(target + _ROW * pair, x)
        for half in (x & 0x7FFF, x >> 16 & 0x7FFF):
            good &= half == 0 or 0x80 <= half < (127 + 60) << 7
    return good


@compiled
def find_places(places: int, keys: int, count: int, stride: int, head_dim: int, block_size: int, copies: int) -> None:
    """Where the groups of 16 keys lie: in their pages if at equal distances, else in `copies` [groups, 16, head_dim]."""
    for first in range(0, count, GROUP):
        at = keys + 8 * first
        place, step = peek_long(at), stride
        # sixteen tokens lie in two blocks at most, so equal ends mean equal distances
        if block_size < GROUP or peek_long(at + 8 * (GROUP - 1)) - place != (GROUP - 1) * stride:
            place, step = copies + 2 * head_dim * first, 2 * head_dim
            for t in range(GROUP):
                copy_bytes(peek_long(at + 8 * t), place + step * t, step)
        poke_long(places + first, place)  # 16 bytes a group of 16
        poke_long(places + first + 8, step)
