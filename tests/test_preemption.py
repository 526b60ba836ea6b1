"""Evict, restore and what a mixed batch needs, example by example; random histories are in test_allocator_machine.py."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from allocator_compare import observe

from cupaged import BlockAllocator, OutOfBlocks, TableMirror


def allocator(num_blocks: int = 8, host_blocks: int = 8, **options: bool) -> BlockAllocator:
    return BlockAllocator(num_blocks, 4, host_blocks=host_blocks, **options)


def test_forks_that_leave_together_are_kept_once_and_come_back_as_forks() -> None:
    alloc = allocator()
    alloc.add_request("A", 10)
    alloc.fork_request("A", ["B"])
    alloc.grow("B", 4)  # a tail of its own, and one block more
    assert (alloc.tables["A"], alloc.tables["B"]) == ([0, 1, 2], [0, 1, 3, 4])
    step = alloc.evict(["A", "B"])
    assert step.swap_out.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3], [4, 4]]
    assert alloc.num_free == 8
    assert alloc.host_pool.ref_count.tolist() == [2, 2, 1, 1, 1, 0, 0, 0]
    alloc.add_request("C", 5)
    step = alloc.restore(["B", "A"])
    assert alloc.tables["B"][:2] == alloc.tables["A"][:2]
    assert step.swap_in.tolist() == [
        [host, block] for host, block in zip([0, 1, 3, 4, 2], [7, 2, 0, 1, 3], strict=True)
    ]
    assert step.block_tables.tolist() == [[7, 2, 0, 1], [7, 2, 3, -1]]
    assert step.seq_lens.tolist() == [14, 10]
    assert (alloc.host_pool.num_free, alloc.stats().blocks_shared) == (8, 2)
    alloc.check()


def test_what_is_shared_with_requests_that_stay_is_copied_out_and_stays_with_them() -> None:
    alloc = allocator()
    alloc.add_request("A", 6)
    alloc.fork_request("A", ["B"])
    step = alloc.evict(["A"])
    assert step.swap_out.tolist() == [[0, 0], [1, 1]]
    assert (alloc.tables["B"], alloc.num_free) == ([0, 1], 6)
    assert len(alloc.grow("B").copies) == 0  # its tail is its own now
    alloc.restore(["A"])
    assert alloc.tables["A"] == [2, 3]


def test_a_restored_prefix_is_shared_where_the_cache_still_has_it_and_can_be_found_where_it_came_back() -> None:
    alloc = allocator(num_blocks=4, prefix_caching=True)
    tokens = list(range(12))
    alloc.add_request("A", token_ids=tokens)
    alloc.commit(["A"], [tokens])
    alloc.evict(["A"])
    alloc.add_request("other", 5)  # takes the plain block and the deepest of A's
    assert alloc.blocks_needed(restore=["A"]) == 3 > alloc.num_free == 2
    with pytest.raises(OutOfBlocks):
        alloc.restore(["A"])
    alloc.free_request("other")
    step = alloc.restore(["A"])
    assert step.swap_in.tolist() == [[2, 3]]
    assert alloc.tables["A"] == [0, 1, 3]
    alloc.free_request("A")
    assert alloc.add_request("again", token_ids=[*tokens, 12]).num_cached.tolist() == [12]
    alloc.check()


def test_a_reset_prefix_cache_finds_nothing_of_what_is_on_the_host() -> None:
    alloc = allocator(prefix_caching=True)
    alloc.add_request("A", token_ids=range(8))
    alloc.commit(["A"], [range(8)])
    alloc.evict(["A"])
    alloc.reset_prefix_cache()
    assert len(alloc.restore(["A"]).swap_in) == 2
    assert alloc.add_request("B", token_ids=range(9)).num_cached.tolist() == [0]
    alloc.check()


def test_an_evicted_request_keeps_its_length_its_row_and_its_name() -> None:
    alloc = allocator()
    alloc.add_request("A", 6)
    alloc.add_request("B", 3)
    rows = alloc.rows(["A", "B"])
    alloc.evict(rows=rows[:1])
    assert (alloc.evicted, alloc.tables["A"], alloc.lengths["A"], list(alloc.lengths)) == (["A"], [], 6, ["B", "A"])
    assert alloc.rows(["A", "B"]).tolist() == rows.tolist()
    alloc.add_request("C", 1)
    assert alloc.rows(["C"])[0] not in rows
    with pytest.raises(KeyError, match="'A' is in use"):
        alloc.add_request("A", 1)
    alloc.restore(rows=rows[:1])
    assert alloc.grow_batch(rows=rows).seq_lens.tolist() == [7, 4]


@pytest.mark.parametrize(
    "call",
    [
        lambda alloc: alloc.grow("A"),
        lambda alloc: alloc.grow_batch(rows=alloc.rows(["B", "A"])),
        lambda alloc: alloc.blocks_needed(["A"]),
        lambda alloc: alloc.commit(["A"], [[1]]),
        lambda alloc: alloc.fork_request("A", ["C"]),
        lambda alloc: alloc.reorder(["B", "A"], [0, 0]),
        lambda alloc: alloc.truncate("A", 1),
        lambda alloc: alloc.physical_slot("A", 0),
        lambda alloc: alloc.evict(["B", "A"]),
    ],
)
def test_an_evicted_request_must_be_restored_before_anything_else(call: Callable[[BlockAllocator], object]) -> None:
    alloc = allocator()
    alloc.add_request("A", 6)
    alloc.add_request("B", 3)
    alloc.evict(["A"])
    before = observe(alloc)
    with pytest.raises(ValueError, match="request 'A' is evicted; restore it first, or free it"):
        call(alloc)
    assert observe(alloc) == before


def test_restore_refuses_what_is_not_evicted() -> None:
    alloc = allocator()
    alloc.add_request("A", 6)
    with pytest.raises(ValueError, match="request 'A' is not evicted"):
        alloc.restore(["A"])
    with pytest.raises(KeyError, match="no request has the id 'B'"):
        alloc.restore(["B"])
    alloc.evict(["A"])
    with pytest.raises(ValueError, match="named twice"):
        alloc.restore(["A", "A"])
    with pytest.raises(KeyError, match="rows: 5 is not the row of a request"):
        alloc.restore(rows=[5])


def test_too_few_host_blocks_change_nothing_and_the_message_says_which() -> None:
    alloc = allocator(host_blocks=2)
    alloc.add_request("A", 12)
    before = observe(alloc)
    with pytest.raises(
        OutOfBlocks, match=re.escape("3 needed, 2 free; free evicted requests, or make the host pool larger (host")
    ):
        alloc.evict(["A"])
    assert observe(alloc) == before
    with pytest.raises(OutOfBlocks, match="1 needed, 0 free"):
        no_host = BlockAllocator(2, 4)
        no_host.add_request("A", 1)
        no_host.evict(["A"])


def test_freeing_gives_host_blocks_back_with_evicted_and_present_requests_in_one_call() -> None:
    alloc = allocator()
    for name in "ABC":
        alloc.add_request(name, 5)
    alloc.fork_request("B", ["D"])
    alloc.evict(["A", "B", "D"])
    assert (alloc.stats().host_blocks_used, alloc.stats().swapped_out) == (4, 4)
    before = observe(alloc)
    with pytest.raises(KeyError):
        alloc.free_batch(["A", "C", "nobody"])
    assert observe(alloc) == before
    alloc.free_batch(["A", "C", "D"])
    assert (alloc.host_pool.num_free, alloc.num_free, alloc.lengths) == (6, 8, {"B": 5})
    alloc.free_batch(rows=alloc.rows(["B"]))
    assert alloc.host_pool.free().tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    alloc.check()


def test_held_blocks_stay_out_of_the_pool_until_the_swap_is_done() -> None:
    alloc = allocator(num_blocks=3)
    alloc.add_request("A", 10)
    leaving = alloc.evict(["A"], hold=True)
    assert (alloc.num_free, alloc.lengths["A"]) == (0, 10)
    with pytest.raises(OutOfBlocks):
        alloc.add_request("B", 1)
    alloc.check()
    alloc.release_swapped(leaving)
    assert alloc.free == [0, 1, 2]
    returning = alloc.restore(["A"], hold=True)
    assert alloc.host_pool.num_free == 5
    alloc.release_swapped(returning)
    assert alloc.host_pool.num_free == 8
    for step in (leaving, alloc.grow("A")):
        with pytest.raises(
            ValueError, match="holds no blocks; release a step of evict or restore with hold=True, once"
        ):
            alloc.release_swapped(step)


def test_a_wrong_hold_or_step_is_refused_before_anything_moves() -> None:
    alloc = allocator()
    alloc.add_request("A", 6)
    alloc.add_request("B", 3)
    alloc.evict(["B"])
    before = observe(alloc)
    for call in (
        lambda: alloc.evict(["A"], hold=np.array([True, False])),  # type: ignore[arg-type]
        lambda: alloc.restore(["B"], hold=["B"]),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="hold: expected True or False, got"):
            call()
    with pytest.raises(TypeError, match="step: expected the step that evict or restore gave, got 2"):
        alloc.release_swapped(2)  # type: ignore[arg-type]
    assert observe(alloc) == before
    alloc.check()


def test_a_mirror_sees_an_evicted_table_empty_and_a_restored_one_whole() -> None:
    alloc, mirror = allocator(), TableMirror(4)
    mirror.apply(alloc.add_request("A", 6).delta)
    mirror.apply(alloc.evict(["A"]).delta)
    assert (mirror.lengths[0], mirror.tables[0].tolist()) == (0, [-1] * 8)
    mirror.apply(alloc.restore(["A"]).delta)
    assert (mirror.lengths[0], mirror.tables[0].tolist()) == (6, [*alloc.tables["A"], *[-1] * 6])


def test_a_mixed_batch_needs_what_its_calls_take() -> None:
    alloc = allocator(num_blocks=12, prefix_caching=True)
    prompt = list(range(8))
    alloc.add_request("running", token_ids=prompt)
    alloc.commit(["running"], [prompt])
    alloc.add_request("gone", 6)
    alloc.evict(["gone"])
    new = [{"token_ids": [*prompt, 1, 2]}, {"n": 5}, {"token_ids": prompt[:6], "n": 1, "extra_key": "x"}]
    before = observe(alloc)
    needed = alloc.blocks_needed(["running"], 5, new=new, restore=["gone"])
    assert needed == 2 + 1 + 2 + 1 + 2
    assert observe(alloc) == before
    assert alloc.blocks_needed() == 0
    assert alloc.blocks_needed(new=new[:1]) == 1
    alloc.grow("running", 5)
    for i, arguments in enumerate(new):
        alloc.add_request(i, **arguments)
    alloc.restore(["gone"])
    assert alloc.num_free == 12 - 2 - needed
    with pytest.raises(TypeError, match="tokens"):
        alloc.blocks_needed(new=[{"tokens": 5}])


def test_a_batch_does_not_count_on_content_that_it_drives_out_itself() -> None:
    alloc = allocator(num_blocks=4, prefix_caching=True)
    for name, tokens in (("A", list(range(8))), ("B", list(range(50, 58)))):
        alloc.add_request(name, token_ids=tokens)
        alloc.commit([name], [tokens])
        alloc.free_request(name)
    new = [
        {"n": 4},
        {"token_ids": range(11), "n": 1},
    ]  # the first takes A's deeper block, which the second would have found
    assert [alloc.blocks_needed(new=[arguments]) for arguments in new] == [1, 3]
    assert alloc.blocks_needed(new=new) == 3
    for i, arguments in enumerate(new):
        step = alloc.add_request(i, **arguments)
    assert (alloc.num_free, step.num_cached.tolist()) == (1, [4])


def test_a_thousand_requests_leave_and_come_back_in_a_few_array_operations() -> None:
    alloc = BlockAllocator(4096, 16, host_blocks=4096)
    ids = list(range(1000))
    for name in ids:
        alloc.add_request(name, 50)
    step = alloc.evict(ids)
    np.testing.assert_array_equal(step.swap_out, np.repeat(np.arange(4000), 2).reshape(-1, 2))
    assert len(alloc.restore(ids[::-1]).swap_in) == 4000
    alloc.check()


def cached(alloc: BlockAllocator, *contents: range) -> None:
    """Requests came, were committed and left again: their full blocks can be found."""
    for tokens in contents:
        alloc.add_request("cached", token_ids=tokens)
        alloc.commit(["cached"], [tokens])
        alloc.free_request("cached")


def takes(alloc: BlockAllocator, *new: dict[str, object], grow: str = "") -> int:
    """What the calls take, which `blocks_needed` must have said."""
    needed, free = alloc.blocks_needed([grow] if grow else [], 1, new=new), alloc.num_free
    if grow:
        alloc.grow(grow)
    for i, arguments in enumerate(new):
        alloc.add_request(i, **arguments)
    assert free - alloc.num_free == needed
    alloc.check()
    return needed


def test_a_batch_does_not_count_on_an_identity_that_its_growth_removes() -> None:
    alloc = allocator(prefix_caching=True)
    alloc.add_request("A", token_ids=range(8))
    alloc.commit(["A"], [range(8)])
    alloc.truncate("A", 6)
    assert takes(alloc, {"token_ids": range(9)}, grow="A") == 2


def test_a_batch_counts_on_a_source_of_a_copy_as_the_most_recently_used() -> None:
    alloc = allocator(num_blocks=5, prefix_caching=True)
    cached(alloc, range(8), range(50, 58))
    new = {"token_ids": [0, 1, 2, 3, 4, 5, 99]}, {"n": 4}, {"token_ids": range(50, 59), "n": 1}
    assert takes(alloc, *new) == 5


def twins(num_blocks: int) -> BlockAllocator:
    """A holds block 0, B a twin of it and one more block."""
    alloc = allocator(num_blocks=num_blocks, prefix_caching=True)
    alloc.add_request("A", token_ids=range(4))
    alloc.add_request("B", token_ids=range(5))
    alloc.commit(["A", "B"], [range(4), range(4)])
    return alloc


def test_a_batch_counts_on_the_twin_of_a_block_that_it_takes() -> None:
    alloc = twins(4)
    alloc.free_request("A")
    cached(alloc, range(50, 54))
    assert takes(alloc, {"n": 4}, {"token_ids": range(5)}) == 2


def test_twins_come_back_as_twins_into_as_many_blocks_as_was_said() -> None:
    alloc = twins(8)
    alloc.commit(["B"], [[4]])
    alloc.evict(["A", "B"])
    alloc.add_request("other", 32)
    alloc.free_request("other")
    assert alloc.blocks_needed(restore=["A", "B"]) == 3
    alloc.restore(["A", "B"])
    assert (alloc.num_free, len(set(alloc.tables["A"] + alloc.tables["B"]))) == (5, 3)
    alloc.check()
