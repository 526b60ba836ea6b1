"""Long random walks through the allocator's calls, equal to the plain model at every call.

A walk makes calls that mostly succeed, so that prompts are found, blocks shared, copied, evicted and joined all the time. After each call
it compares blocks, tables and lengths, and after every `wholly`-th everything: `check()`, contents, events, stats. Each call of a walk
has a random generator of its own, made from the walk's seed and the call's number, so that a walk that fails is walked again without
those of its calls that do not matter.
"""

from __future__ import annotations

import gc
import secrets
import time
from collections.abc import Callable, Sequence
from random import Random

import pytest
from allocator_compare import assert_alike
from allocator_sides import GROUPS
from test_allocator_machine import AllocatorMachine

WEIGHTS = {
    "add": 3, "add_prompt": 12, "commit": 6, "commit_all": 8, "reset": 1, "grow_batch": 5, "grow_batch_equally": 2, "decode_all": 8,
    "fork_batch": 4, "reorder": 4, "truncate_batch": 5, "free_batch": 10, "evict": 6, "restore": 7, "serve": 8, "release_swapped": 3,
}  # fmt: skip

KINDS = [0, 1, 0, 2, 0, 3, 0, 4, 0, 5]  # of GROUPS, by the seed; every second walk has one group of full attention
FAULTS = (Exception, pytest.fail.Exception)  # a call that should have failed is no Exception


def walk(seed: int, calls: Sequence[int], wholly: int = 1) -> int:
    """Make the calls with these numbers; returns how many calls that change the allocator these were."""
    random = Random(seed)
    same_hash, groups = seed % 2 == 1, KINDS[seed // 2 % len(KINDS)]
    machine = AllocatorMachine()
    machine.start(
        num_blocks=random.choice([12, 12, 10, 8, 6, 5, 4, 3]), block_size=random.choice([1, 2, 2, 2, 3, 4]),
        watermark=random.choice([0.0, 0.0, 0.1]), caching=random.random() < 0.9, same_hash=same_hash,
        host_blocks=random.choice([12, 12, 12, random.randrange(12)]), groups=groups,
    )  # fmt: skip
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    number = -1
    try:
        for number in calls:
            random = Random(seed << 32 | number)
            machine.wholly = number % wholly == 0
            call(machine, random.choices(names, weights)[0], random)
            if machine.wholly:
                machine.equal()
                machine.events_tell_what_is_cached()
                machine.contents_are_right()
            else:
                assert_alike(machine.alloc, machine.model)
        machine.teardown()
    except FAULTS as error:
        error.add_note(f"in call {number} of walk({seed}, {calls}, {wholly})")
        raise
    finally:
        machine.patch.undo()
    return machine.calls


def call(machine: AllocatorMachine, name: str, random: Random) -> None:
    """One call, with random arguments."""
    flip = lambda chance: random.random() < chance  # noqa: E731
    fault = lambda: random.choice(["twice", "unknown", "empty", "evicted"]) if flip(0.03) else ""  # noqa: E731
    picks = lambda most=6: [random.randrange(9) for _ in range(random.randint(1, most))]  # noqa: E731
    count = lambda: random.choice([1, 1, 1, 0, 2, 3, 4, 6, 30]) if flip(0.97) else -1  # noqa: E731
    pattern = lambda: random.choice([0, 1, 1, 2])  # noqa: E731
    calls: dict[str, Callable[[], None]] = {
        "add": lambda: machine.add(n=random.randrange(9), taken=flip(0.05), bomb=flip(0.05), pattern=pattern()),
        "add_prompt": lambda: machine.add_prompt(
            pattern=pattern(), length=random.randrange(13), tail=[random.randrange(2) for _ in range(random.randrange(3))],
            n=random.choice([None] * 8 + [0, 1, 3]), key=random.choice([0] * 12 + [1, 2, 3]), taken=False, bomb=flip(0.03)),
        "commit": lambda: machine.commit(
            picks=picks(), n=[random.randrange(9) for _ in range(9)], form=random.choice(["all", "some", "some", "lists", "too many"]),
            wrong=fault(), by_rows=flip(0.5)),
        "commit_all": machine.commit_all,
        "reset": lambda: machine.reset(often=random.choice([0, 0, 0, 9])),
        "grow_batch": lambda: machine.grow_batch(
            picks=picks(), n=[count() for _ in range(9)], wrong=fault(), by_rows=flip(0.5), bomb=flip(0.05), pattern=pattern()),
        "grow_batch_equally": lambda: machine.grow_batch_equally(
            picks=picks(), n=count(), wrong=fault(), by_rows=flip(0.5), pattern=pattern()),
        "decode_all": lambda: machine.decode_all(by_rows=flip(0.5), bomb=flip(0.03), pattern=pattern()),
        "fork_batch": lambda: machine.fork_batch(
            picks=picks(3), wrong=random.choice(["unknown", "twice", "taken"]) if flip(0.05) else ""),
        "reorder": lambda: machine.reorder(
            picks=picks(), parents=picks(), by_rows=flip(0.5), wrong=fault(), shift=-9 if flip(0.03) else 0),
        "truncate_batch": lambda: machine.truncate_batch(
            picks=picks(), back=[random.choice([0, 1, 1, 2, 3, 6]) for _ in range(9)], wrong=fault(), by_rows=flip(0.5)),
        "free_batch": lambda: machine.free_batch(picks=picks(3), wrong=fault(), by_rows=flip(0.5)),
        "evict": lambda: machine.evict(picks=picks(), wrong=fault(), by_rows=flip(0.5), hold=flip(0.1), bomb=flip(0.03)),
        "restore": lambda: machine.restore(picks=picks(), wrong=fault(), by_rows=flip(0.5), hold=flip(0.1), bomb=flip(0.03)),
        "serve": lambda: machine.serve_a_batch(random.randint),
        "release_swapped": lambda: machine.release_swapped(which=random.randrange(2)),
    }  # fmt: skip
    calls[name]()


def long_walk(seed: int, calls: Sequence[int], wholly: int) -> int:
    """`walk`; one that fails ends with the fewest of its calls that fail too."""
    try:
        return walk(seed, calls, wholly)
    except FAULTS:
        print(f"a call of walk({seed}, {calls}) fails; now with fewer calls", flush=True)
        shortest = shrink(seed, calls, wholly)
        print(f"walk({seed}, {shortest}, {wholly}) fails", flush=True)
        walk(seed, shortest, wholly)
        raise


def shrink(seed: int, calls: Sequence[int], wholly: int) -> list[int]:
    """The calls of a failing walk without those that it fails without: first pieces of half of them are left out, single ones last."""
    shortest, piece = list(calls), len(calls)
    while piece := piece // 2:
        for begin in range((len(shortest) - 1) // piece * piece, -1, -piece):
            shorter = shortest[:begin] + shortest[begin + piece :]
            if fails(seed, shorter, wholly):
                shortest = shorter
    return shortest


def fails(seed: int, calls: Sequence[int], wholly: int) -> bool:
    try:
        walk(seed, calls, wholly)
    except FAULTS:
        return True
    return False


@pytest.mark.parametrize("same_hash", [False, True])
def test_long_walks_equal_the_model(same_hash: bool, seed: int) -> None:
    for i in range(8):
        long_walk((seed + i) * 2 * len(KINDS) + same_hash, range(300), 1)


@pytest.mark.parametrize("groups", range(1, len(GROUPS)))
def test_long_walks_with_groups_equal_the_model(groups: int, seed: int) -> None:
    long_walk((seed * len(KINDS) + KINDS.index(groups)) * 2 + seed % 2, range(250), 1)


@pytest.mark.fuzz
def test_two_million_calls_equal_the_model(seed: int) -> None:
    gc.freeze()  # what is imported by now needs no more looks
    calls = walks = 0
    began = time.monotonic()
    while calls < 2_000_000:
        calls += long_walk(seed + walks, range(1000), 32)
        walks += 1
        if walks % 50 == 0:
            print(f"{calls:,} calls in {time.monotonic() - began:,.0f} s", flush=True)


@pytest.fixture
def seed() -> int:
    """A new one each run, printed when the test fails."""
    value = secrets.randbits(48)
    print(f"seed {value}")
    return value
