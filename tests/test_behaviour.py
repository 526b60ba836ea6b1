"""What every backend must do, whatever it is made of: the numerics contract, property by property."""

from __future__ import annotations

from itertools import pairwise

import behaviour
import numpy as np
import pytest
from behaviour import assert_close, make_case
from devices import Device
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged import reference, shared_work
from cupaged.arrays import numpy_dtype


def run(device: Device, case: behaviour.Case) -> tuple[np.ndarray, np.ndarray]:
    return device.paged_attention(*case.arguments(), **case.options)


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


def test_paged_equals_dense(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_work, "LAUNCH_BYTES_PER_SM", -1)  # prefixes are shared wherever they may be
    monkeypatch.setattr(shared_work, "SUM_BYTES", 0)

    @settings(max_examples=device.examples)
    @given(
        behaviour.cases(
            head_dims=device.head_dims, block_sizes=device.block_sizes, groups=device.groups, longest=device.longest
        )
    )
    def check(case: behaviour.Case) -> None:
        assert_close(case, *run(device, case), tensor_cores=device.tensor_cores)

    check()


def test_unowned_memory_never_changes_a_bit(device: Device, rng: np.random.Generator) -> None:
    for kv_dtype in (None, "fp8_e5m2"):
        case = make_case(
            rng, seq_lens=[5, 1, 18, 0], query_lens=[3, 1, 2, 1], window=7, kv_dtype=kv_dtype, dtype="float16"
        )
        out, lse = run(device, case)
        for poison in (np.nan, np.inf, -np.inf, 3e4):
            poisoned_out, poisoned_lse = run(device, case.poisoned(poison))
            same_bits(poisoned_out, out)
            same_bits(poisoned_lse, lse)


@pytest.mark.parametrize("step", [2, 150])
def test_a_largest_logit_that_one_row_finds_in_a_later_tile(
    device: Device, rng: np.random.Generator, step: int
) -> None:
    case = make_case(rng, seq_lens=[600], num_kv_heads=1, group=8, head_dim=128, block_size=4)
    case.options["scale"] = 1.0
    case.q[0] = np.eye(8, 128)  # the logits of head h are entry h of the keys
    for head, tokens in enumerate(np.sort(rng.permutation(600)[:32].reshape(8, 4))):
        blocks = case.block_tables[0, tokens // 4]
        case.k_cache[blocks, 0, tokens % 4, head] = 8 + step * np.arange(4)  # each the largest so far, in this row only
    assert_close(case, *run(device, case), tensor_cores=device.tensor_cores)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("magnitude", [5e4, 1e6, 1e10, 1e30])
def test_huge_logits_of_either_sign(device: Device, rng: np.random.Generator, magnitude: float, dtype: str) -> None:
    # one head_dim entry carries the logit, so float32 holds it exactly and the expected weights are known
    magnitude = float(np.asarray(magnitude, numpy_dtype(dtype)))
    case = make_case(rng, seq_lens=[9, 133], num_kv_heads=1, group=2, head_dim=8, block_size=4, dtype=dtype)
    case.q[:] = 0
    case.q[:, 0, 0], case.q[:, 1, 0] = 1, -1
    case.k_cache[...] = np.where(np.isnan(case.k_cache), np.nan, 0)
    case.k_cache[..., 0] = np.where(np.isnan(case.k_cache[..., 0]), np.nan, -magnitude)
    case.options["scale"] = 1.0
    out, lse = run(device, case)
    expected_out, _ = case.oracle()
    np.testing.assert_allclose(out.astype(np.float64), expected_out, atol=1e-6 if dtype == "float32" else 2**-8)
    np.testing.assert_allclose(lse[:, 0], -magnitude + np.log(case.seq_lens), rtol=1e-6)
    np.testing.assert_allclose(lse[:, 1], magnitude + np.log(case.seq_lens), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("step", [-1e6, 1e6, -1e10, 1e10])
def test_a_far_key_does_not_hide_behind_a_finite_minus_infinity(
    device: Device, rng: np.random.Generator, step: float, dtype: str
) -> None:
    # each tile has logits another step away, the first or the last the largest: the running maximum must start at a true -inf
    case = make_case(rng, seq_lens=[256], num_kv_heads=1, group=1, head_dim=8, block_size=64, dtype=dtype)
    case.q[:] = 0
    case.q[..., 0] = 1
    for column in range(4):
        case.k_cache[case.block_tables[0, column], 0, :, 0] = step * (column + 1)
    case.options["scale"] = 1.0
    out, lse = run(device, case)
    largest = float(np.asarray(max(step, 4 * step), numpy_dtype(dtype)))
    np.testing.assert_allclose(lse, largest + np.log(64), rtol=3e-7)
    np.testing.assert_allclose(out.astype(np.float64), case.oracle()[0], atol=1e-5 if dtype == "float32" else 2**-8)


def test_more_query_rows_than_keys(device: Device, rng: np.random.Generator) -> None:
    for causal in (True, False):
        case = make_case(rng, seq_lens=[2, 0, 3], query_lens=[5, 2, 3], causal=causal)
        out, lse = run(device, case)
        assert (lse[:3] == -np.inf).all() and (out[:3] == 0).all(), "rows at negative positions see nothing"
        assert (lse[5:7] == -np.inf).all() and (out[5:7] == 0).all(), "an empty sequence sees nothing"
        assert_close(case, out, lse)


def test_an_empty_sequence_leaves_its_neighbours_alone(device: Device, rng: np.random.Generator) -> None:
    case = make_case(rng, seq_lens=[7, 0, 12], num_splits=2)
    out, lse = run(device, case)
    keep = np.array([0, 2])
    without = device.paged_attention(
        case.q[keep], case.k_cache, case.v_cache, case.block_tables[keep], case.seq_lens[keep], **case.options
    )
    same_bits(out[keep], without[0])
    same_bits(lse[keep], without[1])


@pytest.mark.parametrize("query_lens", [None, [4, 1, 20]])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_query_that_is_no_number_shows_in_its_own_rows_alone(
    device: Device, dtype: str, query_lens: list[int] | None, rng: np.random.Generator
) -> None:
    for num_splits in (1, 3):
        case = make_case(rng, seq_lens=[40, 9, 170], query_lens=query_lens, num_splits=num_splits, dtype=dtype)
        out, lse = (x.copy() for x in run(device, case))
        row, head = rng.integers(case.q.shape[:2])
        case.q[row, head, rng.integers(case.q.shape[2])] = np.nan
        got, got_lse = run(device, case)
        assert np.isnan(got[row, head].astype(np.float32)).all() and np.isnan(got_lse[row, head])
        others = np.ones(lse.shape, bool)
        others[row, head] = False
        same_bits(got[others], out[others])
        same_bits(got_lse[others], lse[others])


@pytest.mark.parametrize("window", [1, 2, 4, 5, 16])
def test_window_holds_exactly_that_many_keys(device: Device, rng: np.random.Generator, window: int) -> None:
    # keys of equal weight: lse tells how many were seen, for every row of a verify step too
    case = make_case(rng, seq_lens=[23, 3], query_lens=[5, 2], window=window, block_size=4)
    case.q[:] = 0
    _, lse = run(device, case)
    positions = np.array([18, 19, 20, 21, 22, 1, 2])
    counted = np.minimum(positions + 1, window)
    np.testing.assert_allclose(np.exp(lse), np.broadcast_to(counted[:, None], lse.shape), rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_chunk_starts_at_multiples_of_its_size(device: Device, rng: np.random.Generator, chunk: int) -> None:
    case = make_case(rng, seq_lens=[23], query_lens=[9], chunk=chunk, block_size=4)
    case.q[:] = 0
    _, lse = run(device, case)
    counted = np.arange(14, 23) % chunk + 1
    np.testing.assert_allclose(np.exp(lse), np.broadcast_to(counted[:, None], lse.shape), rtol=1e-6)


@pytest.mark.parametrize(("dtype", "head_dim"), [("float16", 16), ("float32", 16), ("float32", 72)])
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    device: Device, dtype: str, head_dim: int, rng: np.random.Generator
) -> None:
    for num_splits in (1, 3):
        case = make_case(
            rng, seq_lens=[40, 9, 170], query_lens=[1, 4, 2], num_splits=num_splits, dtype=dtype, head_dim=head_dim
        )
        out, lse = run(device, case)
        loc = case.options["query_start_loc"]
        for row in range(3):
            rows = slice(loc[row], loc[row + 1])
            alone = dict(case.options, query_start_loc=np.array([0, loc[row + 1] - loc[row]], np.int32))
            wide = np.full((1, case.block_tables.shape[1] + 30), 2**31 - 1, np.int32)
            wide[0, : case.block_tables.shape[1]] = case.block_tables[row]
            got = device.paged_attention(
                case.q[rows], case.k_cache, case.v_cache, wide, case.seq_lens[row : row + 1], **alone
            )
            same_bits(got[0], out[rows])
            same_bits(got[1], lse[rows])


def test_any_number_of_splits_gives_the_same_result(device: Device, rng: np.random.Generator) -> None:
    case = make_case(rng, seq_lens=[130, 1, 64], sinks=np.array([0.5, -1, 2, 0], np.float32))
    for num_splits in (None, 1, 2, 3, 7, 200):
        case.options["num_splits"] = num_splits
        assert_close(case, *run(device, case), tensor_cores=device.tensor_cores)


def test_scales_act_in_decode_and_prefill_alike(device: Device, rng: np.random.Generator) -> None:
    scales = {"k_scale": np.array([0.5, 2.0], np.float32), "v_scale": np.array([4.0, 0.25], np.float32)}
    for query_lens in (None, [6, 11]):
        for kv_dtype in (None, "fp8_e4m3"):
            case = make_case(
                rng, seq_lens=[20, 11], query_lens=query_lens, kv_dtype=kv_dtype, dtype="float16", **scales
            )
            assert_close(case, *run(device, case), tensor_cores=device.tensor_cores)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "softcap", "alibi"),
    [
        ("float16", None, None, False), ("bfloat16", "fp8_e4m3", None, False), ("float16", None, 2.0, False),
        ("bfloat16", "fp8_e4m3", None, True), ("float16", None, 2.0, True),
    ],
)  # fmt: skip
def test_a_scale_may_be_negative_or_zero(
    device: Device, dtype: str, kv_dtype: str | None, softcap: float | None, alibi: bool, rng: np.random.Generator
) -> None:
    # one call of decode and prefill rows; several tiles, so that the largest logit changes between them
    case = make_case(
        rng, seq_lens=[150, 70], query_lens=[1, 12], dtype=dtype, kv_dtype=kv_dtype, softcap=softcap, magnitude=2.0,
        alibi_slopes=np.array([0.3, -0.2, 0.1, 0], np.float32) if alibi else None,
        k_scale=np.array([0.5, 2.0], np.float32), sinks=np.array([0.5, -1, 2, 0], np.float32),
    )  # fmt: skip
    for scale in (-0.7, -1e-3, 0.0):
        case.options["scale"] = scale
        assert_close(case, *run(device, case), tensor_cores=device.tensor_cores)
    out, lse = run(device, case)
    case.options["scale"] = -0.0
    minus_out, minus_lse = run(device, case)
    same_bits(minus_out, out)
    same_bits(minus_lse, lse)
    if not alibi:
        counted = np.array([150, *range(59, 71)])
        np.testing.assert_allclose(lse, np.broadcast_to(np.log(counted)[:, None], lse.shape), rtol=1e-6)


def test_k_and_v_strides_are_each_their_own(device: Device, rng: np.random.Generator) -> None:
    case = make_case(rng, seq_lens=[11, 6])
    apart = behaviour.replace(case, v_cache=np.ascontiguousarray(case.v_cache))
    assert apart.k_cache.strides != apart.v_cache.strides
    same_bits(run(device, apart)[0], run(device, case)[0])


def test_queries_may_be_strided_views(device: Device, rng: np.random.Generator) -> None:
    case = make_case(rng, seq_lens=[11, 6, 3])
    fused = np.full((3, 9, 16), np.nan, np.float32)
    fused[:, 2:6] = case.q
    same_bits(run(device, behaviour.replace(case, q=fused[:, 2:6]))[0], run(device, case)[0])


def test_offsets_past_32_bits(device: Device, rng: np.random.Generator) -> None:
    # two blocks further apart than 2^32 bytes; the memory between them is never touched
    stride = 2**32 + 4096
    buffer = np.empty(stride + 4096, np.uint8)
    shape = (2, 2, 4, 16)  # [num_blocks, num_kv_heads, block_size, head_dim] float16

    def pages(offset: int) -> np.ndarray:
        return np.ndarray(shape, np.float16, buffer.data, offset, (stride, 256, 32, 2))

    if device.xp is not np:
        pytest.skip("the device copy would take the whole range: tests/test_cupy.py has it for device memory")
    k_cache, v_cache = pages(0), pages(1024)
    k, v = (rng.standard_normal((7, 2, 16)).astype(np.float16) for _ in range(2))
    slots = np.array([4, 5, 6, 7, 0, 1, 2])
    device.write_kv(k, v, k_cache, v_cache, slots)
    same_bits(k_cache[1].swapaxes(0, 1), k[:4])
    q = rng.standard_normal((1, 4, 16)).astype(np.float16)
    case = behaviour.Case(
        q, k_cache, v_cache, np.array([[1, 0]], np.int32), np.array([7], np.int32), make_case(rng, seq_lens=[1]).options
    )
    assert_close(case, *run(device, case), tensor_cores=device.tensor_cores)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3", "fp8_e5m2"])
def test_write_puts_every_row_where_its_slot_says(device: Device, dtype: str, kv_dtype: str | None) -> None:
    @settings(max_examples=max(device.examples // 9, 2))
    @given(st.data())
    def check(data: st.DataObject) -> None:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        heads, head_dim = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([8, 46, 64, 80]))
        num_blocks, block_size, rows = (
            data.draw(st.integers(1, 6)),
            data.draw(st.sampled_from([1, 3, 16])),
            data.draw(st.integers(0, 9)),
        )
        layout = data.draw(st.sampled_from(["HND", "NHD"]))
        fused = rng.standard_normal((rows, 4 * heads, head_dim)).astype(numpy_dtype(dtype)) * 3
        k, v = fused[:, heads : 2 * heads], fused[:, 3 * heads :]
        axes = (heads, block_size) if layout == "HND" else (block_size, heads)
        pool = rng.integers(
            0, 256, (num_blocks, 2, 2, *axes, head_dim * (1 if kv_dtype else numpy_dtype(dtype).itemsize)), np.uint8
        )
        pool = pool.view(np.uint8 if kv_dtype else numpy_dtype(dtype))
        expected = pool.copy()
        slots = rng.permutation(num_blocks * block_size)[:rows].astype(data.draw(st.sampled_from([np.int32, np.int64])))
        slots[rng.random(len(slots)) < 0.2] = -1
        options = {
            "layout": layout, "kv_dtype": kv_dtype, "k_scale": data.draw(st.sampled_from([1.0, 0.3])),
            "v_scale": rng.uniform(0.01, 3, heads).astype(np.float32),
        }  # fmt: skip
        reference.write_kv(k, v, expected[:, 1, 0], expected[:, 1, 1], slots, **options)
        device.write_kv(k, v, pool[:, 1, 0], pool[:, 1, 1], slots, **options)
        same_bits(pool, expected)

    check()


def test_fp8_saturates_and_keeps_nan(device: Device) -> None:
    values = np.array(
        [0.0, -0.0, 448, 449, 1e9, -1e9, np.inf, -np.inf, np.nan, 2**-9, 2**-10, 3e-8, 57344, 61440, 17.0, 18.0],
        np.float32,
    )
    for kv_dtype, largest in (("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)):
        k_cache = np.zeros((1, 1, 1, 16), np.uint8)
        v_cache = k_cache.copy()
        k = values.reshape(1, 1, 16)
        device.write_kv(k, k, k_cache, v_cache, np.array([0]), kv_dtype=kv_dtype)
        stored = k_cache.view(numpy_dtype(kv_dtype)).astype(np.float32).ravel()
        expected = np.clip(values, -largest, largest).astype(numpy_dtype(kv_dtype)).astype(np.float32)
        np.testing.assert_array_equal(stored, expected)
        same_bits(v_cache, k_cache)


def test_write_follows_slot_mapping_not_the_rows_of_k(device: Device, rng: np.random.Generator) -> None:
    k = rng.standard_normal((6, 2, 8)).astype(np.float32)
    k_cache = np.full((3, 2, 4, 8), np.nan, np.float32)
    v_cache = k_cache.copy()
    device.write_kv(k, k, k_cache, v_cache, np.array([-1, -1]))
    assert np.isnan(k_cache).all() and np.isnan(v_cache).all()
    device.write_kv(k, k, k_cache, v_cache, np.array([-1, 5, 11]))
    np.testing.assert_array_equal(k_cache[1, :, 1], k[1])
    np.testing.assert_array_equal(v_cache[2, :, 3], k[2])
    assert np.isfinite(k_cache).sum() == 2 * 16


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_merging_parts_equals_attending_once(device: Device, rng: np.random.Generator, dtype: str) -> None:
    q = rng.standard_normal((5, 4, 16))
    k, v = (rng.standard_normal((40, 2, 16)) for _ in range(2))
    sinks = rng.normal(0, 2, 4).astype(np.float32)
    cuts = [0, 7, 7, 20, 40]  # one part is empty
    # rows of a part with fewer keys than queries would stand at negative positions: every row must see every key
    parts = [
        reference.dense_attention(q[i : i + 1], k[a:b], v[a:b], causal=False)
        for a, b in pairwise(cuts)
        for i in range(5)
    ]
    outs = np.stack([p[0] for p in parts]).reshape(4, 5, 4, 16).astype(numpy_dtype(dtype))
    lses = np.stack([p[1] for p in parts]).reshape(4, 5, 4).astype(np.float32)
    out, lse = device.merge_states(outs, lses, sinks)
    expected_out, expected_lse = reference.merge_states(outs, lses, sinks)
    eps = float(np.finfo(np.float32).eps)
    half_unit = {"float32": eps / 2, "bfloat16": 2**-8, "float16": 2**-11}[dtype]
    largest = np.abs(outs.astype(np.float64)).max(axis=0)
    # a weight is off by 2 eps and its distance from the largest, at most 1.4 on average; four sums, one product and one quotient
    # round; an error of the lse or the sink moves what the sink leaves by a quarter of it at most
    several = (9 + (np.abs(sinks) + np.abs(expected_lse)) / 4)[..., None] * eps
    assert (np.abs(out.astype(np.float64) - expected_out) <= half_unit * np.abs(expected_out) + several * largest).all()
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-6)
    whole = np.concatenate(
        [reference.dense_attention(q[i : i + 1], k, v, causal=False, sinks=sinks)[0] for i in range(5)]
    )
    rounded = half_unit + eps * np.abs(lses[np.isfinite(lses)]).max()  # outputs of the parts, and their weights
    assert (np.abs(expected_out - whole) <= rounded * largest).all()


def test_empty_states_merge_to_an_empty_state(device: Device) -> None:
    outs = np.zeros((3, 2, 2, 8), np.float32)
    lses = np.full((3, 2, 2), -np.inf, np.float32)
    out, lse = device.merge_states(outs, lses, np.array([1.0, -np.inf], np.float32))
    assert (out == 0).all() and (lse == -np.inf).all()
    outs[1], lses[1] = 2.5, -3.0
    out, lse = device.merge_states(outs, lses)
    assert (out == 2.5).all() and (lse == -3.0).all(), "(0, -inf) is the identity"
    out, lse = device.merge_states(outs[..., :0], lses)
    assert out.shape == (2, 2, 0) and (lse == -3.0).all()


def test_sinks_take_weight_once_and_lse_excludes_them(device: Device, rng: np.random.Generator) -> None:
    case = make_case(rng, seq_lens=[30, 30], num_splits=3)
    case.q[:] = 0  # 30 keys of weight 1
    plain, lse = run(device, case)
    case.options["sinks"] = np.log(np.array([30, 60, 1, 15], np.float32))
    out, lse_with_sinks = run(device, case)
    share = (30 / (30 + np.array([30, 60, 1, 15])))[None, :, None]
    np.testing.assert_allclose(out, plain * share, rtol=1e-5, atol=1e-6)
    same_bits(lse_with_sinks, lse)


def test_the_six_token_example(device: Device) -> None:
    q = np.array([[[0.5, -0.3, 0.8, 0.1]]])
    k = np.array(
        [
            [0.2, 0.1, -0.4, 0.6],
            [0.9, -0.2, 0.3, 0],
            [-0.5, 0.4, 0.7, -0.1],
            [0.1] * 4,
            [0.8, 0.8, -0.8, 0.2],
            [-0.3, 0.5, 0.2, 0.9],
        ]
    )
    v = np.concatenate([np.eye(4), [[0.5] * 4], [[1.0] * 4]])
    pad = [(0, 0), (0, 4)]  # head_dim is a multiple of 8; zeros change nothing but the default scale
    k8, v8 = (np.pad(x, pad)[:, None].astype(np.float32) for x in (k, v))
    k_cache = np.full((4, 1, 4, 8), np.nan, np.float32)
    v_cache = k_cache.copy()
    slots = np.array([12, 13, 14, 15, 4, 5])  # block table [3, 1]
    device.write_kv(k8, v8, k_cache, v_cache, slots)
    q8 = np.pad(q, [(0, 0), *pad]).astype(np.float32)
    out, _ = device.paged_attention(
        q8, k_cache, v_cache, np.array([[3, 1]], np.int32), np.array([6], np.int32), scale=0.5
    )
    np.testing.assert_allclose(out[0, 0, :4], [0.363083, 0.449897, 0.392487, 0.386499], atol=1e-6)
    assert (out[0, 0, 4:] == 0).all()
