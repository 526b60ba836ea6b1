"""Physical blocks: how many references each has, and the queue of free ones.

For those who keep tables of their own, `BlockPool` is the whole allocator; `BlockAllocator` builds on it.
Every call works on arrays of block ids, costs a few array operations, and happens whole or not at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import OutOfBlocks

Ints = npt.NDArray[np.int64]
Blocks = npt.NDArray[np.int32]  # block ids

_ONE = np.int32(1)  # ufunc.at is twenty times slower with an operand of another dtype


class BlockPool:
    """`num_blocks` blocks with reference counts and a FIFO queue of those without references.

    A new pool hands out 0, 1, 2 ...; a block enters the end of the queue when its last reference goes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = integer(num_blocks, "num_blocks", 0, 2**31 - 1)
        self.ref_count = np.zeros(self.num_blocks, np.int32)
        self.references = 0  # sum of ref_count
        self._queue = FreeQueue(self.num_blocks)
        self._stamp = np.zeros(self.num_blocks, np.int32)  # scratch: which element of a call named the block last

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out."""
        return self._queue.count

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self._queue.count

    @property
    def sharing(self) -> bool:
        """Whether any block has more than one reference."""
        return self.references > self.num_used

    def free(self) -> Blocks:
        """Ids of the free blocks in the order in which `take` hands them out, a copy `[num_free] int32`."""
        return self._queue.to_array()

    def take(self, count: int) -> Blocks:
        """Hand out `count` blocks from the front of the queue, one reference each: `[count] int32`.

        Raises OutOfBlocks with nothing taken.
        """
        count = integer(count, "count", 0)
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free)
        blocks = self._queue.pop(count)
        self.ref_count[blocks] = 1
        self.references += count
        return blocks

    def acquire(self, blocks: npt.ArrayLike) -> None:
        """Add a reference to each of `blocks [n]`; an id that stands there twice gets two.

        Raises ValueError, with nothing changed, for an id outside the pool and for a free block.
        """
        ids = self._ids(blocks)
        if len(ids) and self.ref_count.take(ids).min() < 1:
            raise ValueError(
                f"blocks: expected blocks in use, {self._first(ids, self.ref_count < 1)} is free; take it first"
            )
        np.add.at(self.ref_count, ids, _ONE)
        self.references += len(ids)

    def release(self, blocks: npt.ArrayLike) -> None:
        """Drop a reference of each of `blocks [n]`, in this order; a block enters the queue at its last release.

        Raises ValueError, with nothing changed, for an id outside the pool and for more releases than references.
        """
        ids = self._ids(blocks)
        if not len(ids):
            return
        np.subtract.at(self.ref_count, ids, _ONE)
        left = self.ref_count.take(ids)
        if left.min() < 0:
            block = self._first(ids, self.ref_count < 0)
            np.add.at(self.ref_count, ids, _ONE)
            raise ValueError(
                f"blocks: block {block} is released more often than the {self.ref_count[block]} times it is held"
            )
        self.references -= len(ids)
        freed = ids[left == 0]
        if len(freed):
            self._queue.push(freed[self.last_of_each(freed)])

    def last_of_each(self, ids: Ints) -> npt.NDArray[np.bool_]:
        """For each element of `ids [n]` whether it is the last one with its value, `[n] bool`."""
        order = np.arange(len(ids), dtype=np.int32)
        self._stamp[ids] = order
        result: npt.NDArray[np.bool_] = self._stamp.take(ids) == order
        return result

    def occurrences(self, ids: Ints) -> npt.NDArray[np.int32]:
        """For each element of `ids [n]` how often its value stands there, `[n] int32`."""
        self._stamp[ids] = 0
        np.add.at(self._stamp, ids, _ONE)
        return self._stamp.take(ids)

    def check(self) -> None:
        """Verify the pool by itself; raises AssertionError that says what broke."""
        free = self.free()
        require(np.all((free >= 0) & (free < self.num_blocks)), f"the free queue holds ids outside the pool: {free}")
        require(len(np.unique(free)) == len(free), f"a block stands twice in the free queue: {free}")
        require(np.all(self.ref_count >= 0), f"negative reference count: {self.ref_count}")
        require(np.all(self.ref_count[free] == 0), f"a free block has references: {free}, {self.ref_count}")
        require(np.count_nonzero(self.ref_count == 0) == len(free), f"a block is lost: {free}, {self.ref_count}")
        require(
            self.references == int(self.ref_count.sum(dtype=np.int64)),
            f"references {self.references}: {self.ref_count}",
        )

    def _ids(self, blocks: npt.ArrayLike) -> Ints:
        ids = integers(blocks, "blocks")
        if len(ids) and ids.view(np.uint64).max() >= self.num_blocks:  # a negative id is a huge one
            raise ValueError(f"blocks: expected ids from 0 to {self.num_blocks - 1}, got {ids.min()} to {ids.max()}")
        return ids

    @staticmethod
    def _first(ids: Ints, bad: npt.NDArray[np.bool_]) -> int:
        return int(ids[np.argmax(bad[ids])])


class FreeQueue:
    """FIFO of block ids in a ring of fixed size; holds each id at most once."""

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

    def push(self, ids: Ints | Blocks) -> None:
        """Append `ids [n]`."""
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


def integer(value: Any, name: str, low: int, high: int | None = None) -> int:
    """`value` as an int of at least `low` and at most `high`; raises ValueError, or TypeError when it is no integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}: expected an integer {limits}, got {value}")
    return int(value)


def integers(values: npt.ArrayLike, name: str) -> Ints:
    """`values` as an `[n] int64` array; raises TypeError for other dtypes and ValueError for other shapes."""
    array = np.asarray(values)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got dtype {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {array.shape}")
    return array.astype(np.int64)


def require(condition: Any, message: str) -> None:
    """Raise AssertionError with `message` unless `condition` holds; unlike `assert` it stays under `python -O`."""
    if not condition:
        raise AssertionError(message)
