"""What a commit tells the prefix cache: which tokens the requests' blocks hold, and which of these blocks are full now.

The two forms that running batches repeat, one token each and a whole prompt, have a short way each; they do what any commit would.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .adopt import Adoption
from .arguments import split_tokens
from .array_types import Ints, Tokens
from .block_pool import BlockPool
from .identify import identify_new
from .prefix_cache import PrefixCache
from .rows import Rows
from .tables import ranges

_ONE = np.array(1)

TokenIds = npt.ArrayLike | Sequence[npt.ArrayLike]  # in the forms that `BlockAllocator.commit` takes


def open_tokens(requests: Rows, rows: Ints, token_ids: TokenIds) -> tuple[Ints, Tokens]:
    """How many of `token_ids` are for each of `rows [n]`, and all of them. Raises ValueError for more than a row has uncommitted."""
    known, lengths = requests.known.take(rows), requests.lengths.take(rows)
    counts, tokens = split_tokens(token_ids, lengths - known)
    if np.count_nonzero(known + counts > lengths):
        i = int(np.argmax(known + counts > lengths))
        raise ValueError(
            f"token_ids: expected at most the {lengths[i] - known[i]} tokens of request {requests.names[rows[i]]!r} that are "
            f"not committed, got {counts[i]}"
        )
    return counts, tokens


class Commits:
    """Makes tokens of `requests` known to `cache`."""

    def __init__(self, requests: Rows, pool: BlockPool, cache: PrefixCache) -> None:
        self._requests, self._pool, self._cache = requests, pool, cache
        self._adoption = Adoption(requests, pool, cache)

    def commit(self, rows: Ints, token_ids: TokenIds) -> None:
        """The next tokens of `rows [n]` are `token_ids`; errors are those of `BlockAllocator.commit`."""
        requests = self._requests
        known = requests.known.take(rows)
        if self._cache.companions is None:
            lengths = requests.lengths.take(rows)
            if self._commit_decoded(rows, known, lengths, token_ids) or self._commit_run(
                rows, known, lengths, token_ids
            ):
                return
        counts, tokens = open_tokens(requests, rows, token_ids)
        wrong = self._learn(rows, known, counts, tokens)
        if wrong is not None:
            i, place = wrong
            raise ValueError(
                f"token_ids: token {place} of request {requests.names[rows[i]]!r} differs from what was committed in the block that it "
                "shares"
            )
        ends = known + counts
        requests.known[rows] = ends
        first, stop = known // requests.block_size, ends // requests.block_size
        full = ((first < stop) & (requests.root.take(rows) > 0)).nonzero()[0]
        if len(full):
            self._adoption.adopt(rows.take(full), first.take(full), stop.take(full))

    def _commit_decoded(self, rows: Ints, known: Ints, lengths: Ints, tokens: object) -> bool:
        """Commit as after a decode step: one token of each of `rows [n]` is open, and its block private.

        False, with nothing done, when this is not so, or `tokens` are not a flat int32 array of as many.
        """
        requests, learned = self._requests, self._cache.tokens
        n, tables, size = len(rows), requests.groups[0], learned.size
        if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.shape != (n,) or self._pool.sharing:
            return False
        if np.count_nonzero(lengths - known == _ONE) < n:
            return False
        columns = known // size
        offsets = columns * size
        np.subtract(known, offsets, out=offsets)
        blocks = tables.flat.take(rows * tables.width + columns).astype(np.int64)
        if not learned.learn_one_each(blocks, offsets, tokens):
            return False
        requests.known[rows] = known + _ONE
        full = (offsets == size - _ONE).nonzero()[0]
        full = full[requests.root.take(rows.take(full)) > 0]
        if len(full):
            self._adoption.adopt_blocks(rows.take(full), np.arange(len(full)), columns.take(full), blocks.take(full))
        return True

    def _commit_run(self, rows: Ints, known: Ints, lengths: Ints, tokens: object) -> bool:
        """Commit as after a prompt: all tokens of one request that are open, in blocks that know nothing of them yet.

        False, with nothing done, when this is not so, or `tokens` are not a flat int32 array of as many.
        """
        if len(rows) != 1 or not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
            return False
        requests, cache = self._requests, self._cache
        row, begin, end, size = int(rows[0]), int(known[0]), int(lengths[0]), requests.block_size
        table, first = requests.groups[0].tables[row], begin // size
        blocks = table[first : -(-end // size)].astype(np.int64)
        if len(tokens) != end - begin or begin == end or not tokens.flags.c_contiguous:
            return False
        if not cache.tokens.learn_run(blocks, begin - first * size, tokens):
            return False
        requests.known[row] = end
        root, blocks = int(requests.root[row]), blocks[: end // size - first]
        if not len(blocks) or not root:
            return True
        aligned = tokens[: len(blocks) * size] if begin % size == 0 else cache.tokens.ids.take(blocks, 0)
        above = int(table[first - 1]) if first else -1
        if not identify_new(cache, blocks, aligned.reshape(-1, size), first, above, root):
            self._adoption.adopt_chain(rows, np.array([first]), np.array([end // size]))
        return True

    def _learn(self, rows: Ints, known: Ints, counts: Ints, tokens: Tokens) -> tuple[int, int] | None:
        """The next `counts[i]` tokens of `rows[i]`, after the `known[i]` first, are `tokens`, row after row: their blocks hold them now.

        Returns the row's place in the batch and the position of a token that contradicts what is known of a shared block, with nothing
        changed that can be seen; None when all is well.
        """
        tables, cache = self._requests.groups[self._cache.anchor], self._cache
        size, n = tables.block_size, len(rows)
        if n == 1 and len(tokens):
            first, stop = int(known[0]) // size, -(-(int(known[0]) + len(tokens)) // size)
            blocks = tables.tables[rows[0], first:stop].astype(np.int64)
            if cache.tokens.learn_run(blocks, int(known[0]) - first * size, tokens):
                return None
        places, owners = ranges(known, counts), np.repeat(np.arange(n), counts)
        columns = places // size
        blocks = tables.at(rows.take(owners), columns).astype(np.int64)
        wrong = cache.tokens.learn(blocks, places - columns * size, tokens)
        return (int(owners[wrong[0]]), int(places[wrong[0]])) if len(wrong) else None
