"""The three operations between two attentions: product with a weight matrix, RMSNorm, SwiGLU. All float32.

Each is one expression for NumPy and CuPy. On the CPU with Numba each is compiled, because decoding is bound by reading every weight
once a step, and what stands beside that reading counts:

- BLAS reads at memory speed for one row of x only: for a few it first copies w into a packed form, which costs more than the
  product (8 rows took 2.8 times as long as one). The product here reads w once and keeps 2 rows of w against 4 rows of x in registers.
- Weights push everything else out of the caches, so that a handful of NumPy calls takes five times as long as in a loop of its own.
- Numba's threads are those of the attention. A second team, BLAS's, holds the cores for a while after each of its products, which
  made the first step after a prompt four times as long.
"""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = Any  # a NumPy or a CuPy array

_BLOCK = 8  # rows of w that meet each 4 rows of x while these are in the first-level cache


def linear(x: Array, w: Array) -> Array:
    """`x [n, in] @ w.T [in, out] -> [n, out]`, w stored as `[out, in]`, contiguous, with at least 2 rows."""
    compiled = _compiled() if isinstance(w, np.ndarray) else None
    if compiled is None:
        return x @ w.T
    out = np.empty((len(x), len(w)), np.float32)
    compiled.linear(np.ascontiguousarray(x), w, out)
    return out


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """`x [n, size] / sqrt(mean(x * x) + eps) * weight [size]`, each row by itself (Zhang and Sennrich, 2019)."""
    compiled = _compiled() if isinstance(x, np.ndarray) else None
    if compiled is None:
        return x * ((x * x).sum(axis=1, keepdims=True) / x.shape[1] + eps) ** -0.5 * weight
    out = np.empty_like(x)
    compiled.rms_norm(x, weight, np.float32(eps), out)
    return out


def swiglu(gate_up: Array) -> Array:
    """`gate / (1 + exp(-gate)) * up`, the halves of `gate_up [n, 2 * size]`; `[n, size]` (Shazeer, 2020)."""
    size = gate_up.shape[1] // 2
    compiled = _compiled() if isinstance(gate_up, np.ndarray) else None
    if compiled is None:
        gate, up = gate_up[:, :size], gate_up[:, size:]
        with np.errstate(over="ignore"):  # exp of a large number is inf, and gate / inf is the right answer
            return gate / (1.0 + np.exp(-gate)) * up  # np.exp of a CuPy array is CuPy's
    out = np.empty((len(gate_up), size), np.float32)
    compiled.swiglu(gate_up, out)
    return out


@lru_cache(maxsize=1)
def _compiled() -> SimpleNamespace | None:
    try:
        from numba import njit, prange
    except ImportError:
        return None

    # Sums may be reordered, which is what lets them be vectors; NaN and infinities keep their meaning.
    flags: dict[str, Any] = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy", "cache": True}

    @njit("(f4[:, ::1], f4[:, ::1], f4[:, ::1])", parallel=True, **flags)  # type: ignore[untyped-decorator,unused-ignore]
    def linear(x: Array, w: Array, out: Array) -> None:
        rows, size = x.shape
        end = len(w)
        for block in prange((end + _BLOCK - 1) // _BLOCK):
            first = block * _BLOCK
            row = 0
            while row + 4 <= rows:
                for pair in range(first, min(first + _BLOCK, end), 2):
                    i = min(pair, end - 2)  # an odd last row is computed beside the one before it
                    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
                    for k in range(size):
                        a, b = w[i, k], w[i + 1, k]
                        x0, x1, x2, x3 = x[row, k], x[row + 1, k], x[row + 2, k], x[row + 3, k]
                        a0 += a * x0
                        a1 += a * x1
                        a2 += a * x2
                        a3 += a * x3
                        b0 += b * x0
                        b1 += b * x1
                        b2 += b * x2
                        b3 += b * x3
                    out[row, i], out[row + 1, i], out[row + 2, i], out[row + 3, i] = a0, a1, a2, a3
                    out[row, i + 1], out[row + 1, i + 1], out[row + 2, i + 1], out[row + 3, i + 1] = b0, b1, b2, b3
                row += 4
            while row < rows:
                for pair in range(first, min(first + _BLOCK, end), 2):
                    i = min(pair, end - 2)
                    a0 = b0 = np.float32(0)
                    for k in range(size):
                        a0 += w[i, k] * x[row, k]
                        b0 += w[i + 1, k] * x[row, k]
                    out[row, i], out[row, i + 1] = a0, b0
                row += 1

    @njit("(f4[:, ::1], f4[::1], f4, f4[:, ::1])", **flags)  # type: ignore[untyped-decorator,unused-ignore]
    def rms_norm(x: Array, weight: Array, eps: float, out: Array) -> None:
        rows, size = x.shape
        for row in range(rows):
            total = np.float32(0)
            for k in range(size):
                total += x[row, k] * x[row, k]
            factor = np.float32(1) / np.sqrt(total / np.float32(size) + eps)
            for k in range(size):
                out[row, k] = x[row, k] * factor * weight[k]

    @njit("(f4[:, ::1], f4[:, ::1])", parallel=True, **flags)  # type: ignore[untyped-decorator,unused-ignore]
    def swiglu(gate_up: Array, out: Array) -> None:
        rows, size = out.shape
        for row in prange(rows):
            for k in range(size):
                gate = gate_up[row, k]
                out[row, k] = gate / (np.float32(1) + np.exp(-gate)) * gate_up[row, size + k]

    return SimpleNamespace(linear=linear, rms_norm=rms_norm, swiglu=swiglu)
