"""Groups of layers in a cache: attention of each through its own tables equals dense attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from devices import simt
from simt_device import in_place_of_a_gpu

from cupaged import BlockAllocator, Group, KVCache, blocks_for, reference

KINDS: dict[str, list[Group]] = {
    "full and window": [Group([0, 2, 3]), Group([1, 4], window=6)],
    "chunk, window, full": [Group([1, 4], chunk=8), Group([0], window=5), Group([2, 3])],
}


def small_cache(groups: Any, num_blocks: int = 60, block_size: int = 4, **more: Any) -> KVCache:
    return KVCache(5, num_blocks, block_size, 2, 8, "float32", device="cpu", groups=groups, **more)


def test_a_block_has_room_for_the_layers_of_the_largest_group() -> None:
    cache = small_cache(KINDS["full and window"])
    assert cache.bytes_per_block == 2 * 3 * 2 * 4 * 8 * 4 and cache.pool.nbytes == 60 * cache.bytes_per_block
    sizes: dict[str, Any] = {"num_layers": 5, "block_size": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}
    assert blocks_for(10**6, **sizes, groups=KINDS["full and window"]) == 10**6 // cache.bytes_per_block
    assert cache.pool[3].flags.c_contiguous
    np.testing.assert_array_equal(cache.layer(4)[0].shape, (60, 2, 4, 8))
    assert cache.layer(4)[0].ctypes.data - cache.pool.ctypes.data == 1 * 2 * 2 * 4 * 8 * 4  # place 1 of its group


def test_groups_of_cache_and_allocator_must_be_the_same() -> None:
    for groups in ([Group([0, 1, 2, 3])], [Group(range(5)), Group([4], window=3)]):
        with pytest.raises(ValueError, match=r"groups: expected layers 0 to 4 \(num_layers\), each in one group"):
            small_cache(groups)
    for groups in (None, [Group(), Group(window=5)], [Group(), Group(window=6), Group()]):
        step = BlockAllocator(60, 4, groups).add_request("A", 3)
        with pytest.raises(ValueError, match=r"step: its allocator has groups with .* give both the same groups"):
            small_cache(KINDS["full and window"]).begin(step)
    cache = small_cache(KINDS["full and window"])
    step = BlockAllocator(60, 4, KINDS["full and window"]).add_request("A", 1)
    cache.begin(step)
    with pytest.raises(ValueError, match="window: expected 6, that of group 1 with layer 4, got 5; leave it out"):
        cache.attend(4, np.zeros((1, 2, 8), np.float32), step, window=5)


def serve(cache: KVCache, alloc: BlockAllocator, rng: np.random.Generator, steps: int, fork: bool = True) -> None:
    """Random requests that grow, fork, are cut, leave for the host and come back: attention of every layer equals dense attention."""
    dense: dict[Any, np.ndarray] = {}  # per request [tokens, layers, 2, heads, head_dim]
    cache.pool[:] = np.nan

    def run(step: Any, names: list[Any]) -> None:
        cache.begin(step)
        counts = np.diff(step.query_start_loc)
        fresh = rng.standard_normal((counts.sum(), 5, 2, 2, 8)).astype(np.float32)
        q = rng.standard_normal((counts.sum(), 4, 8)).astype(np.float32)
        for name, part in zip(names, np.split(fresh, counts.cumsum()[:-1]), strict=True):
            dense[name] = np.concatenate([dense.get(name, fresh[:0]), part])
        for layer in range(5):
            cache.write(layer, fresh[:, layer, 0], fresh[:, layer, 1], step)
            out, lse = cache.attend(layer, q, step, return_lse=True)
            group = next(group for group in cache.groups if layer in group.layers)
            for i, name in enumerate(names):
                rows = slice(*step.query_start_loc[i : i + 2])
                k, v = dense[name][:, layer, 0], dense[name][:, layer, 1]
                expected = reference.dense_attention(q[rows], k, v, window=group.window, chunk=group.chunk)
                np.testing.assert_allclose(out[rows], expected[0], atol=2e-5)
                np.testing.assert_allclose(lse[rows], expected[1], atol=2e-5)

    run(alloc.add_request(0, 7), [0])
    for number in range(1, steps):
        here = [name for name in alloc.lengths if name not in alloc.evicted]
        kind = rng.choice(["add", "fork", "truncate", "free", "evict", "restore"])
        if kind == "add" and len(here) < 4 and alloc.can_allocate(9):
            run(alloc.add_request(number, int(rng.integers(1, 9))), [number])
        elif kind == "fork" and fork and here and len(here) < 5:
            alloc.fork_request(here[0], [number])
            dense[number] = dense[here[0]]
        elif kind == "truncate" and here:
            try:
                alloc.truncate(here[-1], alloc.lengths[here[-1]] - 1)
            except ValueError:
                continue
            dense[here[-1]] = dense[here[-1]][:-1]
        elif kind == "free" and len(here) > 2:
            alloc.free_request(here[1])
            del dense[here[1]]
        elif kind == "evict" and len(here) > 1:
            try:
                cache.begin(alloc.evict(here[:1]))
            except MemoryError:
                continue
        elif kind == "restore" and alloc.evicted:
            names = alloc.evicted[:1]
            if alloc.blocks_needed((), 0, restore=names) <= alloc.num_free:
                cache.begin(alloc.restore(names))
        here = [name for name in alloc.lengths if name not in alloc.evicted and alloc.lengths[name]]
        counts = [int(rng.integers(0, 5)) if rng.random() < 0.4 else 1 for _ in here]
        if here and alloc.blocks_needed(here, counts) <= alloc.num_free:
            run(alloc.grow_batch(here, counts), here)
        alloc.check()


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("order", ["page", "layer"])
def test_attention_of_every_group_equals_dense_attention(rng: np.random.Generator, kinds: str, order: str) -> None:
    cache = small_cache(KINDS[kinds], host_blocks=60, order=order)
    serve(cache, BlockAllocator(60, 4, KINDS[kinds], host_blocks=60), rng, 25)


def test_attention_with_kernel_blocks_equals_dense_attention(rng: np.random.Generator) -> None:
    groups = KINDS["full and window"]
    cache = small_cache(groups, num_blocks=120, block_size=2, host_blocks=120)
    serve(cache, BlockAllocator(60, 4, groups, host_blocks=60, kernel_block_size=2), rng, 25)


def test_attention_of_every_group_equals_dense_attention_on_the_executor(rng: np.random.Generator) -> None:
    with in_place_of_a_gpu(simt().backend) as backend:
        groups = KINDS["chunk, window, full"]
        cache = small_cache(groups)
        cache.pool = backend.launcher.put(np.full((60, 2, 2, 2, 4, 8), np.nan, np.float32))
        alloc = BlockAllocator(60, 4, groups)
        serve(cache, alloc, rng, 6)


def test_gather_reads_what_a_window_still_has(rng: np.random.Generator) -> None:
    groups = KINDS["full and window"]
    cache, alloc = small_cache(groups), BlockAllocator(60, 4, groups)
    k = rng.standard_normal((12, 2, 8)).astype(np.float32)
    for n, at in ((11, 0), (1, 11)):
        step = alloc.add_request("A", n) if not at else alloc.grow("A", n)
        cache.begin(step)
        for layer in range(5):
            cache.write(layer, k[at : at + n], -k[at : at + n], step)
    table = np.array(alloc.group_tables(1)["A"])
    assert table[0] == -1
    for got, expected in zip(cache.gather(4, table, 12, start=6), (k[6:], -k[6:]), strict=True):
        np.testing.assert_array_equal(got, expected)
    with pytest.raises(ValueError, match="blocks that left a window are -1, give start"):
        cache.gather(4, table, 12)
    with pytest.raises(ValueError, match="start: expected 0 to seq_len = 12, got 13"):
        cache.gather(4, table, 12, start=13)
