"""Groups of layers: windows and chunks with tables of their own, what leaves them, what a prompt finds."""

from __future__ import annotations

import re

import numpy as np
import pytest

from cupaged import BlockAllocator, Group, OutOfBlocks
from cupaged.prefix_match import match


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


def test_a_window_may_be_a_numpy_integer_of_any_width() -> None:
    alloc = BlockAllocator(40, 4, [Group(window=np.int8(100))])
    alloc.add_request("A", 150)
    alloc.grow("A")  # token 150 sees 51 and later ones: 12 blocks leave
    with pytest.raises(ValueError, match="lengths: expected at least 147"):
        alloc.truncate("A", 140)


def test_bad_groups_are_refused() -> None:
    for arguments, error, message in (
        ({"window": 0}, ValueError, "window: expected an integer from 1 to 2147483647, got 0"),
        ({"chunk": 2**70}, ValueError, "chunk: expected an integer from 1 to 2147483647, got 1180591620717411303424"),
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
    chain = match(alloc._cache, alloc._cache.roots.find(None), tokens, 19)[0]
    served, columns = alloc._cache.companions.serve(chain, tokens)
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
    assert len(match(alloc._cache, alloc._cache.roots.find(None), tokens, 9)[0]) == 4
    # tokens 8, 6 and 4 would see one of the two columns, token 2 sees only column 0
    step = alloc.add_request("B", 0, token_ids=tokens)
    assert step.num_cached.tolist() == [2] and step.seq_lens.tolist() == [2]
    alloc.check()
