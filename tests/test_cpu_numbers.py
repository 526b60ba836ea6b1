"""The CPU backend's numbers: formats read and written exactly, denormals kept, exp and tanh to float32 rounding."""

from __future__ import annotations

import platform

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupaged
from cupaged.arrays import numpy_dtype

pytest.importorskip("numba", reason="the CPU backend needs numba: pip install 'cupaged[cpu]'")

from cupaged.cpu_formats import E4M3, E5M2, F16, F32, store_row, widen_row
from cupaged.cpu_functions import exp, exp_or_zero, tanh
from cupaged.cpu_vector import HOST_FEATURES, WIDTH, entry, load, store


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_denormal_keys_values_and_queries_count(dtype: str) -> None:
    tiny = np.float32(1e-39)  # below the smallest normal number of both formats
    for rows in (1, 20):
        q = np.zeros((rows, 1, 8), numpy_dtype(dtype))
        k_cache, v_cache = np.zeros((2, 1, 1, 4, 8), numpy_dtype(dtype))
        v_cache[:] = tiny
        q[..., 0], k_cache[..., 0, 0] = 2e38, tiny  # logits 0.2 and 0: the tiny key must not be lost
        lse = np.empty((rows, 1), np.float32)
        out = cupaged.paged_attention(
            q, k_cache, v_cache, [[0]], [4], query_start_loc=[0, rows], causal=False, scale=1.0, lse=lse
        )
        seen = lse[:, 0] > -np.inf
        logit = float(q[0, 0, 0]) * float(k_cache[0, 0, 0, 0])
        np.testing.assert_allclose(lse[seen, 0], np.log(np.exp(logit) + 3), rtol=1e-6)
        np.testing.assert_allclose(out[seen].astype(np.float64), float(v_cache[0, 0, 0, 0]), rtol=1e-2)
        assert seen.sum() == min(rows, 4)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code_reads_as_its_value(kv_dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(numpy_dtype(kv_dtype)).astype(np.float32)
    for rows in (1, 4, 20):  # one visible key: the output is its value
        out = cupaged.paged_attention(
            np.zeros((rows, 1, 256), np.float32), np.zeros((1, 1, 1, 256), np.uint8), codes.reshape(1, 1, 1, 256),
            [[0]], [1], query_start_loc=[0, rows], kv_dtype=kv_dtype, causal=False,
        )  # fmt: skip
        np.testing.assert_array_equal(out[-1, 0], expected)


@pytest.mark.parametrize("head_dim", [8, 72, 80, 128])
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code_of_a_key_is_multiplied(kv_dtype: str, head_dim: int, rng: np.random.Generator) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(numpy_dtype(kv_dtype)).astype(np.float32)
    codes, values = codes[~np.isinf(values)], values[~np.isinf(values)]
    n, places = np.arange(len(codes)), rng.integers(head_dim, size=len(codes))
    k_cache = np.zeros((len(codes), 1, 1, head_dim), np.uint8)
    k_cache[n, 0, 0, places] = codes
    for group in (1, 4, 20):  # one key a sequence and queries that see one element of it: the logit is its value
        q = np.zeros((len(codes), group, head_dim), np.float32)
        q[n, :, places] = 1
        _, lse = cupaged.paged_attention(
            q,
            k_cache,
            np.zeros_like(k_cache),
            n[:, None],
            np.ones(len(codes), np.int32),
            kv_dtype=kv_dtype,
            scale=1.0,
            return_lse=True,
        )
        np.testing.assert_array_equal(lse, np.repeat(values[:, None], group, axis=1))


@entry
def _write(kind: int, source: int, target: int, count: int, scale: float) -> None:
    if kind == F16:
        store_row(F32, F16, source, target, count, scale)
    elif kind == E4M3:
        store_row(F32, E4M3, source, target, count, scale)
    else:
        store_row(F32, E5M2, source, target, count, scale)


@entry
def _read_half(source: int, target: int, count: int) -> None:
    widen_row(F16, source, target, count)


def encoded(x: np.ndarray, kind: int, dtype: np.dtype) -> np.ndarray:
    got = np.zeros(x.shape, dtype)
    _write(kind, x.ctypes.data, got.ctypes.data, x.size, np.float32(1))
    return got


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_small_formats_are_rounded_to_nearest_even(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):  # NaN and overflow are among the inputs
        x = rng.integers(0, 2**32, 2048, dtype=np.uint32).view(np.float32)
        x = np.concatenate(
            [x, rng.standard_normal(2048).astype(np.float32) * np.float32(10.0) ** rng.integers(-12, 6, 2048)]
        )
        x = np.concatenate([x, x.astype(np.float16).astype(np.float32)]).astype(np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(encoded(x, F16, np.dtype(np.float16)), x.astype(np.float16))
    for kind, name, largest in ((E4M3, "fp8_e4m3", 448), (E5M2, "fp8_e5m2", 57344)):
        dtype = numpy_dtype(name)
        # ties lie between neighbours
        codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        codes = np.sort(codes[np.isfinite(codes)])
        both = np.concatenate([x, (codes[1:] + codes[:-1]) / 2, codes])
        expected = np.clip(both, -largest, largest).astype(dtype)
        np.testing.assert_array_equal(encoded(both, kind, dtype).astype(np.float32), expected.astype(np.float32))


def test_float16_is_read_exactly() -> None:
    half = np.arange(65536, dtype=np.uint16).view(np.float16)
    got = np.zeros(half.shape, np.float32)
    _read_half(half.ctypes.data, got.ctypes.data, half.size)
    np.testing.assert_array_equal(got, half.astype(np.float32))


@entry
def _map_exp(x: int, y: int, count: int) -> None:
    for at in range(0, 4 * count, 4 * WIDTH):
        store(y + at, exp(load(x + at)))


@entry
def _map_tanh(x: int, y: int, count: int) -> None:
    for at in range(0, 4 * count, 4 * WIDTH):
        store(y + at, tanh(load(x + at)))


def units_off(got: np.ndarray, exact: np.ndarray) -> float:
    """The largest error in units of the last place of float32, denormals' own unit where the result is one."""
    unit = np.maximum(np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64), 2.0**-149)
    return float((np.abs(got.astype(np.float64) - exact) / unit).max())


def test_exp_and_tanh_are_exact_to_float32_rounding(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-104, 0, 1 << 16), -(10.0 ** rng.uniform(-9, 2, 1 << 16))]).astype(np.float32)
    y = np.empty_like(x)
    _map_exp(x.ctypes.data, y.ctypes.data, x.size)
    assert units_off(y, np.exp(x.astype(np.float64))) < 1.5
    x = np.concatenate([x, -x, x / 100, -x / 100]).astype(np.float32)
    y = np.empty_like(x)
    _map_tanh(x.ctypes.data, y.ctypes.data, x.size)
    assert units_off(y, np.tanh(x.astype(np.float64))) < 2.6

    special = np.full(WIDTH, 0, np.float32)
    special[:4] = -np.inf, np.nan, -1e38, -104.5
    y = np.empty_like(special)
    _map_exp(special.ctypes.data, y.ctypes.data, WIDTH)
    np.testing.assert_array_equal(y[:5], [0, np.nan, 0, 0, 1])


@entry
def _map_exp_or_zero(x: int, y: int, count: int) -> None:
    for at in range(0, 4 * count, 4 * WIDTH):
        store(y + at, exp_or_zero(load(x + at)))


def test_exp_or_zero_is_exact_to_float32_rounding_until_it_is_zero(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-87.3, 0, 1 << 16), -(10.0 ** rng.uniform(-9, 1.9, 1 << 16))]).astype(np.float32)
    y = np.empty_like(x)
    _map_exp_or_zero(x.ctypes.data, y.ctypes.data, x.size)
    exact = np.exp(x.astype(np.float64))
    fused = HOST_FEATURES.get("fma") or platform.machine().lower() in ("aarch64", "arm64")
    unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    # of every float32, with fused products: 0.73 units at most beside |x| / 20 of them
    assert (np.abs(y - exact) / unit < (0.8 - x / 20 if fused else 1.5 - x)).all()
    assert np.abs(y - exact).max() < (2.0**-24 if fused else 2.0**-22)
    x = np.full(2 * WIDTH, 0, np.float32)
    x[:7] = -np.inf, np.nan, -1e38, -88.5, -87.7, -90.0, -0.0
    y = np.empty_like(x)
    _map_exp_or_zero(x.ctypes.data, y.ctypes.data, x.size)
    np.testing.assert_array_equal(y[[0, 1, 2, 3, 5, 6, 7]], [0, np.nan, 0, 0, 0, 1, 1])
    assert y[4] < 2.0**-126


@pytest.mark.fuzz
def test_exp_and_tanh_of_every_float32() -> None:
    """Measured with 8 lanes: 0.92 units for exp, 2.55 for tanh (between 0.5 and 1; elsewhere 1.03)."""
    for function, exact, sign, low, high in (
        (_map_exp, np.exp, -1, 2.0**-25, 104.5),
        (_map_tanh, np.tanh, 1, 2.0**-13, 20.0),
    ):
        first, last = (int(np.float32(x).view(np.uint32)) for x in (low, high))
        for at in range(first, last, 1 << 22):
            x = sign * np.arange(at, at + (1 << 22), dtype=np.uint32).view(np.float32)
            y = np.empty_like(x)
            function(x.ctypes.data, y.ctypes.data, x.size)
            assert units_off(y, exact(x.astype(np.float64))) < (1 if function is _map_exp else 2.6)
