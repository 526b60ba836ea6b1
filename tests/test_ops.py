"""The model's operations, compiled and as NumPy expressions, against float64."""

from __future__ import annotations

import numpy as np
import ops
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.fixture(autouse=True, params=["compiled", "expressions"], scope="module")
def _kind(request: pytest.FixtureRequest) -> object:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "expressions":
            patch.setattr(ops, "_compiled", lambda: None)
        elif ops._compiled() is None:
            pytest.skip("numba is not installed")
        yield


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(0, 30), size=st.integers(1, 70), outputs=st.integers(2, 40), seed=st.integers(0, 1 << 32))
def test_linear_is_the_product(rows: int, size: int, outputs: int, seed: int) -> None:
    x, w = normal(seed, rows, 2 * size)[:, ::2], normal(seed + 1, outputs, size)
    out = ops.linear(x, w)
    assert out.dtype == np.float32
    x, w = x.astype(np.float64), w.astype(np.float64)
    # a rounding for each product and each sum, whatever their order
    assert (np.abs(out - x @ w.T) <= (size + 1) * 2.0**-24 * (np.abs(x) @ np.abs(w).T)).all()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 9), size=st.integers(1, 70), seed=st.integers(0, 1 << 32))
def test_rms_norm_scales_each_row_to_unit_size(rows: int, size: int, seed: int) -> None:
    x, weight = 100 * normal(seed, rows, size), normal(seed + 1, size)
    out = ops.rms_norm(x, weight, 1e-5)
    exact = x.astype(np.float64)
    assert out.dtype == np.float32
    np.testing.assert_allclose(
        out, exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-5) * weight, rtol=1e-5, atol=1e-6
    )


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not ops.rms_norm(np.zeros((2, 8), np.float32), np.ones(8, np.float32), 1e-5).any()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 9), size=st.integers(1, 70), seed=st.integers(0, 1 << 32))
def test_swiglu_gates_one_half_by_the_other(rows: int, size: int, seed: int) -> None:
    gate_up = 10 * normal(seed, rows, 2 * size)
    gate, up = gate_up[:, :size].astype(np.float64), gate_up[:, size:].astype(np.float64)
    out = ops.swiglu(gate_up)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("error")
def test_swiglu_closes_and_opens_wholly_at_large_gates() -> None:
    gate_up = np.array([[-1000.0, 1000.0, 0.0, 3.0, 2.0, 5.0]], np.float32)
    assert ops.swiglu(gate_up).tolist() == [[0.0, 2000.0, 0.0]]
