"""What the prefix cache has for the prompt of a new request: a question that changes nothing, asked before the request or in its place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .array_types import Ints, Tokens
from .block_pool import BlockPool
from .companions import Companions
from .errors import OutOfBlocks
from .prefix_cache import PrefixCache
from .rehearsal import Rehearsal


@dataclass(frozen=True, slots=True)
class Attachment:
    """What the prefix cache has for a new request."""

    hits: list[Ints]  # of each group: blocks that are equal as a whole, up to the column where new blocks begin
    columns: int  # that column
    source: int  # the block that goes on equal for some tokens, -1: none
    common: int  # how many
    held: Ints  # all of them
    fresh: int  # blocks to take
    cached: int  # tokens found
    total: int  # tokens of the request, found or with new slots


class Prompts:
    """Looks prompts up for requests with tables of `groups` groups."""

    def __init__(self, pool: BlockPool, cache: PrefixCache, companions: Companions | None, groups: int) -> None:
        self._pool, self._cache, self._companions, self._groups = pool, cache, companions, groups

    def find(self, root: int, tokens: Tokens, n: int, reserve: int, rehearsal: Rehearsal | None = None) -> Attachment:
        """What a new request of `tokens` can have from the cache when up to `n` others get slots; changes nothing.

        With a `rehearsal`, after the calls that were rehearsed. Raises OutOfBlocks when there are too few blocks beside `reserve`.
        """
        pool, cache, size = rehearsal or self._pool, self._cache, self._cache.tokens.block_size
        most = max(len(tokens) - 1, 0)  # one token at least is left to compute
        gone = rehearsal.gone if rehearsal else None
        matched, source, common = cache.match(root, tokens, most, gone)
        hits, columns = [matched], len(matched)
        if self._companions:  # no other group can go on in the middle of a block
            (hits, columns), source = self._companions.serve(matched, tokens, gone), -1
        if not n:
            source = -1  # a copy takes a block, and without new tokens none is taken
        while True:
            cached = columns * size + (common if source >= 0 else 0)
            total = min(len(tokens), cached + n)
            fresh = (-(-total // size) - columns) * self._groups
            whole = hits[0] if len(hits) == 1 else np.concatenate(hits)
            held = whole if source < 0 else np.append(whole, source)
            needed = fresh + int(np.count_nonzero(pool.ref_count.take(whole) == 0))
            idle = needed - fresh if source < 0 else int(np.count_nonzero(pool.ref_count.take(held) == 0))
            if (not needed or needed + reserve <= pool.num_free) and fresh + idle <= pool.num_free:
                return Attachment(hits, columns, source, common, held, fresh, cached, total)
            if source < 0:
                raise OutOfBlocks(needed, max(pool.num_free - reserve, 0))
            source = -1  # without the block that was to be copied, it may be enough

    def rehearse(self, rehearsal: Rehearsal, root: int, tokens: Tokens, n: int, reserve: int) -> None:
        """Note what `Growth.attach` would do; where it would raise, only how many blocks it needs."""
        try:
            found = self.find(root, tokens, n, reserve, rehearsal)
        except OutOfBlocks as error:
            rehearsal.num_free -= error.needed
            return
        rehearsal.take(found.fresh, found.held)
        if found.source >= 0:
            rehearsal.release(found.source)
