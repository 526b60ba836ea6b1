"""`x @ w.T` in float32 at the speed of memory, for one row of x or several.

Decoding multiplies every weight by one row a sequence, so it is bound by reading the weights once. BLAS reaches that for one row
only: for a few it first copies w into a packed form, which costs more than the product (8 rows took 2.8 times as long as one). The
kernel here reads w once and keeps 2 rows of w against 4 rows of x in registers. It uses Numba's threads, as the attention between
two products does: a second team of threads, BLAS's, would hold the cores for a while after each of its products, which made the
first step after a prompt four times as long. Without Numba the product is NumPy's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

Array = Any  # a NumPy or a CuPy array

_BLOCK = 8  # rows of w that meet each 4 rows of x while these are in the first-level cache


def linear(x: Array, w: Array) -> Array:
    """`x [n, in] @ w.T [in, out] -> [n, out]`, w stored as `[out, in]`, contiguous float32 with at least 2 rows."""
    kernel = _kernel() if isinstance(w, np.ndarray) else None
    if kernel is None:
        return x @ w.T
    out = np.empty((len(x), len(w)), np.float32)
    kernel(np.ascontiguousarray(x), w, out)
    return out


@lru_cache(maxsize=1)
def _kernel() -> Callable[[Array, Array, Array], None] | None:
    try:
        from numba import njit, prange
    except ImportError:
        return None

    # Sums may be reordered, which is what lets them be vectors; NaN and infinities keep their meaning.
    @njit("(f4[:, ::1], f4[:, ::1], f4[:, ::1])", parallel=True, fastmath={"reassoc", "contract", "nsz"}, cache=True)  # type: ignore[untyped-decorator,unused-ignore]
    def product(x: Array, w: Array, out: Array) -> None:
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

    return product  # type: ignore[no-any-return,unused-ignore]
