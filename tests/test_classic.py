"""The original entry points: right against the oracle in one pass and in partitions, dense and block-sparse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import devices
import numpy as np
import pairwise
import pytest
from devices import Device
from hypothesis import given, settings
from hypothesis import strategies as st

import cupaged
from cupaged import classic, reference
from cupaged.arrays import numpy_dtype
from cupaged.cuda_structs import CLASSIC_PARTITION

FACTORS = {
    "head_dim": (32, 64, 80, 96, 128, 192, 256),
    "block_size": (8, 16, 32, 64, 128),
    "group": (1, 3, 4, 7, 8),
    "dtype": ("float32", "float16", "bfloat16"),
    "kv_dtype": (None, "fp8_e4m3", "fp8_e5m2"),
    "alibi": (False, True),
    "sparse": (False, True),
}


@pytest.fixture(
    params=[devices.reference, devices.simt, pytest.param(devices.cuda, marks=pytest.mark.gpu)],
    ids=["host", "simt", "cuda"],
)
def device(request: pytest.FixtureRequest) -> Device:
    return request.param()


@dataclass
class Case:
    """Arguments of both entry points, over a poisoned pool that `write_kv` filled on the device."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    tables: np.ndarray
    lens: np.ndarray
    keys: list[tuple[np.ndarray, np.ndarray]]  # of each sequence, as written
    options: dict[str, Any]

    @property
    def num_kv_heads(self) -> int:
        return self.v_cache.shape[1]


def make_case(
    rng: np.random.Generator, device: Device, seq_lens: list[int], *, head_dim: int, block_size: int, group: int, dtype: str,
    kv_dtype: str | None = None, alibi: bool = False, **options: Any,
) -> Case:  # fmt: skip
    element, heads = numpy_dtype(dtype), 2
    pages = np.dtype(np.uint8) if kv_dtype else element
    x = 16 // pages.itemsize
    columns = [-(-n // block_size) for n in seq_lens]
    k_cache = np.empty((sum(columns) + 2, heads, head_dim // x, block_size, x), pages)
    v_cache = np.empty((sum(columns) + 2, heads, head_dim, block_size), pages)
    k_cache[...] = v_cache[...] = {None: np.nan, "fp8_e4m3": 0x7F, "fp8_e5m2": 0x7E}[kv_dtype]
    ids = rng.permutation(sum(columns) + 2)
    tables = np.full((len(seq_lens), max(columns) + 1), 2**31 - 1, np.int32)
    keys = []
    how: dict[str, Any] = {"layout": "classic", "kv_dtype": kv_dtype}
    if kv_dtype:
        how |= {"k_scale": np.array([0.5, 2.0], np.float32), "v_scale": 0.25}
    for row, n in enumerate(seq_lens):
        tables[row, : columns[row]] = ids[sum(columns[:row]) :][: columns[row]]
        k, v = (rng.standard_normal((n, heads, head_dim)).astype(element) for _ in range(2))
        j = np.arange(n)
        slots = tables[row, j // block_size].astype(np.int64) * block_size + j % block_size
        expected = k_cache.copy(), v_cache.copy()
        reference.write_kv(k, v, *expected, slots, **how)
        device.write_kv(k, v, k_cache, v_cache, slots, **how)
        for got, wanted in zip((k_cache, v_cache), expected, strict=True):
            np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))
        keys.append((k, v))
    q = rng.standard_normal((len(seq_lens), heads * group, head_dim)).astype(element)
    options = {
        "kv_cache_dtype": kv_dtype or "auto", "k_scale": how.get("k_scale", 1.0), "v_scale": how.get("v_scale", 1.0),
        "alibi_slopes": rng.uniform(-0.2, 0.2, heads * group).astype(np.float32) if alibi else None, **options,
    }  # fmt: skip
    return Case(q, k_cache, v_cache, tables, np.array(seq_lens, np.int32), keys, options)


def run(device: Device, case: Case, version: int, **options: Any) -> np.ndarray:
    """The result of one entry point, into arrays that held NaN."""
    put = device.put
    out = put(np.full(case.q.shape, np.nan, case.q.dtype))
    longest = int(case.lens.max())
    arguments = [
        put(case.q),
        put(case.k_cache),
        put(case.v_cache),
        case.num_kv_heads,
        case.q.shape[2] ** -0.5,
        case.tables,
        case.lens,
    ]
    arguments += [case.v_cache.shape[3], longest]
    with device.active():
        if version == 1:
            classic.paged_attention_v1(out, *arguments, **{**case.options, **options})
        else:
            shape = (*case.q.shape[:2], -(-longest // classic.PARTITION_SIZE))
            sums, tops = put(np.full(shape, np.nan, np.float32)), put(np.full(shape, np.nan, np.float32))
            partial = put(np.full((*shape, case.q.shape[2]), np.nan, np.float32))
            classic.paged_attention_v2(out, sums, tops, partial, *arguments, **{**case.options, **options})
    return device.get(out)


def oracle(case: Case, mask: Any = None) -> np.ndarray:
    """Dense attention over the cache's own values; `mask(sequence, head)` hides keys."""
    out = np.zeros(case.q.shape)
    how = {
        "layout": "classic",
        "kv_dtype": None if case.options["kv_cache_dtype"] == "auto" else case.options["kv_cache_dtype"],
    }
    group, slopes = case.q.shape[1] // case.num_kv_heads, case.options["alibi_slopes"]
    for i, n in enumerate(case.lens):
        k, _ = reference.gather(case.k_cache, case.tables[i], n, scale=case.options["k_scale"], **how)
        v, _ = reference.gather(case.v_cache, case.tables[i], n, scale=case.options["v_scale"], **how)
        for h in range(case.q.shape[1]):
            kv = slice(h // group, h // group + 1)
            out[i, h : h + 1], _ = reference.dense_attention(
                case.q[i : i + 1, h : h + 1], k[:, kv], v[:, kv], alibi_slopes=None if slopes is None else slopes[h : h + 1],
                mapped=None if mask is None else mask(i, h),
            )  # fmt: skip
    return out


def sparse_mask(case: Case, local: int, stride: int, size: int, step: int, rank: int = 0) -> Any:
    """Which keys a block-sparse head sees, key by key."""
    heads, group = case.q.shape[1], case.q.shape[1] // case.num_kv_heads

    def mask(i: int, h: int) -> np.ndarray:
        n = int(case.lens[i])
        offset = (rank * heads + h) * step + 1 if step >= 0 else (rank * case.num_kv_heads + h // group) * -step + 1
        seen = [j // size > (n - 1) // size - local or (j // size + offset) % stride == 0 for j in range(n)]
        return np.array(seen, bool)

    return mask


def assert_near(got: np.ndarray, expected: np.ndarray, dtype: np.dtype, rounded: int = 1) -> None:
    """Equal but for the rounding of one of them to `dtype`, or of both."""
    unit = {"float32": 2e-6, "float16": 2**-11, "bfloat16": 2**-8}[dtype.name]
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=rounded * unit, atol=3 * unit)


@pytest.mark.parametrize("row", pairwise.cover(FACTORS), ids=lambda row: "-".join(str(x) for x in row.values()))
def test_both_passes_equal_the_oracle_for_every_pair_of_shapes(
    device: Device, row: pairwise.Row, rng: np.random.Generator
) -> None:
    row = dict(row)
    sparse = row.pop("sparse")
    bs = row["block_size"]
    case = make_case(rng, device, [1, 0, 2 * bs + 1, int(rng.integers(30, 300)), 520], **row)
    mask = None
    if sparse:
        case.options |= {
            "blocksparse_local_blocks": 2, "blocksparse_vert_stride": 3, "blocksparse_block_size": 2 * bs,
            "blocksparse_head_sliding_step": 1,
        }  # fmt: skip
        mask = sparse_mask(case, 2, 3, 2 * bs, 1)
    expected = oracle(case, mask)
    for version in (1, 2):
        assert_near(run(device, case, version), expected, case.q.dtype)


def test_random_lengths_and_sparsity(device: Device) -> None:
    @settings(max_examples=15 if device.name == "simt" else 8)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        lens = data.draw(st.lists(st.integers(0, 40) | st.integers(500, 1100), min_size=1, max_size=3))
        if max(lens) == 0:
            lens[0] = 1
        case = make_case(rng, device, lens, head_dim=32, block_size=8, group=3, dtype="float32")
        local, stride, step, rank = (data.draw(st.integers(a, b)) for a, b in ((0, 3), (2, 5), (-2, 2), (0, 2)))
        case.options |= {
            "blocksparse_local_blocks": local, "blocksparse_vert_stride": stride, "blocksparse_block_size": 24,
            "blocksparse_head_sliding_step": step, "tp_rank": rank,
        }  # fmt: skip
        expected = oracle(case, sparse_mask(case, local, stride, 24, step, rank))
        for version in (1, 2):
            assert_near(run(device, case, version), expected, case.q.dtype)

    check()


def test_the_fast_kernels_agree_with_the_original_ones(device: Device, rng: np.random.Generator) -> None:
    case = make_case(rng, device, [70, 3], head_dim=64, block_size=16, group=3, dtype="float16")
    k_cache = np.ascontiguousarray(case.k_cache.swapaxes(2, 3)).reshape(-1, 2, 16, 64)
    v_cache = np.ascontiguousarray(case.v_cache.swapaxes(2, 3))
    q, k, v = device.put(case.q), device.put(k_cache), device.put(v_cache)
    with device.active():
        fast = device.get(cupaged.paged_attention(q, k, v, case.tables, case.lens))
    assert_near(run(device, case, 1), fast.astype(np.float64), case.q.dtype, rounded=2)


def test_a_context_too_long_for_a_single_pass_is_refused_before_any_launch(rng: np.random.Generator) -> None:
    device = devices.simt()
    case = make_case(rng, device, [9], head_dim=64, block_size=16, group=1, dtype="float16")
    out = np.full(case.q.shape, np.nan, np.float16)
    before = device.backend.launcher.num_launches
    arguments = (out, case.q, case.k_cache, case.v_cache, 2, 0.125, case.tables, case.lens, 16)
    with (
        device.active(),
        pytest.raises(
            ValueError, match=r"max_seq_len: a single pass takes at most \d+ tokens .* use paged_attention_v2"
        ),
    ):
        classic.paged_attention_v1(*arguments, 100_000)
    assert device.backend.launcher.num_launches == before and np.isnan(out).all()
    with device.active():
        classic.paged_attention_v1(*arguments, 50_000)
    assert_near(out, oracle(case), case.q.dtype)


def test_more_sequences_than_a_grid_is_high(rng: np.random.Generator) -> None:
    """Axes y and z of a grid end at 65,535: sequences are counted on x."""
    device = devices.simt()
    case = make_case(rng, device, [9], head_dim=32, block_size=16, group=1, dtype="float32")
    many = 65_537
    q, tables, lens = (np.zeros((many, *x.shape[1:]), x.dtype) for x in (case.q, case.tables, case.lens))
    q[-1:], tables[-1:], lens[-1:] = case.q, case.tables, case.lens
    got = run(device, replace(case, q=q, tables=tables, lens=lens), 2)
    assert_near(got[-1:], oracle(case), case.q.dtype)
    assert (got[:-1] == 0).all()


@pytest.mark.parametrize("version", [1, 2])
def test_debug_mode_clamps_lengths_to_what_there_is_room_for(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setenv("CUPAGED_DEBUG", "1")
    device = devices.simt()
    put = device.backend.launcher.put
    case = make_case(rng, device, [48, 48], head_dim=32, block_size=16, group=1, dtype="float32")
    out, ones = put(np.full_like(case.q, np.nan)), put(np.ones(2, np.float32))
    parts = [put(np.full((2, 2, 1, *tail), np.nan, np.float32)) for tail in ((), (), (32,))]
    device.backend.classic_attention(
        classic.ClassicAttention(
            put(case.q), case.k_cache, case.v_cache, put(case.tables), put(np.array([10**6, -5], np.int32)), 40, 32**-0.5, None,
            ones, ones, "float32", None, out, (parts[0], parts[1], parts[2]) if version == 2 else None,
        )
    )  # fmt: skip
    assert_near(out[:1], oracle(replace(case, lens=np.array([40, 0], np.int32)))[:1], case.q.dtype)
    assert (out[1] == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_size": 8}, ValueError, r"value_cache: expected \[num_blocks, 2, 64, 8\]"),
        ({"max_seq_len": 8}, ValueError, "max_seq_len: expected at least 9, the longest of seq_lens, got 8"),
        ({"num_kv_heads": 1}, ValueError, r"value_cache: expected \[num_blocks, 1, 64, 16\]"),
        ({"out": np.zeros((1, 2, 64), np.float32)}, ValueError, r"out: expected \(1, 2, 64\) float16"),
        ({"blocksparse_vert_stride": 2, "blocksparse_block_size": 24}, ValueError, "blocksparse_block_size: expected a multiple of"),
        ({"kv_cache_dtype": "fp8"}, ValueError, "kv_cache_dtype: expected None or float16, as the pages are, got 'fp8_e4m3'"),
        ({"seq_lens": np.array([9, 9], np.int32)}, ValueError, "seq_lens: expected 1 entries"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(
    rng: np.random.Generator, change: dict[str, Any], error: type[Exception], message: str
) -> None:
    case = make_case(rng, devices.reference(), [9], head_dim=64, block_size=16, group=1, dtype="float16")
    arguments = {
        "out": np.zeros(case.q.shape, np.float16), "query": case.q, "key_cache": case.k_cache, "value_cache": case.v_cache,
        "num_kv_heads": 2, "scale": 0.125, "block_tables": case.tables, "seq_lens": case.lens, "block_size": 16, "max_seq_len": 9,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        classic.paged_attention_v1(**{**arguments, **change})


def test_partials_of_the_wrong_shape_or_dtype_are_refused(rng: np.random.Generator) -> None:
    case = make_case(rng, devices.reference(), [600], head_dim=64, block_size=16, group=1, dtype="float16")
    good = [np.zeros((1, 2, 2), np.float32), np.zeros((1, 2, 2), np.float32), np.zeros((1, 2, 2, 64), np.float32)]
    rest = (case.q, case.k_cache, case.v_cache, 2, 0.125, case.tables, case.lens, 16, 600)
    out = np.zeros(case.q.shape, np.float16)
    classic.paged_attention_v2(out, *good, *rest)
    for i, bad, message in (
        (0, np.zeros((1, 2, 1), np.float32), r"exp_sums: expected \(1, 2, 2\) float32, got \(1, 2, 1\)"),
        (1, np.zeros((1, 2, 2), np.float16), "max_logits: expected .* float32, got .* float16"),
        (2, np.zeros((1, 2, 2, 64), np.float16), "tmp_out: expected .* float32, got .* float16"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            classic.paged_attention_v2(out, *[bad if j == i else x for j, x in enumerate(good)], *rest)


def test_both_sides_cut_partitions_alike() -> None:
    assert classic.PARTITION_SIZE == CLASSIC_PARTITION
