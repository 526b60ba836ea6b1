"""The allocator's contract, example by example; random histories are in test_allocator_machine.py."""

from __future__ import annotations

import itertools
import pickle
import re
from typing import Any

import numpy as np
import pytest
from allocator_compare import observe
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged import BlockAllocator, OutOfBlocks, TableMirror


def about_to_take(table: list[int], block_size: int) -> BlockAllocator:
    """An allocator whose free queue begins with these blocks."""
    alloc = BlockAllocator(max(table) + 1, block_size)
    for block in range(alloc.num_blocks):
        alloc.add_request(block, block_size)
    for block in [*table, *(b for b in range(alloc.num_blocks) if b not in table)]:
        alloc.free_request(block)
    return alloc


def test_the_timeline_of_six_blocks() -> None:
    alloc = BlockAllocator(6, 4)
    alloc.add_request("A", 6)
    assert alloc.tables["A"] == [0, 1]
    alloc.add_request("B", 3)
    assert alloc.tables["B"] == [2]
    alloc.free_request("B")
    assert alloc.free == [3, 4, 5, 2]
    alloc.grow("A", 3)
    assert (alloc.tables["A"], alloc.free) == ([0, 1, 3], [4, 5, 2])
    alloc.add_request("C", 5)
    assert (alloc.tables["C"], alloc.free) == ([4, 5], [2])
    alloc.free_request("A")
    assert alloc.free == [2, 0, 1, 3]
    alloc.add_request("D", 10)
    assert (alloc.tables["D"], alloc.free) == ([2, 0, 1], [3])
    assert alloc.physical_slot("D", 9) == 5
    before = observe(alloc)
    with pytest.raises(MemoryError):
        alloc.grow("D", 100)
    assert observe(alloc) == before


@pytest.mark.parametrize(
    ("table", "block_size", "position", "slot"),
    [([7, 3, 11], 4, 9, 45), ([5, 2], 16, 15, 95), ([5, 2], 16, 16, 32), ([5, 2], 16, 23, 39)],
)
def test_a_slot_is_block_times_size_plus_offset(table: list[int], block_size: int, position: int, slot: int) -> None:
    alloc = about_to_take(table, block_size)
    step = alloc.add_request("A", len(table) * block_size)
    assert alloc.tables["A"] == table
    assert alloc.physical_slot("A", position) == slot
    assert step.slot_mapping[position] == slot


def test_lengths_1_4_5_8_9_need_nine_blocks_of_four() -> None:
    lengths = [1, 4, 5, 8, 9]
    alloc = BlockAllocator(9, 4)
    wasted = []
    for i, n in enumerate(lengths):
        before = alloc.stats().slots_wasted
        alloc.add_request(i, n)
        wasted.append(alloc.stats().slots_wasted - before)
    assert (alloc.num_free, wasted) == (0, [3, 0, 3, 0, 3])

    small = BlockAllocator(8, 4)
    for i, n in enumerate(lengths[:-1]):
        small.add_request(i, n)
    with pytest.raises(OutOfBlocks, match="out of blocks: 3 needed, 2 free") as caught:
        small.add_request(4, lengths[-1])
    there = pickle.loads(pickle.dumps(caught.value))  # as a worker process sends it
    assert (str(there), there.needed, there.free) == (str(caught.value), 3, 2)


def test_only_the_first_owners_to_write_copy_and_the_last_writes_in_place() -> None:
    alloc = BlockAllocator(8, 4)
    alloc.add_request("A", 6)
    alloc.fork_request("A", ["B", "C"])
    step = alloc.grow_batch(["C", "A", "B"], 1)
    assert step.copies.tolist() == [[1, 2], [1, 3]]
    assert (alloc.tables["C"], alloc.tables["A"], alloc.tables["B"]) == ([0, 2], [0, 3], [0, 1])
    assert step.slot_mapping.tolist() == [2 * 4 + 2, 3 * 4 + 2, 1 * 4 + 2]


def test_the_copy_is_taken_before_the_blocks_of_growth() -> None:
    alloc = BlockAllocator(8, 4)
    alloc.add_request("A", 6)
    alloc.fork_request("A", ["B"])
    step = alloc.grow_batch(["A", "B"], [6, 3])
    assert step.copies.tolist() == [[1, 2]]
    assert (alloc.tables["A"], alloc.tables["B"]) == ([0, 2, 3], [0, 1, 4])


def test_a_step_is_a_snapshot() -> None:
    alloc = BlockAllocator(8, 2)
    rows = np.array([0])
    alloc.add_request("A", 3)
    step = alloc.grow_batch(rows=rows, n=1)
    kept = {
        name: getattr(step, name).copy()
        for name in ("block_tables", "seq_lens", "slot_mapping", "query_start_loc", "rows", "packed")
    }
    rows[0] = 5
    alloc.grow("A", 5)
    alloc.free_request("A")
    for name, array in kept.items():
        np.testing.assert_array_equal(getattr(step, name), array)


def test_a_draft_tree_by_fork_and_drop() -> None:
    """Speculative decoding: three drafts of four tokens, one of them accepted up to its third token."""
    alloc = BlockAllocator(16, 4)
    alloc.add_request("A", 7)
    alloc.fork_request("A", ["A1", "A2"])
    step = alloc.grow_batch(["A", "A1", "A2"], 4)
    assert step.seq_lens.tolist() == [11, 11, 11]
    alloc.truncate("A1", 7 + 3)
    alloc.reorder(["A", "A1", "A2"], [1, 1, 1])
    alloc.free_batch(["A1", "A2"])
    assert alloc.lengths["A"] == 10
    assert alloc.num_free == 16 - 3
    assert alloc.grow("A").copies.tolist() == []
    alloc.check()


@given(data=st.data(), depth=st.integers(1, 6))
@settings(max_examples=60)
def test_any_order_of_frees_of_a_fork_tree_ends_with_a_full_pool(data: st.DataObject, depth: int) -> None:
    alloc = BlockAllocator(64, 3)
    alloc.add_request(0, data.draw(st.integers(0, 9)))
    fresh = itertools.count(1)
    for _ in range(depth):
        parent = data.draw(st.sampled_from(list(alloc.tables)))
        alloc.fork_request(parent, [next(fresh) for _ in range(data.draw(st.integers(1, 3)))])
        alloc.grow_batch(list(alloc.tables), data.draw(st.integers(0, 2)))
    for name in data.draw(st.permutations(list(alloc.tables))):
        alloc.free_request(name)
        alloc.check()
    assert sorted(alloc.free) == list(range(64))


def test_a_fork_of_ten_thousand_blocks_takes_none() -> None:
    alloc = BlockAllocator(10_001, 16)
    alloc.add_request("A", 160_000 - 5)
    alloc.fork_request("A", ["B", "C"])
    assert alloc.num_free == 1
    assert alloc.grow("B").copies.tolist() == [[9_999, 10_000]]
    with pytest.raises(OutOfBlocks):
        alloc.grow("A")
    alloc.free_batch(["A", "C", "B"])
    alloc.check()
    assert alloc.num_free == 10_001


def test_an_id_and_a_row_serve_again_after_they_were_freed() -> None:
    alloc = BlockAllocator(4, 2)
    for _ in range(3):
        alloc.add_request("A", 5)
        assert alloc.rows(["A"]).tolist() == [0]
        alloc.grow_batch(rows=[0], n=1)
        alloc.free_request("A")
    with pytest.raises(KeyError, match="0 is not the row of a request"):
        alloc.grow_batch(rows=[0], n=1)


def test_the_watermark_limits_new_requests_and_not_growth() -> None:
    alloc = BlockAllocator(10, 1, watermark=0.25)
    with pytest.raises(OutOfBlocks, match="8 needed, 7 free"):
        alloc.add_request("A", 8)
    alloc.add_request("A", 7)
    alloc.add_request("empty", 0)
    alloc.grow("A", 3)
    assert alloc.num_free == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a: a.add_request("A", 1), KeyError, "'A' is in use"),
        (lambda a: a.add_request(["C"], 1), TypeError, "id: expected a hashable value, got ['C']"),
        (lambda a: a.grow("X"), KeyError, "no request has the id 'X'"),
        (lambda a: a.grow("A", -1), ValueError, "n: expected an integer of at least 0, got -1"),
        (lambda a: a.grow_batch(["A", "B"], [1, [2]]), ValueError, "n: expected a flat list of integers, got [1, [2]]"),
        (lambda a: a.grow("A", 1.5), TypeError, "n"),
        (lambda a: a.grow("A", True), TypeError, "n: expected an integer, got True"),
        (lambda a: a.grow_batch(["A", "A"]), ValueError, "named twice"),
        (lambda a: a.grow_batch(["A", "B"], [1]), ValueError, "n: expected one for each of 2 requests, got 1"),
        (lambda a: a.grow_batch(["A", "B"], [1, -2]), ValueError, "n: expected integers of at least 0, got -2"),
        (lambda a: a.grow_batch(["B", "A", "A"]), ValueError, "request 'A' is named twice; name each one once"),
        (lambda a: a.grow_batch(rows=[0, 1, 1]), ValueError, "request 'B' is named twice; name each one once"),
        (lambda a: a.grow_batch("A"), TypeError, "ids: expected a list of ids, got 'A'; write ['A']"),
        (lambda a: a.grow_batch(5), TypeError, "ids: expected a list of ids, got 5; write [5]"),
        (lambda a: a.grow_batch([["A"]]), TypeError, "ids: expected hashable ids, got [['A']]"),
        (lambda a: a.grow_batch(), TypeError, "ids or rows"),
        (lambda a: a.grow_batch(["A"], rows=[0]), TypeError, "ids or rows=, one of the two, got both"),
        (lambda a: a.grow_batch(rows=[0, -1]), KeyError, "-1 is not the row"),
        (lambda a: a.grow_batch(rows=[0, 99]), KeyError, "99 is not the row"),
        (lambda a: a.grow_batch(rows=[0.0]), TypeError, "rows: expected integers"),
        (lambda a: a.grow_batch(rows=[[0]]), ValueError, "rows: expected one dimension"),
        (lambda a: a.fork_request("X", ["C"]), KeyError, "no request has the id 'X'"),
        (lambda a: a.fork_request("A", ["C", "B"]), KeyError, "'B' is in use"),
        (lambda a: a.fork_request("A", ["C", "C"]), KeyError, "'C' is in use"),
        (lambda a: a.fork_request("A", "CD"), TypeError, "children: expected a list"),
        (lambda a: a.fork_request("A", 7), TypeError, "children: expected a list of ids, got 7; write [7]"),
        (lambda a: a.fork_batch(["A"], "C"), TypeError, "children: expected a list of ids, got 'C'; write ['C']"),
        (lambda a: a.fork_batch("A", ["C"]), TypeError, "parents: expected a list of ids, got 'A'; write ['A']"),
        (lambda a: a.fork_batch(["A"], ["C", "D"]), ValueError, "children: expected one for each of 1 parents, got 2"),
        (lambda a: a.reorder(["A", "B"], [0]), ValueError, "parents: expected one index for each of 2 requests, got 1"),
        (lambda a: a.reorder(["A", "B"], [0, 2]), ValueError, "parents: expected indices from 0 to 1"),
        (lambda a: a.reorder(["A", "A"], [0, 0]), ValueError, "named twice"),
        (lambda a: a.truncate("A", 7), ValueError, "lengths: expected at most the 6 tokens of request 'A', got 7"),
        (lambda a: a.truncate("A", -1), ValueError, "lengths"),
        (lambda a: a.free_batch(["B", "X"]), KeyError, "'X'"),
        (lambda a: a.free_batch(["B", "B"]), ValueError, "named twice"),
        (lambda a: a.physical_slot("A", 6), IndexError, "position: expected 0 to 5"),
        (lambda a: a.physical_slot("A", -1), IndexError, "position"),
        (lambda a: a.physical_slot("X", 0), KeyError, "'X'"),
        (lambda a: a.physical_slot("A", 1.5), TypeError, "position: expected an integer, got 1.5"),
        (lambda a: a.physical_slot("A", 0, group="0"), IndexError, "group: expected 0 to 0, got '0'"),
        (lambda a: a.blocks_needed(new={"n": 5}), TypeError, "as in [{\"n\": 5}], got {'n': 5}"),
        (lambda a: a.blocks_needed(new=[5]), TypeError, "new: expected a list of arguments of add_request"),
        (lambda a: a.blocks_needed(new=[{"tokens": 5}]), TypeError, "(n, token_ids, extra_key)"),
        (lambda a: a.tables["X"], KeyError, "'X'"),
        (lambda a: a.lengths["X"], KeyError, "'X'"),
        (lambda a: a.rows(["A", "X"]), KeyError, "'X'"),
        (lambda a: a.grow_batch(["A", "B"], [1, 100]), OutOfBlocks, "25 needed, 3 free"),
    ],
)
def test_a_wrong_call_says_why_and_changes_nothing(call: Any, error: type[Exception], message: str) -> None:
    alloc = BlockAllocator(6, 4)
    alloc.add_request("A", 6)
    alloc.add_request("B", 3)
    before = observe(alloc)
    with pytest.raises(error, match=re.escape(message)) as caught:
        call(alloc)
    assert type(caught.value) is error
    assert observe(alloc) == before
    alloc.check()


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "watermark", "error"),
    [
        (-1, 4, 0.0, ValueError),
        (2**31, 4, 0.0, ValueError),
        (4, 0, 0.0, ValueError),
        (4.0, 4, 0.0, TypeError),
        (4, 4, -0.1, ValueError),
        (4, 4, 1.1, ValueError),
        (4, 4, float("nan"), ValueError),
        (4, 4, "0.5", TypeError),
        (4, 2**31, 0.0, ValueError),
    ],
)
def test_impossible_sizes_are_refused(num_blocks: Any, block_size: Any, watermark: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        BlockAllocator(num_blocks, block_size, watermark=watermark)


def test_tables_and_lengths_read_like_dicts() -> None:
    alloc = BlockAllocator(6, 4)
    alloc.add_request("A", 6)
    alloc.add_request(("B", 2), 0)
    assert alloc.tables == {"A": [0, 1], ("B", 2): []}
    assert dict(alloc.lengths.items()) == {"A": 6, ("B", 2): 0}
    assert "A" in alloc.tables and "X" not in alloc.tables
    assert repr(alloc.tables) == "{'A': [0, 1], ('B', 2): []}"


def test_a_mirror_refuses_a_delta_out_of_order() -> None:
    alloc, mirror = BlockAllocator(6, 4), TableMirror(4)
    first, second = alloc.add_request("A", 6), alloc.grow("A")
    with pytest.raises(ValueError, match="expected that of step 1, got step 2"):
        mirror.apply(second.delta)
    with pytest.raises(TypeError, match=r"delta: expected what step\.delta gives, got Step"):
        mirror.apply(first)  # type: ignore[arg-type]
    mirror.apply(pickle.loads(pickle.dumps(first.delta)))
    mirror.apply(second.delta)
    with pytest.raises(ValueError, match="expected that of step 3, got step 2"):
        mirror.apply(second.delta)
    assert mirror.tables[0].tolist() == [0, 1, *[-1] * 6]
    assert mirror.lengths[0] == 7


def test_a_mirror_of_another_block_size_refuses_a_delta_and_stays_as_it_was() -> None:
    alloc, mirror = BlockAllocator(6, 8), TableMirror(4)
    mirror.apply(alloc.add_request("A", 3).delta)
    before = mirror.tables.copy(), mirror.lengths.copy()
    with pytest.raises(
        ValueError, match="delta: expected 2 ids of blocks of 4 tokens, got 1; give the mirror the block_size"
    ):
        mirror.apply(alloc.grow("A", 9).delta)
    np.testing.assert_array_equal(mirror.tables, before[0])
    np.testing.assert_array_equal(mirror.lengths, before[1])


def test_a_decode_step_tells_the_mirror_only_what_is_new() -> None:
    alloc = BlockAllocator(100, 4)
    for i in range(8):
        alloc.add_request(i, 9 + i % 4)
    delta = alloc.grow_batch(list(range(8)), 1).delta
    assert delta.rows.tolist() == list(range(8))
    assert len(delta.blocks) == 2  # only the two sequences of 12 tokens got a block


def test_large_tables_rows_and_pools_keep_their_contents() -> None:
    alloc = BlockAllocator(3_000, 1)
    for i in range(300):
        alloc.add_request(i, 1)
    alloc.grow_batch([0, 299], [1_000, 1_500])
    alloc.check()
    assert [alloc.tables[i][0] for i in range(300)] == list(range(300))
    assert alloc.tables[0] == [0, *range(300, 1_300)]
    assert alloc.tables[299] == [299, *range(1_300, 2_800)]
