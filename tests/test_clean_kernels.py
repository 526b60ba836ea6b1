"""Every CUDA-core kernel runs clean under the executor's checks and sanitizers: bounds, races, misaligned and uninitialised reads."""

from __future__ import annotations

import behaviour
import numpy as np
import pytest
import simt_device
from simt import build

import cupaged
from cupaged import classic, cuda, reference


@pytest.fixture(params=["checked", "asan", "tsan"])
def launcher(request: pytest.FixtureRequest) -> simt_device.Launcher:
    if reason := build.unavailable():
        pytest.skip(reason)
    return simt_device.Launcher(75, kind=request.param, num_sms=3)


def test_write_copy_decode_and_merge(launcher: simt_device.Launcher, rng: np.random.Generator) -> None:
    backend = cuda.Backend(launcher)
    with simt_device.in_place_of_a_gpu(backend):
        for dtype, kv_dtype, head_dim, block_size in (("float16", None, 40, 3), ("float32", "fp8_e4m3", 24, 8)):
            case = behaviour.make_case(
                rng, seq_lens=[150, 0, 9], query_lens=[2, 1, 3], head_dim=head_dim, block_size=block_size, group=3, dtype=dtype,
                kv_dtype=kv_dtype, sinks=np.ones(6, np.float32),
            )  # fmt: skip
            copied = case.k_cache.copy()
            spare = np.setdiff1d(np.arange(len(copied)), case.block_tables[case.block_tables >= 0])[:1]
            pairs = np.array([[case.block_tables[0, 0], spare[0]]])
            backend.copy_blocks(copied, pairs)
            np.testing.assert_array_equal(copied[pairs[0, 1]].view(np.uint8), case.k_cache[pairs[0, 0]].view(np.uint8))
            out, lse = cupaged.paged_attention(*case.arguments(), return_lse=True, **case.options)
            behaviour.assert_close(case, out, lse)
            k = rng.standard_normal((4, 2, head_dim)).astype(case.q.dtype)
            expected = case.k_cache.copy(), case.v_cache.copy()
            slots = np.array([5, -1, 0, 2])
            reference.write_kv(k, k, *expected, slots, kv_dtype=kv_dtype)
            cupaged.write_kv(k, k, case.k_cache, case.v_cache, slots, kv_dtype=kv_dtype)
            np.testing.assert_array_equal(np.ascontiguousarray(case.v_cache).view(np.uint8), expected[1].view(np.uint8))
        outs = np.stack([out, out])
        merged, _ = cupaged.merge_states(outs, np.stack([lse, lse]))
        np.testing.assert_allclose(merged, out, atol=1e-6)


@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), [("float16", 40, 8), ("float32", 64, 128)])
def test_the_original_kernels(
    launcher: simt_device.Launcher, rng: np.random.Generator, dtype: str, head_dim: int, block_size: int
) -> None:
    element = np.dtype(dtype)
    x = 16 // element.itemsize
    k_cache = rng.standard_normal((140, 2, head_dim // x, block_size, x)).astype(element)
    v_cache = rng.standard_normal((140, 2, head_dim, block_size)).astype(element)
    q = rng.standard_normal((2, 6, head_dim)).astype(element)
    lens = np.array([530, 7], np.int32)
    tables = rng.permutation(140)[: 2 * (-(-530 // block_size))].astype(np.int32).reshape(2, -1)
    rest = (q, k_cache, v_cache, 2, head_dim**-0.5, tables, lens, block_size, 530)
    near = {"rtol": 2**-10, "atol": 2**-10} if dtype == "float16" else {"atol": 2e-6}  # both sides are rounded
    expected, out = np.zeros_like(q), np.full_like(q, np.nan)
    classic.paged_attention_v1(expected, *rest)
    sums, tops, partial = (np.full(shape, np.nan, np.float32) for shape in ((2, 6, 2), (2, 6, 2), (2, 6, 2, head_dim)))
    with simt_device.in_place_of_a_gpu(cuda.Backend(launcher)):
        classic.paged_attention_v1(out, *rest)
        np.testing.assert_allclose(out, expected, **near)
        out[...] = np.nan
        classic.paged_attention_v2(out, sums, tops, partial, *rest)
    np.testing.assert_allclose(out, expected, **near)
