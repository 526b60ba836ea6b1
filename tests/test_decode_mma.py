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
    # 8 packed rows are the N of the matrix instructions, 12 their M: other operands, sums in the same order
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


def rising(rng: np.random.Generator, slopes: list[float], **how: object) -> behaviour.Case:
    """One sequence of 384 keys, three tiles of every warp; the logit of key j is j times the head's slope."""
    case = make_case(
        rng, seq_lens=[384], num_kv_heads=1, group=len(slopes), head_dim=64, block_size=16, dtype="float16", scale=1.0,
        num_splits=1, **how,
    )  # fmt: skip
    case.q[:] = 0
    case.q[..., 0] = 8 * np.array(slopes)
    for j in range(384):
        case.k_cache[case.block_tables[0, j // 16], 0, j % 16, 0] = j / 8
    return case


# 1 / 16: every tile doubles probabilities many times; 1 / 512: no tile after a warp's first does, so its base stays, but the second
# next would have; 1 / 128: some do
@pytest.mark.parametrize("slope", [1 / 16, 1 / 128, 1 / 512])
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_a_rising_maximum_rescales_what_was_summed(
    slope: float, softcap: float | None, rng: np.random.Generator
) -> None:
    case = rising(rng, [slope, -slope], softcap=softcap)
    assert_close(case, *run(case), tensor_cores=True)


def test_a_row_keeps_its_base_whatever_its_neighbours_logits_do(rng: np.random.Generator) -> None:
    # one row's logits rise by less than a factor of 2 in its probabilities from tile to tile, another's by many
    both = rising(rng, [1 / 512, 1 / 16])
    alone = behaviour.replace(both, q=both.q[:, :1])
    out, lse = run(both)
    few_out, few_lse = run(alone)
    np.testing.assert_array_equal(few_out.view(np.uint16), out[:, :1].view(np.uint16))
    np.testing.assert_array_equal(few_lse, lse[:, :1])


def test_a_row_keeps_its_base_in_a_tile_that_another_row_may_not_see(rng: np.random.Generator) -> None:
    # the row before it ends one key before the last tile does; logits rise by less than a factor of 2 in probabilities
    both = rising(rng, [1 / 512], query_lens=[2])
    alone = behaviour.replace(
        both, q=both.q[1:], options=dict(both.options, query_start_loc=np.array([0, 1], np.int32))
    )
    out, lse = run(both)
    last_out, last_lse = run(alone)
    np.testing.assert_array_equal(last_out.view(np.uint16), out[1:].view(np.uint16))
    np.testing.assert_array_equal(last_lse, lse[1:])


# The kernel is compiled for each power of two; else tokens are found by ones, or by twos where blocks are even
@pytest.mark.parametrize("block_size", [1, 2, 3, 6, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("how", [{}, {"window": 75}, {"chunk": 100}], ids=str)
def test_tokens_of_long_tiles_are_found_in_blocks_of_any_size(
    block_size: int, how: dict[str, int], rng: np.random.Generator
) -> None:
    # lengths and windows that end between two tokens of a block; what lies before a window is released
    case = make_case(
        rng, seq_lens=[301, 64, 0, 129], query_lens=[3, 1, 1, 2], num_kv_heads=1, group=2, head_dim=64, block_size=block_size,
        dtype="float16", kv_dtype="fp8_e4m3", **how,
    )  # fmt: skip
    for i, (seq_len, rows) in enumerate(zip(case.seq_lens, (3, 1, 1, 2), strict=True)):
        position = seq_len - rows
        first = max(0, position - 74) if "window" in how else position // 100 * 100 if "chunk" in how else 0
        case.block_tables[i, : first // block_size] = -1
    assert_close(case, *run(case, 80), tensor_cores=True)


@pytest.mark.parametrize("block_size", [1, 6, 16, 64, 256])
def test_a_block_without_memory_amid_others_is_hidden(block_size: int, rng: np.random.Generator) -> None:
    # in tiles that every row would see whole; a window allows such entries. Logits near 0: no tile but a warp's first has to look
    # for the largest
    case = make_case(
        rng, seq_lens=[700, 70], num_kv_heads=1, group=4, head_dim=64, block_size=block_size, dtype="float16",
        kv_dtype="fp8_e4m3", window=10_000, scale=1e-3, num_splits=1,
    )  # fmt: skip
    case.block_tables[0, [200 // block_size, 333 // block_size, 500 // block_size]] = -1
    assert_close(case, *run(case, 80), tensor_cores=True)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_a_cache_may_begin_at_any_byte(offset: int, rng: np.random.Generator) -> None:
    # rows of 72 bytes in pieces of so many: of 4 and of 2 all lanes of a warp copy one row
    case = make_case(
        rng,
        seq_lens=[200, 31],
        num_kv_heads=1,
        group=4,
        head_dim=72,
        block_size=16,
        dtype="float16",
        kv_dtype="fp8_e4m3",
    )
    moved = {}
    for name in ("k_cache", "v_cache"):
        cache = getattr(case, name)
        buffer = np.empty(cache.nbytes + 32, np.uint8)
        moved[name] = np.ndarray(cache.shape, cache.dtype, buffer.data, -buffer.ctypes.data % 16 + offset)
        moved[name][...] = cache
    assert_close(case, *run(behaviour.replace(case, **moved), 80), tensor_cores=True)


@pytest.mark.parametrize("axes", [0, 2, (0, 1, 2)])
def test_pages_may_lie_backwards(axes: int | tuple[int, ...], rng: np.random.Generator) -> None:
    # negative strides: no tile takes the short way, which has room for 31 bits
    case = make_case(
        rng, seq_lens=[200, 31], num_kv_heads=2, group=4, head_dim=64, block_size=16, dtype="float16", layout="HND"
    )
    backwards = {name: np.flip(np.flip(getattr(case, name), axes).copy(), axes) for name in ("k_cache", "v_cache")}
    assert min(backwards["k_cache"].strides) < 0
    assert_close(case, *run(behaviour.replace(case, **backwards)), tensor_cores=True)


@pytest.mark.parametrize("side", ["k_cache", "v_cache"])
@pytest.mark.parametrize("block_size", [6, 16])
def test_a_row_may_lie_across_an_address_that_2_to_the_32_divides(
    side: str, block_size: int, rng: np.random.Generator
) -> None:
    # with blocks of 6 the offset in a run of rows is elsewhere added to the low half of its address; memory around is never touched
    case = make_case(rng, seq_lens=[256], num_kv_heads=1, group=4, head_dim=64, block_size=block_size, dtype="float16")
    cache = getattr(case, side)
    buffer = np.empty(2**32 + 2 * cache.nbytes, np.uint8)
    row = int(case.block_tables[0, 9]) * block_size + 5
    start = -(buffer.ctypes.data + cache.nbytes) % 2**32 + cache.nbytes - row * 128 - 48
    moved = np.ndarray(cache.shape, cache.dtype, buffer.data, start)
    moved[...] = cache
    assert (moved.ctypes.data + row * 128 + 48) % 2**32 == 0
    assert_close(case, *run(behaviour.replace(case, **{side: moved})), tensor_cores=True)


# two, three and four tiles in a ring, and whole tiles whose tokens are found by blocks, by ones and by twos
@pytest.mark.parametrize(
    ("kind", "head_dim", "dtype", "kv_dtype", "block_size"),
    [
        ("tsan", 64, "float16", None, 16), ("tsan", 32, "float16", "fp8_e5m2", 4), ("asan", 64, "bfloat16", "fp8_e4m3", 5),
        ("asan", 96, "float16", "fp8_e4m3", 8),
    ],
)  # fmt: skip
def test_whole_tiles_run_clean(
    kind: str, head_dim: int, dtype: str, kv_dtype: str | None, block_size: int, rng: np.random.Generator
) -> None:
    case = make_case(
        rng, seq_lens=[600, 0, 75], query_lens=[2, 1, 1], num_kv_heads=1, group=4, head_dim=head_dim, block_size=block_size,
        dtype=dtype, kv_dtype=kv_dtype, num_splits=1,
    )  # fmt: skip
    out, lse, launched = simt_device.attend(case, simt_device.backend(80, kind=kind))
    assert launched == [KERNEL]
    assert_close(case, out, lse, tensor_cores=True)


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
