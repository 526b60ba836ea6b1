"""The allocator and the plain model side by side: every call is made on both, and must leave both alike.

Steps are run on shadow pages, and their deltas bring a mirror up to date as in another process. Pages hold for each slot a number that
stands for the whole sequence of tokens up to it: a block that serves a wrong prefix is seen at once.
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
from hypothesis.stateful import invariant
from shadow_pages import ShadowPages

from cupaged import BlockAllocator, Group, Step, TableMirror

GROUPS = [
    [Group()], [Group(window=3)], [Group(), Group(window=4)], [Group(chunk=4), Group(), Group(window=1)], [Group(), Group()],
    [Group(window=5, chunk=3), Group(chunk=5), Group(), Group(window=2)],
]  # fmt: skip


class Bomb(Exception):
    """Raised in place of a take."""


class BothSides:
    """What a history has: `start` first, then `both` for each call, then the invariants."""

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
