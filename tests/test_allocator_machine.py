"""Random histories: the allocator against the plain model, its steps against shadow pages and a mirror in another process.

Tokens are 0 and 1 and pools are tiny, so that prompts repeat, blocks run out and content is evicted all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from allocator_compare import observe
from allocator_sides import GROUPS, BothSides
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

NAMES = [*"ABCDEFG", 7, ("tuple", 1)]
KEYS = [None, "x", {"salt": "x"}, {"adapter": "x"}, {"adapter": "x", "salt": "y"}, 1, True]
some = st.lists(st.integers(0, 8), min_size=1, max_size=6)  # which of the requests, see `choose`
fault = st.sampled_from([""] * 9 + ["twice", "unknown", "empty", "evicted"])
counts = st.sampled_from([1] * 6 + [0, 2, 3, 4, 5, 6, 7] * 3 + [9, 13, 20, 40, -1, 10**30])
bombs = st.sampled_from([False] * 12 + [True])
patterns = st.sampled_from([0, 1, 1, 2])


def tokens_of(pattern: int, count: int, at: int = 0) -> list[int]:
    """Tokens of a sequence from position `at` on; sequences of one pattern are equal."""
    return [pattern >> (at + i) % 2 & 1 for i in range(count)]


class AllocatorMachine(BothSides, RuleBasedStateMachine):
    """The calls, with random arguments; some are wrong on purpose, some stopped by a bomb before they take a block."""

    start = initialize(
        num_blocks=st.sampled_from([12] * 8 + [*range(4, 12)] * 2 + [0, 1, 2, 3]), block_size=st.sampled_from([2, 2, 3, 4, 1, 5]),
        watermark=st.sampled_from([0.0] * 6 + [0.1, 0.5]),
        caching=st.sampled_from([False, True, True]), same_hash=st.booleans(), host_blocks=st.integers(0, 12),
        groups=st.sampled_from([0] * 5 + [*range(len(GROUPS))]),
    )(BothSides.start)  # fmt: skip

    def begin(self, taken: bool, key: int) -> Any:
        """A name for a new request, in use already when `taken`."""
        unused = [name for name in NAMES if name not in self.alloc.tables]
        if not unused or (taken and len(unused) < len(NAMES)):
            return next(iter(self.alloc.tables))
        self.keys[unused[0]], self.contents[unused[0]] = key, []
        return unused[0]

    @rule(n=counts, taken=bombs, bomb=bombs, pattern=patterns)
    def add(self, n: int, taken: bool, bomb: bool, pattern: int) -> None:
        name, self.bomb = self.begin(taken, 0), bomb
        new = name not in self.alloc.tables
        fits = n < 0 or self.alloc.can_allocate(n)
        done, _ = self.both(
            lambda: self.alloc.add_request(name, n), "add_request", name, min(n, 10**4),
            tokens=lambda _, count, at: tokens_of(pattern, count, at),
        )  # fmt: skip
        if n >= 0 and new and not bomb:
            assert done == fits
        self.bomb = False

    @rule(
        pattern=patterns, length=st.sampled_from([*range(12)] * 3 + [16, 20, 24]), tail=st.lists(st.integers(0, 1), max_size=3),
        taken=bombs, bomb=bombs,
        n=st.sampled_from([None] * 10 + [0, 1, 2, 4, 30, -1]), key=st.sampled_from([*[0] * 12, *range(len(KEYS))]),
    )  # fmt: skip
    def add_prompt(
        self, pattern: int, length: int, tail: list[int], n: int | None, key: int, taken: bool, bomb: bool
    ) -> None:
        prompt = tokens_of(pattern, length) + tail
        name, self.bomb = self.begin(taken, key), bomb
        new = name not in self.alloc.tables
        fits = (n or 0) < 0 or self.alloc.can_allocate(n, token_ids=prompt, extra_key=KEYS[key])
        done, _ = self.both(
            lambda: self.alloc.add_request(name, n, token_ids=prompt, extra_key=KEYS[key]), "add_request", name, n, prompt, key,
            tokens=lambda _, count, at: prompt[at : at + count],
        )  # fmt: skip
        if (n or 0) >= 0 and new and not bomb:
            assert done == fits
        self.bomb = False

    @rule(picks=some, n=st.lists(st.integers(0, 9), min_size=8, max_size=8), form=st.sampled_from(["all", "some", "lists", "too many"]),
          wrong=fault, by_rows=st.booleans())  # fmt: skip
    def commit(self, picks: list[int], n: list[int], form: str, wrong: str, by_rows: bool) -> None:
        sequences, tokens = self.choose(picks, wrong), []
        for name, most in zip(sequences, n, strict=False):
            rest = [self.token_of[c] for c in self.contents.get(name, [])[self.model.known.get(name, 0) :]]
            tokens.append(rest[:most] if form == "some" else rest + [0] * (form == "too many" and most > 4))
        given: Any = tokens
        if form == "all" and not wrong:
            given = np.array([token for part in tokens for token in part], np.int32)
        which = self.keywords(sequences, by_rows)
        self.both(lambda: self.alloc.commit(**which, token_ids=given), "commit", sequences, tokens)

    @rule()
    def commit_all(self) -> None:
        self.commit(list(range(9)), [0] * 9, "all", "", True)

    @rule(often=st.integers(0, 9))
    def reset(self, often: int) -> None:
        if often == 9:
            self.both(self.alloc.reset_prefix_cache, "reset_prefix_cache")

    @rule(
        picks=some,
        n=st.lists(counts, min_size=8, max_size=8),
        wrong=fault,
        by_rows=st.booleans(),
        bomb=bombs,
        pattern=patterns,
    )
    def grow_batch(self, picks: list[int], n: list[int], wrong: str, by_rows: bool, bomb: bool, pattern: int) -> None:
        sequences = self.choose(picks, wrong)
        each = [min(count, 10**4) for count in n[: len(sequences)]]
        self.grow(sequences, each, each, by_rows, bomb, pattern)

    @rule(picks=some, n=counts, wrong=fault, by_rows=st.booleans(), pattern=patterns)
    def grow_batch_equally(self, picks: list[int], n: int, wrong: str, by_rows: bool, pattern: int) -> None:
        sequences = self.choose(picks, wrong)
        if sequences:
            self.grow(sequences, n, [min(n, 10**4)] * len(sequences), by_rows, False, pattern)

    @rule(by_rows=st.booleans(), bomb=bombs, pattern=patterns)
    def decode_all(self, by_rows: bool, bomb: bool, pattern: int) -> None:
        sequences = list(self.model.tables)
        self.grow(sequences, 1, [1] * len(sequences), by_rows, bomb, pattern)

    def grow(self, sequences: list[Any], n: Any, n_each: list[int], by_rows: bool, bomb: bool, pattern: int) -> bool:
        def tokens(name: Any, count: int, at: int) -> list[int]:
            return tokens_of(pattern, count, len(self.contents[name]))

        which = self.keywords(sequences, by_rows)
        try:
            needed = self.alloc.blocks_needed(**which, n=n)
        except (KeyError, ValueError):
            needed = None
        free, self.bomb = self.alloc.num_free, bomb
        done, _ = self.both(lambda: self.alloc.grow_batch(**which, n=n), "grow_batch", sequences, n_each, tokens=tokens)
        self.bomb = False
        if done:
            assert needed == max(free - self.alloc.num_free, 0)
        elif needed is not None and not bomb:
            assert needed > free
        return done

    @rule(
        picks=st.lists(st.integers(0, 8), min_size=1, max_size=3),
        wrong=st.sampled_from([""] * 6 + ["unknown", "twice", "taken"]),
    )
    def fork_batch(self, picks: list[int], wrong: str) -> None:
        here = list(self.model.tables) or ["nobody"]
        parents = ["nobody" if wrong == "unknown" else here[i % len(here)] for i in picks]
        children = [name for name in NAMES if name not in self.alloc.tables][: len(parents)]
        parents = parents[: len(children)]
        if wrong in ("twice", "taken") and children:
            children[-1] = children[0] if wrong == "twice" else parents[0]
        old = {name: list(contents) for name, contents in self.contents.items()}
        if self.both(lambda: self.alloc.fork_batch(parents, children), "fork_batch", parents, children)[0]:
            for parent, child in zip(parents, children, strict=True):
                self.contents[child], self.keys[child] = list(old[parent]), self.keys[parent]

    @rule(picks=some, parents=some, by_rows=st.booleans(), wrong=fault, shift=st.sampled_from([0] * 8 + [1, -9]))
    def reorder(self, picks: list[int], parents: list[int], by_rows: bool, wrong: str, shift: int) -> None:
        sequences = self.choose(picks, wrong)
        parents = [parents[i % len(parents)] % len(sequences) + shift for i in range(len(sequences))]
        old = {name: (list(contents), self.keys[name]) for name, contents in self.contents.items()}
        which = self.keywords(sequences, by_rows)
        if self.both(lambda: self.alloc.reorder(**which, parents=parents), "reorder", sequences, parents)[0]:
            for name, parent in zip(sequences, parents, strict=True):
                self.contents[name], self.keys[name] = list(old[sequences[parent]][0]), old[sequences[parent]][1]

    @rule(
        picks=some,
        back=st.lists(st.one_of(st.integers(0, 4), st.integers(-1, 40)), min_size=8, max_size=8),
        wrong=fault,
        by_rows=st.booleans(),
    )
    def truncate_batch(self, picks: list[int], back: list[int], wrong: str, by_rows: bool) -> None:
        sequences = self.choose(picks, wrong)
        lengths = [self.model.lengths.get(name, 0) - n for name, n in zip(sequences, back, strict=False)]
        which = self.keywords(sequences, by_rows)
        if self.both(lambda: self.alloc.truncate_batch(**which, lengths=lengths), "truncate_batch", sequences, lengths)[
            0
        ]:
            for name, length in zip(sequences, lengths, strict=True):
                del self.contents[name][length:]

    @rule(picks=st.lists(st.integers(0, 8), min_size=1, max_size=3), wrong=fault, by_rows=st.booleans())
    def free_batch(self, picks: list[int], wrong: str, by_rows: bool) -> None:
        sequences = self.choose(picks, wrong)
        if len(picks) > 1 and self.model.away:
            sequences.insert(picks[0] % 2, next(iter(self.model.away)))
        which = self.keywords(sequences, by_rows)
        if self.both(lambda: self.alloc.free_batch(**which), "free_batch", sequences)[0]:
            for name in sequences:
                del self.contents[name], self.keys[name]

    @rule(picks=some, wrong=fault, by_rows=st.booleans(), hold=bombs, bomb=bombs)
    def evict(self, picks: list[int], wrong: str, by_rows: bool, hold: bool, bomb: bool) -> None:
        self.move("evict", self.choose(picks, wrong), by_rows, hold, bomb)

    @rule(picks=some, wrong=fault, by_rows=st.booleans(), hold=bombs, bomb=bombs)
    def restore(self, picks: list[int], wrong: str, by_rows: bool, hold: bool, bomb: bool) -> None:
        away = list(self.model.away)
        chosen = list(dict.fromkeys(away[i % len(away)] for i in picks)) if away else []
        if wrong in ("twice", "unknown"):
            chosen += [chosen[0] if chosen and wrong == "twice" else "nobody"]
        if wrong == "evicted":
            chosen += list(self.model.tables)[:1]
        self.move("restore", chosen, by_rows, hold, bomb)

    def move(self, method: str, sequences: list[Any], by_rows: bool, hold: bool, bomb: bool) -> bool:
        which = self.keywords(sequences, by_rows)
        self.bomb = bomb
        call = getattr(self.alloc, method)
        done, step = self.both(lambda: call(**which, hold=hold), method, sequences, hold, tokens=lambda *_: [])
        self.bomb = False
        if done and hold:
            pages, swaps = (self.pages.slots, step.swap_out) if method == "evict" else (self.pages.host, step.swap_in)
            self.held.append((step, pages, swaps[:, 0], pages[swaps[:, 0]]))
        return done

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """What a scheduler does: the batch grows, new requests come, evicted ones come back."""
        self.serve_a_batch(lambda low, high: data.draw(st.integers(low, high)))

    def serve_a_batch(self, draw: Callable[[int, int], int]) -> None:
        here, away = list(self.model.tables), list(self.model.away)
        unused = [name for name in NAMES if name not in self.alloc.tables]
        growing, returning = here[: draw(0, len(here))], away[: draw(0, len(away))]
        counts = [draw(0, 5) for _ in growing]
        new: dict[Any, dict[str, Any]] = {}
        for name in unused[: draw(0, 3)]:
            prompt = tokens_of(draw(0, 2), draw(0, 12)) + [draw(0, 1) for _ in range(draw(0, 2))]
            new[name] = {"token_ids": prompt} if draw(0, 2) else {"n": draw(0, 9)}
            if draw(0, 2) == 0 and "token_ids" in new[name]:
                new[name]["n"] = draw(0, 4)
        before = observe(self.alloc) if self.wholly else None
        needed = self.alloc.blocks_needed(growing, counts, new=list(new.values()), restore=returning)
        if self.wholly:
            assert observe(self.alloc) == before
        free, pattern = self.alloc.num_free, draw(0, 2)
        done = self.grow(growing, counts, counts, False, False, pattern)
        for name, arguments in new.items():
            if done:
                self.keys[name], self.contents[name] = 0, []
                prompt = arguments.get("token_ids")
                done, _ = self.both(
                    lambda name=name, arguments=arguments: self.alloc.add_request(name, **arguments),
                    "add_request", name, arguments.get("n"), prompt, 0,
                    tokens=lambda _, n, at, prompt=prompt: tokens_of(pattern, n) if prompt is None else prompt[at : at + n],
                )  # fmt: skip
        done = done and self.move("restore", returning, False, False, False)
        if done:
            assert needed == max(free - self.alloc.num_free, 0)
        else:
            assert needed + self.model.reserve > free
        if needed + (self.model.reserve if new else 0) <= free:
            assert done

    @rule(which=st.integers(0, 3))
    def release_swapped(self, which: int) -> None:
        if which < len(self.held):
            step, pages, sources, content = self.held.pop(which)
            np.testing.assert_array_equal(pages[sources], content)  # a swap on another stream would still read them
            self.both(lambda: self.alloc.release_swapped(step), "release_swapped", step.serial)
            if not which:
                self.both(lambda: self.alloc.release_swapped(step), "release_swapped", step.serial)


def test_random_histories_equal_the_model() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=settings(max_examples=60, stateful_step_count=40))
