"""Blocks by the hash of their content: a table of small buckets whose every action works on arrays.

A hash only finds candidates: whoever asks compares contents. A bucket has room for eight entries and holds three on average when the pool
is full of content, so that nearly every question is answered by one bucket: its eight tags (other bits of the hashes) are read and
compared at once. An entry that finds its bucket full goes to the next one with room, and the buckets that it passed remember
that (Swiss tables do the same with tombstones).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .array_types import Blocks, Flags, Hashes, Ints

Homes = tuple[Ints, npt.NDArray[np.uint32]]

_ROOM = 8  # entries of a bucket
_FEW = 8  # so many are dealt with one by one sooner than at once
_ALL = 255  # places of a bucket that is full
_FULL = np.array(_ALL, np.uint8)
_SPREAD = np.array(0x9E3779B97F4A7C15, np.uint64)  # 2**64 over the golden ratio
_HALF = np.array(32, np.uint64)
_TAGGED = np.array(1, np.uint32)  # set in the tag of every entry: 0 is an empty place
_EIGHT, _THREE, _SEVEN = np.array(8), np.array(3), np.array(7)
_STATES = np.arange(256)
_FIRST_FREE: Ints = np.array([(~s & s + 1).bit_length() - 1 for s in range(256)]) % _ROOM  # lowest bit that is not set
_FILLED = (_STATES | _STATES + 1).astype(np.uint8)  # with that bit set
_BIT = (1 << np.arange(_ROOM)).astype(np.uint8)


class HashIndex:
    """Entries are block ids; `hashes [num_blocks]`, which the owner fills, says where they belong."""

    def __init__(self, hashes: Hashes) -> None:
        self.hashes = hashes
        self._num_buckets = len(hashes) // 3 + 2
        self._modulus = np.array(self._num_buckets, np.uint64)
        self._nowhere = self._num_buckets * _ROOM  # a place that no one reads
        self._tags = np.zeros((self._num_buckets + 1, _ROOM), np.uint32)
        self._flat_tags = self._tags.reshape(-1)  # the same memory
        self._table = np.full(self._nowhere + 1, -1, np.int32)  # the entries, bucket by bucket
        self._used = np.zeros(self._num_buckets, np.uint8)  # a bit for each place that has an entry
        self._passed = np.zeros(self._num_buckets, np.bool_)  # whether an entry that belongs here may be further on
        self._num_passed = 0  # as many at most
        self._place = np.full(len(hashes), -1, np.int32)  # of each block in the table, -1: none
        self.count = 0

    def holds(self, blocks: npt.NDArray[Any]) -> Flags:
        """Which of `blocks [n]` are entries."""
        return self._place.take(blocks) >= 0

    def find(self, homes: Homes) -> Ints:
        """A candidate for each of the hashes with `homes [n]`, -1 where no entry has that hash."""
        buckets, tags = homes
        found = np.empty(len(tags), np.int64)
        found.fill(-1)  # `np.full` takes ten times as long to begin
        if not self.count:
            return found
        asking: Ints | None = None  # None: all
        while True:
            same = (self._tags.take(buckets, 0) == tags[:, None]).reshape(-1).nonzero()[0]
            if len(same):
                who = same >> _THREE
                places = buckets.take(who) * _EIGHT + (same & _SEVEN)
                found[who if asking is None else asking.take(who)] = self._table.take(places)
            if not self._num_passed:
                return found
            further = self._passed.take(buckets).nonzero()[0]
            if not len(further):
                return found
            further = further[found.take(further if asking is None else asking.take(further)) < 0]
            asking = further if asking is None else asking.take(further)
            buckets, tags = self._next(buckets.take(further)), tags.take(further)
            if len(further) <= _FEW:
                for i, bucket, tag in zip(asking.tolist(), buckets.tolist(), tags.tolist(), strict=True):
                    found[i] = self._find_from(bucket, tag)
                return found

    def find_one(self, homes: Homes) -> int:
        """`find` for the first of `homes`."""
        return self._find_from(int(homes[0][0]), int(homes[1][0]))

    def _find_from(self, bucket: int, tag: int) -> int:
        """`find` for one hash, from a bucket on."""
        while True:
            there = self._tags[bucket].tolist()
            if tag in there:
                return int(self._table[bucket * _ROOM + there.index(tag)])
            if not self._passed[bucket]:
                return -1
            bucket = (bucket + 1) % self._num_buckets

    def find_all(self, hash_: np.uint64) -> Iterator[int]:
        """Every entry with one hash."""
        bucket = int(self.homes(np.array([hash_]))[0][0])
        while True:
            for block in self._table[bucket * _ROOM : (bucket + 1) * _ROOM].tolist():
                if block >= 0 and self.hashes[block] == hash_:
                    yield block
            if not self._passed[bucket]:
                return
            bucket = (bucket + 1) % self._num_buckets

    def insert(self, blocks: npt.NDArray[Any], homes: Homes) -> None:
        """Add `blocks [n]`, none of them an entry, whose hashes have `homes`."""
        if 16 * self._num_passed > self._num_buckets:
            self._rebuild()
        self.count += len(blocks)
        buckets, tags = homes
        while len(blocks) > _FEW:
            used = self._used.take(buckets)
            places = buckets * _EIGHT
            places += _FIRST_FREE.take(used)
            full = (used == _FULL).nonzero()[0]
            if len(full):
                places[full] = self._nowhere
            # of several that want one place the last one gets it, with its tag
            self._table[places] = blocks.astype(np.int32)  # converted while it is assigned it takes longer
            self._flat_tags[places] = tags
            self._place[blocks] = places.astype(np.int32)
            self._used[buckets] = _FILLED.take(used)
            if len(full):
                self._table[self._nowhere] = -1
            lost = (self._table.take(places) != blocks).nonzero()[0]
            if not len(lost):
                return
            blocks, buckets, tags = blocks.take(lost), buckets.take(lost), tags.take(lost)
            if len(blocks) > _FEW and len(full):
                full = (self._used.take(buckets) == _FULL).nonzero()[0]
                buckets[full] = self._pass(buckets.take(full))
        for block, bucket, tag in zip(blocks.tolist(), buckets.tolist(), tags.tolist(), strict=True):
            self._insert_from(bucket, block, tag)

    def _insert_from(self, bucket: int, block: int, tag: int) -> None:
        """`insert` for one block, in this bucket or the next one with room."""
        while (used := int(self._used[bucket])) == _ALL:
            if not self._passed[bucket]:
                self._passed[bucket] = True
                self._num_passed += 1
            bucket = (bucket + 1) % self._num_buckets
        place = bucket * _ROOM + int(_FIRST_FREE[used])
        self._table[place], self._tags[bucket, place % _ROOM], self._place[block] = block, tag, place
        self._used[bucket] = _FILLED[used]

    def _pass(self, buckets: Ints) -> Ints:
        """The buckets after these, which are full: what belongs here will be further on."""
        self._num_passed += len(buckets) - int(np.count_nonzero(self._passed.take(buckets)))  # or fewer
        self._passed[buckets] = True
        return self._next(buckets)

    def remove(self, blocks: npt.NDArray[Any]) -> None:
        """Take out `blocks [n]`, all of them entries."""
        places = self._place.take(blocks).astype(np.int64)
        self._table[places] = -1
        self._flat_tags[places] = 0
        np.subtract.at(self._used, places >> _THREE, _BIT.take(places & _SEVEN))
        self._place[blocks] = -1
        self.count -= len(blocks)

    def replace(self, old: int, new: int) -> None:
        """Put `new` in the place of `old`; they have one hash."""
        self._table[self._place[old]] = new
        self._place[new], self._place[old] = self._place[old], -1

    def clear(self) -> None:
        """Take out all entries."""
        self._table.fill(-1)
        self._place.fill(-1)
        self._tags.fill(0)
        self._used.fill(0)
        self._passed.fill(False)
        self.count = self._num_passed = 0

    def entries(self) -> Blocks:
        """All entries, in no order."""
        return self._table[self._table >= 0]

    def _rebuild(self) -> None:
        blocks = self.entries()
        self.clear()
        self.insert(blocks, self.homes(self.hashes.take(blocks)))

    def _next(self, buckets: Ints) -> Ints:
        following = buckets + 1
        following[following == self._num_buckets] = 0
        return following

    def homes(self, hashes: Hashes) -> Homes:
        """The bucket where each of `hashes [n]` belongs, and its tag."""
        mixed = hashes * _SPREAD
        tags = mixed.astype(np.uint32)
        tags |= _TAGGED
        mixed >>= _HALF
        mixed *= self._modulus
        mixed >>= _HALF
        return mixed.view(np.int64), tags
