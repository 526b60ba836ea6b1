"""Random histories: the allocator against the plain model, its steps against shadow pages and a mirror in another process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from allocator_model import Model, ModelStep, ShadowPages, assert_same, assert_step, observe
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cupaged import BlockAllocator, Step, TableMirror

NAMES = [*"ABCDEFG", 7, ("tuple", 1)]
names = st.sampled_from(NAMES)
counts = st.one_of(st.integers(0, 6), st.integers(0, 60), st.just(-1), st.just(10**30))


class Bomb(Exception):
    """Raised in place of a take."""


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(0, 12), block_size=st.integers(1, 5), watermark=st.sampled_from([0.0, 0.0, 0.1, 0.5])
    )
    def start(self, num_blocks: int, block_size: int, watermark: float) -> None:
        self.alloc = BlockAllocator(num_blocks, block_size, watermark=watermark)
        self.model = Model(num_blocks, block_size, watermark)
        self.pages = ShadowPages(num_blocks, block_size)
        self.tokens: dict[Any, list[int]] = {}
        self.mirror = TableMirror(block_size)
        self.serial = self.after = 0
        self.take = self.alloc.pool.take
        self.takes = 0
        self.bomb = False
        self.alloc.pool.take = self._take  # type: ignore[method-assign]

    def _take(self, count: int) -> Any:
        self.takes += 1
        if self.bomb:
            raise Bomb
        return self.take(count)

    # ---- one call on both sides ----

    def both(self, real: Callable[[], Any], method: str, *args: Any) -> tuple[bool, Any]:
        """Whether both succeeded, and the allocator's result; a failure must be of the same class and change nothing."""
        before, self.takes = observe(self.alloc), 0
        try:
            result = real()
        except Exception as error:
            assert observe(self.alloc) == before
            if isinstance(error, Bomb):
                return False, None
            with pytest.raises(type(error)):
                self.model.call(method, *args)
            return False, None
        assert self.takes <= 1, "a call that takes twice can fail halfway"
        expected = self.model.call(method, *args)
        if isinstance(result, Step):
            self.ran(result, expected, args[0] if isinstance(args[0], list) else [args[0]])
        return True, result

    def ran(self, step: Step, expected: ModelStep, sequences: list[Any]) -> None:
        assert_step(step, expected)
        assert (step.serial, step.after) == (self.serial + 1, self.after)
        assert step.rows.tolist() == self.alloc.rows(sequences).tolist()
        self.serial = step.serial
        if len(step.copies):
            self.after = step.serial
        for name, written in zip(sequences, self.pages.run(step), strict=True):
            self.tokens.setdefault(name, []).extend(written)
        self.mirror.apply(pickle.loads(pickle.dumps(step.delta)))
        for name in self.alloc.tables:
            row = int(self.alloc.rows([name])[0])
            if row < len(self.mirror.lengths):
                assert self.mirror.lengths[row] == self.alloc.lengths[name]
                table = self.alloc.tables[name]
                assert self.mirror.tables[row].tolist() == table + [-1] * (self.mirror.tables.shape[1] - len(table))
            else:
                assert self.alloc.lengths[name] == 0

    def keywords(self, sequences: list[Any], by_rows: bool) -> dict[str, Any]:
        if by_rows and all(name in self.alloc.tables for name in sequences):
            return {"rows": self.alloc.rows(sequences)}
        return {"ids": sequences}

    # ---- calls ----

    @rule(name=names, n=counts, bomb=st.booleans())
    def add(self, name: Any, n: int, bomb: bool) -> None:
        self.bomb = bomb and n > 6
        self.both(lambda: self.alloc.add_request(name, n), "add_request", name, min(n, 10**4))
        self.bomb = False
        if name in self.alloc.tables:
            self.tokens.setdefault(name, [])

    @rule(
        batch=st.lists(st.tuples(names, counts), max_size=6, unique_by=lambda pair: str(pair[0])),
        by_rows=st.booleans(), bomb=st.sampled_from([False, False, False, True]),
    )  # fmt: skip
    def grow_batch(self, batch: list[tuple[Any, int]], by_rows: bool, bomb: bool) -> None:
        sequences, n = (
            [name for name, _ in batch if name in self.alloc.tables],
            [n for name, n in batch if name in self.alloc.tables],
        )
        n = [min(count, 10**4) for count in n]
        self.grow(sequences, n, n, by_rows, bomb)

    @rule(batch=st.lists(names, min_size=1, max_size=5), n=counts, by_rows=st.booleans())
    def grow_batch_equally(self, batch: list[Any], n: int, by_rows: bool) -> None:
        self.grow(batch, n, [min(n, 10**4)] * len(batch), by_rows, False)

    @rule(by_rows=st.booleans(), bomb=st.sampled_from([False, False, False, True]))
    def decode_all(self, by_rows: bool, bomb: bool) -> None:
        sequences = list(self.alloc.tables)
        self.grow(sequences, 1, [1] * len(sequences), by_rows, bomb)

    def grow(self, sequences: list[Any], n: Any, n_each: list[int], by_rows: bool, bomb: bool) -> None:
        which = self.keywords(sequences, by_rows)
        try:
            needed = self.alloc.blocks_needed(**which, n=n)
        except (KeyError, ValueError):
            needed = None
        free, self.bomb = self.alloc.num_free, bomb
        done, _ = self.both(lambda: self.alloc.grow_batch(**which, n=n), "grow_batch", sequences, n_each)
        self.bomb = False
        if done:
            assert needed == free - self.alloc.num_free
        elif needed is not None and not bomb:
            assert needed > free

    @rule(parents=st.lists(names, min_size=1, max_size=4), children=st.lists(names, min_size=4, max_size=4))
    def fork_batch(self, parents: list[Any], children: list[Any]) -> None:
        children = children[: len(parents)]
        old = {name: list(tokens) for name, tokens in self.tokens.items()}
        if self.both(lambda: self.alloc.fork_batch(parents, children), "fork_batch", parents, children)[0]:
            for parent, child in zip(parents, children, strict=True):
                self.tokens[child] = list(old[parent])

    @rule(data=st.data(), by_rows=st.booleans(), wrong=st.sampled_from([0, 0, 0, 1, -9]))
    def reorder(self, data: st.DataObject, by_rows: bool, wrong: int) -> None:
        sequences = data.draw(st.lists(names, max_size=6))
        parents = data.draw(
            st.lists(st.integers(0, max(0, len(sequences) - 1)), min_size=len(sequences), max_size=len(sequences))
        )
        parents = [p + wrong for p in parents]
        old = {name: list(tokens) for name, tokens in self.tokens.items()}
        which = self.keywords(sequences, by_rows)
        if self.both(lambda: self.alloc.reorder(**which, parents=parents), "reorder", sequences, parents)[0]:
            for name, parent in zip(sequences, parents, strict=True):
                self.tokens[name] = list(old[sequences[parent]])

    @rule(batch=st.lists(st.tuples(names, st.integers(-1, 40)), max_size=5), by_rows=st.booleans(), exact=st.booleans())
    def truncate_batch(self, batch: list[tuple[Any, int]], by_rows: bool, exact: bool) -> None:
        sequences = [name for name, _ in batch]
        lengths = [min(n, self.alloc.lengths[name]) if exact and name in self.alloc.lengths else n for name, n in batch]
        which = self.keywords(sequences, by_rows)
        if self.both(lambda: self.alloc.truncate_batch(**which, lengths=lengths), "truncate_batch", sequences, lengths)[
            0
        ]:
            for name, length in zip(sequences, lengths, strict=True):
                del self.tokens[name][length:]

    @rule(batch=st.lists(names, max_size=4), by_rows=st.booleans())
    def free_batch(self, batch: list[Any], by_rows: bool) -> None:
        which = self.keywords(batch, by_rows)
        if self.both(lambda: self.alloc.free_batch(**which), "free_batch", batch)[0]:
            for name in batch:
                del self.tokens[name]

    # ---- after every call ----

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "alloc"):
            assert_same(self.alloc, self.model)

    @invariant()
    def contents(self) -> None:
        if hasattr(self, "alloc"):
            for name, table in self.alloc.tables.items():
                assert self.pages.read(table, self.alloc.lengths[name]) == self.tokens[name]

    def teardown(self) -> None:
        if hasattr(self, "alloc"):
            self.alloc.free_batch(list(self.alloc.tables))
            self.alloc.check()
            assert self.alloc.num_free == self.alloc.num_blocks


def test_random_histories_equal_the_model() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=settings(max_examples=150, stateful_step_count=40))


@pytest.mark.fuzz
def test_long_random_histories_equal_the_model() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=settings(max_examples=8000, stateful_step_count=120))
