"""`x @ w.T` in float32 at the speed of memory, for one row of x or a handful.

Decoding multiplies every weight by one row a sequence, so it is bound by reading the weights once. BLAS reaches that for one row
only: for a few it first copies w into a packed form, which costs more than the product (8 rows took 2.8 times as long as one). The
kernel here reads w once and keeps 2 rows of w against 4 rows of x in registers. It uses Numba's threads, as the attention between
two products does: two teams of threads would wait for each other's cores. Without Numba, and for many rows, the product is NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

Array = Any  # a NumPy or a CuPy array

_FEW_ROWS = 24  # BLAS is faster from here on


def linear(x: Array, w: Array) -> Array:
    """`x [n, in] @ w.T [in, out] -> [n, out]`, w stored as `[out, in]`, both contiguous float32."""
    if isinstance(w, np.ndarray) and 0 < len(x) <= _FEW_ROWS and len(w) > 1:
        kernel = _few_rows_kernel()
        if kernel is not None:
            out = np.empty((len(x), len(w)), np.float32)
            kernel(np.ascontiguousarray(x), w, out)
            return out
    return x @ w.T


@lru_cache(maxsize=1)
def _few_rows_kernel() -> Callable[[Array, Array, Array], None] | None:
    try:
        from numba import njit, prange
    except ImportError:
        return None

    # Sums may be reordered, which is what lets them be vectors; NaN and infinities keep their meaning.
    @njit("(f4[:, ::1], f4[:, ::1], f4[:, ::1])", parallel=True, fastmath={"reassoc", "contract", "nsz"}, cache=True)
    def few_rows(x: Array, w: Array, out: Array) -> None:
        rows, size = x.shape
        last = len(w) - 2
        for pair in prange((len(w) + 1) // 2):
            i = min(2 * pair, last)  # an odd last row is computed beside the one before it
            row = 0
            while row + 4 <= rows:
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
                a0 = b0 = np.float32(0)
                for k in range(size):
                    a0 += w[i, k] * x[row, k]
                    b0 += w[i + 1, k] * x[row, k]
                out[row, i], out[row, i + 1] = a0, b0
                row += 1

    return few_rows
