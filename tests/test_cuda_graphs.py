"""Plans, graphs and warmups of the CUDA path: what is captured once serves every later step, and nothing is allocated or compiled late."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simt_device
from behaviour import assert_close, make_case
from devices import Machine
from simt import build

import cupaged
from cupaged import cuda, reference
from cupaged.arrays import numpy_dtype

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


def test_a_step_of_a_cache_is_one_copy_to_the_device(rng: np.random.Generator) -> None:
    """Slots, tables, lengths and work of all layers, though the first write comes before attention says what it will be."""
    if reason := build.unavailable():
        pytest.skip(reason)
    backend = simt_device.backend()
    with simt_device.in_place_of_a_gpu(backend):
        cache, alloc = cupaged.KVCache(2, 8, 16, 2, 64, device="cpu"), cupaged.BlockAllocator(8, 16)
        keys, copies = [], []
        for number, count in enumerate((20, 1, 1)):
            step = alloc.grow("a", count) if number else alloc.add_request("a", count)
            cache.begin(step)
            before = backend.launcher.num_copies
            q, k, v = (rng.standard_normal((count, heads, 64)).astype(np.float16) for heads in (6, 2, 2))
            for layer in range(2):
                cache.write(layer, k, v, step)
                out = cache.attend(layer, q, step)
            copies.append(backend.launcher.num_copies - before)
            keys.append((k, v))
            expected, _ = reference.paged_attention(
                q, *cache.layer(1), step.block_tables, step.seq_lens, query_start_loc=step.query_start_loc
            )
            np.testing.assert_allclose(out, expected, atol=4e-3)
        for found, rows in zip(cache.gather(1, alloc.tables["a"], 22), zip(*keys, strict=True), strict=True):
            np.testing.assert_array_equal(found, np.concatenate(rows))
    assert copies == [2, 1, 1], "the first step of all does not know what attention there will be"


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
    ("arch", "dtype", "kv_dtype", "head_dim", "block_size"),
    [(75, "float32", None, 80, 16), (90, "float16", "fp8_e4m3", 64, 16), (80, "float16", "fp8_e4m3", 64, 3)],
)
def test_after_a_warmup_no_call_compiles(
    rng: np.random.Generator, arch: int, dtype: str, kv_dtype: str | None, head_dim: int, block_size: int
) -> None:
    if reason := build.unavailable():
        pytest.skip(reason)
    backend = cuda.Backend(simt_device.Launcher(arch))
    with simt_device.in_place_of_a_gpu(backend):
        cupaged.warmup(
            num_heads=6,
            num_kv_heads=2,
            head_dim=head_dim,
            dtype=dtype,
            kv_dtype=kv_dtype,
            max_queries=7,
            block_size=block_size,
        )
        compiled = set(backend.launcher.known)
        for query_lens in (None, [1, 5], [7, 3], [1, 7]):
            case = make_case(
                rng,
                seq_lens=[40, 33],
                query_lens=query_lens,
                head_dim=head_dim,
                group=3,
                block_size=block_size,
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
