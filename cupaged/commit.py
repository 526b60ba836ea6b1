"""What a commit tells the prefix cache: which tokens the requests' blocks hold, and which of these blocks are full now.

The two forms that running batches repeat, one token each and a whole prompt, have a short way each; they do what `commit` would.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .adopt import adopt, adopt_chain, identify_in_tables
from .arguments import split_tokens
from .array_types import Ints, Tokens
from .block_pool import BlockPool
from .companions import Companions
from .identify import identify_new
from .prefix_cache import PrefixCache
from .rows import Rows
from .tables import BlockTables, ranges

_ONE = np.array(1)


def commit(
    requests: Rows,
    pool: BlockPool,
    cache: PrefixCache | None,
    companions: Companions | None,
    rows: Ints,
    token_ids: npt.ArrayLike | Sequence[npt.ArrayLike],
) -> None:
    """The next tokens of `rows [n]` are `token_ids`; forms and errors are those of `BlockAllocator.commit`."""
    known, lengths = requests.known.take(rows), requests.lengths.take(rows)
    if cache and not companions:
        arguments = requests, pool, cache, rows, known, lengths, token_ids
        if _commit_decoded(*arguments) or _commit_run(*arguments):
            return
    counts, tokens = split_tokens(token_ids, lengths - known)
    ends = known + counts
    if np.count_nonzero(ends > lengths):
        i = int(np.argmax(ends > lengths))
        raise ValueError(
            f"token_ids: expected at most the {lengths[i] - known[i]} tokens of request {requests.names[rows[i]]!r} that are "
            f"not committed, got {counts[i]}"
        )
    if cache is None:
        return
    tables = requests.groups[companions.anchor if companions else 0]
    wrong = _learn(tables, cache, rows, known, counts, tokens)
    if wrong is not None:
        i, place = wrong
        raise ValueError(
            f"token_ids: token {place} of request {requests.names[rows[i]]!r} differs from what was committed in the block that it "
            "shares"
        )
    requests.known[rows] = ends
    first, stop = known // requests.block_size, ends // requests.block_size
    full = ((first < stop) & (requests.root.take(rows) > 0)).nonzero()[0]
    if len(full):
        adopt(requests, pool, cache, companions, rows.take(full), first.take(full), stop.take(full))


def _commit_decoded(
    requests: Rows, pool: BlockPool, cache: PrefixCache, rows: Ints, known: Ints, lengths: Ints, tokens: object
) -> bool:
    """Commit as after a decode step: one token of each of `rows [n]` is open, and its block private.

    False, with nothing done, when this is not so, or `tokens` are not a flat int32 array of as many.
    """
    n, tables, size = len(rows), requests.groups[0], cache.tokens.size
    if not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.shape != (n,) or pool.sharing:
        return False
    if np.count_nonzero(lengths - known == _ONE) < n:
        return False
    columns = known // size
    offsets = columns * size
    np.subtract(known, offsets, out=offsets)
    blocks = tables.flat.take(rows * tables.width + columns).astype(np.int64)
    if not cache.tokens.learn_one_each(blocks, offsets, tokens):
        return False
    requests.known[rows] = known + _ONE
    full = (offsets == size - _ONE).nonzero()[0]
    full = full[requests.root.take(rows.take(full)) > 0]
    if len(full):
        heads = rows.take(full)
        identify_in_tables(
            requests, pool, cache, tables, heads, np.arange(len(full)), columns.take(full), blocks.take(full), True
        )
    return True


def _commit_run(
    requests: Rows, pool: BlockPool, cache: PrefixCache, rows: Ints, known: Ints, lengths: Ints, tokens: object
) -> bool:
    """Commit as after a prompt: all tokens of one request that are open, in blocks that know nothing of them yet.

    False, with nothing done, when this is not so, or `tokens` are not a flat int32 array of as many.
    """
    if len(rows) != 1 or not isinstance(tokens, np.ndarray) or tokens.dtype != np.int32 or tokens.ndim != 1:
        return False
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
    if not identify_new(cache, blocks, aligned.reshape(-1, size), first, int(table[first - 1]) if first else -1, root):
        adopt_chain(requests, pool, cache, 0, rows, np.array([first]), np.array([end // size]), True)
    return True


def _learn(
    tables: BlockTables, cache: PrefixCache, rows: Ints, known: Ints, counts: Ints, tokens: Tokens
) -> tuple[int, int] | None:
    """The next `counts[i]` tokens of `rows[i]`, after the `known[i]` first, are `tokens`, row after row: their blocks hold them now.

    Returns the row's place in the batch and the position of a token that contradicts what is known of a shared block, with nothing
    changed that can be seen; None when all is well.
    """
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
