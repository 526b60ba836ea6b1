"""The prefix cache, example by example; random histories are in test_allocator_machine.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from allocator_compare import observe
from caching import cached, one_hash, run

from cupaged import BlockAllocator, OutOfBlocks
from cupaged.prefix_match import match

TRACE = Path(__file__).parents[2] / "shared" / "traces" / "mooncake_conversation_trace.jsonl"


def test_a_second_prompt_shares_full_blocks_and_copies_the_partly_equal_one() -> None:
    alloc = cached()
    run(alloc, "A", list(range(12)))
    step = alloc.add_request("B", token_ids=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 99])
    assert step.num_cached.tolist() == [10]
    assert step.copies.tolist() == [[2, 3]]
    assert (alloc.tables["A"], alloc.tables["B"]) == ([0, 1, 2], [0, 1, 3])
    assert step.slot_mapping.tolist() == [3 * 4 + 2]
    assert (step.seq_lens.tolist(), step.query_start_loc.tolist()) == ([11], [0, 1])


def test_a_full_hit_leaves_one_token_to_compute() -> None:
    alloc = cached()
    run(alloc, "A", list(range(8)))
    step = alloc.add_request("B", token_ids=list(range(8)))
    assert step.num_cached.tolist() == [7]
    assert step.slot_mapping.tolist() == [alloc.physical_slot("B", 7)]
    assert step.copies.tolist() == [[1, 2]]


def test_only_committed_tokens_are_found() -> None:
    alloc = cached()
    alloc.add_request("A", token_ids=list(range(8)))
    assert run(alloc, "B", list(range(8))) == 0
    alloc.commit(["A"], [[0, 1, 2]])
    alloc.free_request("B")
    alloc.reset_prefix_cache()
    assert run(alloc, "C", list(range(8))) == 0


@pytest.mark.parametrize("tokens", [[], [5], [0, 1], [9, 9, 9, 9, 9]])
def test_prompts_without_a_hit_are_no_error(tokens: list[int]) -> None:
    alloc = cached()
    run(alloc, "A", [7, 7, 7, 7])
    assert run(alloc, "B", tokens) == 0
    alloc.check()


def test_chunked_prefill_finds_and_commits_piece_by_piece() -> None:
    alloc = cached()
    tokens = list(range(14))
    run(alloc, "A", tokens)
    alloc.free_request("A")
    step = alloc.add_request("B", 0, token_ids=tokens)
    assert (step.num_cached.tolist(), len(step.copies), alloc.lengths["B"]) == ([12], 0, 12)
    step = alloc.add_request("C", 3, token_ids=[50, *tokens])
    assert (step.num_cached.tolist(), alloc.lengths["C"]) == ([0], 3)
    alloc.commit(["C"], [50, 0, 1])
    alloc.grow("C", 3)
    alloc.commit(["C"], [2, 3, 4])
    assert int(alloc.add_request("D", token_ids=[50, *range(9)]).num_cached[0]) == 4


def test_generated_tokens_are_found_too() -> None:
    alloc = cached()
    run(alloc, "A", [1, 2, 3])
    for token in (4, 5, 6, 7, 8):
        alloc.grow_batch(["A"], 1)
        alloc.commit(["A"], [token])
    assert run(alloc, "B", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (None, "x"), ("x", "y"), ({"salt": "x"}, {"adapter": "x"}), ({"salt": "x"}, "x"), (1, True), (1, "1"),
        ({"adapter": "x"}, {"adapter": "x", "salt": "x"}), (("adapter", "x"), {"adapter": "x"}), ({"adapter": 1}, {"adapter": True}),
        (("x", 1), ("x", True)), ({"adapter": ("x", (1,))}, {"adapter": ("x", (1.0,))}),
    ],
)  # fmt: skip
def test_equal_tokens_under_another_key_are_not_shared(one: Any, other: Any) -> None:
    alloc = cached()
    tokens = list(range(9))
    run(alloc, "A", tokens, one)
    assert run(alloc, "B", tokens, other) == 0
    assert run(alloc, "C", tokens, one) == run(alloc, "D", tokens, other) == 8


def test_equal_mappings_are_one_key_in_any_order() -> None:
    alloc = cached()
    run(alloc, "A", list(range(9)), {"adapter": "x", "salt": 1})
    assert run(alloc, "B", list(range(9)), {"salt": 1, "adapter": "x"}) == 8


def test_keys_that_nobody_needs_any_more_are_forgotten() -> None:
    alloc = cached()
    run(alloc, "running", list(range(9)), "of a request")
    run(alloc, "freed", list(range(9)), "of cached blocks")
    alloc.free_request("freed")
    for salt in range(5000):
        alloc.add_request(salt, 1, extra_key={"salt": salt})
        alloc.free_request(salt)
    assert alloc._cache is not None
    assert len(alloc._cache.roots._numbers) == len(alloc._cache.roots._keys) <= 1024
    alloc.truncate("running", 8)
    assert run(alloc, "A", list(range(9)), "of a request") == run(alloc, "B", list(range(9)), "of cached blocks") == 8
    alloc.check()


def test_the_same_block_after_another_prefix_is_not_shared() -> None:
    alloc = cached()
    run(alloc, "A", [1, 1, 1, 1, 5, 5, 5, 5])
    assert run(alloc, "B", [2, 2, 2, 2, 5, 5, 5, 5, 0]) == 0


def test_a_child_whose_parent_is_gone_is_never_found_again() -> None:
    """The parent is written over, then its id carries another identity, then its old content comes back under a new one."""
    alloc = cached(num_blocks=8, block_size=2)
    run(alloc, "A", [1, 2, 3, 4])
    alloc.truncate("A", 1)
    alloc.grow("A", 1)
    assert run(alloc, "B", [1, 2, 3, 4, 9]) == 0
    alloc.free_request("B")
    alloc.commit(["A"], [7])
    assert alloc.tables["A"] == [0]
    assert int(alloc.add_request("C", 0, token_ids=[1, 7, 3, 4, 9]).num_cached[0]) == 2
    alloc.check()
    alloc.reset_prefix_cache()
    assert run(alloc, "D", [1, 2, 3, 4, 9]) == 0


def test_plain_blocks_go_first_then_the_least_recently_used_and_deeper_ones_before_their_parents() -> None:
    alloc = cached(num_blocks=8, block_size=2)
    run(alloc, "A", [1, 1, 2, 2, 3])
    run(alloc, "B", [5, 5, 6, 6])
    alloc.free_batch(["A", "B"])
    assert alloc.free == [5, 6, 7, 2, 1, 0, 4, 3]
    assert run(alloc, "C", [1, 1, 7]) == 2  # takes 0 out of the middle
    assert alloc.free == [6, 7, 2, 1, 4, 3]
    alloc.free_request("C")
    assert alloc.free == [6, 7, 2, 5, 1, 4, 3, 0]


def test_blocks_in_use_are_never_evicted_and_hits_count_against_free_space() -> None:
    alloc = cached(num_blocks=4, block_size=2)
    run(alloc, "A", [1, 1, 2, 2])
    alloc.free_request("A")
    alloc.add_request("B", 3)
    before = observe(alloc)
    with pytest.raises(OutOfBlocks):
        alloc.add_request("C", token_ids=[1, 1, 2, 2, 3])
    assert observe(alloc) == before
    run(alloc, "D", [1, 1, 2, 2])
    with pytest.raises(OutOfBlocks):
        alloc.add_request("E", 1)
    alloc.check()


def test_a_partly_equal_block_is_given_up_when_only_so_the_request_fits() -> None:
    alloc = cached(num_blocks=2, block_size=4)
    run(alloc, "A", [1, 2, 3, 4, 5, 6, 7, 8])
    alloc.free_request("A")
    step = alloc.add_request("B", token_ids=[1, 2, 3, 4, 5, 6, 9, 9])
    assert (step.num_cached.tolist(), step.copies.tolist()) == ([4], [])
    alloc.check()


def test_everything_touched_can_be_evicted_again() -> None:
    alloc = cached(num_blocks=6, block_size=2)
    run(alloc, "A", list(range(12)))
    alloc.free_request("A")
    run(alloc, "B", list(range(12)))
    alloc.free_request("B")
    assert alloc.num_free == 6
    alloc.add_request("C", 12)
    assert alloc.stats().blocks_cached == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda a: a.commit(["A"], [1, 2]), ValueError, "expected the 1 tokens that are not committed, got 2"),
        (
            lambda a: a.commit(["A"], [[1, 2]]),
            ValueError,
            "expected at most the 1 tokens of request 'A' that are not committed, got 2",
        ),
        (lambda a: a.commit(["A", "B"], [[1]]), ValueError, "a list for each of 2 requests, got 1"),
        (lambda a: a.commit(["A"], [2**31]), ValueError, "token_ids: expected values of int32"),
        (lambda a: a.commit(["A"], [0.5]), TypeError, "token_ids: expected integers"),
        (lambda a: a.commit(["X"], [1]), KeyError, "'X'"),
        (lambda a: a.add_request("C"), TypeError, "n: expected a number of tokens, or token_ids, got neither"),
        (lambda a: a.add_request("C", token_ids=[[1]]), ValueError, "token_ids: expected one dimension"),
        (
            lambda a: a.add_request("C", token_ids=[1], extra_key=[]),
            TypeError,
            "extra_key: expected hashable values, got []",
        ),
        (lambda a: a.add_request("C", 1, extra_key=[]), TypeError, "extra_key: expected hashable values, got []"),
        (
            lambda a: a.add_request("C", 1, extra_key={"salt": []}),
            TypeError,
            "extra_key: expected hashable values, got {'salt': []}",
        ),
        (lambda a: a.take_events(), RuntimeError, "record_events=True"),
    ],
)
def test_a_wrong_call_says_why_and_changes_nothing(call: Any, error: type[Exception], message: str) -> None:
    alloc = cached()
    alloc.add_request("A", 1)
    alloc.add_request("B", 1)
    before = observe(alloc)
    with pytest.raises(error, match=re.escape(message)):
        call(alloc)
    assert observe(alloc) == before
    alloc.check()


def test_statistics_tell_no_query_from_no_hit() -> None:
    alloc = cached()
    assert alloc.stats().hit_rate is None
    run(alloc, "A", list(range(8)))
    assert alloc.stats().hit_rate == 0.0
    run(alloc, "B", list(range(8)))
    stats = alloc.stats()
    assert (stats.queried_tokens, stats.hit_tokens, stats.hit_rate) == (16, 7, 7 / 16)


def test_events_let_an_outside_index_follow() -> None:
    alloc = cached(num_blocks=3, block_size=2, record_events=True)
    run(alloc, "A", [1, 2, 3, 4], key="x")
    (stored,) = alloc.take_events()
    assert stored.kind == "stored"
    assert stored.token_ids.tolist() == [[1, 2], [3, 4]]
    assert stored.parents[1] == stored.serials[0]
    assert stored.root_of == {int(stored.parents[0]): "x"}
    alloc.free_request("A")
    alloc.add_request("B", 4)
    (removed,) = alloc.take_events()
    assert (removed.kind, removed.serials.tolist()) == ("removed", [int(stored.serials[1])])
    alloc.reset_prefix_cache()
    assert [event.kind for event in alloc.take_events()] == ["cleared"]
    assert alloc.take_events() == []


def test_after_a_reset_nothing_old_is_found_and_running_requests_store_nothing() -> None:
    alloc = cached()
    run(alloc, "A", list(range(8)))
    run(alloc, "B", list(range(50, 58)))
    alloc.free_request("A")
    alloc.reset_prefix_cache()
    alloc.grow("B", 8)
    alloc.commit(["B"], list(range(58, 66)))
    assert run(alloc, "C", list(range(8))) == 0
    assert run(alloc, "D", list(range(50, 66))) == 0
    alloc.check()


def test_collisions_of_the_hash_never_serve_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    one_hash(monkeypatch)
    alloc = cached(num_blocks=64, block_size=2)
    prompts = [[i, i, j, j, 9] for i in range(4) for j in range(4)]
    for i, prompt in enumerate(prompts):
        run(alloc, i, prompt)
    for i, prompt in enumerate(prompts):
        assert run(alloc, ("again", i), prompt) == 4
        assert alloc.tables[("again", i)][:2] == alloc.tables[i][:2]
    alloc.check()


def test_many_siblings_are_evicted_and_found_in_any_order(rng: np.random.Generator) -> None:
    alloc = cached(num_blocks=40, block_size=2)
    for i in rng.integers(0, 60, 400).tolist():
        prompt = [1, 1, i % 6, i % 6, i, i, 0]
        found = run(alloc, "A", prompt)
        alloc.check()
        alloc.free_request("A")
        assert run(alloc, "B", prompt) == 6 >= found
        alloc.free_request("B")


def test_metadata_takes_at_most_160_bytes_per_block_of_16_tokens() -> None:
    alloc = BlockAllocator(1 << 14, 16, prefix_caching=True)
    held, seen = 0, set()
    objects: list[Any] = [alloc.pool, alloc._cache]
    while objects:
        item = objects.pop()
        if id(item) not in seen and type(item).__module__.startswith("cupaged"):
            seen.add(id(item))
            objects += vars(item).values()
        elif isinstance(item, np.ndarray) and item.base is None and id(item) not in seen:
            seen.add(id(item))
            held += item.nbytes
    assert 64 < held / alloc.num_blocks <= 160


def mooncake() -> Iterator[np.ndarray]:
    """The prompts of the trace, 512 tokens for each of its ids."""
    with TRACE.open() as lines:
        for line in lines:
            entry = json.loads(line)
            ids = np.array(entry["hash_ids"], np.int64)
            yield (ids[:, None] * 512 + np.arange(512)).reshape(-1)[: entry["input_length"]].astype(np.int32)


@pytest.mark.skipif(not TRACE.exists(), reason=f"no trace {TRACE.name}")
def test_the_mooncake_trace_hits_as_often_as_its_authors_say() -> None:
    alloc = BlockAllocator(300_000, 512, prefix_caching=True)
    hits = references = 0
    for prompt in mooncake():
        root = alloc._cache.root(None, np.zeros(0, np.int64))  # type: ignore[union-attr]
        hits += len(match(alloc._cache, root, prompt, len(prompt))[0])  # type: ignore[union-attr]
        references += len(prompt) // 512
        found = int(alloc.add_request("A", token_ids=prompt).num_cached[0])
        alloc.commit(["A"], prompt[found:])
        alloc.free_request("A")
    assert (hits, references) == (105_592, 276_491)
    alloc.check()
