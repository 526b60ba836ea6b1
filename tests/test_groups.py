"""Groups of layers: windows and chunks with tables of their own, what leaves them, what a prompt finds, and attention through them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from devices import simt
from hypothesis import given, settings
from hypothesis import strategies as st
from simt_device import in_place_of_a_gpu

from cupaged import BlockAllocator, Group, KVCache, OutOfBlocks, TableMirror, blocks_for, reference


def group_tables(alloc: BlockAllocator, name: str) -> list[list[int]]:
    return [alloc.group_tables(g)[name] for g in range(len(alloc.groups))]


# ---- tables ----


def test_blocks_before_the_window_are_given_back_at_the_next_growth_and_taken_again() -> None:
    alloc = BlockAllocator(8, 2, [Group(), Group(window=3)])
    step = alloc.add_request("A", 5)
    assert group_tables(alloc, "A") == [[0, 1, 2], [3, 4, 5]]  # group after group
    assert step.slot_mapping.tolist() == [0, 1, 2, 3, 4] and step.group(1).slot_mapping.tolist() == [6, 7, 8, 9, 10]
    step = alloc.grow("A")  # token 5 sees 3, 4, 5: block 3 with tokens 0 and 1 is of no use any more
    assert group_tables(alloc, "A") == [[0, 1, 2], [-1, 4, 5]]
    assert step.group(1).block_tables.tolist() == [[-1, 4, 5]] and alloc.free == [6, 7, 3]
    step = alloc.grow("A")  # token 6 sees 4, 5, 6: block 4 goes back, and then both groups take one
    assert group_tables(alloc, "A") == [[0, 1, 2, 6], [-1, -1, 5, 7]] and alloc.free == [3, 4]
    alloc.grow("A", 2)  # 8 sees 6, 7: block 5 goes back before 3 and 4 are taken
    assert group_tables(alloc, "A") == [[0, 1, 2, 6, 3], [-1, -1, 5, 7, 4]] and alloc.free == []
    assert alloc.blocks_needed(["A"], 2) == 1 and alloc.blocks_needed(["A"], 1) == 0
    with pytest.raises(OutOfBlocks, match="2 needed, 1 free"):
        alloc.grow("A", 2)
    assert group_tables(alloc, "A")[1] == [-1, -1, 5, 7, 4] and alloc.free == []
    alloc.check()


def test_a_chunk_goes_back_as_a_whole_when_the_next_one_begins() -> None:
    alloc = BlockAllocator(8, 2, [Group(chunk=4)])
    alloc.add_request("A", 4)
    alloc.grow("A")  # token 4 begins a chunk and sees none of the first
    assert alloc.tables["A"] == [-1, -1, 2] and alloc.free == [3, 4, 5, 6, 7, 0, 1]
    alloc.grow("A", 4)
    assert alloc.tables["A"] == [-1, -1, 2, 3, 4]


@pytest.mark.parametrize("group", [Group(window=40), Group(chunk=40), Group(window=40, chunk=64)])
def test_a_long_run_needs_only_the_blocks_of_its_horizon(group: Group) -> None:
    alloc = BlockAllocator(16, 4, [group])
    alloc.add_request("A", 9)
    for _ in range(500):
        alloc.grow("A")
        assert alloc.num_blocks - alloc.num_free <= 40 // 4 + 2


def test_a_length_whose_next_token_sees_what_is_gone_is_refused() -> None:
    alloc = BlockAllocator(20, 2, [Group(), Group(window=4)])
    alloc.add_request("A", 9)
    alloc.grow("A", 4)  # 9 sees 6 on: tokens 0 to 5 are gone
    alloc.truncate("A", 9)  # what was drafted can always be taken back
    before = group_tables(alloc, "A"), alloc.free
    with pytest.raises(
        ValueError, match=r"lengths: expected at least 9 for request 'A', got 8: .* group 1 .* truncate to 0"
    ):
        alloc.truncate("A", 8)
    assert (group_tables(alloc, "A"), alloc.free) == before
    alloc.truncate("A", 0)
    assert group_tables(alloc, "A") == [[], []] and alloc.num_free == 20
    alloc.grow("A", 3)
    assert [len(table) for table in group_tables(alloc, "A")] == [2, 2]
    alloc.check()


def test_a_block_that_leaves_its_other_owner_in_the_same_batch_is_written_in_place() -> None:
    alloc = BlockAllocator(20, 4, [Group(window=2)])
    alloc.add_request("A", 8)
    alloc.fork_request("A", ["B"])
    alloc.truncate("A", 6)
    alloc.grow("B")  # token 8 sees 7, in the block that is the last of "A"
    step = alloc.grow_batch(["A", "B"], [1, 1])  # token 9 does not
    assert len(step.copies) == 0 and step.block_tables.tolist() == [[-1, 1, -1], [-1, -1, 2]]
    alloc.check()


def test_a_request_without_new_tokens_keeps_its_blocks() -> None:
    alloc = BlockAllocator(20, 2, [Group(window=2)])
    alloc.add_request("A", 8)
    alloc.grow("A", 0)
    alloc.truncate("A", 5)
    assert alloc.tables["A"] == [0, 1, 2]


def test_a_slot_that_left_the_horizon_has_no_number() -> None:
    alloc = BlockAllocator(20, 2, [Group(), Group(window=2)])
    alloc.add_request("A", 6)
    alloc.grow("A")
    assert alloc.physical_slot("A", 1) == 1 and alloc.physical_slot("A", 5, group=1) == 11
    with pytest.raises(IndexError, match="position: token 1 of request 'A' has left the horizon of group 1"):
        alloc.physical_slot("A", 1, group=1)
    with pytest.raises(IndexError, match="group: expected 0 to 1, got 2"):
        alloc.group_tables(2)
    with pytest.raises(IndexError, match="g: expected 0 to 1, got 2"):
        alloc.grow("A").group(2)


def test_bad_groups_are_refused() -> None:
    for arguments, error, message in (
        ({"window": 0}, ValueError, "window: expected an integer of at least 1, got 0"),
        ({"chunk": 1.5}, TypeError, "chunk: expected an integer, got 1.5"),
        ({"layers": 3}, TypeError, "layers: expected a list of layer numbers, got 3; write [3]"),
        ({"layers": [-1]}, ValueError, "layers: expected an integer of at least 0, got -1"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            Group(**arguments)
    with pytest.raises(ValueError, match="groups: expected at least one group"):
        BlockAllocator(4, 2, [])
    with pytest.raises(
        TypeError, match=r"groups: expected a list of cupaged.Group objects, got Group\(.*; write \[Group"
    ):
        BlockAllocator(4, 2, Group())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"groups: expected cupaged.Group objects, got 4"):
        BlockAllocator(4, 2, [4])
    with pytest.raises(ValueError, match="prefix_caching: expected a group of full attention"):
        BlockAllocator(4, 2, [Group(window=3), Group(window=4)], prefix_caching=True)


# ---- the prefix cache ----


def cached(alloc: BlockAllocator, tokens: np.ndarray) -> int:
    """How many of `tokens` a request finds."""
    assert alloc.can_allocate(token_ids=tokens)
    found = int(alloc.add_request("again", token_ids=tokens).num_cached[0])
    alloc.check()
    alloc.free_request("again")
    return found


def test_a_prompt_is_found_up_to_where_every_group_has_what_the_next_token_sees() -> None:
    tokens = np.arange(20, dtype=np.int32)
    alloc = BlockAllocator(40, 2, [Group(), Group(window=4)], prefix_caching=True)
    alloc.add_request("A", token_ids=tokens)
    alloc.commit(["A"], tokens)
    assert cached(alloc, tokens) == 18  # token 18 sees 15 to 18: blocks 7 and 8 of the window, no others
    assert cached(alloc, tokens[:7]) == 6
    alloc.free_request("A")
    window = [block for block in range(40) if alloc._cache.parent[block] < 0]
    assert len(window) == 10
    lost = [block for block in window if alloc._cache.tokens.ids[block, 0] == 14]
    alloc._cache.forget(np.array(lost))
    assert alloc._cache.serial[lost].tolist() == [0]
    # token 18 and token 16 would see the block of 14 and 15, token 14 sees 11 to 14
    chain = alloc._cache.match(alloc._cache.roots.find(None), tokens, 19)[0]
    served, columns = alloc._companions.serve(chain, tokens)
    assert columns == 7 and [len(hits) for hits in served] == [7, 2]


def test_events_speak_of_the_group_that_keeps_the_chain() -> None:
    alloc = BlockAllocator(12, 2, [Group(window=4), Group()], prefix_caching=True, record_events=True)
    tokens = np.arange(8, dtype=np.int32)
    alloc.add_request("A", token_ids=tokens)
    alloc.commit(["A"], tokens)
    stored = alloc.take_events()
    assert (
        [event.kind for event in stored] == ["stored"] and len(stored[0].serials) == 4 and stored[0].parents.min() > 0
    )
    alloc.free_request("A")
    alloc.add_request("B", 12)
    removed = np.concatenate([event.serials for event in alloc.take_events()])
    assert sorted(removed.tolist()) == stored[0].serials.tolist()


def test_tokens_of_a_partly_equal_block_are_not_copied_with_several_groups() -> None:
    alloc = BlockAllocator(40, 4, [Group(), Group(window=8)], prefix_caching=True)
    tokens = np.arange(12, dtype=np.int32)
    alloc.add_request("A", token_ids=tokens)
    alloc.commit(["A"], tokens)
    other = np.append(tokens[:10], [99, 98]).astype(np.int32)
    step = alloc.add_request("B", token_ids=other)
    assert step.num_cached.tolist() == [8] and len(step.copies) == len(step.group(1).copies) == 0


def test_window_blocks_that_a_request_gave_back_are_found_by_the_next() -> None:
    alloc = BlockAllocator(40, 2, [Group(window=4), Group()], prefix_caching=True)
    tokens = np.arange(30, dtype=np.int32)
    alloc.add_request("A", 8, token_ids=tokens)
    alloc.commit(["A"], tokens[:8])
    for at in range(8, 30, 2):
        alloc.grow("A", 2)
        alloc.commit(["A"], tokens[at : at + 2])
    assert alloc.tables["A"][:10] == [-1] * 10
    for length in (30, 21, 9):
        assert cached(alloc, tokens[:length]) == (length - 1) // 2 * 2


def test_a_prompt_is_found_only_as_far_as_the_window_was_not_evicted() -> None:
    alloc = BlockAllocator(20, 2, [Group(), Group(window=4)], prefix_caching=True)
    tokens = np.arange(10, dtype=np.int32)
    alloc.add_request("A", token_ids=tokens)
    alloc.commit(["A"], tokens)
    for n in (
        8,
        4,
        4,
    ):  # the window gives back its first five blocks; the last growth takes those of columns 2 and 1 for itself
        alloc.grow("A", n)
    assert alloc.stats().blocks_cached == 3
    assert len(alloc._cache.match(alloc._cache.roots.find(None), tokens, 9)[0]) == 4
    # tokens 8, 6 and 4 would see one of the two columns, token 2 sees only column 0
    step = alloc.add_request("B", 0, token_ids=tokens)
    assert step.num_cached.tolist() == [2] and step.seq_lens.tolist() == [2]
    alloc.check()


# ---- kernel blocks ----


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_steps_in_kernel_blocks_say_the_same(data: st.DataObject) -> None:
    """Two allocators run the same calls; the steps of one are in smaller blocks: same slots, same tables token by token."""
    per, size = data.draw(st.sampled_from([(2, 4), (4, 4), (3, 6), (1, 2)]))
    groups = data.draw(st.sampled_from([[Group()], [Group(), Group(window=5)]]))
    plain, fine = (
        BlockAllocator(30, size, groups, prefix_caching=True, host_blocks=30, kernel_block_size=kernel)
        for kernel in (None, size // per)
    )
    mirrors = [TableMirror(size // per) for _ in groups]
    for call in range(data.draw(st.integers(1, 15))):
        names, away = list(plain.lengths), plain.evicted
        here = [name for name in names if name not in away]
        kind = data.draw(st.sampled_from(["add", "grow", "grow", "fork", "truncate", "free", "evict", "restore"]))
        n = data.draw(st.integers(0, 9))
        name = data.draw(st.sampled_from(here)) if here else None
        steps = []
        for alloc in (plain, fine):
            try:
                if kind == "add":
                    steps.append(alloc.add_request(call, token_ids=np.zeros(n, np.int32)))
                    alloc.commit([call], np.zeros(n - int(steps[-1].num_cached[0]), np.int32))
                elif kind == "restore" and away:
                    steps.append(alloc.restore(away))
                elif kind == "evict" and here:
                    steps.append(alloc.evict([name]))
                elif kind == "grow" and here:
                    steps.append(alloc.grow_batch(here, n))
                elif kind == "fork" and here:
                    alloc.fork_request(name, [call])
                elif kind == "truncate" and here:
                    alloc.truncate(name, min(n, alloc.lengths[name]))
                elif kind == "free" and here:
                    alloc.free_request(name)
            except (MemoryError, ValueError):
                pass
        assert plain.free == fine.free
        if not steps:
            continue
        for g in range(len(groups)):
            one, other = (step.group(g) for step in steps)
            small = size // per
            assert (other.block_size, other.num_blocks) == (small, 30 * per)
            for field in ("slot_mapping", "seq_lens", "query_start_loc", "num_cached"):
                np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
                assert getattr(one, field).dtype == getattr(other, field).dtype
            assert np.shares_memory(other.packed, other.block_tables) and other.block_tables.dtype == np.int32
            width = max(1, -(-int(one.seq_lens.max(initial=0)) // small))
            assert other.block_tables.shape == (len(one.rows), width)
            for row, length in enumerate(one.seq_lens.tolist()):
                for j in range(length):
                    block, piece = int(one.block_tables[row, j // size]), int(other.block_tables[row, j // small])
                    assert piece == (-1 if block < 0 else block * per + j % size // small)
            for pairs in ("copies", "swap_out", "swap_in"):
                expected = [(a * per + i, b * per + i) for a, b in getattr(one, pairs).tolist() for i in range(per)]
                assert [tuple(pair) for pair in getattr(other, pairs).tolist()] == expected
            mirrors[g].apply(other.delta)
            for row, length, table in zip(other.rows, other.seq_lens, other.block_tables, strict=True):
                used = -(-int(length) // small)
                assert mirrors[g].tables[row, :used].tolist() == table[:used].tolist()
                assert (mirrors[g].tables[row, used:] == -1).all()


def test_a_kernel_block_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel_block_size: expected a divisor of block_size = 16, got 12"):
        BlockAllocator(4, 16, kernel_block_size=12)


def test_an_empty_batch_makes_a_step_in_kernel_blocks_too() -> None:
    alloc = BlockAllocator(4, 16, kernel_block_size=4, host_blocks=4)
    for serial, step in enumerate([alloc.grow_batch([]), alloc.evict([]), alloc.restore([])], 1):
        assert (step.serial, step.block_tables.shape, step.query_start_loc.tolist()) == (serial, (0, 1), [0])


def test_kernel_blocks_past_int32_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"kernel_block_size: expected at most 2\*\*31 - 1 kernel blocks, got 1048576 blocks of 2048"
    ):
        BlockAllocator(2**20, 4096, kernel_block_size=2)
    with pytest.raises(ValueError, match=r"got 2097152 blocks of 1024; make it larger"):
        BlockAllocator(2**20, 4096, kernel_block_size=4, host_blocks=2**21)
    alloc = BlockAllocator(2**20, 4096, kernel_block_size=4)
    alloc.pool.take(2**20 - 1)
    step = alloc.add_request("A", 4095)
    assert step.block_tables[0, -1] == 2**30 - 1
    assert step.slot_mapping[-1] == 2**32 - 2


# ---- the data plane ----

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
