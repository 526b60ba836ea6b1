"""The memory study: its accounts against cases worked out by hand, slow models, and the allocator's own count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged.study import policies, traces
from cupaged.study.contiguous import Buddy, Contiguous, FirstFit, reserve_maximum, reserve_oracle, reserve_power_of_two
from cupaged.study.measures import measure
from cupaged.study.paged import Paged
from cupaged.study.plots import over_time
from cupaged.study.prefix import PrefixCached
from cupaged.study.replay import Holding, Memory, Outcome, replay
from cupaged.study.sharing import WIDTHS, SharedSequences, beam_parents
from cupaged.study.traces import Trace

# (arrival in steps, prompt, output) of up to 25 requests
REQUESTS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=25)
NAMES = [*policies.NAMES, "paged-3"]


def trace_of(*requests: tuple[int, int, int]) -> Trace:
    """A trace of (arrival in seconds, prompt, output); all prompts are the beginning of one text."""
    table = np.array(sorted(requests), np.int64)
    prefixes = tuple((7,) * -(-int(prompt) // traces.HASHED_TOKENS) for prompt in table[:, 1])
    return Trace("test", (table[:, 0] - table[0, 0]).astype(float), table[:, 1], table[:, 2], prefixes)


def held(memory: Memory, *lengths: int) -> tuple[int, int, int]:
    """Slots taken, used, and wasted by requests that are as long as they will ever be."""
    for request, length in enumerate(lengths):
        assert memory.admit(request, length, length)
    now = np.array(lengths)
    holding = memory.holding(np.arange(len(now)), now, now)
    assert holding.reservation == 0
    return holding.taken, holding.used, holding.taken - holding.used


def records(outcome: Outcome, *names: str) -> list[tuple[int, ...]]:
    return list(zip(*(outcome.timeline.column(name).tolist() for name in names), strict=True))


# ---- contiguous memory ----


def test_reserving_16_slots_for_lengths_5_and_12_wastes_15() -> None:
    assert held(reserve_maximum(64, 16), 5, 12) == (32, 17, 15)


def test_reserving_12_slots_for_each_of_five_lengths_takes_60_slots_for_27_tokens() -> None:
    assert held(reserve_maximum(60, 12), 1, 4, 5, 8, 9)[:2] == (60, 27)


def test_two_holes_of_8_and_6_refuse_a_request_of_10() -> None:
    arena = FirstFit(20)
    memory = Contiguous(20, arena, lambda final: final)
    for request, size in enumerate((8, 6, 6)):
        assert memory.admit(request, size, size)
    memory.release(0)
    memory.release(2)
    assert arena.holes == [(0, 8), (14, 6)] and arena.largest_hole == 8
    assert not memory.admit(3, 10, 10)
    assert memory.stranded(10) and memory.stranded(14) and not memory.stranded(15)
    assert arena.holes == [(0, 8), (14, 6)]
    assert memory.admit(3, 8, 8) and arena.holes == [(14, 6)]


def test_power_of_two_reserves_the_next_one() -> None:
    assert held(reserve_power_of_two(64), 1, 5, 8, 9) == (1 + 8 + 8 + 16, 23, 10)


class Pieces:
    """What a random history has taken of an arena."""

    def __init__(self, data: st.DataObject, arena: FirstFit | Buddy, capacity: int) -> None:
        self.data, self.arena = data, arena
        self.taken = bytearray(capacity)  # 1 where a piece lies
        self.pieces: list[tuple[int, int]] = []

    def give(self) -> bool:
        """Give one of them back, or none: chance decides."""
        if not self.pieces or not self.data.draw(st.booleans()):
            return False
        start, size = self.pieces.pop(self.data.draw(st.integers(0, len(self.pieces) - 1)))
        self.arena.give(start, size)
        self.taken[start : start + size] = bytes(size)
        return True

    def take(self, size: int) -> int | None:
        start = self.arena.take(size)
        if start is not None:
            self.taken[start : start + size] = b"\1" * size
            self.pieces.append((start, size))
        return start


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_first_fit_takes_the_lowest_run_of_free_slots(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 60))
    arena = FirstFit(capacity)
    pieces = Pieces(data, arena, capacity)
    for _ in range(data.draw(st.integers(1, 40))):
        if not pieces.give():
            size = data.draw(st.integers(1, capacity + 1))
            found = pieces.taken.find(bytes(size))
            assert pieces.take(size) == (found if found >= 0 else None)
        runs = [len(run) for run in bytes(pieces.taken).split(b"\1") if run]
        assert [size for _, size in arena.holes] == runs
        assert arena.largest_hole == max(runs, default=0)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_buddy_serves_whenever_an_aligned_block_is_free_and_joins_all_of_them_again(data: st.DataObject) -> None:
    capacity = data.draw(st.integers(1, 70))
    arena = Buddy(capacity)
    pieces = Pieces(data, arena, capacity)
    whole = arena.holes
    assert sum(size for _, size in whole) == capacity
    for _ in range(data.draw(st.integers(1, 40))):
        if not pieces.give():
            size = 1 << data.draw(st.integers(0, 7))
            possible = [at for at in range(0, capacity - size + 1, size) if not any(pieces.taken[at : at + size])]
            start = pieces.take(size)
            assert start in possible if possible else start is None
        assert sum(size for _, size in arena.holes) == pieces.taken.count(0)
    for start, size in pieces.pieces:
        arena.give(start, size)
    assert arena.holes == whole


# ---- the replay ----


def test_a_request_waits_for_room_and_its_reservation_turns_into_use() -> None:
    outcome = replay(trace_of((0, 2, 3), (0, 5, 2)), reserve_oracle(8), interval=1, max_length=8)
    assert records(outcome, "step", "steps", "running", "waiting") == [(0, 3, 1, 1), (3, 2, 1, 0)]
    kinds = {kind: slots.tolist() for kind, slots in outcome.kinds().items()}
    assert kinds == {"used": [3, 5.5], "reservation": [1, 0.5], "internal": [0, 0], "external": [0, 0], "free": [4, 2]}
    assert outcome.waits.tolist() == [0, 3]


def test_a_refused_request_is_admitted_as_soon_as_one_of_the_others_has_finished() -> None:
    outcome = replay(trace_of((0, 2, 2), (0, 2, 5), (0, 3, 1)), reserve_oracle(9), interval=1, max_length=9)
    assert records(outcome, "step", "steps", "running", "waiting") == [(0, 2, 2, 1), (2, 1, 2, 0), (3, 2, 1, 0)]
    assert outcome.waits.tolist() == [0, 0, 2]


def test_free_slots_are_external_while_a_request_waits_that_needs_no_more() -> None:
    # 8, 6 and 6 slots; the first and the last leave after one step, the one in the middle stays, and 10 do not fit around it
    trace = Trace("test", np.array([0.0, 0, 0, 1]), np.array([8, 1, 6, 10]), np.array([1, 6, 1, 1]))
    outcome = replay(trace, reserve_oracle(20), interval=1, max_length=20)
    assert outcome.kinds()["external"].tolist() == [0, 14, 0]
    assert records(outcome, "steps", "running") == [(1, 3), (5, 1), (1, 1)]


def test_the_request_admitted_last_is_preempted_and_computed_again_when_blocks_run_out() -> None:
    outcome = replay(trace_of((0, 1, 3), (0, 1, 3)), Paged(4, 1), interval=1, max_length=4)
    assert records(outcome, "step", "running", "waiting", "used") == [
        (0, 2, 0, 2),
        (1, 2, 0, 4),
        (2, 1, 1, 3),
        (3, 1, 0, 3),
    ]
    assert (outcome.preempted, outcome.recomputed, outcome.rejected) == (1, 2, 0)


class Scripted(Memory):
    """Room for two requests of any size, but the growth of one step fails once."""

    capacity, metadata_bytes, grows = 1000, 0, True

    def __init__(self, fails_at: int) -> None:
        self.fails_at, self.step, self.running = fails_at, -1, 0
        self.admitted: list[tuple[int, int, int]] = []

    def can_hold(self, final: int) -> bool:
        return True

    def admit(self, request: int, tokens: int, final: int) -> bool:
        if self.running == 2:
            return False
        self.running += 1
        self.admitted.append((self.step, request, tokens))
        return True

    def release(self, request: int) -> None:
        self.running -= 1

    def holding(self, requests: np.ndarray, lengths: np.ndarray, finals: np.ndarray) -> Holding:
        return Holding(int(lengths.sum()), int(lengths.sum()), 0)

    def stranded(self, final: int) -> bool:
        return False

    def begin_step(self, requests: np.ndarray) -> None:
        self.step += 1
        self.failed = False

    def grow(self, requests: np.ndarray) -> bool:
        fails = self.step == self.fails_at and not self.failed
        self.failed |= fails
        return not fails


def test_after_a_preemption_nobody_is_admitted_before_a_request_has_finished_and_the_preempted_one_is_first() -> None:
    memory = Scripted(fails_at=2)
    outcome = replay(trace_of((0, 1, 5), (0, 1, 6), (1, 1, 1)), memory, interval=1, max_length=8)
    # the second one had 2 tokens, and its third is known; the first one leaves after step 4
    assert memory.admitted == [(0, 0, 1), (0, 1, 1), (5, 1, 3), (5, 2, 1)]
    assert records(outcome, "running", "waiting") == [
        (2, 0),
        (2, 1),
        (1, 2),
        (1, 2),
        (1, 2),
        (2, 0),
        (1, 0),
        (1, 0),
        (1, 0),
    ]
    assert (outcome.preempted, outcome.recomputed) == (1, 2)


def test_the_empty_end_of_a_last_block_is_reserved_as_far_as_the_request_will_come() -> None:
    memory = Paged(6400, 16)
    assert memory.admit(0, 5, 12)
    assert memory.holding(np.array([0]), np.array([5]), np.array([12])) == (16, 5, 7, 16)
    assert memory.holding(np.array([0]), np.array([5]), np.array([40])) == (16, 5, 11, 16)


def test_admission_leaves_a_hundredth_of_the_blocks_for_growth() -> None:
    memory = Paged(200, 1)
    assert not memory.can_hold(199) and memory.can_hold(198)
    assert not memory.admit(0, 199, 199) and memory.admit(0, 197, 198)
    assert memory.grow(np.array([0])) and memory.grow(np.array([0])) and memory.grow(np.array([0]))
    assert not memory.grow(np.array([0])) and memory.allocator.lengths[0, 0] == 200


@pytest.mark.parametrize("name", NAMES)
def test_what_can_never_fit_is_rejected_and_the_rest_is_served(name: str) -> None:
    trace = trace_of((0, 10, 2), (0, 300, 2), (1, 20, 2))
    outcome = replay(trace, policies.make(name, 2048, 64, trace), interval=1, max_length=64)
    assert outcome.rejected == 1 and len(outcome.waits) == 2
    outcome = replay(trace, policies.make(name, 256, 300, trace), interval=1, max_length=400)
    assert outcome.rejected == (3 if name == "contiguous-max" else 1)


@pytest.mark.parametrize("name", NAMES)
@given(requests=REQUESTS, pool=st.integers(200, 600), interval=st.sampled_from([0.5, 1.0, 3.0]))
@settings(max_examples=12, deadline=None)
def test_the_kinds_of_slots_sum_to_the_capacity_at_every_step_and_every_token_is_generated(
    name: str, requests: list[tuple[int, int, int]], pool: int, interval: float
) -> None:
    trace = trace_of(*requests)
    memory = policies.make(name, pool, 64, trace)
    outcome = replay(trace, memory, interval=interval, max_length=64)
    kinds = outcome.kinds()
    assert all((slots >= 0).all() for slots in kinds.values())
    np.testing.assert_array_equal(sum(kinds.values()), np.full(len(kinds["used"]), memory.capacity))
    assert pool - memory.capacity < 128
    assert outcome.rejected == 0 or isinstance(memory, SharedSequences) or name == "paged-128"
    if not outcome.rejected:
        assert len(outcome.waits) == len(trace) and outcome.waits.min() > -1e-6
        generated = (outcome.timeline.column("running") * outcome.timeline.column("steps")).sum()
        assert generated == trace.outputs.sum()
    left = memory.holding(*[np.zeros(0, np.int64)] * 3)
    assert left.taken == left.used == left.reservation == 0


@given(requests=REQUESTS, pool=st.integers(64, 300), name=st.sampled_from(policies.CONTIGUOUS))
@settings(max_examples=40, deadline=None)
def test_skipping_over_steps_without_events_gives_what_single_steps_give(
    requests: list[tuple[int, int, int]], pool: int, name: str
) -> None:
    trace = trace_of(*requests)
    skipping, single = policies.make(name, pool, 60, trace), policies.make(name, pool, 60, trace)
    single.grows = True
    one, other = (replay(trace, memory, interval=1, max_length=60) for memory in (skipping, single))
    assert (other.timeline.column("steps") == 1).all()
    assert one.waits.tolist() == other.waits.tolist() and one.rejected == other.rejected
    first, second = measure(one), measure(other)
    for field in ("used", "used_peak", "reservation", "internal", "external", "free", "running_mean", "duration"):
        assert getattr(first, field) == pytest.approx(getattr(second, field), abs=1e-12), field


@pytest.mark.parametrize("name", [name for name in NAMES if name not in policies.CONTIGUOUS])
@given(requests=REQUESTS)
@settings(max_examples=8, deadline=None)
def test_used_slots_are_those_that_the_allocator_counts(name: str, requests: list[tuple[int, int, int]]) -> None:
    trace = trace_of(*requests)
    memory = policies.make(name, 800, 64, trace)
    assert isinstance(memory, Paged)
    counted = []
    holding = memory.holding

    def noting(*args: np.ndarray) -> object:
        counted.append(memory.allocator.stats().slots_used)
        return holding(*args)

    memory.holding = noting  # type: ignore[method-assign, assignment]
    outcome = replay(trace, memory, interval=1, max_length=64)
    assert outcome.timeline.column("used").tolist() == counted


# ---- sharing ----


def test_parallel_samples_share_the_full_blocks_of_their_prompt() -> None:
    outcome = replay(trace_of((0, 32, 3)), SharedSequences(640, 16, 4), interval=1, max_length=64)
    assert records(outcome, "taken", "unshared", "used") == [(32, 32, 32), (96, 192, 36), (96, 192, 40)]


def test_beams_of_one_parent_share_all_but_the_last_token() -> None:
    always_the_best = np.zeros((5, 4), np.int64)
    outcome = replay(trace_of((0, 32, 20)), SharedSequences(640, 16, 4, always_the_best), interval=1, max_length=64)
    # 16 tokens after the prompt its block is full, and shared from the next step on
    assert records(outcome, "taken", "used")[15:18] == [(96, 92), (96, 96), (112, 52)]
    assert records(outcome, "running")[-1] == (1,)


@pytest.mark.parametrize(("parents", "blocks"), [(None, 2 + 4), (np.zeros((5, 4), np.int64), 3)])
def test_a_request_computed_again_shares_its_prompt_as_samples_and_its_past_as_beams(
    parents: np.ndarray | None, blocks: int
) -> None:
    memory = SharedSequences(1600, 16, 4, parents)
    assert memory.admit(0, 32, 64)
    memory.release(0)
    assert memory.admit(0, 40, 64)
    assert memory.allocator.num_free == 100 - blocks
    memory.begin_step(np.array([0]))
    assert memory.grow(np.array([0]))
    assert sorted(memory.allocator.lengths.values()) == [41] * 4


@pytest.mark.parametrize("width", WIDTHS)
def test_the_record_of_beams_names_a_parent_for_each_beam(width: int) -> None:
    parents = beam_parents(width)
    assert parents.shape[1] == width and len(parents) > 500
    assert parents.min() == 0 and parents.max() == width - 1


def test_prompts_that_begin_alike_share_full_blocks_and_find_them_again_when_nobody_holds_them() -> None:
    trace = Trace(
        "test", np.array([0.0, 0, 9]), np.array([600, 552, 552]), np.array([2, 2, 2]), ((1, 2), (1, 3), (1, 3))
    )
    memory = PrefixCached(16 * 200, 16, trace)
    outcome = replay(trace, memory, interval=1, max_length=1024)
    # 512 tokens are 32 blocks; of 600 and 552 tokens 6 and 3 blocks more, and a third that has all its full blocks from the second
    assert records(outcome, "taken", "unshared") == [
        (16 * 41, 16 * 73),
        (16 * 41, 16 * 73),
        (16 * 35, 16 * 35),
        (16 * 35, 16 * 35),
    ]
    assert memory.prefix_hits == pytest.approx((512 + 544) / (600 + 552 + 552))


def test_a_cache_without_end_finds_every_hash_after_an_equal_beginning() -> None:
    trace = Trace(
        "test", np.zeros(3), np.array([1500, 1100, 1024]), np.ones(3, np.int64), ((1, 2, 3), (1, 2, 4), (1, 2))
    )
    # the second prompt finds two hashes, the third one: a token of it has to be computed
    assert trace.repeated_share() == pytest.approx(512 * 3 / (1500 + 1100 + 1024))


def test_prefixes_differ_where_an_earlier_part_differs_and_generated_tokens_are_nobodys() -> None:
    trace = Trace("test", np.zeros(3), np.array([1024] * 3), np.array([100] * 3), ((1, 2), (3, 2), (1, 2)))
    memory = PrefixCached(16 * 400, 16, trace)
    assert memory.admit(0, 1024, 1100) and memory.admit(1, 1024, 1100)
    assert memory.prefix_hits == 0
    memory.release(0)
    assert memory.admit(0, 1060, 1100) and memory.prefix_hits == pytest.approx(1024 / (2 * 1024 + 1060))
    assert memory.admit(2, 1060, 1100) and memory.prefix_hits == pytest.approx(2 * 1024 / (2 * 1024 + 2 * 1060))


def test_use_over_time_has_the_mean_of_the_replay_and_gaps_are_free() -> None:
    outcome = replay(trace_of((0, 5, 4), (10, 5, 4)), Paged(32, 1), interval=1, max_length=32)
    seconds, shares = over_time(outcome, until=20, bins=20)
    assert seconds.tolist() == list(range(20))
    used = [5, 6, 7, 8, *[0] * 6] * 2
    assert (shares["used"] * 32).tolist() == pytest.approx(used)
    np.testing.assert_allclose(sum(shares.values()), 1)
