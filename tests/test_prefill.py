"""Tensor-core prefill: many packed rows to a tile, alone and beside decode rows in one call."""

from __future__ import annotations

import behaviour
import numpy as np
import pytest
from behaviour import assert_close, make_case
from simt import build

if reason := build.unavailable():
    pytest.skip(reason, allow_module_level=True)

import simt_device


def run(case: behaviour.Case, arch: int = 90, kind: str = "plain") -> tuple[np.ndarray, np.ndarray, list[str]]:
    return simt_device.attend(case, simt_device.backend(arch, kind=kind))


def check(case: behaviour.Case, arch: int = 90, kernels: tuple[str, ...] = ("prefill",)) -> None:
    out, lse, launched = run(case, arch)
    assert launched == list(kernels)
    assert_close(case, out, lse, tensor_cores=True)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "arch", "head_dim"),
    [
        ("float16", None, 80, 64), ("bfloat16", None, 90, 24), ("float16", "fp8_e4m3", 80, 40), ("bfloat16", "fp8_e4m3", 90, 64),
        ("bfloat16", "fp8_e5m2", 86, 256), ("float16", None, 86, 256),
    ],
)  # fmt: skip
def test_every_operand_format(
    dtype: str, kv_dtype: str | None, arch: int, head_dim: int, rng: np.random.Generator
) -> None:
    case = make_case(
        rng, seq_lens=[70, 33], query_lens=[21, 9], num_kv_heads=2, group=3, head_dim=head_dim, block_size=5, dtype=dtype,
        kv_dtype=kv_dtype, layout="NHD", k_scale=0.5, v_scale=np.array([0.25, 3], np.float32),
    )  # fmt: skip
    check(case, arch)


@pytest.mark.parametrize(
    "how",
    [
        {}, {"causal": False}, {"window": 1}, {"window": 40}, {"chunk": 32}, {"chunk": 50, "window": 20}, {"softcap": 2.0},
        {"window": 30, "causal": False},
    ],
    ids=str,
)  # fmt: skip
def test_a_chunk_of_a_prompt_behind_a_cached_prefix(how: dict[str, object], rng: np.random.Generator) -> None:
    # 40 rows behind 210 cached tokens, a whole prompt, and more rows than keys; rows of a tile end at different keys
    case = make_case(
        rng,
        seq_lens=[250, 70, 11],
        query_lens=[40, 70, 19],
        group=2,
        head_dim=64,
        block_size=16,
        dtype="float16",
        **how,
    )
    check(case)


def test_sinks_and_alibi_belong_to_the_head_of_each_packed_row(rng: np.random.Generator) -> None:
    case = make_case(
        rng, seq_lens=[50, 30], query_lens=[20, 30], group=7, head_dim=64, block_size=3, dtype="float16",
        alibi_slopes=rng.uniform(-0.3, 0.3, 14).astype(np.float32), sinks=rng.normal(0, 2, 14).astype(np.float32),
    )  # fmt: skip
    check(case)


@pytest.mark.parametrize("group", [17, 71])
def test_a_large_group_splits_rows_even_in_decode(group: int, rng: np.random.Generator) -> None:
    case = make_case(
        rng, seq_lens=[300, 0, 1], num_kv_heads=1, group=group, head_dim=64, block_size=16, dtype="bfloat16"
    )
    check(case)


def test_eight_warps_share_a_tile_of_a_long_prompt(rng: np.random.Generator) -> None:
    case = make_case(
        rng, seq_lens=[310], query_lens=[290], num_kv_heads=1, group=1, head_dim=64, block_size=32, dtype="float16"
    )
    check(case)


def test_decode_and_prefill_rows_in_one_call(rng: np.random.Generator) -> None:
    case = make_case(
        rng,
        seq_lens=[150, 90, 0, 40, 7],
        query_lens=[1, 33, 1, 2, 0],
        group=4,
        head_dim=64,
        block_size=16,
        dtype="float16",
    )
    check(case, kernels=("decode_mma", "prefill"))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_row_has_the_same_bits_in_any_batch(num_splits: int, rng: np.random.Generator) -> None:
    # the neighbours make the prefill's tile larger, and bring a second kernel into the call
    case = make_case(
        rng, seq_lens=[130, 300, 50], query_lens=[12, 280, 1], group=2, num_kv_heads=1, head_dim=64, block_size=16, dtype="bfloat16",
        num_splits=num_splits,
    )  # fmt: skip
    out, lse, launched = run(case)
    assert launched == ["decode_mma", "prefill"]
    start = case.options["query_start_loc"]
    for i, kernel in ((0, "prefill"), (2, "decode_mma")):
        rows = slice(start[i], start[i + 1])
        alone = behaviour.replace(
            case, q=case.q[rows], block_tables=case.block_tables[i : i + 1], seq_lens=case.seq_lens[i : i + 1],
            options=dict(case.options, query_start_loc=np.array([0, start[i + 1] - start[i]], np.int32)),
        )  # fmt: skip
        alone_out, alone_lse, alone_launched = run(alone)
        assert alone_launched == [kernel]
        np.testing.assert_array_equal(alone_out.view(np.uint16), out[rows].view(np.uint16))
        np.testing.assert_array_equal(alone_lse, lse[rows])


@pytest.mark.parametrize("kv_dtype", [None, "fp8_e4m3"])
def test_poison_in_slots_of_a_visible_tile_changes_no_bit(kv_dtype: str | None, rng: np.random.Generator) -> None:
    case = make_case(
        rng, seq_lens=[70, 33, 9], query_lens=[21, 9, 2], group=2, head_dim=40, block_size=5, dtype="float16", kv_dtype=kv_dtype,
        window=25,
    )  # fmt: skip
    # what stands for no token is never read, not even in block 0, whose address it gets
    used = case.block_tables[np.arange(3).repeat([14, 7, 2]), np.r_[0:14, 0:7, 0:2]]
    free = np.setdiff1d(np.arange(len(case.k_cache)), used)[0]
    case.k_cache[free], case.v_cache[free] = case.k_cache[0], case.v_cache[0]
    case.block_tables[case.block_tables == 0] = free
    out, lse, _ = run(case)
    for poison in (np.nan, np.inf, 3e4):
        poisoned_out, poisoned_lse, _ = run(case.poisoned(poison))
        np.testing.assert_array_equal(poisoned_out.view(np.uint16), out.view(np.uint16))
        np.testing.assert_array_equal(poisoned_lse, lse)


@pytest.mark.parametrize("kind", ["checked", "asan", "tsan"])
def test_no_race_no_read_outside_and_nothing_uninitialised(kind: str, rng: np.random.Generator) -> None:
    # fp8 rows of 40 bytes end inside a unit; splits bring in tickets and partial results; both kernels run
    case = make_case(
        rng, seq_lens=[200, 90, 40], query_lens=[12, 1, 3], group=2, head_dim=40, block_size=5, dtype="bfloat16", kv_dtype="fp8_e4m3",
        num_splits=3, window=120,
    )  # fmt: skip
    out, lse, launched = run(case, kind=kind)
    assert launched == ["decode_mma", "prefill"]
    assert_close(case, out, lse, tensor_cores=True)
