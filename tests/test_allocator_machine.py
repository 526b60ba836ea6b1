"""Random histories: the allocator against the plain model, its steps against shadow pages and a mirror in another process.

Tokens are 0 and 1 and pools are tiny, so that prompts repeat, blocks run out and content is evicted all the time. Pages hold for each
slot a number that stands for the whole sequence of tokens up to it: a block that serves a wrong prefix is seen at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from allocator_compare import assert_same, assert_step, observe
from allocator_model import Model, ModelStep
from caching import one_hash
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from shadow_pages import ShadowPages

from cupaged import BlockAllocator, Group, Step, TableMirror

NAMES = [*"ABCDEFG", 7, ("tuple", 1)]
KEYS = [None, "x", {"salt": "x"}, {"adapter": "x"}, {"adapter": "x", "salt": "y"}, 1, True]
GROUPS = [
    [Group()], [Group(window=3)], [Group(), Group(window=4)], [Group(chunk=4), Group(), Group(window=1)], [Group(), Group()],
    [Group(window=5, chunk=3), Group(chunk=5), Group(), Group(window=2)],
]  # fmt: skip
some = st.lists(st.integers(0, 8), min_size=1, max_size=6)  # which of the requests, see `choose`
fault = st.sampled_from([""] * 9 + ["twice", "unknown", "empty", "evicted"])
counts = st.sampled_from([1] * 6 + [0, 2, 3, 4, 5, 6, 7] * 3 + [9, 13, 20, 40, -1, 10**30])
bombs = st.sampled_from([False] * 12 + [True])
patterns = st.sampled_from([0, 1, 1, 2])


def tokens_of(pattern: int, count: int, at: int = 0) -> list[int]:
    """Tokens of a sequence from position `at` on; sequences of one pattern are equal."""
    return [pattern >> (at + i) % 2 & 1 for i in range(count)]


class Bomb(Exception):
    """Raised in place of a take."""


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([12] * 8 + [*range(4, 12)] * 2 + [0, 1, 2, 3]), block_size=st.sampled_from([2, 2, 3, 4, 1, 5]),
        watermark=st.sampled_from([0.0] * 6 + [0.1, 0.5]),
        caching=st.sampled_from([False, True, True]), same_hash=st.booleans(), host_blocks=st.integers(0, 12),
        groups=st.sampled_from([0] * 5 + [*range(len(GROUPS))]),
    )  # fmt: skip
    def start(
        self,
        num_blocks: int,
        block_size: int,
        watermark: float,
        caching: bool,
        same_hash: bool,
        host_blocks: int,
        groups: int,
    ) -> None:
        self.groups = GROUPS[groups]
        num_blocks *= len(self.groups)
        host_blocks *= len(self.groups)
        caching &= self.groups[0].window is None or len(self.groups) > 1
        self.patch = pytest.MonkeyPatch()
        if same_hash:
            one_hash(self.patch)
        self.alloc = BlockAllocator(
            num_blocks, block_size, self.groups, watermark=watermark, prefix_caching=caching, host_blocks=host_blocks,
            record_events=caching,
        )  # fmt: skip
        self.index: dict[int, tuple[int, tuple[int, ...]]] = {}  # what events say is cached: (parent, tokens) by number
        self.model = Model(num_blocks, block_size, watermark, caching, host_blocks, self.groups)
        self.pages = ShadowPages(num_blocks, block_size, host_blocks)
        self.held: list[
            tuple[Step, Any, Any, Any]
        ] = []  # steps with hold=True: pages, sources of the swaps, their content
        self.contents: dict[Any, list[int]] = {}  # of each request, what its slots must hold
        self.keys: dict[Any, int] = {}
        self.numbers: dict[tuple[int, int], int] = {}  # (content of the prefix, token) -> content
        self.token_of: dict[int, int] = {}
        self.mirrors = [TableMirror(block_size) for _ in self.groups]
        self.serial = self.after = 0
        self.takes = self.calls = 0
        self.wholly = True  # compare all that callers see before and after each call, not only what the calls change
        self.bomb = False
        for pool in (self.alloc.pool, self.alloc.host_pool):
            pool.take = partial(self._take, pool.take)  # type: ignore[method-assign]

    def _take(self, take: Callable[..., Any], *how: Any, **more: Any) -> Any:
        self.takes += 1
        if self.bomb:
            raise Bomb
        return take(*how, **more)

    def chain(self, before: list[int], key: int, tokens: list[int]) -> list[int]:
        """What the slots of `tokens` hold after those of `before`."""
        contents, last = [], before[-1] if before else -1 - key
        for token in tokens:
            last = self.numbers.setdefault((last, token), len(self.numbers))
            self.token_of[last] = token
            contents.append(last)
        return contents

    # ---- one call on both sides ----

    def both(self, real: Callable[[], Any], method: str, *args: Any, tokens: Any = None) -> tuple[bool, Any]:
        """Whether both succeeded, and the allocator's result; a failure must be of the same class and change nothing."""
        before = observe(self.alloc) if self.wholly else None
        self.takes, self.calls = 0, self.calls + 1
        try:
            result = real()
        except Exception as error:
            if self.wholly:
                assert observe(self.alloc) == before
            if isinstance(error, Bomb):
                return False, None
            with pytest.raises(type(error)):
                self.model.copied().call(method, *args)
            return False, None
        expected = self.model.call(method, *args)
        if isinstance(result, Step):
            assert self.takes == 1, "a call that takes twice can fail halfway"
            self.ran(result, expected, args[0] if isinstance(args[0], list) else [args[0]], tokens)
        return True, result

    def ran(self, step: Step, expected: ModelStep, sequences: list[Any], tokens: Any) -> None:
        assert_step(step, expected, self.wholly)
        assert (step.serial, step.after) == (self.serial + 1, self.after)
        assert step.rows.tolist() == self.alloc.rows(sequences).tolist()
        self.serial = step.serial
        if any(expected.copies) or expected.swap_out or expected.swap_in:
            self.after = step.serial
        written = []
        for i, (name, n) in enumerate(zip(sequences, np.diff(step.query_start_loc).tolist(), strict=True)):
            so_far = self.contents.setdefault(name, [])
            cached = int(step.num_cached[i])
            so_far += self.chain(so_far, self.keys[name], tokens(name, cached, 0))
            written.append(self.chain(so_far, self.keys[name], tokens(name, n, cached)))
            so_far += written[-1]
        self.pages.run(step, written)
        self.pages.slots[self.model.plain] = self.pages.host[self.model.host_free] = -9  # no one may count on these
        for g, mirror in enumerate(self.mirrors):
            group = step.group(g)
            for i, name in enumerate(sequences):  # what the step's first query sees
                length = int(group.seq_lens[i])
                first = self.model.horizon(g, length - len(written[i]) if written[i] else length)
                seen = self.pages.read(group.block_tables[i].tolist(), first, length)
                assert seen == self.pages.of_group(self.contents[name][first:length], g)
            mirror.apply(pickle.loads(pickle.dumps(group.delta)) if self.wholly else group.delta)
            for name, table in self.alloc.group_tables(g).items() if self.wholly else ():
                row = int(self.alloc.rows([name])[0])
                if row < len(mirror.lengths):
                    assert mirror.lengths[row] == (0 if name in self.model.away else self.alloc.lengths[name])
                    assert mirror.tables[row].tolist() == table + [-1] * (mirror.tables.shape[1] - len(table))
                else:
                    assert table == []

    def keywords(self, sequences: list[Any], by_rows: bool) -> dict[str, Any]:
        if by_rows and sequences and all(name in self.alloc.tables for name in sequences):
            return {"rows": self.alloc.rows(sequences)}
        return {"ids": sequences}

    def choose(self, picks: list[int], wrong: str) -> list[Any]:
        """Requests that are there, each once, unless something is to be wrong."""
        here = list(self.model.tables)
        chosen = list(dict.fromkeys(here[i % len(here)] for i in picks)) if here and wrong != "empty" else []
        if wrong == "evicted":
            chosen.insert(len(chosen) // 2, next(iter(self.model.away), "nobody"))
        if wrong == "twice" and chosen:
            chosen.append(chosen[0])
        if wrong == "unknown":
            chosen.insert(len(chosen) // 2, "nobody")
        return chosen

    # ---- calls ----

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

    # ---- after every call ----

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "alloc"):
            assert_same(self.alloc, self.model)

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        if not hasattr(self, "alloc") or self.alloc._cache is None:
            return
        for event in self.alloc.take_events():
            if event.kind == "cleared":
                self.index.clear()
            elif event.kind == "removed":
                for number in event.serials.tolist():
                    del self.index[number]
            else:
                for number, parent, tokens in zip(
                    event.serials.tolist(), event.parents.tolist(), event.token_ids.tolist(), strict=True
                ):
                    assert number not in self.index and (parent in event.root_of or parent in self.index)
                    self.index[number] = parent, tuple(tokens)
        cache = self.alloc._cache
        named = ((cache.serial > 0) & (cache.parent > 0)).nonzero()[0]  # blocks beside the chain have a parent below 0
        assert self.index == {
            int(cache.serial[b]): (int(cache.parent[b]), tuple(cache.tokens.ids[b].tolist())) for b in named
        }
        assert len(set(self.index.values())) == len(self.index)

    @invariant()
    def contents_are_right(self) -> None:
        if hasattr(self, "alloc"):
            for g in range(len(self.groups)):
                for name, tables in self.model.tables.items():
                    self.holds(name, g, tables[g], self.model.lengths[name], False)
                for name, (tables, length, *_) in self.model.away.items():
                    self.holds(name, g, tables[g], length, True)

    def holds(self, name: Any, g: int, table: list[int], length: int, on_host: bool) -> None:
        """What the next query sees is there."""
        first = self.model.horizon(g, length)
        assert self.pages.read(table, first, length, on_host) == self.pages.of_group(self.contents[name][first:], g)

    def teardown(self) -> None:
        if hasattr(self, "alloc"):
            self.patch.undo()
            self.alloc.free_batch(list(self.alloc.tables))
            for step, *_ in self.held:
                self.alloc.release_swapped(step)
            self.alloc.check()
            assert self.alloc.num_free == self.alloc.num_blocks
            assert self.alloc.host_pool.num_free == self.alloc.host_pool.num_blocks


def test_random_histories_equal_the_model() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=settings(max_examples=60, stateful_step_count=40))
