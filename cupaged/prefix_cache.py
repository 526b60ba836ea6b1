"""Identities: which tokens a block holds, after which others, so that a prompt finds what was computed before.

An identity is (number of the parent's identity, token ids); numbers are never used again. The parent of a sequence's first block is
a root, one for each `extra_key`, so that the key is part of the whole chain. `prefix_match` finds identities, `identify` gives them.

With several groups of layers the chain is that of the first group of full attention. Blocks of the others are each an identity by
themselves, under a negative parent that `Companions` knows: nothing continues them, and events do not speak of them.

Arrays are indexed by physical block. Blocks with one identity are twins: the first of them, the canonical block, is what a match
finds, and the next takes its place when it goes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from .array_types import Blocks, Hashes, Ints, Tokens
from .block_pool import BlockPool
from .block_tokens import BlockTokens
from .hash_index import HashIndex, Homes
from .roots import Roots
from .siblings import Siblings

if TYPE_CHECKING:
    from .companions import Companions

_NONE: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """What an outside index must know. `serials` number identities: equal number, equal prefix."""

    kind: str  # "stored", "removed" or "cleared"
    serials: Ints  # [n]
    parents: Ints  # [n], "stored" only: number of the parent's identity or of a root
    token_ids: Tokens  # [n, block_size], "stored" only
    root_of: Mapping[int, Hashable]  # "stored" only: extra_key of those parents that are roots


class PrefixCache:
    """The identities of a pool's blocks. Tables and references are the allocator's own."""

    def __init__(self, pool: BlockPool, block_size: int, record_events: bool = False) -> None:
        n = pool.num_blocks
        self.block_size = block_size
        self.tokens = BlockTokens(pool, block_size)
        self.serial = np.zeros(n, np.int64)  # number of the identity, 0: none
        self.parent = np.zeros(n, np.int64)  # number of the parent's identity
        self.next_twin = np.full(n, -1, np.int32)  # next block of the same identity
        self.num_twins = 0  # blocks that are not their own canonical one
        self.index = HashIndex(np.zeros(n, np.uint64))
        self.siblings = Siblings(pool, self.serial, self.parent)
        self.roots = Roots()
        self._next = 1
        self.events: list[CacheEvent] | None = [] if record_events else None
        self.companions: Companions | None = None  # of groups beside the one that has the chain
        self.queried_tokens = self.hit_tokens = 0
        pool.track(self.serial, self.forget)

    @property
    def anchor(self) -> int:
        """The group whose blocks have the chain."""
        return self.companions.anchor if self.companions else 0

    def root(self, extra_key: Hashable | Mapping[str, Hashable], held: Ints) -> int:
        """Number of the root of `extra_key`, a new one if there is none. `held [n]` are roots of requests, which must stay."""
        root = self.roots.find(extra_key)
        if not root:
            if self.roots.many:
                self.roots.keep(chain(held.tolist(), self.siblings.roots()))
            root = self.new_numbers(1)
            self.roots.add(extra_key, root)
        return root

    def new_numbers(self, count: int) -> int:
        """The first of `count` numbers that no identity had before."""
        self._next += count
        return self._next - count

    def search(self, hash_: np.uint64, parent: int, words: Tokens) -> int:
        """The canonical block of the identity (`parent`, `words`), whose hash is given; -1: there is none."""
        for block in self.index.find_all(hash_):
            if self.parent[block] == parent and np.array_equal(self.tokens.ids[block], words):
                return block
        return -1

    def canonical(self, blocks: Ints) -> Ints:
        """The canonical block of each one's identity; -1 stays -1."""
        if not self.num_twins:
            return blocks
        twins = ((blocks >= 0) & ~self.index.holds(blocks)).nonzero()[0]
        blocks = blocks.copy()
        for i in twins.tolist():
            block = int(blocks[i])
            blocks[i] = self.search(self.index.hashes[block], int(self.parent[block]), self.tokens.ids[block])
        return blocks

    def store(self, blocks: Ints, serials: Ints, parents: Ints, hashes: Hashes, homes: Homes, above: Ints) -> None:
        """Note identities of `blocks [n]`, which follow blocks `above [n]`; of one run, `[1]` is enough."""
        self.serial[blocks], self.parent[blocks] = serials, parents
        self.index.hashes[blocks] = hashes
        self.index.insert(blocks, homes)
        if parents[0] < 0:
            return
        if len(above) == len(blocks):
            self.siblings.add(blocks, above)
        else:
            self.siblings.add_run(blocks, int(above[0]))
        self._record("stored", serials, parents, blocks)

    def join(self, block: int, canonical: int) -> None:
        """Make `block`, which has none, a twin of the identity of `canonical`."""
        self.serial[block], self.parent[block] = self.serial[canonical], self.parent[canonical]
        self.index.hashes[block] = self.index.hashes[canonical]
        last = canonical
        while self.next_twin[last] >= 0:
            last = int(self.next_twin[last])
        self.next_twin[last] = block
        self.num_twins += 1

    def write(self, blocks: Ints, offsets: Ints) -> None:
        """A step will write into `blocks [n]` from `offsets` on: what was there is forgotten, identities too.

        There is something to forget only after a truncation (`BlockTokens.cut`).
        """
        self.tokens.keep(blocks, offsets)
        if np.count_nonzero(self.serial.take(blocks)):
            self.forget(blocks)

    def forget(self, blocks: Ints | Blocks) -> None:
        """Take the identities of `blocks [n]`, where they have one; an identity goes with its last block."""
        blocks = blocks.astype(np.int64, copy=False)
        named = self.serial.take(blocks) > 0
        if np.count_nonzero(named) < len(blocks):
            blocks = blocks[named]
        if not len(blocks):
            return
        if self.num_twins:
            twins = (self.next_twin.take(blocks) >= 0) | ~self.index.holds(blocks)
            for block in blocks[twins].tolist():
                self._forget_twin(block)
            blocks = blocks[self.serial.take(blocks) > 0]
        self.index.remove(blocks)
        chained = blocks[self.parent.take(blocks) > 0] if self.companions else blocks
        if self.events is not None:
            self._record("removed", self.serial.take(chained))
        self.siblings.remove(chained)
        self.serial[blocks] = 0

    def _forget_twin(self, block: int) -> None:
        """Take one block out of an identity that others may keep."""
        canonical = int(self.canonical(np.array([block]))[0])
        twin = int(self.next_twin[block])
        if canonical != block:
            before = canonical
            while self.next_twin[before] != block:
                before = int(self.next_twin[before])
            self.next_twin[before] = twin
        elif twin >= 0:
            self.index.replace(block, twin)
            if self.parent[block] > 0:
                self.siblings.replace(block, twin)
        else:
            return  # the last one: an ordinary block by now
        self.next_twin[block] = -1
        self.num_twins -= 1
        self.serial[block] = 0

    def clear(self) -> None:
        """Forget everything."""
        self.serial.fill(0)
        self.next_twin.fill(-1)
        self.num_twins = 0
        self.index.clear()
        self.siblings.clear()
        self.roots.clear()
        self._record("cleared", _NONE)

    def check(self) -> None:
        """Verify the identities by themselves; raises AssertionError that says what broke."""
        entries = np.sort(self.index.entries()).astype(np.int64)
        named = (self.serial > 0).nonzero()[0]
        twins = self.next_twin[named][self.next_twin[named] >= 0]
        if len(twins) != self.num_twins or not np.array_equal(np.sort(np.concatenate((entries, twins))), named):
            raise AssertionError(f"blocks {named} have identities, entries are {entries}, their twins {twins}")
        if len(np.unique(self.serial[entries])) != len(entries):
            raise AssertionError(f"two entries have one identity: {entries}, {self.serial[entries]}")
        for block in named.tolist():
            twin = int(self.next_twin[block])
            if twin >= 0 and (
                self.serial[twin] != self.serial[block] or (self.tokens.ids[twin] != self.tokens.ids[block]).any()
            ):
                raise AssertionError(f"blocks {block} and {twin} are twins and differ")
        if (self.tokens.filled[named] < self.block_size).any():
            raise AssertionError(f"a block with an identity is not full: {named}, {self.tokens.filled[named]}")
        self.siblings.check(entries[self.parent[entries] > 0].astype(np.int32))

    def _record(self, kind: str, serials: Ints, parents: Ints = _NONE, blocks: Ints = _NONE) -> None:
        if self.events is not None and (len(serials) or kind == "cleared"):
            roots = self.roots.keys_of(parents.tolist())
            self.events.append(CacheEvent(kind, serials.copy(), parents.copy(), self.tokens.ids.take(blocks, 0), roots))
