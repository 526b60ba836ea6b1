"""exp and tanh of vectors of float32."""

from __future__ import annotations

import math

from llvmlite import ir
from numba.core import cgutils

from .cpu_vector import LANES, WIDTH, call, const, const_int, emit_fma, emit_maximum, floats, operation

_i32, _i16 = ir.IntType(32), ir.IntType(16)


def _exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """exp to about one unit in the last place for x <= 88, denormal results and exp(-inf) = 0 included.

    Cody and Waite, "Software Manual for the Elementary Functions" (1980): x = n ln 2 + r, |r| <= ln 2 / 2; exp(r) by a polynomial
    of degree 6; and a scaling by 2^n that rounds a denormal result once.
    """
    x = emit_maximum(b, const(-105.0), x)  # exp(-105) rounds to 0
    n = call(b, "rint", x.type, [b.fmul(x, const(1.4426950408889634))])
    r = emit_fma(
        b, n, const(-0.693359375), x
    )  # ln 2 in two parts, the first with few enough bits for n * part to be exact
    r = emit_fma(b, n, const(2.12194440e-4), r)
    p = const(_EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        p = emit_fma(b, p, r, const(coefficient))
    if WIDTH == 16:
        kinds = [LANES, LANES, LANES, _i16, _i32]
        scale = cgutils.get_or_insert_function(
            b.module, ir.FunctionType(LANES, kinds), "llvm.x86.avx512.mask.scalef.ps.512"
        )
        current_rounding = 4
        return b.call(scale, [p, n, const(0.0), ir.Constant(_i16, 0xFFFF), ir.Constant(_i32, current_rounding)])
    n = b.fptosi(n, ir.VectorType(_i32, WIDTH))
    half = b.ashr(n, const_int(1, 32))
    for power in (half, b.sub(n, half)):
        two = b.bitcast(b.shl(b.add(power, const_int(127, 32)), const_int(23, 32)), LANES)
        p = b.fmul(p, two)
    return p


# exp(r) for |r| <= ln 2 / 2, highest power first: (exp(r) - 1 - r) / r^2 fitted at Chebyshev points, off by 2^-27 of exp(r).
_EXP_COEFFICIENTS = (
    0.0013945555547252297, 0.008368970826268196, 0.04166628047823906, 0.166665181517601, 0.5, 1.0, 1.0,
)  # fmt: skip


def _exp_or_zero(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """exp for x <= 0 to about 1 + |x| / 20 units in the last place, so to 2^-24 of 1; where it is below 2^-126, it may be 0.

    As `_exp` with fewer instructions: n comes from the last bits of a number so large that they count in ones, already in place to
    become 2^n, and ln 2 is one number, whose error counts n times. Without fused products that is 1 + |x| units.
    """
    ones = const(1.5 * 2.0**23 + 127)
    x = emit_maximum(b, const(-88.0), x)  # n = -127: an exponent of 0
    shifted = emit_fma(b, x, const(1.4426950408889634), ones)
    r = emit_fma(b, b.fsub(shifted, ones), const(-math.log(2)), x)
    p = const(_EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        p = emit_fma(b, p, r, const(coefficient))
    power = b.shl(b.bitcast(shifted, ir.VectorType(_i32, WIDTH)), const_int(23, 32))
    return b.fmul(p, b.bitcast(power, LANES))


def _tanh(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """tanh to float32 rounding: an odd polynomial up to 0.5, beyond it 1 - 2 / (exp(2 |x|) + 1)."""
    a = call(b, "fabs", x.type, [x])
    small = emit_maximum(b, b.fneg(a), const(-20.0))  # tanh(20) rounds to 1; min(a, 20), negated
    e = _exp(b, b.fmul(small, const(2.0)))  # exp(-2a): 1 - 2e / (1 + e)
    large = b.fsub(const(1.0), b.fdiv(b.fmul(const(2.0), e), b.fadd(const(1.0), e)))
    large = b.select(b.fcmp_ordered("<", x, const(0.0)), b.fneg(large), large)
    z = b.fmul(x, x)
    p = const(_TANH_COEFFICIENTS[-1])
    for coefficient in _TANH_COEFFICIENTS[-2::-1]:
        p = emit_fma(b, p, z, const(coefficient))
    near = emit_fma(b, b.fmul(x, z), p, x)
    return b.select(b.fcmp_ordered("<", a, const(0.5)), near, large)


# Taylor coefficients of (tanh(x) - x) / x^3 in x^2; the first left out is below 2^-26 of the result at x = 0.5.
_TANH_COEFFICIENTS = (
    -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925, 21844 / 6081075, -929569 / 638512875, 6404582 / 10854718875,
)  # fmt: skip


exp = operation(floats, [floats], _exp)
exp_or_zero = operation(floats, [floats], _exp_or_zero)
tanh = operation(floats, [floats], _tanh)
