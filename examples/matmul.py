"""`x @ w.T` for float32 on the CPU at the speed of memory, also for a handful of rows.

Three ways, by the number of rows of x:

- one row is a matrix-vector product, and BLAS reads the weights at memory speed;
- many rows (a prompt) are a matrix product, and BLAS is bound by arithmetic;
- a few rows (one token of each sequence of a batch) are what BLAS is bad at: it copies w into a packed form first, which costs more
  than the product. Cut into tiles so small that BLAS skips packing (OpenBLAS on AVX-512) or packs within the cache, the product is
  nearly twice as fast; the tiles of one product are shared out over threads.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

Array = Any  # a NumPy or a CuPy array

_FEW_ROWS = 24
_TILE = 262144  # multiplications of one tile: below this OpenBLAS stays on the calling thread
_SHARE = 1 << 18  # fewest weights worth another thread


def linear(x: Array, w: Array) -> Array:
    """`x [n, in] @ w.T [in, out] -> [n, out]`, w stored as `[out, in]`."""
    n = len(x)
    if not isinstance(w, np.ndarray) or not 1 < n <= _FEW_ROWS:
        return x @ w.T
    rows = _tile_rows(len(w), _TILE // (n * w.shape[1]))
    out = np.empty((n, len(w)), np.float32)
    tiles = w.reshape(-1, rows, w.shape[1]).swapaxes(1, 2)  # [tiles, in, rows]
    outs = out.reshape(n, -1, rows).swapaxes(0, 1)  # [tiles, n, rows]
    threads = min(_num_cores(), 1 + w.size // _SHARE, len(tiles))
    cuts = [len(tiles) * i // threads for i in range(threads + 1)]
    others = [_pool().submit(np.matmul, x, tiles[i:j], outs[i:j]) for i, j in zip(cuts[1:-1], cuts[2:], strict=True)]
    np.matmul(x, tiles[: cuts[1]], outs[: cuts[1]])
    for other in others:
        other.result()
    return out


@lru_cache
def _tile_rows(rows: int, limit: int) -> int:
    """The largest divisor of `rows` up to `limit`, at least 1."""
    return max(d for d in range(1, max(1, min(rows, limit)) + 1) if rows % d == 0)


@lru_cache(maxsize=1)
def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, _num_cores() - 1), thread_name_prefix="matmul")
