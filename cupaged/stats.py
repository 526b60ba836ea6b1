"""Numbers about a pool and its requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .block_pool import BlockPool
from .preemption import Preemption
from .prefix_cache import PrefixCache
from .rows import Rows


@dataclass(frozen=True, slots=True)
class Stats:
    """Use of the pool. A slot holds one token of every layer of its group."""

    blocks_free: int
    blocks_used: int
    blocks_shared: int  # with more than one reference
    blocks_cached: int  # free, with content that a prompt may find
    slots_used: int  # distinct slots that hold a token, and all of a block that a running swap holds
    slots_wasted: int  # in used blocks, holding none
    utilization: float  # used blocks over all blocks
    fragmentation: float  # wasted slots over the slots of used blocks
    copies: int  # block copies of all steps so far
    host_blocks_used: int  # with the content of evicted requests
    host_blocks_free: int
    swapped_out: int  # blocks that went to the host so far
    swapped_in: int  # blocks that came back
    queried_tokens: int  # of requests that came with their token ids
    hit_tokens: int  # of these, found in the prefix cache
    hit_rate: float | None  # hit over queried, None before the first query


def read_stats(
    requests: Rows, pool: BlockPool, copies: int, cache: PrefixCache | None, preemption: Preemption
) -> Stats:
    """The numbers of this moment."""
    used, slots = pool.num_used, pool.num_used * requests.block_size
    wasted = _wasted_slots(requests, pool)
    queried, hit = (cache.queried_tokens, cache.hit_tokens) if cache else (0, 0)
    return Stats(
        blocks_free=pool.num_free,
        blocks_used=used,
        blocks_shared=int(np.count_nonzero(pool.ref_count > 1)) if pool.sharing else 0,
        blocks_cached=pool.num_cached,
        slots_used=slots - wasted,
        slots_wasted=wasted,
        utilization=used / pool.num_blocks if pool.num_blocks else 0.0,
        fragmentation=wasted / slots if slots else 0.0,
        copies=copies,
        host_blocks_used=preemption.pool.num_used,
        host_blocks_free=preemption.pool.num_free,
        swapped_out=preemption.swapped_out,
        swapped_in=preemption.swapped_in,
        queried_tokens=queried,
        hit_tokens=hit,
        hit_rate=hit / queried if queried else None,
    )


def _wasted_slots(requests: Rows, pool: BlockPool) -> int:
    """Slots in used blocks that hold no token: only last blocks have such, and only where no one holds the block as a full one."""
    rows = (requests.lengths > 0).nonzero()[0]
    lengths = requests.lengths.take(rows)
    column = (lengths - 1) // requests.block_size
    filled = np.tile(lengths - column * requests.block_size, len(requests.groups))
    tails = np.concatenate([tables.at(rows, column) for tables in requests.groups]).astype(np.int64)
    if any(tables.limited for tables in requests.groups):  # a last block may lie beyond the horizon of what comes next
        tails, filled = tails[tails >= 0], filled[tails >= 0]
    if pool.sharing:
        order = np.argsort(filled, kind="stable")  # of several owners the one with the most tokens counts
        tails, filled = tails.take(order), filled.take(order)
        counted = pool.last_of_each(tails) & (pool.occurrences(tails) == pool.ref_count.take(tails))
        filled = filled[counted]
    return int(len(filled) * requests.block_size - filled.sum())
