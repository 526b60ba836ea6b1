"""The host side of the CUDA path: metadata on the device, copies, arithmetic, messages. On the executor, and on a GPU if there is one."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import behaviour
import numpy as np
import pytest
from behaviour import assert_close, make_case
from devices import Machine
from hypothesis import given, settings
from hypothesis import strategies as st

import cupaged
from cupaged import cuda
from cupaged.arrays import Attention, numpy_dtype
from cupaged.call_form import call_form
from cupaged.cuda_structs import division_by, merged_axes, power_of_two
from cupaged.launcher import CupyLauncher
from cupaged.plan import Plan

# --------------------------------------------------------------------------------------------------- device metadata


def attend(
    machine: Machine, case: behaviour.Case, *, on_device: bool, tokens: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The backend's own call, with metadata on the host or on the device; `tokens` rows of q and out, NaN past the case's."""
    o, hk = (
        case.options,
        case.q.shape[1] // (case.q.shape[1] // case.k_cache.shape[1 if case.options["layout"] == "HND" else 2]),
    )
    starts = np.arange(len(case.seq_lens) + 1, dtype=np.int32) if o["query_start_loc"] is None else o["query_start_loc"]
    q = np.full((tokens or len(case.q), *case.q.shape[1:]), np.nan, case.q.dtype)
    q[: len(case.q)] = case.q
    pages = [cupaged.arrays.pages_view(machine.put(x), o["layout"]) for x in (case.k_cache, case.v_cache)]
    out = machine.put(np.full(q.shape, np.nan, q.dtype))
    lse = machine.put(np.full(q.shape[:2], np.nan, np.float32))
    put = machine.put if on_device else np.ascontiguousarray
    per_head = [None if o[name] is None else machine.put(o[name]) for name in ("alibi_slopes", "sinks")]
    scales = [machine.put(np.broadcast_to(np.float32(o[name]), (hk,)).copy()) for name in ("k_scale", "v_scale")]
    there, metadata = machine.put(q), [put(x) for x in (case.block_tables, case.seq_lens, starts)]
    form, _ = call_form(
        there, *pages, out, lse, True, "HND", o["kv_dtype"], o["scale"], o["causal"], o["window"], o["chunk"], o["softcap"],
        o["num_splits"], True, *scales, o["alibi_slopes"] is not None,
    )  # fmt: skip
    plan = None if on_device else Plan(*metadata, form.block_size, form.num_blocks)
    machine.backend.paged_attention(
        Attention(
            there, *pages, *metadata, form.scale, o["causal"], o["window"], o["chunk"], o["softcap"], *per_head, *scales,
            form.options.kv_dtype, o["num_splits"], plan, out, lse, form,
        )
    )  # fmt: skip
    return machine.get(out), machine.get(lse)


def test_lengths_that_only_the_device_knows_give_the_same_result(machine: Machine) -> None:
    @settings(max_examples=25)
    @given(behaviour.cases(head_dims=(8, 64), block_sizes=(1, 3, 16), groups=(1, 3, 17)))
    def check(case: behaviour.Case) -> None:
        if not len(case.q):
            return
        out, lse = attend(machine, case, on_device=True)
        assert_close(case, out, lse, machine.tensor_cores)
        if case.options["num_splits"] is not None:  # then even the bits are those of planned work
            planned, planned_lse = attend(machine, case, on_device=False)
            np.testing.assert_array_equal(out.view(np.uint8), planned.view(np.uint8))
            np.testing.assert_array_equal(lse, planned_lse)

    check()


def test_rows_past_the_last_sequence_come_out_empty(machine: Machine, rng: np.random.Generator) -> None:
    case = make_case(rng, seq_lens=[5, 40], query_lens=[2, 1], block_size=16, head_dim=64, group=3, dtype="float16")
    for on_device in (True, False):
        out, lse = attend(machine, case, on_device=on_device, tokens=9)
        assert_close(case, out[:3], lse[:3], machine.tensor_cores)
        assert (out[3:] == 0).all() and (lse[3:] == -np.inf).all()


def test_debug_mode_clamps_what_only_the_device_knows(
    machine: Machine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPAGED_DEBUG", "1")
    case = make_case(rng, seq_lens=[40, 33], block_size=16, head_dim=64, group=3, dtype="float16", spare_columns=0)
    tables, lens = case.block_tables.copy(), case.seq_lens.copy()
    tables[0, 1] = len(case.k_cache) + 10**6  # no such block: its keys are hidden
    lens[1] = 2**31 - 1  # longer than the table: clamped
    wild = replace(case, block_tables=tables, seq_lens=lens)
    tamed_tables = tables.copy()
    tamed_tables[0, 1] = -1
    tamed = replace(
        case,
        block_tables=tamed_tables,
        seq_lens=np.array([40, 48], np.int32),
        options={**case.options, "causal": False},
    )
    wild.options["causal"] = False
    case.k_cache[...], case.v_cache[...] = np.nan_to_num(case.k_cache), np.nan_to_num(case.v_cache)
    out, lse = attend(machine, wild, on_device=True)
    assert_close(tamed, out, lse, machine.tensor_cores)
    for starts in ([-7, 1, 10**6], [0, 1, 2**31 - 1]):  # before the first row and past the last
        wilder = replace(wild, options={**wild.options, "query_start_loc": np.array(starts, np.int32)})
        out, lse = attend(machine, wilder, on_device=True)
        assert_close(tamed, out, lse, machine.tensor_cores)
    cache = machine.put(np.zeros((2, 1, 4, 8), np.float32))
    k = machine.put(np.ones((2, 1, 8), np.float32))
    ones = machine.put(np.ones(1, np.float32))
    machine.backend.write_kv(
        cupaged.arrays.WriteKV(k, k, cache, cache, machine.put(np.array([8, 7])), ones, ones, "float32", "HND")
    )
    written = machine.get(cache)
    assert (written[1, 0, 3] == 1).all() and written.sum() == 8, "slot 8 lies past the pool of 8 slots"


# ------------------------------------------------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    "pool",
    ["page-major", "layer-major", "odd bytes", "one token", "sliced heads", "interleaved"],
)
def test_copies_move_whole_blocks_and_nothing_else(machine: Machine, rng: np.random.Generator, pool: str) -> None:
    shape = {
        "page-major": (9, 3, 2, 2, 4, 8), "layer-major": (3, 2, 9, 2, 4, 8), "odd bytes": (9, 7, 5), "one token": (9, 1, 1, 1, 3),
        "sliced heads": (9, 2, 6, 4, 8), "interleaved": (9, 2, 4, 24),
    }[pool]  # fmt: skip
    dtype = np.uint8 if pool in ("odd bytes", "one token") else np.float16
    whole = rng.integers(0, 250, shape).astype(dtype)
    there = machine.put(whole)

    def view(x: Any) -> Any:
        if pool == "layer-major":
            return x.transpose(2, 0, 1, 3, 4, 5)
        return x[:, :, 1:5] if pool == "sliced heads" else x[..., 8:16] if pool == "interleaved" else x

    expected = whole.copy()
    pairs = np.array([[0, 5], [3, 1], [0, 8], [7, 2]], np.int32)
    for src, dst in pairs:
        view(expected)[dst] = view(whole)[src]
    machine.backend.copy_blocks(view(there), pairs)
    np.testing.assert_array_equal(machine.get(there), expected)


def test_more_copies_than_one_launch_takes(machine: Machine, rng: np.random.Generator) -> None:
    whole = rng.standard_normal((1000, 6)).astype(np.float32)
    there = machine.put(whole)
    ids = rng.permutation(1000)
    pairs = np.stack([ids[:490], ids[500:990]], axis=1)
    machine.backend.copy_blocks(there, pairs)
    whole[pairs[:, 1]] = whole[pairs[:, 0]]
    np.testing.assert_array_equal(machine.get(there), whole)


@pytest.mark.parametrize("order", ["page", "layer"])
def test_swapping_out_and_in_brings_the_blocks_back(machine: Machine, rng: np.random.Generator, order: str) -> None:
    shape = (10, 3, 2, 4, 8) if order == "page" else (3, 2, 10, 4, 8)
    axes = (0, 1, 2, 3, 4) if order == "page" else (2, 0, 1, 3, 4)
    whole = rng.standard_normal(shape).astype(np.float16)
    there = machine.put(whole)
    pool = there.transpose(axes)
    host = machine.backend.launcher.pinned(6 * pool[0].nbytes).view(np.float16).reshape(6, *pool.shape[1:])
    machine.backend.swap_blocks(pool, host, np.array([[4, 0], [5, 1], [9, 3]]))
    event = machine.backend.launcher.record()
    machine.backend.launcher.synchronize(event)
    np.testing.assert_array_equal(host[[0, 1, 3]], whole.transpose(axes)[[4, 5, 9]])
    pool[...] = machine.put(np.zeros(pool.shape, np.float16))
    machine.backend.swap_blocks(host, pool, np.array([[0, 2], [3, 4], [1, 3]]))
    expected = np.zeros(pool.shape, np.float16)
    expected[[2, 4, 3]] = whole.transpose(axes)[[4, 9, 5]]
    np.testing.assert_array_equal(machine.get(pool), expected)


# --------------------------------------------------------------------------------------------------------- arithmetic


@given(st.integers(1, 2**20), st.lists(st.integers(0, 2**31 - 1), min_size=1))
@settings(max_examples=200)
def test_division_by_multiplication_is_exact(divisor: int, numbers: list[int]) -> None:
    magic, shift = division_by(divisor)
    assert magic < 2**32
    for n in (
        *numbers,
        0,
        divisor - 1,
        divisor,
        2**31 - 1,
        (2**31 - 1) // divisor * divisor,
        (2**31 - 1) // divisor * divisor - 1,
    ):
        if n >= 0:
            assert n * magic >> shift == n // divisor


def test_access_width_divides_every_address_and_stride() -> None:
    assert power_of_two(4096, 256, 32) == 16
    assert power_of_two(4096 + 8, 256) == 8 and power_of_two(4096, 6) == 2 and power_of_two(1, 16) == 1
    assert power_of_two(4096, -48) == 16 and power_of_two(0) == 16


def test_axes_inside_a_block_are_merged_where_both_arrays_allow_it() -> None:
    pool = np.zeros((5, 3, 2, 4, 8), np.float16)
    assert merged_axes(pool, pool) == [(3 * 2 * 4 * 8, 2, 2)]
    layers = np.zeros((3, 2, 5, 4, 8), np.float16).transpose(2, 0, 1, 3, 4)
    assert merged_axes(layers, layers) == [(6, 5 * 4 * 8 * 2, 5 * 4 * 8 * 2), (32, 2, 2)]
    assert merged_axes(pool, layers) == [(6, 64, 5 * 4 * 8 * 2), (32, 2, 2)]


# ------------------------------------------------------------------------------------------------------- no device


def test_without_cupy_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(
        ModuleNotFoundError, match=r"needs CuPy, which is not installed: pip install 'cupaged\[cuda12x\]'"
    ):
        cuda.current_backend()


def test_without_a_gpu_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setitem(sys.modules, "cupy", no_gpu)
    with pytest.raises(RuntimeError, match="device: 'cuda' found no GPU"):
        cuda.current_backend()


def test_a_device_older_than_the_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(
        cuda=SimpleNamespace(Device=lambda i: SimpleNamespace(compute_capability="70", attributes={}))
    )
    monkeypatch.setitem(sys.modules, "cupy", old)
    with pytest.raises(RuntimeError, match=r"device 0 has compute capability 7\.0; cupaged's kernels need 7\.5"):
        CupyLauncher(0)


def test_dtypes_of_kernels_have_numpy_twins() -> None:
    for name in ("float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"):
        assert numpy_dtype(name).itemsize in (1, 2, 4)
