"""Attention on CuPy arrays, for tests that are not about its values: one small case and what the oracle says."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupaged import reference

SHAPE = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": "float16"}


class Host:
    """Three sequences, their keys and values, and what the oracle says."""

    def __init__(self, rng: np.random.Generator) -> None:
        def random(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float16)

        self.q, self.k, self.v = random(3, 6, 64), random(20, 2, 16, 64), random(20, 2, 16, 64)
        self.tables = rng.permutation(20)[:15].reshape(3, 5).astype(np.int32)
        self.lens = np.array([70, 1, 33], np.int32)

    def check(self, cupy: Any, out: Any, **options: Any) -> None:
        expected, _ = reference.paged_attention(self.q, self.k, self.v, self.tables, self.lens, **options)
        np.testing.assert_allclose(cupy.asnumpy(out), expected, atol=4e-3)
