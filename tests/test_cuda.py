"""The host side of the CUDA path: plans, graphs, uploads, copies. On the executor everywhere, on a GPU where there is one."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import behaviour
import numpy as np
import pytest
import simt_device
from behaviour import assert_close, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from simt import build

import cupaged
from cupaged import cuda, reference
from cupaged.arrays import Attention, numpy_dtype
from cupaged.call_form import call_form
from cupaged.cuda_structs import division_by, merged_axes, power_of_two
from cupaged.launcher import CupyLauncher
from cupaged.plan import Plan


@dataclass(frozen=True)
class Machine:
    """Where the CUDA path runs: the executor, or a GPU."""

    backend: cuda.Backend
    put: Any  # host array -> device array
    get: Any  # device array -> host array
    tensor_cores: bool  # whether 16-bit queries go there


@pytest.fixture(params=["simt", "simt_sm75", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda":
        cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
        if not cupy.cuda.is_available():
            pytest.skip("no CUDA device found")
        backend = cuda.current_backend()
        yield Machine(backend, cupy.asarray, cupy.asnumpy, backend.launcher.info.arch >= 80)
        return
    if reason := build.unavailable():
        pytest.skip(reason)
    backend = simt_device.backend(75 if request.param == "simt_sm75" else 90)
    with simt_device.in_place_of_a_gpu(backend):
        yield Machine(backend, backend.launcher.put, backend.launcher.fetch, request.param == "simt")


# ------------------------------------------------------------------------------------------------------ graphs and plans

SHAPE = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": "float16"}


class Decoding:
    """Growing sequences in a pool on the device, and what the oracle says of each step."""

    def __init__(self, machine: Machine, rng: np.random.Generator, num_blocks: int = 160) -> None:
        self.machine, self.rng = machine, rng
        self.alloc = cupaged.BlockAllocator(num_blocks, 16)
        self.host = np.full((num_blocks, 2, 2, 16, 64), np.nan, np.float16)
        self.pool = machine.put(self.host)
        self.caches = self.pool[:, 0], self.pool[:, 1]

    def rows(self, n: int, heads: int) -> np.ndarray:
        return self.rng.standard_normal((n, heads, 64)).astype(np.float16)

    def expect(
        self, step: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Store this step's keys and values on the host too, and attend there."""
        reference.write_kv(k, v, self.host[:, 0], self.host[:, 1], step.slot_mapping)
        where = (step.block_tables, step.seq_lens)
        return reference.paged_attention(
            q, self.host[:, 0], self.host[:, 1], *where, query_start_loc=step.query_start_loc, **options
        )


@pytest.mark.parametrize("max_queries", [1, 5])
@pytest.mark.parametrize("options", [{}, {"window": 37}, {"num_splits": 3}], ids=str)
def test_one_captured_graph_serves_every_later_step(
    machine: Machine, rng: np.random.Generator, max_queries: int, options: dict[str, Any]
) -> None:
    """Write and attention are captured once, for two short sequences; then lengths grow, sequences come, go, and pad."""
    world = Decoding(machine, rng)
    launcher = machine.backend.launcher
    ids = ["a", "b"]
    for name, n in zip(ids, (3, 1), strict=True):
        world.alloc.add_request(name, 0)
        step = world.alloc.grow(name, n)
    max_seqs, max_tokens = 4, 4 * max_queries
    first = world.alloc.grow_batch(ids, [1, 1])
    plan = cupaged.plan(
        first.seq_lens, first.block_tables, query_start_loc=first.query_start_loc, slot_mapping=first.slot_mapping, device="cuda",
        max_seqs=max_seqs, max_tokens=max_tokens, max_blocks=48, **SHAPE, **options,
    )  # fmt: skip
    q, k, v, out = (machine.put(np.full((max_tokens, heads, 64), np.nan, np.float16)) for heads in (6, 2, 2, 6))
    lse = machine.put(np.full((max_tokens, 6), np.nan, np.float32))

    def run() -> None:
        cupaged.write_kv(k, v, *world.caches, plan.write_slots)
        cupaged.paged_attention(q, *world.caches, None, None, plan=plan, out=out, lse=lse, return_lse=True, **options)

    # the two sequences' earlier tokens have to be there before the first replay
    for name in ids:
        n = world.alloc.lengths[name] - 1
        slots = np.array([world.alloc.physical_slot(name, i) for i in range(n)])
        some = world.rows(n, 2), world.rows(n, 2)
        reference.write_kv(*some, world.host[:, 0], world.host[:, 1], slots)
    world.pool[...] = machine.put(world.host)

    run()  # compile before capturing
    with launcher.capture() as graph:
        run()

    step = first
    for number in range(6):
        n = step.slot_mapping.size
        new_q, new_k, new_v = world.rows(n, 6), world.rows(n, 2), world.rows(n, 2)
        for there, new in ((q, new_q), (k, new_k), (v, new_v)):
            there[:n] = machine.put(new)
            there[n:] = np.nan  # rows of padding
        out[...] = lse[...] = 7.0
        plan.update(step)
        graph.replay()
        expected_out, expected_lse = world.expect(
            step, new_q, new_k, new_v, **{k: v for k, v in options.items() if k != "num_splits"}
        )
        got_out, got_lse = machine.get(out), machine.get(lse)
        np.testing.assert_allclose(got_out[:n], expected_out, atol=4e-3, err_msg=f"step {number}")
        np.testing.assert_allclose(got_lse[:n], expected_lse, atol=1e-4)
        assert (got_out[n:] == 0).all() and (got_lse[n:] == -np.inf).all(), "padding is an empty row"
        np.testing.assert_array_equal(np.isnan(machine.get(world.pool)), np.isnan(world.host))
        if number == 1:
            world.alloc.add_request("c", 0)
            ids = [*ids, "c"]
        if number == 3:
            world.alloc.free_request("a")
            ids = ["c", "b"]
        grown = [int(g) for g in rng.integers(1, max_queries + 1, len(ids))] if max_queries > 1 else [1] * len(ids)
        if number == 2 and max_queries > 1:
            grown = [0, max_queries, 2][: len(ids)]
        for name in ids if number != 2 else []:  # tokens that arrived by another way: long contexts
            before = world.alloc.lengths[name]
            world.alloc.grow(name, int(rng.integers(60, 160)))
            slots = np.array([world.alloc.physical_slot(name, i) for i in range(before, world.alloc.lengths[name])])
            reference.write_kv(
                world.rows(len(slots), 2), world.rows(len(slots), 2), world.host[:, 0], world.host[:, 1], slots
            )
            world.pool[...] = machine.put(world.host)
        step = world.alloc.grow_batch(ids, grown)


def test_an_update_is_one_copy_and_a_call_with_plan_and_out_allocates_nothing(rng: np.random.Generator) -> None:
    if reason := build.unavailable():
        pytest.skip(reason)
    backend = simt_device.backend()
    with simt_device.in_place_of_a_gpu(backend):
        launcher = backend.launcher
        case = make_case(rng, seq_lens=[300, 5], head_dim=64, group=3, block_size=16, dtype="float16")
        plan = cupaged.plan(
            case.seq_lens, case.block_tables, slot_mapping=np.array([-1, -1]), **SHAPE, device="cuda",
            max_seqs=4, max_tokens=4, max_blocks=32,
        )  # fmt: skip
        out, lse = np.full(case.q.shape, np.nan, np.float16), np.full(case.q.shape[:2], np.nan, np.float32)
        step = SimpleNamespace(
            block_tables=case.block_tables, seq_lens=case.seq_lens, query_start_loc=np.arange(3, dtype=np.int32),
            slot_mapping=np.array([-1, -1]), block_size=16, num_blocks=len(case.k_cache),
        )  # fmt: skip
        before = launcher.num_copies
        plan.update(step)
        assert launcher.num_copies == before + 1
        with launcher.capture() as graph:  # the executor refuses allocation, compilation and synchronisation in here
            cupaged.paged_attention(case.q, case.k_cache, case.v_cache, None, None, plan=plan, out=out, lse=lse)
        graph.replay()
        assert_close(case, out, lse, tensor_cores=True)


def test_updates_may_run_ahead_of_the_device(rng: np.random.Generator) -> None:
    """More steps are enqueued than the pinned ring has buffers, before the first of them runs."""
    if reason := build.unavailable():
        pytest.skip(reason)
    backend = cuda.Backend(simt_device.Launcher(90, lazy=True))
    launcher = backend.launcher
    with simt_device.in_place_of_a_gpu(backend):
        case = make_case(rng, seq_lens=[90, 70], head_dim=64, group=3, block_size=16, dtype="float16")
        plan = cupaged.plan(
            case.seq_lens, case.block_tables, **SHAPE, device="cuda", max_seqs=2, max_tokens=2, max_blocks=8
        )
        out = launcher.put(np.zeros(case.q.shape, np.float16))
        lse = launcher.put(np.zeros(case.q.shape[:2], np.float32))
        snapshots, cases = [], []
        for _ in range(11):
            lens = rng.integers(0, [91, 71]).astype(np.int32)
            cases.append(replace(case, seq_lens=lens))
            plan.update(
                SimpleNamespace(
                    block_tables=case.block_tables, seq_lens=lens, query_start_loc=np.arange(3, dtype=np.int32),
                    slot_mapping=np.array([-1, -1]), block_size=16, num_blocks=len(case.k_cache),
                )
            )  # fmt: skip
            cupaged.paged_attention(case.q, case.k_cache, case.v_cache, None, None, plan=plan, out=out, lse=lse)
            snapshots.append((launcher.empty(out.shape, out.dtype), launcher.empty(lse.shape, lse.dtype)))
            launcher.copy_async(snapshots[-1][0], out)
            launcher.copy_async(snapshots[-1][1], lse)
        launcher.flush()
        for one, snapshot in zip(cases, snapshots, strict=True):
            assert_close(one, *snapshot, tensor_cores=True)


def test_a_plan_with_bounds_refuses_a_larger_step_and_stays_as_it_was(
    machine: Machine, rng: np.random.Generator
) -> None:
    case = make_case(rng, seq_lens=[30, 17], head_dim=64, group=3, block_size=16, dtype="float16")
    plan = cupaged.plan(
        case.seq_lens, case.block_tables, **SHAPE, device="cuda", max_seqs=2, max_tokens=3, max_blocks=3
    )
    good = {
        "block_tables": case.block_tables, "seq_lens": case.seq_lens, "query_start_loc": np.arange(3, dtype=np.int32),
        "slot_mapping": np.array([-1, -1]), "block_size": 16, "num_blocks": len(case.k_cache),
    }  # fmt: skip
    wide = np.zeros((2, 9), np.int32)
    for change, message in (
        (
            {"seq_lens": np.array([50, 1], np.int32), "block_tables": wide},
            "max_blocks: the plan has room for 3, the step needs 4",
        ),
        ({"query_start_loc": np.array([0, 2, 4], np.int32)}, "max_tokens: the plan has room for 3, the step needs 4"),
        (
            {"seq_lens": np.ones(3, np.int32), "query_start_loc": np.arange(4, dtype=np.int32)},
            "max_seqs: the plan has room for 2",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            plan.update(SimpleNamespace(**{**good, **change}))
    q, k, v = machine.put(case.q), machine.put(case.k_cache), machine.put(case.v_cache)
    out, lse = cupaged.paged_attention(q, k, v, None, None, plan=plan, return_lse=True)
    assert_close(case, machine.get(out), machine.get(lse), machine.tensor_cores)
    too_many = machine.put(np.zeros((4, 6, 64), np.float16))
    with pytest.raises(ValueError, match=r"q: expected 2 .* to max_tokens = 3 rows, got 4"):
        cupaged.paged_attention(too_many, k, v, None, None, plan=plan)


@pytest.mark.parametrize(
    ("arch", "dtype", "kv_dtype", "head_dim"), [(75, "float32", None, 80), (90, "float16", "fp8_e4m3", 64)]
)
def test_after_a_warmup_no_call_compiles(
    rng: np.random.Generator, arch: int, dtype: str, kv_dtype: str | None, head_dim: int
) -> None:
    if reason := build.unavailable():
        pytest.skip(reason)
    backend = cuda.Backend(simt_device.Launcher(arch))
    with simt_device.in_place_of_a_gpu(backend):
        cupaged.warmup(num_heads=6, num_kv_heads=2, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, max_queries=7)
        compiled = set(backend.launcher.known)
        for query_lens in (None, [1, 5], [7, 3], [1, 7]):
            case = make_case(
                rng,
                seq_lens=[40, 33],
                query_lens=query_lens,
                head_dim=head_dim,
                group=3,
                block_size=16,
                dtype=dtype,
                kv_dtype=kv_dtype,
            )
            put = backend.launcher.put
            case = replace(case, q=put(case.q), k_cache=put(case.k_cache), v_cache=put(case.v_cache))
            cupaged.paged_attention(*case.arguments(), **case.options)
            k = put(rng.standard_normal((3, 2, head_dim)).astype(numpy_dtype(dtype)))
            cupaged.write_kv(k, k, case.k_cache, case.v_cache, np.array([0, -1, 5]), kv_dtype=kv_dtype)
        backend.copy_blocks(case.k_cache, np.array([[0, 1]]))
        outs = put(np.zeros((2, 3, 6, head_dim), numpy_dtype(dtype)))
        cupaged.merge_states(outs, put(np.zeros((2, 3, 6), np.float32)))
        assert set(backend.launcher.known) == compiled


def test_a_warmup_of_impossible_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="num_heads: expected a multiple of num_kv_heads = 2, got 5"):
        cupaged.warmup(num_heads=5, num_kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match="max_queries: expected an integer of at least 1, got 0"):
        cupaged.warmup(num_heads=4, num_kv_heads=2, head_dim=64, max_queries=0)


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
