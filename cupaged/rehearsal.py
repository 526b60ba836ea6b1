"""What several calls would take from a pool, one after the other, found out with nothing done.

Each call changes what the next one finds: blocks are taken, cached ones among them, which no prompt finds from then on, and those
that a prompt finds are no longer free. A rehearsal keeps these changes to itself.
"""

from __future__ import annotations

import numpy as np

from .array_types import Flags, Ints
from .block_pool import BlockPool


class Rehearsal:
    """A pool's numbers as calls would leave them.

    Attributes:
        num_free: free blocks; below 0 when there are too few.
        ref_count: `[num_blocks] int32`, above 0 for blocks in use.
        gone: `[num_blocks] bool`, blocks whose identity would be lost.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.num_free = pool.num_free
        self.ref_count = pool.ref_count.copy()
        self.gone: Flags = np.zeros(pool.num_blocks, np.bool_)
        self._plain = pool.num_free - pool.num_cached
        self._cached = pool.free()[self._plain :]  # least recently used first; those that left stand there too

    def take(self, count: int, reuse: Ints) -> None:
        """As `BlockPool.take`."""
        idle = reuse[self.ref_count.take(reuse) == 0]
        self.num_free -= count + len(set(idle.tolist()))
        self.ref_count[reuse] += 1
        plain = min(count, self._plain)
        self._plain -= plain
        if plain < count:
            waiting = (self.ref_count.take(self._cached) == 0) & ~self.gone.take(self._cached)
            self.gone[self._cached[waiting][: count - plain]] = True

    def drop(self, blocks: Ints, tables: Ints, named: Flags) -> None:
        """As `BlockPool.release`, of blocks that have an identity where `named [n]` says so (empty: none has)."""
        begin = 0
        for size in tables.tolist():
            waiting: list[int] = []
            for i in range(begin, begin + size):
                block = int(blocks[i])
                self.ref_count[block] -= 1
                if not self.ref_count[block]:
                    self.num_free += 1
                    if len(named) and named[i]:
                        waiting.insert(0, block)
                    else:
                        self._plain += 1
            begin += size
            self._cached = np.append(self._cached[~np.isin(self._cached, waiting)], np.array(waiting, np.int32))

    def release(self, block: int) -> None:
        """As `BlockPool.release` of one block with an identity."""
        self.ref_count[block] -= 1
        if not self.ref_count[block]:
            self._cached = np.append(self._cached[self._cached != block], np.int32(block))
            self.num_free += 1
