"""The pool's memory: sizes, layouts, steps in order, copies before writes."""

from __future__ import annotations

import pickle
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged import BlockAllocator, KVCache, blocks_for, reference
from cupaged.arrays import numpy_dtype


def small_cache(**changes: Any) -> KVCache:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "num_blocks": 6,
        "block_size": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "dtype": "float32",
    }
    return KVCache(**(sizes | {"device": "cpu"} | changes))


def new_rows(rng: np.random.Generator, n: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    k, v = (rng.standard_normal((n, 2, 8)).astype(numpy_dtype(dtype)) for _ in range(2))
    return k, v


def test_a_slot_of_all_layers_takes_what_the_sizes_say() -> None:
    for dtype, itemsize in (("float32", 4), ("float16", 2), ("bfloat16", 2), ("fp8_e4m3", 1)):
        cache = KVCache(
            num_layers=30, num_blocks=3, block_size=1, num_kv_heads=3, head_dim=64, dtype=dtype, device="cpu"
        )
        assert cache.bytes_per_block == 2 * 30 * 3 * 64 * itemsize
        assert cache.pool.nbytes == 3 * cache.bytes_per_block
    sizes: dict[str, Any] = {"num_layers": 30, "block_size": 16, "num_kv_heads": 3, "head_dim": 64, "dtype": "float32"}
    per_block = 2 * 30 * 3 * 16 * 64 * 4
    assert [blocks_for(n, **sizes) for n in (per_block - 1, per_block, 10 * per_block)] == [0, 1, 10]


def test_sizes_may_be_integers_of_numpy() -> None:
    sizes = np.array([80, 2**20, 1024, 64, 128], np.int32)
    cache = KVCache(*sizes, dtype="float16", device="cpu")  # nothing is written, so no memory is taken
    assert cache.bytes_per_block == 2 * 80 * 64 * 1024 * 128 * 2
    small = small_cache(num_blocks=np.int8(100), block_size=np.int8(16), head_dim=np.int8(64))
    assert small.pool.shape == (100, 2, 2, 2, 16, 64) and small.pool.nbytes == 100 * small.bytes_per_block


def test_one_block_of_all_layers_is_one_contiguous_piece() -> None:
    assert small_cache().pool[3].flags.c_contiguous


@pytest.mark.parametrize("order", ["page", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_begin_on_a_cache_line(order: str, dtype: str) -> None:
    pools = [small_cache(order=order, dtype=dtype).pool for _ in range(4)]
    assert all(pool.ctypes.data % 64 == 0 and pool.flags.writeable for pool in pools)
    k_cache, v_cache = small_cache(order="layer").layer(1)
    assert k_cache.flags.c_contiguous and v_cache.flags.c_contiguous


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("order", ["page", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_written_is_gathered_and_attended(
    rng: np.random.Generator, layout: str, order: str, dtype: str
) -> None:
    cache, alloc = small_cache(layout=layout, order=order, dtype=dtype), BlockAllocator(6, 4)
    cache.pool[:] = np.nan
    alloc.add_request("other", 3)
    rows = [[], []]
    for n in (6, 1, 1):
        step = alloc.add_request("A", n) if n == 6 else alloc.grow("A", n)
        cache.begin(step)
        for layer in range(2):
            k, v = new_rows(rng, n, dtype)
            rows[layer].append((k, v))
            cache.write(layer, k, v, step)
            k, v = (np.concatenate(x) for x in zip(*rows[layer], strict=True))
            for got, expected in zip(cache.gather(layer, alloc.tables["A"], len(k)), (k, v), strict=True):
                np.testing.assert_array_equal(got, expected)
                assert got.flags.c_contiguous
            q = rng.standard_normal((1, 4, 8)).astype(numpy_dtype(dtype))
            if n == 1:
                out, lse = cache.attend(layer, q, step, return_lse=True)
                expected_out, expected_lse = reference.dense_attention(q, k, v)
                terms = 2 + np.abs(q.astype(float)).sum(axis=2).max() * np.abs(k.astype(float)).max() * 8**-0.5
                # of a logit; of the result
                unit = {"float32": 2.0**-22 * terms, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
                np.testing.assert_allclose(out.astype(float), expected_out, atol=unit * np.abs(v.astype(float)).max())
                np.testing.assert_allclose(lse, expected_lse, atol=1e-5)


@settings(max_examples=60)
@given(st.data())
def test_forked_sequences_equal_dense_copies(data: st.DataObject) -> None:
    """Fork, grow, reorder, evict, restore and free at random: every sequence always reads back exactly its own tokens."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    cache = small_cache(
        num_blocks=24,
        host_blocks=9,
        block_size=data.draw(st.sampled_from([1, 3, 4])),
        order=data.draw(st.sampled_from(["page", "layer"])),
    )
    alloc = BlockAllocator(24, cache.block_size, host_blocks=9)
    cache.pool[:] = np.nan
    dense: dict[str, np.ndarray] = {}

    def run(step: Any, ids: list[str], counts: list[int]) -> None:
        cache.begin(step)
        k, v = new_rows(rng, sum(counts))
        for layer in range(2):
            cache.write(layer, k + layer, v + layer, step)
        for name, part in zip(ids, np.split(k, np.cumsum(counts)[:-1]), strict=True):
            dense[name] = np.concatenate([dense.get(name, np.zeros((0, 2, 8), np.float32)), part])

    run(alloc.add_request("A", 3), ["A"], [3])
    for fresh in range(data.draw(st.integers(1, 8))):
        ids = sorted(set(dense) - set(alloc.evicted))
        kind = data.draw(st.sampled_from(["grow", "fork", "reorder", "free", "truncate", "evict", "restore"]))
        if kind in ("evict", "restore"):
            names = data.draw(st.lists(st.sampled_from(ids or alloc.evicted), unique=True))
            try:
                cache.begin(alloc.evict(names) if kind == "evict" and ids else alloc.restore(alloc.evicted))
            except MemoryError:
                continue
        elif not ids:
            continue
        elif kind == "grow":
            counts = data.draw(st.lists(st.integers(0, 3), min_size=len(ids), max_size=len(ids)))
            try:
                step = alloc.grow_batch(ids, counts)
            except MemoryError:
                continue
            run(step, ids, counts)
        elif kind == "fork":
            parent = data.draw(st.sampled_from(ids))
            alloc.fork_request(parent, [f"B{fresh}"])
            dense[f"B{fresh}"] = dense[parent]
        elif kind == "reorder":
            parents = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=len(ids), max_size=len(ids)))
            alloc.reorder(ids, parents)
            dense.update(zip(ids, [dense[ids[p]] for p in parents], strict=True))
        elif kind == "truncate":
            name = data.draw(st.sampled_from(ids))
            length = data.draw(st.integers(0, len(dense[name])))
            alloc.truncate(name, length)
            dense[name] = dense[name][:length]
        elif len(ids) > 1:
            name = data.draw(st.sampled_from(ids))
            alloc.free_request(name)
            del dense[name]
        alloc.check()
        for name, tokens in dense.items():
            for layer in range(0 if name in alloc.evicted else 2):
                np.testing.assert_array_equal(cache.gather(layer, alloc.tables[name], len(tokens))[0], tokens + layer)


def forked_steps() -> tuple[Any, Any, Any]:
    """A step without copies, one with a copy, and one after it."""
    alloc = BlockAllocator(6, 4)
    first = alloc.add_request("A", 3)
    alloc.fork_request("A", ["B"])
    return first, alloc.grow("A", 1), alloc.grow("B", 1)


def test_a_step_whose_predecessor_with_copies_did_not_run_is_refused() -> None:
    first, copying, later = forked_steps()
    assert len(copying.copies) == 1 and len(first.copies) == len(later.copies) == 0
    cache = small_cache()
    cache.begin(first)
    with pytest.raises(
        RuntimeError, match=f"number {later.serial} needs the copies or swaps of step number {copying.serial}"
    ):
        cache.begin(later)
    cache.begin(copying)
    cache.begin(later)
    with pytest.raises(RuntimeError, match=f"number {copying.serial} comes after number {later.serial} began"):
        cache.begin(copying)


def test_steps_of_two_allocators_are_told_apart() -> None:
    """Their numbers may be equal: another one's step would pass for one that has begun."""
    cache = small_cache()
    own, other = (BlockAllocator(6, 4).add_request("A", 3) for _ in range(2))
    cache.begin(own)
    with pytest.raises(ValueError, match="step: another allocator made it than the steps before"):
        cache.begin(other)
    q = np.zeros((3, 4, 8), np.float32)
    with pytest.raises(RuntimeError, match="step: number 1 has not begun"):
        cache.attend(0, q, other)
    cache.begin(pickle.loads(pickle.dumps(own)))  # still the same step


def test_a_step_whose_predecessor_with_swaps_did_not_run_is_refused() -> None:
    alloc, cache = BlockAllocator(6, 4, host_blocks=2), small_cache(host_blocks=2)
    cache.begin(alloc.add_request("A", 7))
    leaving = alloc.evict(["A"])
    returning = alloc.restore(["A"])
    with pytest.raises(RuntimeError, match="number 3 needs the copies or swaps of step number 2"):
        cache.begin(returning)
    cache.begin(leaving)
    with pytest.raises(RuntimeError, match="number 4 needs the copies or swaps of step number 3"):
        cache.begin(alloc.grow("A"))
    cache.begin(returning)


def test_swaps_past_the_host_memory_are_refused() -> None:
    alloc, cache = BlockAllocator(6, 4, host_blocks=3), small_cache(host_blocks=2)
    cache.begin(alloc.add_request("A", 9))
    with pytest.raises(ValueError, match="its swaps use host block 2, the cache has 2; give both the same host_blocks"):
        cache.begin(alloc.evict(["A"]))
    with pytest.raises(ValueError, match="host_blocks: expected an integer from 0 to 2147483647, got -1"):
        small_cache(host_blocks=-1)


@pytest.mark.parametrize("order", ["page", "layer"])
def test_swaps_and_copies_of_all_kinds_run_in_order_on_the_executor(rng: np.random.Generator, order: str) -> None:
    """The pool on the device, the host's pages in pinned memory: what was evicted comes back, over blocks that others used meanwhile."""
    simt_device = pytest.importorskip("simt_device")
    from simt import build

    if reason := build.unavailable():
        pytest.skip(reason)
    with simt_device.in_place_of_a_gpu(simt_device.backend()) as backend:
        cache, alloc = small_cache(num_blocks=4, host_blocks=4, order=order), BlockAllocator(4, 4, host_blocks=4)
        cache.pool[:] = np.nan
        kept = {}
        for name in "AB":
            step = alloc.add_request(name, 7)
            kept[name] = new_rows(rng, 7)
            cache.begin(step)
            for layer in range(2):
                cache.write(layer, *kept[name], step)
        alloc.fork_request("A", ["C"])
        cache.begin(alloc.evict(["C", "A"]))
        step = alloc.add_request("D", 8)
        cache.begin(step)
        cache.write(0, *new_rows(rng, 8), step)
        alloc.free_request("D")
        cache.begin(alloc.restore(["A", "C"]))
        assert alloc.tables["A"] == alloc.tables["C"]
        alloc.free_request("B")
        step = alloc.grow_batch(["A", "C"])  # a copy of the shared tail, made of what came back
        cache.begin(step)
        assert len(step.copies) == 1
        backend.launcher.flush()
        for name in "AC":
            for layer in range(2):
                for got, expected in zip(cache.gather(layer, alloc.tables[name], 7), kept["A"], strict=True):
                    np.testing.assert_array_equal(got, expected)


def test_copies_of_a_step_run_once(rng: np.random.Generator) -> None:
    first, copying, _ = forked_steps()
    cache = small_cache()
    cache.begin(first)
    cache.write(0, *new_rows(rng, 3), first)
    cache.begin(copying)
    k, v = new_rows(rng, 1)
    cache.write(0, k, v, copying)
    cache.begin(copying)  # again: must not copy over what was written
    table = copying.block_tables[0]
    np.testing.assert_array_equal(cache.gather(0, table, 4)[0][3], k[0])


def test_a_pickled_step_runs_in_another_process_as_here(rng: np.random.Generator) -> None:
    alloc = BlockAllocator(6, 4)
    here, there = small_cache(), small_cache()
    for call in (
        lambda: alloc.add_request("A", 6),
        lambda: alloc.fork_request("A", ["B"]),
        lambda: alloc.grow_batch(["A", "B"], [1, 3]),
    ):
        step = call()
        if step is None:
            continue
        results = []
        k, v = new_rows(rng, len(step.slot_mapping))
        for cache in (here, there):
            cache.begin(step)
            cache.write(1, k, v, step)
            results.append(cache.attend(1, k, step))
            step = pickle.loads(pickle.dumps(step))  # after it ran: what `device` holds stays behind
            assert not step.device and np.shares_memory(step.packed, step.slot_mapping)
        np.testing.assert_array_equal(*results)
        assert step.delta.serial == step.serial


def test_writing_before_begin_is_refused(rng: np.random.Generator) -> None:
    first, *_ = forked_steps()
    cache = small_cache()
    for call in (
        lambda: cache.write(0, *new_rows(rng, 3), first),
        lambda: cache.attend(0, np.ones((3, 4, 8), np.float32), first),
    ):
        with pytest.raises(RuntimeError, match=r"has not begun .* call cache.begin"):
            call()


def test_fewer_rows_than_the_step_has_are_refused_and_nothing_is_written(rng: np.random.Generator) -> None:
    first, *_ = forked_steps()
    cache = small_cache()
    cache.pool[:] = np.nan
    cache.begin(first)
    with pytest.raises(ValueError, match="k: expected 3 rows, as many tokens as the step has, got 2"):
        cache.write(0, *new_rows(rng, 2), first)
    with pytest.raises(ValueError, match="q: expected 3 rows, one for each new token of the step, got 2"):
        cache.attend(0, np.ones((2, 4, 8), np.float32), first)
    assert np.isnan(cache.pool).all()


def test_a_step_of_another_geometry_is_refused() -> None:
    for alloc in (BlockAllocator(6, 8), BlockAllocator(7, 4)):
        with pytest.raises(ValueError, match=r"step: its allocator has .* blocks of .* tokens, the cache 6 of 4"):
            small_cache().begin(alloc.add_request("A", 1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers: expected an integer from 1 to 65536, got 0"),
        ({"num_layers": 1 << 20}, "num_layers: expected an integer from 1 to 65536, got 1048576"),
        ({"num_blocks": 1 << 31}, "num_blocks: expected an integer from 1 to 2147483647, got 2147483648"),
        ({"head_dim": 12}, "head_dim: expected a multiple of 8 from 8 to 256, got 12"),
        ({"layout": "classic"}, "layout: expected one of HND, NHD, got 'classic'"),
        ({"order": "block"}, "order: expected one of page, layer, got 'block'"),
        ({"device": "gpu"}, "device: expected one of cpu, cuda, auto, got 'gpu'"),
        ({"dtype": "int8"}, "dtype: expected one of"),
    ],
)
def test_bad_sizes_are_refused_at_construction(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small_cache(**changes)


def test_arguments_of_another_type_are_refused() -> None:
    cache = small_cache()
    for call, message in (
        (lambda: small_cache(num_blocks=2.0), "num_blocks: expected an integer, got 2.0"),
        (lambda: small_cache(dtype=np.float32), "dtype: expected the name of a dtype, such as 'float16', got <class"),
        (lambda: cache.begin(None), "step: expected the Step that a BlockAllocator gave, got NoneType"),  # type: ignore[arg-type]
        (lambda: cache.layer("0"), "layer: expected an integer, got '0'"),  # type: ignore[arg-type]
        (lambda: cache.gather(0, np.array([1]), 1.5), "seq_len: expected an integer, got 1.5"),  # type: ignore[arg-type]
        (
            lambda: blocks_for("1 GB", num_layers=1, block_size=4, num_kv_heads=1, head_dim=8),
            "num_bytes: expected a number",
        ),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=message):
            call()
    with pytest.raises(ValueError, match="num_bytes: expected a number from 0 to 9223372036854775807, got -1"):
        blocks_for(-1, num_layers=1, block_size=4, num_kv_heads=1, head_dim=8)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("windw", "windw: KVCache.attend has no such option; did you mean window?"),
        ("num_split", "num_split: KVCache.attend has no such option; did you mean num_splits?"),
        ("zzz", "zzz: KVCache.attend has no such option; expected one of scale, causal, window, chunk, softcap"),
        ("layout", "layout: KVCache.attend takes it from the cache; leave it out"),
        ("seq_lens", "seq_lens: KVCache.attend takes it from the step; leave it out"),
    ],
)
def test_an_option_that_attend_does_not_take_is_named(option: str, message: str, rng: np.random.Generator) -> None:
    first, *_ = forked_steps()
    cache = small_cache()
    cache.pool[:] = np.nan
    cache.begin(first)
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        cache.attend(
            0, np.ones((3, 4, 8), np.float32), first, k=new_rows(rng, 3)[0], v=new_rows(rng, 3)[1], **{option: 4}
        )
    assert np.isnan(cache.pool).all()


def test_gather_refuses_what_the_table_does_not_hold() -> None:
    cache = small_cache()
    with pytest.raises(ValueError, match="seq_len: expected 0 to 4, what table_row holds, got 5"):
        cache.gather(0, np.array([1]), 5)
    with pytest.raises(ValueError, match="table_row: expected block ids from 0 to 5, got"):
        cache.gather(0, np.array([6]), 1)
    with pytest.raises(IndexError, match="layer: expected 0 to 1, got 2"):
        cache.gather(2, np.array([0]), 1)


def test_no_gpu_and_no_cupy_are_different_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ModuleNotFoundError, match="needs CuPy, which is not installed: pip install"):
        small_cache(device="cuda")

    class Cupy:
        class cuda:
            @staticmethod
            def is_available() -> bool:
                return False

    monkeypatch.setitem(sys.modules, "cupy", Cupy)
    with pytest.raises(RuntimeError, match="found no GPU"):
        small_cache(device="cuda")
