"""types.cuh against ml_dtypes, for every code; with and without the fp8 instruction of sm_89."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .conftest import Run

FP8 = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}
TO_FLOATS = """
extern "C" __global__ void test(const Params p) {
  const kType* x = reinterpret_cast<const kType*>(p.x) + threadIdx.x * kN;
  float f[kN];
  to_floats(load_vec<kN>(x), f);
  for (int i = 0; i < kN; ++i) p.y[threadIdx.x * kN + i] = f[i];
  for (int i = 0; i < kN; ++i) p.z[threadIdx.x * kN + i] = to_float(x[i]);
}
"""
FROM_FLOAT = """
extern "C" __global__ void test(const Params p) {
  const int i = blockIdx.x * 32 + threadIdx.x;
  reinterpret_cast<kType*>(p.y)[i] = from_float<kType>(p.x[i]);
}
"""


@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("name", FP8)
def test_every_fp8_code_becomes_its_value(run: Run, name: str, arch: int) -> None:
    codes = np.arange(256, dtype=np.uint8)
    pairs, singles = np.full(256, np.nan, np.float32), np.full(256, np.nan, np.float32)
    run(TO_FLOATS, defines={"kType": name, "kN": 8}, arch=arch, x=codes, y=pairs, z=singles)
    expected = codes.view(FP8[name]).astype(np.float32)
    if name == "fp8_e4m3" and arch < 89:  # without the instruction, NaN codes read as the next number would
        expected[[0x7F, 0xFF]] = [480, -480]
    np.testing.assert_array_equal(pairs, expected)
    np.testing.assert_array_equal(singles, expected)


@pytest.mark.parametrize(("name", "dtype"), [("__half", np.float16), ("__nv_bfloat16", ml_dtypes.bfloat16)])
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_16_bit_vectors_become_floats(run: Run, name: str, dtype: type, count: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal(32 * count).astype(dtype)
    y, z = np.full(x.shape, np.nan, np.float32), np.full(x.shape, np.nan, np.float32)
    run(TO_FLOATS, defines={"kType": name, "kN": count}, x=x.view(np.uint16), y=y, z=z)
    np.testing.assert_array_equal(y, x.astype(np.float32))
    np.testing.assert_array_equal(z, x.astype(np.float32))


@pytest.mark.parametrize("name", FP8)
def test_floats_become_fp8_by_rounding_to_nearest_even_and_saturating(
    run: Run, name: str, rng: np.random.Generator
) -> None:
    finite = np.sort(np.arange(256, dtype=np.uint8).view(FP8[name]).astype(np.float32))
    finite = finite[np.isfinite(finite)]
    middles = (finite[1:] + finite[:-1]) / 2  # ties
    random = (rng.standard_normal(1024 - 2 * 8) * 2.0 ** rng.integers(-16, 16, 1024 - 2 * 8)).astype(np.float32)
    x = np.concatenate([finite, middles, [np.inf, -np.inf, np.nan, 1e30, -1e30], random]).astype(np.float32)
    x = np.resize(x, (len(x) + 31) // 32 * 32)
    y = np.zeros(len(x), np.uint8)
    run(FROM_FLOAT, defines={"kType": name}, x=x, y=y, grid=(len(x) // 32, 1, 1))
    top = finite[-1]
    expected = np.where(np.isnan(x), x, np.clip(x, -top, top)).astype(FP8[name])
    np.testing.assert_array_equal(y.view(FP8[name]).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(("name", "dtype"), [("__half", np.float16), ("__nv_bfloat16", ml_dtypes.bfloat16)])
def test_floats_become_16_bit_by_rounding_to_nearest_even(
    run: Run, name: str, dtype: type, rng: np.random.Generator
) -> None:
    x: Any = rng.integers(0, 2**32, 3200, dtype=np.uint32).view(np.float32)
    x = np.where(np.abs(x) < 2.0**-126, 0, x).astype(np.float32)  # the device flushes subnormal floats
    x[:3] = [np.inf, -np.inf, np.nan]
    y = np.zeros(len(x), np.uint16)
    run(FROM_FLOAT, defines={"kType": name}, x=x, y=y, grid=(100, 1, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(y.view(dtype).astype(np.float32), x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize("bytes_", [1, 2, 4, 8, 16, 32, 64, 12, 6])
def test_vectors_move_whole_and_in_the_widest_accesses(run: Run, bytes_: int) -> None:
    x = np.arange(32 * bytes_, dtype=np.uint8)
    buffer = np.full(32 * bytes_ + 16, 255, np.uint8)
    y = buffer[-buffer.ctypes.data % 16 :][: 32 * bytes_]
    aligned = np.zeros(32 * bytes_ + 16, np.uint8)
    aligned = aligned[-aligned.ctypes.data % 16 :][: 32 * bytes_]
    aligned[:] = x
    kernel = f"""
    extern "C" __global__ void test(const Params p) {{
      store_vec(p.y + threadIdx.x * {bytes_}, load_vec<{bytes_}>((const unsigned char*)p.x + threadIdx.x * {bytes_}));
    }}"""
    launcher = run(kernel, x=aligned, y=y, kind="checked", traced=True)
    np.testing.assert_array_equal(y, x)
    width = next(w for w in (16, 8, 4, 2, 1) if bytes_ % w == 0)
    assert {traffic.lane_bytes for traffic in launcher.traffic} == {width}
