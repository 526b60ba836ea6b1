"""Vectors of float32 for Numba: LLVM vector types of the host's width, and the few operations that attention needs.

Numba's own loops leave the choice of registers to the auto-vectoriser. Here a value of type `floats` *is* one vector register of
`WIDTH` lanes, so compiled code says what stays in registers. Addresses are plain integers. No fast-math flag is set anywhere:
products and sums fuse where the machine can (`llvm.fmuladd`), NaN and infinities keep their meaning.

`emit_*` functions build LLVM IR and are shared with the register-blocked products in `cpu_products`; the names without the
prefix can be called from compiled code.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
from llvmlite import ir
from numba import cfunc, config, njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

F = TypeVar("F", bound=Callable[..., Any])


def _host_features() -> dict[str, bool]:
    chosen = config.CPU_FEATURES
    if chosen is None:
        return dict(llvm.get_host_cpu_features())
    return {feature[1:]: feature[0] == "+" for feature in chosen.split(",") if feature}


HOST_FEATURES = _host_features()
# Lanes of a vector; 8 are two registers of NEON or SSE, which then have twice as many sums to work on.
WIDTH = 16 if HOST_FEATURES.get("avx512bw") else 8
_f32, _i64, _i32, _i16, _i8, _i1 = (
    ir.FloatType(),
    ir.IntType(64),
    ir.IntType(32),
    ir.IntType(16),
    ir.IntType(8),
    ir.IntType(1),
)
LANES = ir.VectorType(_f32, WIDTH)


def compiled(function: F) -> F:
    """Compile on first use, without bounds checks. For functions that entry points call: machine code is kept only with theirs."""
    return cast(F, njit(error_model="numpy")(function))


def entry(function: F) -> F:
    """Compile on first use what Python calls, release the GIL in it, and keep the machine code on disk."""
    return cast(F, _cached(njit, nogil=True, error_model="numpy")(function))


def parallel_entry(function: F) -> F:
    """The same for a function with a `prange`, which runs on Numba's threads."""
    return cast(F, _cached(njit, parallel=True, nogil=True, error_model="numpy")(function))


def worker(function: Callable[..., None]) -> Any:
    """Compile `function(params_address, worker)` into machine code with an address that any thread may call; kept on disk."""
    return _cached(cfunc, types.void(types.int64, types.int64), error_model="numpy")(function)


def _cached(decorator: Any, *args: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        # Numba names files after functions and numbers the specialisations of one: two processes that compile different ones at the
        # same time may take the same number, and one's code is then kept, and run, for the other's. So each has a name of its own.
        held = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        constants = [f"{name}{x}" for name, cell in held if isinstance(x := cell.cell_contents, int | float)]
        function.__qualname__ = "_".join([function.__qualname__, *constants])
        try:
            return decorator(*args, cache=True, **options)(function)
        except RuntimeError:  # no writable place for the cache, as in a frozen or read-only installation
            return decorator(*args, **options)(function)

    return decorate


class _Vector(types.Type):  # type: ignore[misc]
    def __init__(self, lane: str) -> None:
        super().__init__(name=f"{lane}x{WIDTH}")


class _Floats(_Vector):
    pass


class _Ints(_Vector):
    pass


class _Mask(_Vector):
    pass


floats, ints, mask = _Floats("float32"), _Ints("int32"), _Mask("bool")


def _model(lane: ir.Type) -> Any:
    class Model(models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, dmm: Any, fe_type: Any) -> None:
            super().__init__(dmm, fe_type, ir.VectorType(lane, WIDTH))

    return Model


register_model(_Floats)(_model(_f32))
register_model(_Ints)(_model(_i32))
register_model(_Mask)(_model(_i1))


# ---- pieces of IR ----


def const(value: float, width: int = WIDTH) -> ir.Constant:
    """A float32 in every lane. LLVM takes float constants as the bits of the double of the same value."""
    rounded = struct.unpack("f", struct.pack("f", value))[0]
    return ir.Constant(ir.VectorType(_f32, width), [rounded] * width)


def const_int(value: int, bits: int, width: int = WIDTH) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(bits), width), [value] * width)


def int64(value: int) -> ir.Constant:
    return ir.Constant(_i64, value)


def loop(
    b: ir.IRBuilder,
    start: ir.Value,
    stop: ir.Value,
    step: int,
    carried: Sequence[ir.Value],
    body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
) -> tuple[ir.Value, list[ir.Value]]:
    """`for i in range(start, stop, step)` with values carried round in registers; returns the first i not run, and the values."""
    before = b.block
    head, inside, after = (b.append_basic_block(name) for name in ("head", "inside", "after"))
    b.branch(head)
    b.position_at_end(head)
    i = b.phi(_i64)
    phis = [b.phi(value.type) for value in carried]
    b.cbranch(b.icmp_signed("<", i, stop), inside, after)
    b.position_at_end(inside)
    results = body(i, list(phis))
    following = b.add(i, int64(step))
    b.branch(head)
    for phi, first, last in zip([i, *phis], [start, *carried], [following, *results], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(last, b.block)
    b.position_at_end(after)
    return i, list(phis)


def emit_splat(b: ir.IRBuilder, x: ir.Value, width: int = WIDTH) -> ir.Value:
    one = b.insert_element(ir.Constant(ir.VectorType(x.type, width), ir.Undefined), x, ir.Constant(_i32, 0))
    return emit_shuffle(b, one, one, [0] * width)


def emit_shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value, lanes: Sequence[int]) -> ir.Value:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(_i32, len(lanes)), list(lanes)))


def emit_transpose(b: ir.IRBuilder, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """In every group of as many lanes as there are vectors, a power of two: lane j of vector i and lane i of vector j change places."""
    rows, lanes = list(rows), range(rows[0].type.count)
    distance = 1
    while distance < len(rows):
        low = [lane if not lane & distance else len(lanes) + lane - distance for lane in lanes]
        high = [lane + distance if not lane & distance else len(lanes) + lane for lane in lanes]
        for i in range(len(rows)):
            if not i & distance:
                x, y = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = emit_shuffle(b, x, y, low), emit_shuffle(b, x, y, high)
        distance *= 2
    return rows


def call(b: ir.IRBuilder, name: str, result: ir.Type, args: Sequence[ir.Value]) -> ir.Value:
    """Call an LLVM intrinsic overloaded on `result`."""
    suffix = f"v{result.count}f32" if isinstance(result, ir.VectorType) else "f32"
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(result, [a.type for a in args]), f"llvm.{name}.{suffix}"
    )
    return b.call(function, args)


def emit_fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    return call(b, "fmuladd", x.type, [x, y, z])


def emit_maximum(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """The larger of each lane; a NaN in `y` is kept, one in `x` is dropped: one instruction on x86."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def pointer(b: ir.IRBuilder, address: ir.Value, to: ir.Type) -> ir.Value:
    return b.inttoptr(address, to.as_pointer())


def emit_fold(b: ir.IRBuilder, x: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Combine all lanes of `x` into one scalar, halves first: a fixed order."""
    while x.type.count > 1:
        half = x.type.count // 2
        low, high = (emit_shuffle(b, x, x, range(at, at + half)) for at in (0, half))
        x = combine(low, high)
    return b.extract_element(x, ir.Constant(_i32, 0))


# ---- operations of compiled code ----


def operation(result: Any, arguments: Sequence[Any], emit: Callable[..., Any], literals: int = 0) -> Any:
    """`emit(builder, *values)` as a function of compiled code, whose first `literals` arguments are constants that Python code reads."""

    def definition(context: Any, *given: Any) -> Any:
        settings = given[:literals]
        if not all(isinstance(x, (types.IntegerLiteral, types.BooleanLiteral)) for x in settings):
            return None

        def generate(context: Any, b: ir.IRBuilder, _: Any, args: Sequence[ir.Value]) -> ir.Value:
            value = emit(b, *(x.literal_value for x in settings), *args[literals:])
            return context.get_dummy_value() if result is types.void else value

        return result(*settings, *arguments), generate

    names = [f"x{n}" for n in range(1 + literals + len(arguments))]  # Numba calls with what the signature says
    definition.__signature__ = Signature([Parameter(x, Parameter.POSITIONAL_OR_KEYWORD) for x in names])  # type: ignore[attr-defined]
    return intrinsic(prefer_literal=literals > 0)(definition)


_address = types.int64


def emit_prefetch(b: ir.IRBuilder, address: ir.Value) -> None:
    function = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(ir.VoidType(), [_i8.as_pointer(), _i32, _i32, _i32]), "llvm.prefetch.p0"
    )
    b.call(
        function, [pointer(b, address, _i8), *(ir.Constant(_i32, x) for x in (0, 2, 1))]
    )  # to read, into L2, as data


def emit_store(b: ir.IRBuilder, address: ir.Value, x: ir.Value) -> None:
    b.store(x, pointer(b, address, x.type), align=4)


load = operation(floats, [_address], lambda b, a: b.load(pointer(b, a, LANES), align=4))
load_ints = operation(ints, [_address], lambda b, a: b.load(pointer(b, a, ir.VectorType(_i32, WIDTH)), align=4))
store = operation(types.void, [_address, floats], emit_store)
splat = operation(floats, [types.float32], emit_splat)
splat_int = operation(ints, [types.int32], emit_splat)
add = operation(floats, [floats, floats], lambda b, x, y: b.fadd(x, y))
subtract = operation(floats, [floats, floats], lambda b, x, y: b.fsub(x, y))
multiply = operation(floats, [floats, floats], lambda b, x, y: b.fmul(x, y))
divide = operation(floats, [floats, floats], lambda b, x, y: b.fdiv(x, y))
fma = operation(floats, [floats, floats, floats], emit_fma)
maximum = operation(floats, [floats, floats], emit_maximum)
total = operation(types.float32, [floats], lambda b, x: emit_fold(b, x, lambda y, z: b.fadd(y, z)))
select_finite = operation(  # -inf becomes 0: what is subtracted from logits that are all -inf
    floats, [floats], lambda b, x: b.select(b.fcmp_unordered("!=", x, const(-math.inf)), x, const(0.0))
)  # fmt: skip
to_float = operation(floats, [ints], lambda b, x: b.sitofp(x, LANES))
subtract_int = operation(ints, [ints, ints], lambda b, x, y: b.sub(x, y))
within = operation(  # low <= x < high
    mask, [ints, ints, ints],
    lambda b, x, low, high: b.and_(b.icmp_signed(">=", x, low), b.icmp_signed("<", x, high)),
)  # fmt: skip
differs = operation(  # whether any lane does; NaN differs from all
    types.boolean, [floats, floats],
    lambda b, x, y: b.icmp_unsigned("!=", b.bitcast(b.fcmp_unordered("!=", x, y), ir.IntType(WIDTH)), ir.Constant(ir.IntType(WIDTH), 0)),
)  # fmt: skip
choose = operation(floats, [mask, floats, floats], lambda b, m, x, y: b.select(m, x, y))

_scalars = {"f32": (types.float32, _f32), "i32": (types.int32, _i32), "i64": (types.int64, _i64)}


def _peek(kind: str) -> Any:
    numba_type, llvm_type = _scalars[kind]
    return operation(numba_type, [_address], lambda b, a: b.load(pointer(b, a, llvm_type), align=4))


def _poke(kind: str) -> Any:
    numba_type, _ = _scalars[kind]
    return operation(types.void, [_address, numba_type], emit_store)


peek_float, peek_int, peek_long = (_peek(kind) for kind in _scalars)
poke_float, poke_int, poke_long = (_poke(kind) for kind in _scalars)


def _count_up(b: ir.IRBuilder, place: ir.Value, first: ir.Value, step: ir.Value, count: ir.Value) -> None:
    lanes = ir.VectorType(first.type, 8)
    size = first.type.width // 8
    steps = b.mul(emit_splat(b, step, 8), ir.Constant(lanes, list(range(8))))
    start = b.add(emit_splat(b, first, 8), steps)
    stride = emit_splat(b, b.mul(step, ir.Constant(step.type, 8)), 8)

    def body(i: ir.Value, values: list[ir.Value]) -> list[ir.Value]:
        b.store(values[0], pointer(b, b.add(place, b.mul(i, int64(size))), lanes), align=4)
        return [b.add(values[0], stride)]

    loop(b, int64(0), count, 8, [start], body)


# (place, first, step, count): first, first + step, ... stored at `place`, up to 7 more of them than `count`
count_up_long = operation(types.void, [_address, types.int64, types.int64, types.int64], _count_up)
count_up_int = operation(types.void, [_address, types.int32, types.int32, types.int64], _count_up)
as_pointer = operation(types.voidptr, [_address], lambda b, a: pointer(b, a, _i8))


def _fetch_add(b: ir.IRBuilder, address: ir.Value, amount: ir.Value) -> ir.Value:
    return b.atomic_rmw("add", pointer(b, address, _i64), amount, "acq_rel")


def _call_worker(b: ir.IRBuilder, kernel: ir.Value, params: ir.Value, number: ir.Value) -> None:
    b.call(pointer(b, kernel, ir.FunctionType(ir.VoidType(), [_i64, _i64])), [params, number])


call_worker = operation(types.void, [_address, _address, types.int64], _call_worker)
fetch_add = operation(types.int64, [_address, types.int64], _fetch_add)
