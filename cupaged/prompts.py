"""New requests that come with their tokens: what the prefix cache has for a prompt is attached first, the rest gets slots.

What it has is a question that changes nothing, asked before the request or in its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .array_types import Ints, Tokens
from .block_pool import BlockPool
from .errors import OutOfBlocks
from .prefix_cache import PrefixCache
from .prefix_match import match
from .rehearsal import Rehearsal
from .rows import MAX_TOKENS, Rows
from .step_maker import StepMaker
from .steps import Step


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
    """Finds prompts in the cache, and gives what was found to new rows of `requests`."""

    def __init__(self, requests: Rows, pool: BlockPool, cache: PrefixCache, steps: StepMaker) -> None:
        self._requests, self._pool, self._cache, self._steps = requests, pool, cache, steps

    def find(self, root: int, tokens: Tokens, n: int, reserve: int, rehearsal: Rehearsal | None = None) -> Attachment:
        """What a new request of `tokens` can have from the cache when up to `n` others get slots; changes nothing.

        With a `rehearsal`, after the calls that were rehearsed. Raises OutOfBlocks when there are too few blocks beside `reserve`.
        """
        pool, cache, size = rehearsal or self._pool, self._cache, self._requests.block_size
        most = max(len(tokens) - 1, 0)  # one token at least is left to compute
        gone = rehearsal.gone if rehearsal else None
        matched, source, common = match(cache, root, tokens, most, gone)
        hits, columns = [matched], len(matched)
        if cache.companions:  # no other group can go on in the middle of a block
            (hits, columns), source = cache.companions.serve(matched, tokens, gone), -1
        if not n:
            source = -1  # a copy takes a block, and without new tokens none is taken
        while True:
            cached = columns * size + (common if source >= 0 else 0)
            total = min(len(tokens), cached + n)
            fresh = (-(-total // size) - columns) * len(self._requests.groups)
            whole = hits[0] if len(hits) == 1 else np.concatenate(hits)
            held = whole if source < 0 else np.append(whole, source)
            needed = fresh + int(np.count_nonzero(pool.ref_count.take(whole) == 0))
            idle = needed - fresh if source < 0 else int(np.count_nonzero(pool.ref_count.take(held) == 0))
            if (not needed or needed + reserve <= pool.num_free) and fresh + idle <= pool.num_free:
                return Attachment(hits, columns, source, common, held, fresh, cached, total)
            if source < 0:
                raise OutOfBlocks(needed, max(pool.num_free - reserve, 0))
            source = -1  # without the block that was to be copied, it may be enough

    def attach(self, row: Ints, root: int, found: Attachment, num_tokens: int) -> Step:
        """The first tokens of a new row: what was found of its `num_tokens`, and slots for more."""
        requests, pool, cache, size = self._requests, self._pool, self._cache, self._requests.block_size
        cached, total = found.cached, found.total
        if total > MAX_TOKENS:
            raise ValueError(f"token_ids: a sequence holds at most 2**31 - 1 tokens, not {total}")
        columns = max(1, -(-total // size))
        requests.widen(columns)
        steps = self._steps.begin(row, columns, total - cached)
        blocks = pool.take(found.fresh, found.held)  # the last thing that can fail; from here on, state changes

        cache.tokens.filled[blocks.astype(np.int64)] = 0
        for tables, step, hits, fresh in zip(
            requests.groups, steps, found.hits, blocks.reshape(len(requests.groups), -1), strict=True
        ):
            begin, end = found.columns - len(hits), found.columns + len(fresh)
            table = step.block_tables[0]
            table[begin : found.columns], table[found.columns : end] = hits, fresh
            tables.tables[row[0], begin:end] = table[begin:end]
            tables.begin[row] = begin
            tables.mark(row, 0)
        if found.source >= 0:
            steps[0].copies = np.array([[found.source, blocks[0]]], np.int32)
            cache.tokens.copy(steps[0].copies[:, 0], steps[0].copies[:, 1])
            cache.write(blocks[:1].astype(np.int64), np.array([found.common]))
            pool.release([found.source])
        cache.queried_tokens += num_tokens
        cache.hit_tokens += cached
        requests.lengths[row], requests.known[row], requests.root[row] = total, cached, root
        before, after = np.array([cached]), np.array([total])
        return self._steps.finish(steps, before, after - before, after, cached=cached)

    def rehearse(self, rehearsal: Rehearsal, root: int, tokens: Tokens, n: int, reserve: int) -> None:
        """Note what `attach` would do; where it would raise, only how many blocks it needs."""
        try:
            found = self.find(root, tokens, n, reserve, rehearsal)
        except OutOfBlocks as error:
            rehearsal.num_free -= error.needed
            return
        rehearsal.take(found.fresh, found.held)
        if found.source >= 0:
            rehearsal.release(found.source)
