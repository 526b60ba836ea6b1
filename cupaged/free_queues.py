"""Queues of free blocks: plain ones first in, first out; those with cached content least recently used first."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .array_types import Blocks


class FreeQueue:
    """FIFO of block ids in a ring of fixed size; holds each id at most once, at first all of them."""

    def __init__(self, capacity: int) -> None:
        self._ring = np.arange(capacity, dtype=np.int32)
        self._head = 0
        self.count = capacity

    def pop(self, count: int) -> Blocks:
        """The first `count` ids, removed; the caller has checked that there are so many."""
        blocks = self._slice(count)
        self.count -= count
        if len(self._ring):
            self._head = (self._head + count) % len(self._ring)
        return blocks

    def push(self, ids: npt.NDArray[Any]) -> None:
        """Append `ids [n]`."""
        if not len(ids):
            return
        size = len(self._ring)
        start = (self._head + self.count) % size
        straight = min(len(ids), size - start)
        self._ring[start : start + straight] = ids[:straight]
        self._ring[: len(ids) - straight] = ids[straight:]
        self.count += len(ids)

    def to_array(self) -> Blocks:
        """All ids in order, a copy."""
        return self._slice(self.count)

    def _slice(self, count: int) -> Blocks:
        end = self._head + count
        if end <= len(self._ring):
            return self._ring[self._head : end].copy()
        return np.concatenate((self._ring[self._head :], self._ring[: end - len(self._ring)]))


class LruQueue:
    """A queue of block ids that gives up any of its members: a hit takes a block out of the middle.

    A line twice as long as the pool, with a hole (-1) where a member left. When the end is reached, half of the line is holes at
    least, and the members move to its front, so that every action costs O(1) for each block, amortised.
    """

    def __init__(self, capacity: int) -> None:
        self._line = np.full(2 * capacity, -1, np.int32)
        self._place = np.zeros(capacity, np.int32)  # of each member in the line
        self._head = self._tail = 0
        self.count = 0

    def push(self, ids: npt.NDArray[Any]) -> None:
        """Append `ids [n]`."""
        if self._tail + len(ids) > len(self._line):
            members = self.to_array()
            self._head, self._tail, self.count = 0, 0, 0
            self.push(members)
        end = self._tail + len(ids)
        self._line[self._tail : end] = ids
        self._place[ids] = np.arange(self._tail, end, dtype=np.int32)
        self._tail = end
        self.count += len(ids)

    def remove(self, ids: npt.NDArray[Any]) -> None:
        """Take `ids [n]` out, all of them members."""
        self._line[self._place.take(ids)] = -1
        self.count -= len(ids)

    def pop(self, count: int) -> Blocks:
        """The first `count` ids, removed; the caller has checked that there are so many."""
        if not count:
            return np.zeros(0, np.int32)
        length = count
        while True:  # the holes that a longer look passes over are passed over for good
            members = (self._line[self._head : min(self._head + length, self._tail)] >= 0).nonzero()[0]
            if len(members) >= count:
                break
            length *= 2
        blocks = self._line.take(members[:count] + self._head)
        self._head += int(members[count - 1]) + 1
        self.count -= count
        return blocks

    def to_array(self) -> Blocks:
        """All ids in order, a copy."""
        line = self._line[self._head : self._tail]
        return line[line >= 0]
