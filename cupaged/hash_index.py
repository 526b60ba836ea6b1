"""Blocks by the hash of their content: an open-addressing table whose every action works on arrays.

A hash only finds candidates: blocks with one hash stand side by side, and whoever asks compares contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .free_queues import Blocks

Hashes = npt.NDArray[np.uint64]

_EMPTY, _HOLE = -1, -2
_HALF = np.uint64(32)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio


class HashIndex:
    """Entries are block ids; `hashes [num_blocks]`, which the owner fills, says where they belong. Linear probing."""

    def __init__(self, hashes: Hashes) -> None:
        self.hashes = hashes
        self._size = min(4 * len(hashes) + 4, 2**32 - 1)  # a quarter full at most, with the holes three eighths
        self._table = np.full(self._size, _EMPTY, np.int32)
        self._place = np.full(len(hashes), -1, np.int32)  # of each block in the table, -1: none
        self.count = 0
        self._holes = 0

    def holds(self, blocks: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Which of `blocks [n]` are entries."""
        return self._place.take(blocks) >= 0

    def find(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """The first entry with each of `hashes [n]`, -1 where there is none."""
        found = np.full(len(hashes), -1, np.int64)
        if not self.count:
            return found
        asking, places = np.arange(len(hashes)), self._home(hashes)
        while True:
            blocks = self._table.take(places)
            there = (blocks != _EMPTY).nonzero()[0]
            if len(there) < len(blocks):
                asking, places, blocks = asking.take(there), places.take(there), blocks.take(there)
            if not len(asking):
                return found
            same = (self.hashes.take(blocks, mode="clip") == hashes.take(asking)) & (blocks >= 0)
            found[asking[same]] = blocks[same]
            further = (~same).nonzero()[0]
            asking, places = asking.take(further), (places.take(further) + 1) % self._size

    def find_leading(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        """`find`, but what comes after the first one that is not there may be -1 without a look."""
        found = np.full(len(hashes), -1, np.int64)
        begin, length = 0, 32
        while begin < len(hashes):
            piece = found[begin : begin + length] = self.find(hashes[begin : begin + length])
            if piece.min() < 0:
                break
            begin, length = begin + length, 4 * length
        return found

    def find_all(self, hash_: np.uint64) -> Iterator[int]:
        """Every entry with one hash."""
        place = int(self._home(np.array([hash_]))[0])
        while (block := int(self._table[place])) != _EMPTY:
            if block >= 0 and self.hashes[block] == hash_:
                yield block
            place = (place + 1) % self._size

    def insert(self, blocks: npt.NDArray[Any]) -> None:
        """Add `blocks [n]`, none of them an entry."""
        if 8 * self._holes > self._size:
            self._rebuild()
        self.count += len(blocks)
        places = self._home(self.hashes.take(blocks))
        while len(blocks):
            before = self._table.take(places)
            vacant = (before < 0).nonzero()[0]
            self._table[places.take(vacant)] = blocks.take(vacant)
            there = self._table.take(places)
            won = (there == blocks).nonzero()[0]  # of several that wanted one place, one
            self._place[blocks.take(won)] = places.take(won)
            if self._holes:
                self._holes -= int(np.count_nonzero(before.take(won) == _HOLE))
            lost = (there != blocks).nonzero()[0]
            blocks, places = blocks.take(lost), (places.take(lost) + 1) % self._size

    def remove(self, blocks: npt.NDArray[Any]) -> None:
        """Take out `blocks [n]`, all of them entries."""
        places = self._place.take(blocks)
        self._table[places] = _HOLE
        self._place[blocks] = -1
        self.count -= len(blocks)
        self._holes += len(blocks)

    def replace(self, old: int, new: int) -> None:
        """Put `new` in the place of `old`; they have one hash."""
        self._table[self._place[old]] = new
        self._place[new], self._place[old] = self._place[old], -1

    def clear(self) -> None:
        """Take out all entries."""
        self._table.fill(_EMPTY)
        self._place.fill(-1)
        self.count = self._holes = 0

    def entries(self) -> Blocks:
        """All entries, in no order."""
        return self._table[self._table >= 0]

    def _rebuild(self) -> None:
        blocks = self.entries()
        self.clear()
        self.insert(blocks)

    def _home(self, hashes: Hashes) -> npt.NDArray[np.int64]:
        return (((hashes * _SPREAD) >> _HALF) * np.uint64(self._size) >> _HALF).astype(np.int64)
