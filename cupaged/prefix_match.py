"""What of a prompt is cached: a walk from the root that compares parent and tokens at every block, and changes nothing.

Hashes only find candidates. They are sums over a prefix, computed for many blocks at once.
"""

from __future__ import annotations

import numpy as np

from .array_types import Flags, Hashes, Ints, Tokens
from .block_hashes import block_hashes, root_hash
from .prefix_cache import PrefixCache
from .siblings import common_lengths

_FIRST = 64  # blocks of a prompt that are asked for at first
_SIBLINGS = 8  # children of one parent that are compared for a partial match, the newest ones


def match(cache: PrefixCache, root: int, tokens: Tokens, most: int, gone: Flags | None = None) -> tuple[Ints, int, int]:
    """The longest cached prefix of `tokens [n]`, of at most `most` of them.

    Returns the blocks `[m]` that are equal as a whole, and the block which goes on equal for some tokens: its id (-1: none) and
    how many. Blocks that are `gone [num_blocks]` are taken to have lost their identities. Changes nothing.
    """
    if not root:
        return np.zeros(0, np.int64), -1, 0
    full = most // cache.block_size
    found = _match_blocks(cache, root, tokens[: full * cache.block_size].reshape(full, cache.block_size))
    blocks = found
    if gone is not None:
        blocks = _remaining(cache, found, gone)
        blocks = blocks[: leading(blocks >= 0)]
    begin = len(blocks) * cache.block_size
    rest = tokens[begin : min(most, begin + cache.block_size)]
    above = int(found[len(blocks) - 1]) if len(blocks) else -1
    listed = _SIBLINGS if gone is None else len(gone)
    children = cache.siblings.newest(above, root, listed) if len(rest) else []
    if gone is not None:
        remaining = _remaining(cache, np.array(children, np.int64), gone)
        children = remaining[remaining >= 0][:_SIBLINGS].tolist()
    children = [child for child in children if cache.tokens.ids[child, 0] == rest[0]]
    if not children:
        return blocks, -1, 0
    common = common_lengths(cache.tokens.ids.take(children, 0)[:, : len(rest)], rest)
    best = int(common.argmax())
    return blocks, children[best] if common[best] else -1, int(common[best])


def _remaining(cache: PrefixCache, blocks: Ints, gone: Flags) -> Ints:
    """For each canonical block the one that would be canonical without those that are gone, -1: none."""
    blocks = blocks.copy()
    for i in (gone.take(blocks) & (blocks >= 0)).nonzero()[0].tolist():
        while blocks[i] >= 0 and gone[blocks[i]]:
            blocks[i] = cache.next_twin[blocks[i]]
    return blocks


def _match_blocks(cache: PrefixCache, root: int, words: Tokens) -> Ints:
    blocks, hashes = _candidates(cache, root, words)
    done, above = 0, root
    while True:
        done += _verified(cache, blocks[done:], words[done:], above)
        if done == len(words) or blocks[done] < 0:
            return blocks[:done]
        above = int(cache.serial[blocks[done - 1]]) if done else root  # another block has this hash
        blocks[done] = cache.search(hashes[done], above, words[done])
        if blocks[done] < 0:
            return blocks[:done]


def _candidates(cache: PrefixCache, root: int, words: Tokens) -> tuple[Ints, Hashes]:
    """Candidates for the blocks `words [n, block_size]` of a prompt, and their hashes, up to the first that is not there at least.

    What comes after that is -1. A few are asked for at first, since hashes of the rest would be for nothing.
    """
    blocks, hashes = np.empty(len(words), np.int64), np.empty(len(words), np.uint64)
    blocks.fill(-1)  # `np.full` takes ten times as long to begin
    begin, length, last = 0, _FIRST, root_hash(root)
    while begin < len(words):
        here = words[begin : begin + length]
        end = begin + len(here)
        piece = hashes[begin:end]
        np.add.accumulate(block_hashes(here, np.arange(begin, end)), out=piece)
        piece += last
        found = blocks[begin:end] = cache.index.find(cache.index.homes(piece))
        if found[found.argmin()] < 0:
            break
        begin, length, last = end, 16 * length, piece[-1]
    return blocks, hashes


def _verified(cache: PrefixCache, blocks: Ints, words: Tokens, above: int) -> int:
    """How many of the candidates, from the first on, hold these tokens after these parents."""
    count = leading(blocks >= 0)
    blocks = blocks[:count]
    if not count:
        return 0
    parents = np.empty(count, np.int64)
    parents[0], parents[1:] = above, cache.serial.take(blocks[:-1])
    count = leading(cache.parent.take(blocks) == parents)
    right = (cache.tokens.ids.take(blocks[:count], 0) == words[:count]).reshape(-1)
    return leading(right) // cache.block_size


def find(cache: PrefixCache, parents: Ints, columns: Ints, words: Tokens, gone: Flags | None = None) -> Ints:
    """The canonical blocks `[n]` whose identities are (`parents[i]`, `words[i]`), in `columns[i]`; -1 where there is none.

    Blocks that are `gone [num_blocks]` are taken to have lost their identities.
    """
    hashes = root_hash(parents) + block_hashes(words, columns)
    found: Ints = cache.index.find(cache.index.homes(hashes))
    there = (found >= 0).nonzero()[0]
    blocks = found.take(there)
    same = (cache.parent.take(blocks) == parents.take(there)) & (cache.tokens.ids.take(blocks, 0) == words[there]).all(
        1
    )
    for i in there[~same].tolist():  # another block has this hash
        found[i] = cache.search(hashes[i], int(parents[i]), words[i])
    if gone is not None:
        found[there] = _remaining(cache, found.take(there), gone)
    return found


def leading(flags: Flags) -> int:
    """How many are true before the first that is not."""
    if not len(flags):
        return 0
    first = int(flags.argmin())
    return len(flags) if flags[first] else first
