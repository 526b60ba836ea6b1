"""Tensor-core decode: what a matrix instruction's layout could break, on both sides of the fp8 conversion."""

from __future__ import annotations

import behaviour
import numpy as np
import pytest
from behaviour import assert_close, make_case
from devices import Device
from simt import build

from cupaged.arrays import numpy_dtype
from cupaged.kernel_config import attention_kernels

if reason := build.unavailable():
    pytest.skip(reason, allow_module_level=True)

import simt_device

KERNEL = "decode_mma"


def device(arch: int = 90) -> Device:
    return Device("simt", simt_device.backend(arch))


def run(case: behaviour.Case, arch: int = 90, kernel: str = KERNEL) -> tuple[np.ndarray, np.ndarray]:
    """`(out, lse)`, and a check that `kernel` and no other took every row."""
    out, lse, launched = simt_device.attend(case, simt_device.backend(arch))
    assert launched == [kernel]
    return out, lse


# head_dim 8: a half step alone; 24: one and a half; 40: fp8 rows that end inside a unit; 256: the widest
@pytest.mark.parametrize("head_dim", [8, 24, 40, 256])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "arch"),
    [
        ("float16", None, 80), ("bfloat16", None, 90), ("float16", "fp8_e4m3", 80), ("bfloat16", "fp8_e4m3", 90),
        ("bfloat16", "fp8_e5m2", 80),
    ],
)  # fmt: skip
def test_every_operand_format(
    head_dim: int, dtype: str, kv_dtype: str | None, arch: int, rng: np.random.Generator
) -> None:
    case = make_case(
        rng, seq_lens=[70, 1, 0, 33], query_lens=[2, 3, 1, 1], num_kv_heads=2, group=4, head_dim=head_dim, block_size=5,
        dtype=dtype, kv_dtype=kv_dtype, layout="NHD", k_scale=0.5, v_scale=np.array([0.25, 3], np.float32),
    )  # fmt: skip
    assert_close(case, *run(case, arch), tensor_cores=True)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("arch", [80, 90])
def test_every_finite_fp8_code_is_exact(kv_dtype: str, arch: int, rng: np.random.Generator) -> None:
    # one key a sequence: the output is its value, whatever the score
    codes = np.arange(256, dtype=np.uint8)
    codes = codes[np.isfinite(codes.view(numpy_dtype(kv_dtype)).astype(np.float32))]
    codes = np.resize(codes, (8, 1, 1, 32))
    q = rng.standard_normal((8, 2, 32)).astype(np.float16)
    case = behaviour.Case(
        q, codes, codes, np.arange(8, dtype=np.int32)[:, None], np.ones(8, np.int32),
        dict(make_case(rng, seq_lens=[1]).options, kv_dtype=kv_dtype, v_scale=2**-8, k_scale=2**-8),
    )  # fmt: skip
    out, lse = run(case, arch)
    expected_out, expected_lse = case.oracle()
    np.testing.assert_array_equal(out, expected_out.astype(np.float16))
    keys = codes.reshape(8, 32).view(numpy_dtype(kv_dtype)).astype(np.float64) * 2**-8
    terms = (np.abs(q) @ np.abs(keys)[..., None])[..., 0] * 32**-0.5
    # of the magnitudes together: two sums of 16 products, each cut, and the roundings of scale and units of the logit
    assert (np.abs(lse - expected_lse) <= 4 * np.finfo(np.float32).eps * terms + 1e-6).all()


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(("magnitude", "scale"), [(1e-30, 3e29), (1e30, 3e-31), (1e37, 3e-38), (1e36, 1.0)])
def test_bf16_queries_of_any_magnitude_meet_fp8_keys(
    magnitude: float, scale: float, arch: int, rng: np.random.Generator
) -> None:
    # far outside the range of halves, in which fp8 keys are multiplied
    case = make_case(
        rng, seq_lens=[40, 7], group=3, head_dim=64, block_size=16, dtype="bfloat16", kv_dtype="fp8_e4m3", scale=scale
    )
    case.q[:] = (case.q.astype(np.float32) * magnitude).astype(case.q.dtype)
    assert_close(case, *run(case, arch), tensor_cores=True)


@pytest.mark.parametrize(("magnitude", "scale"), [(0.0, 0.125), (1e-37, 0.125), (1e-30, -1e-10), (1e37, 0.0)])
def test_logits_too_small_for_float32_weigh_keys_alike(
    magnitude: float, scale: float, rng: np.random.Generator
) -> None:
    # a softmax scale times a row's power of two below the smallest normal float32
    case = make_case(
        rng, seq_lens=[40, 7], group=3, head_dim=64, block_size=16, dtype="bfloat16", kv_dtype="fp8_e4m3", scale=scale
    )
    case.q[:] = (case.q.astype(np.float32) * magnitude).astype(case.q.dtype)
    _, lse = run(case)
    np.testing.assert_allclose(lse, np.log([[40.0] * 6, [7.0] * 6]), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_rows_bits_do_not_depend_on_how_many_rows_share_its_tile(dtype: str, rng: np.random.Generator) -> None:
    # 8 packed rows take one row tile, 12 take two: the same specialisation but for the number of rows
    case = make_case(
        rng, seq_lens=[150, 60], query_lens=[3, 2], group=4, head_dim=40, block_size=3, dtype=dtype, num_splits=2
    )
    out, lse = run(case)
    alone = behaviour.replace(
        case, q=case.q[3:], block_tables=case.block_tables[1:], seq_lens=case.seq_lens[1:],
        options=dict(case.options, query_start_loc=np.array([0, 2], np.int32)),
    )  # fmt: skip
    few_out, few_lse = run(alone)
    np.testing.assert_array_equal(few_out.view(np.uint16), out[3:].view(np.uint16))
    np.testing.assert_array_equal(few_lse, lse[3:])


def test_a_rising_maximum_rescales_what_was_summed(rng: np.random.Generator) -> None:
    # every later key has a larger logit, over several tiles of every warp
    case = make_case(
        rng, seq_lens=[400], num_kv_heads=1, group=2, head_dim=64, block_size=16, dtype="float16", scale=1.0, num_splits=1,
    )  # fmt: skip
    case.q[:] = 0
    case.q[..., 0] = [[0.5, -0.5]]
    for j in range(400):
        case.k_cache[case.block_tables[0, j // 16], 0, j % 16, 0] = j / 8
    assert_close(case, *run(case), tensor_cores=True)


@pytest.mark.parametrize("side", ["k_cache", "v_cache"])
def test_a_row_may_lie_across_an_address_that_2_to_the_32_divides(side: str, rng: np.random.Generator) -> None:
    # elsewhere the offset of a piece of a row is added to the low half of its address; memory around is never touched
    case = make_case(rng, seq_lens=[256], num_kv_heads=1, group=4, head_dim=64, block_size=16, dtype="float16")
    cache = getattr(case, side)
    buffer = np.empty(2**32 + 2 * cache.nbytes, np.uint8)
    row = int(case.block_tables[0, 9]) * 16 + 5
    start = -(buffer.ctypes.data + cache.nbytes) % 2**32 + cache.nbytes - row * 128 - 48
    moved = np.ndarray(cache.shape, cache.dtype, buffer.data, start)
    moved[...] = cache
    assert (moved.ctypes.data + row * 128 + 48) % 2**32 == 0
    assert_close(case, *run(behaviour.replace(case, **{side: moved})), tensor_cores=True)


def test_what_takes_how_many_rows() -> None:
    info = simt_device.backend(90).launcher.info
    names = lambda **how: [c.kernel for c in attention_kernels(info, 64, **how)]  # noqa: E731
    f16 = {"dtype": "float16", "kv_dtype": "float16"}
    assert names(**f16, group=4, few=4, most=4) == ["decode_mma"]
    assert names(**f16, group=16, few=16, most=16) == ["decode_mma"]
    assert names(**f16, group=17, few=1, most=17) == ["prefill"]
    assert names(**f16, group=4, few=4, most=20) == ["decode_mma", "prefill"]
    assert names(dtype="float32", kv_dtype="fp8_e4m3", group=4, few=4, most=20) == ["decode"]
    old = simt_device.backend(75).launcher.info
    assert [c.kernel for c in attention_kernels(old, 64, "float16", "float16", 4, 4, 20)] == ["decode"]
    kernels = attention_kernels(info, 64, "float16", "float16", 4, 4, 20)
    taken = [sum(c.takes[0] <= n <= c.takes[1] for c in kernels) for n in range(100)]
    assert taken == [1] * 100, "each sequence has one kernel"
