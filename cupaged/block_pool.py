"""Physical blocks: how many references each has, and the queue of free ones.

For those who keep tables of their own, `BlockPool` is the whole allocator; `BlockAllocator` builds on it.
Every call works on arrays of block ids, costs a few array operations, and happens whole or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from .arguments import integer, integers
from .array_types import Blocks, Flags, Ints
from .errors import OutOfBlocks, refuse_copies, require
from .free_queues import FreeQueue, LruQueue

_NONE: Ints = np.zeros(0, np.int64)
_ZERO = np.array(0, np.int32)
_ONE = np.array(1, np.int32)  # ufunc.at is twenty times slower with an operand of another dtype


class BlockPool:
    """`num_blocks` blocks with reference counts and a FIFO queue of those without references.

    A new pool hands out 0, 1, 2 ...; a block enters the end of the queue when its last reference goes. With a prefix cache
    (`track`) free blocks that have an identity wait in a second queue, least recently used first, and are handed out last.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = integer(num_blocks, "num_blocks", 0, 2**31 - 1)
        self.ref_count = np.zeros(self.num_blocks, np.int32)
        self.references = 0  # sum of ref_count
        self._queue = FreeQueue(self.num_blocks)
        self._stamp = np.zeros(self.num_blocks, np.int32)  # scratch: which element of a call named the block last
        self._cached: LruQueue | None = None
        self._identity: Ints = np.zeros(0, np.int64)
        self._forget: Callable[[Blocks], None] = lambda blocks: None

    __reduce_ex__ = refuse_copies

    def track(self, identity: Ints, forget: Callable[[Blocks], None]) -> None:
        """Keep free blocks with `identity [num_blocks]` above 0 for reuse; `forget` hears of those that are handed out anew."""
        self._identity, self._forget, self._cached = identity, forget, LruQueue(self.num_blocks)

    @property
    def num_cached(self) -> int:
        """Free blocks with an identity."""
        return self._cached.count if self._cached else 0

    @property
    def num_free(self) -> int:
        """Blocks that `take` can hand out."""
        return self._queue.count + self.num_cached

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - self.num_free

    @property
    def sharing(self) -> bool:
        """Whether any block has more than one reference."""
        return self.references > self.num_blocks - self._queue.count - (self._cached.count if self._cached else 0)

    def free(self) -> Blocks:
        """Ids of the free blocks in the order in which `take` hands them out, a copy `[num_free] int32`."""
        plain = self._queue.to_array()
        return np.concatenate((plain, self._cached.to_array())) if self._cached else plain

    def take(
        self, count: int, reuse: npt.ArrayLike | None = None, drop: tuple[npt.ArrayLike, Ints | None] | None = None
    ) -> Blocks:
        """Hand out `count` blocks from the front of the queues, one reference each: `[count] int32`.

        Blocks of `reuse [m]` are not handed out but get a reference too, free ones with an identity among them.
        `drop` are arguments of `release`, which is done first: what it frees may be handed out. It does not go with `reuse`.
        Raises OutOfBlocks with nothing taken or released.
        """
        count = integer(count, "count", 0)
        if drop is not None:
            if reuse is not None:
                raise TypeError("reuse, drop: expected one of the two at most, got both; release first")
            left = self.num_free + self.would_free(self._ids(drop[0], "drop"))
            if count > left:
                raise OutOfBlocks(count, left)
            self.release(*drop)
        kept = idle = _NONE
        if reuse is not None and len(kept := self._ids(reuse, "reuse")):
            idle = kept.take((self.ref_count.take(kept) == _ZERO).nonzero()[0])
            last = self.last_of_each(idle)
            if np.count_nonzero(last) < len(idle):
                idle = idle[last]
            if len(idle) and (self._cached is None or _lowest(self._identity.take(idle)) < 1):
                raise ValueError("reuse: expected blocks in use or with an identity; take the others")
        if count + len(idle) > self.num_free:
            raise OutOfBlocks(count + len(idle), self.num_free)
        if len(kept):
            if self._cached and len(idle):
                self._cached.remove(idle)
            np.add.at(self.ref_count, kept, _ONE)
        plain = min(count, self._queue.count)
        blocks = self._queue.pop(plain)
        if self._cached and plain < count:
            victims = self._cached.pop(count - plain)
            self._forget(victims)
            blocks = np.concatenate((blocks, victims))
        self.ref_count[blocks.astype(np.int64)] = _ONE  # an index of another type costs more than its conversion
        self.references += count + len(kept)
        return blocks

    def acquire(self, blocks: npt.ArrayLike) -> None:
        """Add a reference to each of `blocks [n]`; an id that stands there twice gets two.

        Raises ValueError, with nothing changed, for an id outside the pool and for a free block.
        """
        ids = self._ids(blocks)
        if len(ids) and _lowest(self.ref_count.take(ids)) < 1:
            raise ValueError(
                f"blocks: expected blocks in use, {self._first(ids, self.ref_count < 1)} is free; take it first"
            )
        np.add.at(self.ref_count, ids, _ONE)
        self.references += len(ids)

    def release(self, blocks: npt.ArrayLike, tables: Ints | None = None) -> None:
        """Drop a reference of each of `blocks [n]`, in this order; a block enters its queue at its last release.

        `tables [m]` says how many of the blocks belong to one table, and then to the next; None: all to one. Blocks with an identity
        enter their queue table by table, later blocks of a table before earlier ones.
        Raises ValueError, with nothing changed, for an id outside the pool, for more releases than references and where `tables`
        do not say of every block whose it is.
        """
        ids = self._ids(blocks)
        if tables is not None and (
            np.add.reduce(tables) != len(ids) or (len(tables) and _lowest(np.asarray(tables)) < 0)
        ):
            raise ValueError(
                f"tables: expected counts whose sum is {len(ids)}, the number of blocks, got {list(tables)}"
            )
        if not len(ids):
            return
        once = not self.sharing  # then no block can stand in `ids` twice
        np.subtract.at(self.ref_count, ids, _ONE)
        left = self.ref_count.take(ids)
        if _lowest(left) < 0:
            block = self._first(ids, self.ref_count < 0)
            np.add.at(self.ref_count, ids, _ONE)
            raise ValueError(
                f"blocks: block {block} is released more often than the {self.ref_count[block]} times it is held"
            )
        self.references -= len(ids)
        freed, at = ids, None
        if not once:
            at = (left == _ZERO).nonzero()[0]
            at = at[self.last_of_each(ids.take(at))]
            if not len(at):
                return
            freed = ids.take(at)
        if self._cached:
            known = self._identity.take(freed) > 0
            if count := np.count_nonzero(known):
                every = count == len(freed)
                backward = (freed if every else freed[known])[::-1]
                if tables is not None and len(tables) > 1:
                    table = np.repeat(np.arange(len(tables)), tables)
                    table = table if at is None else table.take(at)
                    backward = backward[np.argsort((table if every else table[known])[::-1], kind="stable")]
                self._cached.push(backward)
                if every:
                    return
                freed = freed[~known]
        self._queue.push(freed)

    def forsake(self) -> None:
        """Make plain blocks of all cached ones, in their order: their identities are gone."""
        if self._cached:
            self._queue.push(self._cached.pop(self._cached.count))

    def last_of_each(self, ids: Ints | Blocks) -> Flags:
        """For each element of `ids [n]` whether it is the last one with its value, `[n] bool`."""
        order = np.arange(len(ids), dtype=np.int32)
        self._stamp[ids] = order
        result: Flags = self._stamp.take(ids) == order
        return result

    def occurrences(self, ids: Ints, of: Ints | Blocks | None = None) -> npt.NDArray[np.int32]:
        """How often each element of `of [n]` (None: of `ids`) stands in `ids [m]`, `[n] int32`."""
        if of is None:
            of = ids
        else:
            self._stamp[of] = 0
        self._stamp[ids] = 0
        np.add.at(self._stamp, ids, _ONE)
        return self._stamp.take(of)

    def would_free(self, ids: Ints) -> int:
        """How many blocks a release of `ids [n]` would leave without references."""
        if not self.sharing:
            return len(ids)
        last = self.last_of_each(ids)
        return int(np.count_nonzero(last & (self.occurrences(ids) >= self.ref_count.take(ids))))

    def check(self) -> None:
        """Verify the pool by itself; raises AssertionError that says what broke."""
        free = self.free()
        require(np.all((free >= 0) & (free < self.num_blocks)), "the free queue holds ids outside the pool: {}", free)
        require(len(free) == self.num_free, "{} free blocks are counted, the queues hold {}", self.num_free, free)
        require(np.bincount(free).max(initial=0) < 2, "a block stands twice in the free queue: {}", free)
        require(np.all(self.ref_count >= 0), "negative reference count: {}", self.ref_count)
        require(np.all(self.ref_count[free] == 0), "a free block has references: {}, {}", free, self.ref_count)
        require(np.count_nonzero(self.ref_count == 0) == len(free), "a block is lost: {}, {}", free, self.ref_count)
        references = int(self.ref_count.sum(dtype=np.int64))
        require(self.references == references, "references {}, counted {}", self.references, self.ref_count)
        if self._cached:
            cached = self._cached.to_array()
            require(np.all(self._identity[cached] > 0), "a block without identity waits for reuse: {}", cached)
            require(
                np.all(self._identity[self._queue.to_array()] == 0),
                "a block with identity is in the plain queue: {}",
                free,
            )

    def _ids(self, blocks: npt.ArrayLike, name: str = "blocks") -> Ints:
        ids = integers(blocks, name)
        huge = ids.view(np.uint64)  # a negative id is a huge one
        if len(ids) and huge[huge.argmax()] >= self.num_blocks:
            raise ValueError(f"{name}: expected ids from 0 to {self.num_blocks - 1}, got {ids.min()} to {ids.max()}")
        return ids

    @staticmethod
    def _first(ids: Ints, bad: Flags) -> int:
        return int(ids[np.argmax(bad[ids])])


def _lowest(values: npt.NDArray[Any]) -> Any:
    return values[values.argmin()]  # twice as fast as `min`
