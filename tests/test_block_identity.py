"""Which block has which identity: duplicates, truncation, forks. Random histories are in test_allocator_machine.py."""

from __future__ import annotations

import pytest
from allocator_compare import observe
from caching import cached, run


def test_two_requests_that_compute_one_prefix_end_with_one_copy_of_it() -> None:
    alloc = cached()
    tokens = list(range(8))
    for name in "AB":
        alloc.add_request(name, token_ids=tokens)
    assert alloc.tables["B"] == [2, 3]
    alloc.commit(["A", "B"], [tokens, tokens])
    assert alloc.tables["A"] == alloc.tables["B"] == [0, 1]
    assert alloc.free[-2:] == [2, 3]
    alloc.free_request("A")
    assert alloc.tables["B"] == [0, 1] and 0 not in alloc.free
    alloc.check()


def test_a_duplicate_that_a_later_step_refers_to_stays_and_takes_over() -> None:
    alloc = cached(num_blocks=8, block_size=4)
    tokens = list(range(4))
    for name in "AB":
        alloc.add_request(name, token_ids=tokens)
    alloc.commit(["A"], tokens)
    alloc.grow("B", 1)  # a step that refers to B's own block
    alloc.commit(["B"], [tokens])
    assert (alloc.tables["A"], alloc.tables["B"]) == ([0], [1, 2])
    alloc.free_request("A")
    alloc.add_request("C", 4 * 6)  # takes all plain blocks, and evicts A's
    assert 0 in alloc.tables["C"]
    assert alloc.add_request("D", 0, token_ids=[*tokens, 7]).num_cached.tolist() == [4]
    assert alloc.tables["D"] == [1]
    alloc.check()


def test_a_block_that_takes_over_keeps_its_place_as_a_child_and_as_a_parent() -> None:
    alloc = cached(num_blocks=12, block_size=4)
    for name in "AB":
        alloc.add_request(name, token_ids=list(range(4)))
    alloc.commit(["A"], [0, 1, 2, 3])
    alloc.grow("B", 4)
    alloc.commit(["B"], [[0, 1, 2, 3]])  # stays as a twin
    run(alloc, "C", [9, 9, 9, 9])
    alloc.commit(["B"], [4, 5, 6, 7])
    assert (alloc.tables["A"], alloc.tables["B"]) == ([0], [1, 2])
    alloc.free_request("A")
    alloc.add_request("D", 4 * 9)  # all that is left: block 0 is evicted, block 1 takes over
    alloc.check()
    alloc.free_request("D")
    assert alloc.add_request("E", token_ids=[0, 1, 8]).copies[:, 0].tolist() == [1]
    assert alloc.add_request("F", token_ids=[0, 1, 2, 3, 4, 8]).copies[:, 0].tolist() == [2]


def test_writing_into_a_block_after_truncation_takes_its_identity() -> None:
    alloc = cached()
    run(alloc, "A", list(range(8)))
    alloc.truncate("A", 6)
    assert int(alloc.add_request("B", 0, token_ids=list(range(9))).num_cached[0]) == 8
    alloc.free_request("B")
    step = alloc.grow("A", 2)
    assert (step.copies.tolist(), alloc.tables["A"]) == ([], [0, 1])
    alloc.commit(["A"], [50, 51])
    assert int(alloc.add_request("C", 0, token_ids=list(range(9))).num_cached[0]) == 4
    assert int(alloc.add_request("D", 0, token_ids=[0, 1, 2, 3, 4, 5, 50, 51, 9]).num_cached[0]) == 8


@pytest.mark.parametrize("committed_first", [True, False])
def test_what_another_owner_committed_behind_a_truncation_is_forgotten_too(committed_first: bool) -> None:
    alloc = cached()
    alloc.add_request("A", 4)
    alloc.fork_request("A", ["B"])
    for step in ("commit", "truncate") if committed_first else ("truncate", "commit"):
        if step == "commit":
            alloc.commit(["A"], [1, 2, 3, 4])
        else:
            alloc.truncate("B", 2)
    alloc.free_request("A")
    assert alloc.grow("B", 2).copies.tolist() == []
    assert run(alloc, "C", [1, 2, 3, 4, 9]) == 0
    alloc.commit(["B"], [1, 2, 7, 8])
    assert run(alloc, "D", [1, 2, 7, 8, 9]) == 4
    alloc.check()


def test_a_failed_forward_is_undone_by_truncation() -> None:
    alloc = cached()
    run(alloc, "A", [1, 2, 3])
    alloc.grow("A", 4)
    alloc.truncate("A", 3)
    alloc.grow("A", 1)
    alloc.commit(["A"], [4])
    assert run(alloc, "B", [1, 2, 3, 4, 5]) == 4


def test_tokens_that_contradict_a_shared_block_are_refused() -> None:
    alloc = cached()
    alloc.add_request("A", 3)
    alloc.fork_request("A", ["B"])
    alloc.commit(["A"], [1, 2, 3])
    before = observe(alloc)
    with pytest.raises(ValueError, match="token 1 of request 'B' differs"):
        alloc.commit(["B"], [1, 9, 3])
    assert observe(alloc) == before
    alloc.commit(["B"], [1, 2, 3])
    alloc.add_request("C", 2)
    alloc.fork_request("C", ["D"])
    with pytest.raises(ValueError, match="differs"):
        alloc.commit(["C", "D"], [[1, 2], [1, 3]])
    alloc.commit(["C", "D"], [[1, 2], [1, 2]])
    alloc.check()
