"""Identities: which tokens a block holds, after which others, so that a prompt finds what was computed before.

An identity is (number of the parent's identity, token ids); numbers are never used again. The parent of a sequence's first block is
a root, one for each `extra_key`, so that the key is part of the whole chain. A match walks from the root and compares the parent's
number and the tokens at every block. Hashes only find candidates: they are sums over a prefix, computed for all blocks at once.

With several groups of layers the chain is that of the first group of full attention. Blocks of the others are each an identity by
themselves, under a negative parent that `Companions` knows: nothing continues them, and events do not speak of them.

Arrays are indexed by physical block. Blocks with one identity are twins: the first of them, the canonical block, is what a match
finds, and the next takes its place when it goes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np

from .array_types import Blocks, Flags, Hashes, Ints, Tokens
from .block_hashes import block_hashes, root_hash
from .block_pool import BlockPool
from .block_tokens import BlockTokens
from .hash_index import HashIndex, Homes
from .roots import Roots
from .siblings import Siblings, common_lengths

_ZERO, _ONE = np.array(0), np.array(1)
_FIRST = 64  # blocks of a prompt that are asked for at first
_SIBLINGS = 8  # children of one parent that are compared for a partial match, the newest ones


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """What an outside index must know. `serials` number identities: equal number, equal prefix."""

    kind: str  # "stored", "removed" or "cleared"
    serials: Ints  # [n]
    parents: Ints  # [n], "stored" only: number of the parent's identity or of a root
    token_ids: Tokens  # [n, block_size], "stored" only
    root_of: Mapping[int, Hashable]  # "stored" only: extra_key of those parents that are roots


class PrefixCache:
    """The identities of a pool's blocks. `allocator` decides when; tables and references are its own."""

    def __init__(self, pool: BlockPool, block_size: int, record_events: bool = False) -> None:
        n = pool.num_blocks
        self._pool, self.block_size = pool, block_size
        self.tokens = BlockTokens(pool, block_size)
        self.serial = np.zeros(n, np.int64)  # number of the identity, 0: none
        self.parent = np.zeros(n, np.int64)  # number of the parent's identity
        self._twin = np.full(n, -1, np.int32)  # next block of the same identity
        self._twins = 0  # blocks that are not their own canonical one
        self._index = HashIndex(np.zeros(n, np.uint64))
        self._siblings = Siblings(pool, self.serial, self.parent)
        self.roots = Roots()
        self._next = 1
        self.events: list[CacheEvent] | None = [] if record_events else None
        self.companions = False  # whether there are groups beside the one that has the chain
        self.queried_tokens = self.hit_tokens = 0
        pool.track(self.serial, self.forget)

    def root(self, extra_key: Hashable | Mapping[str, Hashable], held: Ints) -> int:
        """Number of the root of `extra_key`, a new one if there is none. `held [n]` are roots of requests, which must stay."""
        root = self.roots.find(extra_key)
        if not root:
            if self.roots.many:
                self.roots.keep(chain(held.tolist(), self._siblings.roots()))
            root = self._numbers(1)
            self.roots.add(extra_key, root)
        return root

    # ---- finding ----

    def match(self, root: int, tokens: Tokens, most: int, gone: Flags | None = None) -> tuple[Ints, int, int]:
        """The longest cached prefix of `tokens [n]`, of at most `most` of them.

        Returns the blocks `[m]` that are equal as a whole, and the block which goes on equal for some tokens: its id (-1: none) and
        how many. Blocks that are `gone [num_blocks]` are taken to have lost their identities. Changes nothing.
        """
        if not root:
            return np.zeros(0, np.int64), -1, 0
        full = most // self.block_size
        found = self._match_blocks(root, tokens[: full * self.block_size].reshape(full, self.block_size))
        blocks = found
        if gone is not None:
            blocks = self._remaining(found, gone)
            blocks = blocks[: _leading(blocks >= 0)]
        begin = len(blocks) * self.block_size
        rest = tokens[begin : min(most, begin + self.block_size)]
        above = int(found[len(blocks) - 1]) if len(blocks) else -1
        listed = _SIBLINGS if gone is None else len(gone)
        children = self._siblings.newest(above, root, listed) if len(rest) else []
        if gone is not None:
            remaining = self._remaining(np.array(children, np.int64), gone)
            children = remaining[remaining >= 0][:_SIBLINGS].tolist()
        children = [child for child in children if self.tokens.ids[child, 0] == rest[0]]
        if not children:
            return blocks, -1, 0
        common = common_lengths(self.tokens.ids.take(children, 0)[:, : len(rest)], rest)
        best = int(common.argmax())
        return blocks, children[best] if common[best] else -1, int(common[best])

    def _remaining(self, blocks: Ints, gone: Flags) -> Ints:
        """For each canonical block the one that would be canonical without those that are gone, -1: none."""
        blocks = blocks.copy()
        for i in (gone.take(blocks) & (blocks >= 0)).nonzero()[0].tolist():
            while blocks[i] >= 0 and gone[blocks[i]]:
                blocks[i] = self._twin[blocks[i]]
        return blocks

    def _match_blocks(self, root: int, words: Tokens) -> Ints:
        blocks, hashes = self._candidates(root, words)
        done, above = 0, root
        while True:
            done += self._verified(blocks[done:], words[done:], above)
            if done == len(words) or blocks[done] < 0:
                return blocks[:done]
            above = int(self.serial[blocks[done - 1]]) if done else root  # another block has this hash
            blocks[done] = self._search(hashes[done], above, words[done])
            if blocks[done] < 0:
                return blocks[:done]

    def _candidates(self, root: int, words: Tokens) -> tuple[Ints, Hashes]:
        """Candidates for the blocks `words [n, block_size]` of a prompt, and their hashes, up to the first that is not there at least.

        What comes after that is -1. A few are asked for at first, since hashes of the rest would be for nothing.
        """
        blocks, hashes = np.empty(len(words), np.int64), np.empty(len(words), np.uint64)
        blocks.fill(-1)  # `np.full` takes ten times as long to begin
        begin, length, last = 0, _FIRST, root_hash(root)
        while begin < len(words):
            here = words[begin : begin + length]
            end = begin + len(here)
            piece = hashes[begin:end]
            np.add.accumulate(block_hashes(here, np.arange(begin, end)), out=piece)
            piece += last
            found = blocks[begin:end] = self._index.find(self._index.homes(piece))
            if found[found.argmin()] < 0:
                break
            begin, length, last = end, 16 * length, piece[-1]
        return blocks, hashes

    def _verified(self, blocks: Ints, words: Tokens, above: int) -> int:
        """How many of the candidates, from the first on, hold these tokens after these parents."""
        count = _leading(blocks >= 0)
        blocks = blocks[:count]
        if not count:
            return 0
        parents = np.empty(count, np.int64)
        parents[0], parents[1:] = above, self.serial.take(blocks[:-1])
        count = _leading(self.parent.take(blocks) == parents)
        right = (self.tokens.ids.take(blocks[:count], 0) == words[:count]).reshape(-1)
        return _leading(right) // self.block_size

    def _search(self, hash_: np.uint64, parent: int, words: Tokens) -> int:
        for block in self._index.find_all(hash_):
            if self.parent[block] == parent and np.array_equal(self.tokens.ids[block], words):
                return block
        return -1

    def find(self, parents: Ints, columns: Ints, words: Tokens, gone: Flags | None = None) -> Ints:
        """The canonical blocks `[n]` whose identities are (`parents[i]`, `words[i]`), in `columns[i]`; -1 where there is none.

        Blocks that are `gone [num_blocks]` are taken to have lost their identities.
        """
        hashes = root_hash(parents) + block_hashes(words, columns)
        found: Ints = self._index.find(self._index.homes(hashes))
        there = (found >= 0).nonzero()[0]
        blocks = found.take(there)
        same = (self.parent.take(blocks) == parents.take(there)) & (
            self.tokens.ids.take(blocks, 0) == words[there]
        ).all(1)
        for i in there[~same].tolist():  # another block has this hash
            found[i] = self._search(hashes[i], int(parents[i]), words[i])
        if gone is not None:
            found[there] = self._remaining(found.take(there), gone)
        return found

    def write(self, blocks: Ints, offsets: Ints) -> None:
        """A step will write into `blocks [n]` from `offsets` on: what was there is forgotten, identities too.

        There is something to forget only after a truncation (`BlockTokens.cut`).
        """
        self.tokens.keep(blocks, offsets)
        if np.count_nonzero(self.serial.take(blocks)):
            self.forget(blocks)

    # ---- identities ----

    def identify(self, blocks: Ints, columns: Ints, starts: Ints, above: Ints, roots: Ints) -> Ints:
        """Give blocks whose tokens are all known an identity: runs of blocks, each a piece of one table.

        `blocks`, `columns [n]` are the runs laid end to end; run i begins at `starts[i]`, its first block follows block `above[i]`
        (-1: the root `roots[i]`). Returns `[n]` the canonical block of each one's identity; a block that is not its own canonical
        one has no identity yet (see `join`).
        """
        words = self.tokens.ids.take(blocks, 0)
        numbers, bases = self.serial.take(above), self._index.hashes.take(above)
        at_root = (above < _ZERO).nonzero()[0]
        if len(at_root):
            numbers[at_root], bases[at_root] = roots.take(at_root), root_hash(roots.take(at_root))
        one_each, single = len(starts) == len(blocks), len(starts) == 1
        hashes = block_hashes(words, columns)
        if one_each:
            hashes += bases
        elif single:
            hashes = np.add.accumulate(hashes)
            hashes += bases
        else:
            sums = hashes.cumsum(dtype=np.uint64)
            hashes = sums + np.repeat(bases - (sums - hashes).take(starts), np.diff(starts, append=len(blocks)))
        # after its first new block a run is new: no identity can follow a number that was not there before
        homes = self._index.homes(hashes)
        found = self._index.find(homes)
        if single:
            found[_leading(found >= 0) :] = -1
        if (one_each or single) and found[found.argmax()] < 0 and (single or not _repeats(hashes)):
            serials = self._numbers(len(blocks)) + np.arange(len(blocks))
            over = self._canonical(above)
            parents = numbers if one_each else _after(numbers, serials)
            self._store(blocks, serials, parents, hashes, homes, over)
            return blocks

        lengths = np.diff(starts, append=len(blocks))
        parents = numbers if one_each else _shifted(self.serial.take(found), starts, numbers)
        known = found >= 0
        if np.count_nonzero(known):
            known &= self.parent.take(found) == parents
            known[known] = (self.tokens.ids.take(found[known], 0) == words[known]).all(1)
        if not one_each:
            misses = (~known).cumsum()
            known = misses == np.repeat((misses - ~known).take(starts), lengths)  # a run is known up to its first miss
        fresh = (~known).nonzero()[0]
        alike = len(starts) > 1 and _repeats(hashes.take(fresh))
        if len(fresh) and (alike or np.count_nonzero(found.take(fresh) >= 0)):
            if len(blocks) > 1:
                return self._identify_singly(blocks, columns, starts, above, roots)
            found[0] = self._search(hashes[0], int(parents[0]), words[0])
            fresh = fresh[found < 0]
        if not len(fresh):
            return found
        serials = self._numbers(len(fresh)) + np.arange(len(fresh))
        over = self._canonical(above)
        canonical = found
        canonical[fresh] = blocks.take(fresh)
        numbered = self.serial.take(canonical)
        numbered[fresh] = serials
        parents = _shifted(numbered, starts, numbers).take(fresh)
        homes = homes[0].take(fresh), homes[1].take(fresh)
        over = _shifted(canonical, starts, over).take(fresh)
        self._store(blocks.take(fresh), serials, parents, hashes.take(fresh), homes, over)
        return canonical

    def identify_new(self, blocks: Ints, words: Tokens, column: int, above: int, root: int) -> bool:
        """`identify` for one run that holds `words [n, block_size]` from `column` on, after block `above` (-1: `root`), when its first
        block has no equal in the cache.

        No identity can follow a number that was not there before, so that then the whole run is new. False, with nothing done, else.
        """
        if self._twins or np.count_nonzero(self.serial.take(blocks)):
            return False
        hashes = np.add.accumulate(block_hashes(words, np.arange(column, column + len(blocks))))
        hashes += self._index.hashes[above] if above >= 0 else root_hash(root)
        homes = self._index.homes(hashes)
        if self._index.find_one(homes) >= 0:
            return False
        serials = self._numbers(len(blocks)) + np.arange(len(blocks))
        parents = np.empty_like(serials)
        parents[0], parents[1:] = self.serial[above] if above >= 0 else root, serials[:-1]
        self._store(blocks, serials, parents, hashes, homes, np.array([above]))
        return True

    def _identify_singly(self, blocks: Ints, columns: Ints, starts: Ints, above: Ints, roots: Ints) -> Ints:
        """`identify` block by block, for batches with equal contents or equal hashes among themselves."""
        canonical, run = blocks.copy(), np.zeros(len(blocks), np.int64)
        run[starts[1:]] = 1
        run = run.cumsum()
        beginning = np.zeros(1, np.int64)
        for i in range(len(blocks)):
            here = slice(i, i + 1)
            before = above[run[here]] if i == starts[run[i]] else canonical[i - 1 : i]
            canonical[i] = self.identify(blocks[here], columns[here], beginning, before, roots[run[here]])[0]
        return canonical

    def join(self, block: int, canonical: int) -> None:
        """Make `block`, which has none, a twin of the identity of `canonical`."""
        self.serial[block], self.parent[block] = self.serial[canonical], self.parent[canonical]
        self._index.hashes[block] = self._index.hashes[canonical]
        last = canonical
        while self._twin[last] >= 0:
            last = int(self._twin[last])
        self._twin[last] = block
        self._twins += 1

    def forget(self, blocks: Ints | Blocks) -> None:
        """Take the identities of `blocks [n]`, where they have one; an identity goes with its last block."""
        blocks = blocks.astype(np.int64, copy=False)
        named = self.serial.take(blocks) > 0
        if np.count_nonzero(named) < len(blocks):
            blocks = blocks[named]
        if not len(blocks):
            return
        if self._twins:
            twins = (self._twin.take(blocks) >= 0) | ~self._index.holds(blocks)
            for block in blocks[twins].tolist():
                self._forget_twin(block)
            blocks = blocks[self.serial.take(blocks) > 0]
        self._index.remove(blocks)
        chained = blocks[self.parent.take(blocks) > 0] if self.companions else blocks
        if self.events is not None:
            self._record("removed", self.serial.take(chained))
        self._siblings.remove(chained)
        self.serial[blocks] = 0

    def clear(self) -> None:
        """Forget everything."""
        self.serial.fill(0)
        self._twin.fill(-1)
        self._twins = 0
        self._index.clear()
        self._siblings.clear()
        self.roots.clear()
        self._record("cleared", np.zeros(0, np.int64))

    def check(self) -> None:
        """Verify the identities by themselves; raises AssertionError that says what broke."""
        entries = np.sort(self._index.entries()).astype(np.int64)
        named = (self.serial > 0).nonzero()[0]
        twins = self._twin[named][self._twin[named] >= 0]
        if len(twins) != self._twins or not np.array_equal(np.sort(np.concatenate((entries, twins))), named):
            raise AssertionError(f"blocks {named} have identities, entries are {entries}, their twins {twins}")
        if len(np.unique(self.serial[entries])) != len(entries):
            raise AssertionError(f"two entries have one identity: {entries}, {self.serial[entries]}")
        for block in named.tolist():
            twin = int(self._twin[block])
            if twin >= 0 and (
                self.serial[twin] != self.serial[block] or (self.tokens.ids[twin] != self.tokens.ids[block]).any()
            ):
                raise AssertionError(f"blocks {block} and {twin} are twins and differ")
        if (self.tokens.filled[named] < self.block_size).any():
            raise AssertionError(f"a block with an identity is not full: {named}, {self.tokens.filled[named]}")
        self._siblings.check(entries[self.parent[entries] > 0].astype(np.int32))

    def _store(self, blocks: Ints, serials: Ints, parents: Ints, hashes: Hashes, homes: Homes, above: Ints) -> None:
        """Note identities of `blocks [n]`, which follow blocks `above [n]`; of one run, `[1]` is enough."""
        self.serial[blocks], self.parent[blocks] = serials, parents
        self._index.hashes[blocks] = hashes
        self._index.insert(blocks, homes)
        if parents[0] < 0:
            return
        if len(above) == len(blocks):
            self._siblings.add(blocks, above)
        else:
            self._siblings.add_run(blocks, int(above[0]))
        self._record("stored", serials, parents, blocks)

    def _canonical(self, blocks: Ints) -> Ints:
        """The canonical block of each one's identity; -1 stays -1."""
        if not self._twins:
            return blocks
        twins = ((blocks >= 0) & ~self._index.holds(blocks)).nonzero()[0]
        blocks = blocks.copy()
        for i in twins.tolist():
            block = int(blocks[i])
            blocks[i] = self._search(self._index.hashes[block], int(self.parent[block]), self.tokens.ids[block])
        return blocks

    def _forget_twin(self, block: int) -> None:
        """Take one block out of an identity that others may keep."""
        canonical = int(self._canonical(np.array([block]))[0])
        twin = int(self._twin[block])
        if canonical != block:
            before = canonical
            while self._twin[before] != block:
                before = int(self._twin[before])
            self._twin[before] = twin
        elif twin >= 0:
            self._index.replace(block, twin)
            if self.parent[block] > 0:
                self._siblings.replace(block, twin)
        else:
            return  # the last one: an ordinary block by now
        self._twin[block] = -1
        self._twins -= 1
        self.serial[block] = 0

    def _numbers(self, count: int) -> int:
        self._next += count
        return self._next - count

    def _record(self, kind: str, serials: Ints, parents: Ints | None = None, blocks: Ints | None = None) -> None:
        if self.events is not None and (len(serials) or kind == "cleared"):
            parents = np.zeros(0, np.int64) if parents is None else parents
            words = self.tokens.ids.take(np.zeros(0, np.int64) if blocks is None else blocks, 0)
            roots = self.roots.keys_of(parents.tolist())
            self.events.append(CacheEvent(kind, serials.copy(), parents.copy(), words, roots))


def _shifted(values: Ints, starts: Ints, first: Ints) -> Ints:
    """Each value's predecessor in its run; runs begin at `starts` and have `first` before them."""
    result = np.empty_like(values)
    result[1:] = values[:-1]
    result[starts] = first
    return result


def _after(first: Ints, values: Ints) -> Ints:
    """`first [1]`, then all `values [n]` but the last."""
    result = np.empty_like(values)
    result[0], result[1:] = first[0], values[:-1]
    return result


def _leading(flags: Flags) -> int:
    """How many are true before the first that is not."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first


def _repeats(hashes: Hashes) -> bool:
    ordered = hashes.copy()
    ordered.sort()
    return bool(np.count_nonzero(ordered[1:] == ordered[:-1]))
