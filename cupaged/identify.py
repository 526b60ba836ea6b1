"""Identities for blocks that are full: whole runs at once, that of an equal block where the cache has one, a new one else."""

from __future__ import annotations

import numpy as np

from .array_types import Hashes, Ints, Tokens
from .block_hashes import block_hashes, root_hash
from .prefix_cache import PrefixCache
from .prefix_match import leading

_ZERO = np.array(0)


def identify(cache: PrefixCache, blocks: Ints, columns: Ints, starts: Ints, above: Ints, roots: Ints) -> Ints:
    """Give blocks whose tokens are all known an identity: runs of blocks, each a piece of one table.

    `blocks`, `columns [n]` are the runs laid end to end; run i begins at `starts[i]`, its first block follows block `above[i]`
    (-1: the root `roots[i]`). Returns `[n]` the canonical block of each one's identity; a block that is not its own canonical
    one has no identity yet (see `join`).
    """
    words = cache.tokens.ids.take(blocks, 0)
    numbers, bases = cache.serial.take(above), cache.index.hashes.take(above)
    at_root = (above < _ZERO).nonzero()[0]
    if len(at_root):
        numbers[at_root], bases[at_root] = roots.take(at_root), root_hash(roots.take(at_root))
    one_each, single = len(starts) == len(blocks), len(starts) == 1
    hashes = block_hashes(words, columns)
    if one_each:
        hashes += bases
    elif single:
        hashes = np.add.accumulate(hashes)
        hashes += bases
    else:
        sums = hashes.cumsum(dtype=np.uint64)
        hashes = sums + np.repeat(bases - (sums - hashes).take(starts), np.diff(starts, append=len(blocks)))
    # after its first new block a run is new: no identity can follow a number that was not there before
    homes = cache.index.homes(hashes)
    found = cache.index.find(homes)
    if single:
        found[leading(found >= 0) :] = -1
    if (one_each or single) and found[found.argmax()] < 0 and (single or not _repeats(hashes)):
        serials = cache.new_numbers(len(blocks)) + np.arange(len(blocks))
        over = cache.canonical(above)
        parents = numbers if one_each else _after(numbers[0], serials)
        cache.store(blocks, serials, parents, hashes, homes, over)
        return blocks

    lengths = np.diff(starts, append=len(blocks))
    parents = numbers if one_each else _shifted(cache.serial.take(found), starts, numbers)
    known = found >= 0
    if np.count_nonzero(known):
        known &= cache.parent.take(found) == parents
        known[known] = (cache.tokens.ids.take(found[known], 0) == words[known]).all(1)
    if not one_each:
        misses = (~known).cumsum()
        known = misses == np.repeat((misses - ~known).take(starts), lengths)  # a run is known up to its first miss
    fresh = (~known).nonzero()[0]
    alike = len(starts) > 1 and _repeats(hashes.take(fresh))
    if len(fresh) and (alike or np.count_nonzero(found.take(fresh) >= 0)):
        if len(blocks) > 1:
            return _identify_singly(cache, blocks, columns, starts, above, roots)
        found[0] = cache.search(hashes[0], int(parents[0]), words[0])
        fresh = fresh[found < 0]
    if not len(fresh):
        return found
    serials = cache.new_numbers(len(fresh)) + np.arange(len(fresh))
    over = cache.canonical(above)
    canonical = found
    canonical[fresh] = blocks.take(fresh)
    numbered = cache.serial.take(canonical)
    numbered[fresh] = serials
    parents = _shifted(numbered, starts, numbers).take(fresh)
    homes = homes[0].take(fresh), homes[1].take(fresh)
    over = _shifted(canonical, starts, over).take(fresh)
    cache.store(blocks.take(fresh), serials, parents, hashes.take(fresh), homes, over)
    return canonical


def identify_new(cache: PrefixCache, blocks: Ints, words: Tokens, column: int, above: int, root: int) -> bool:
    """`identify` for one run that holds `words [n, block_size]` from `column` on, after block `above` (-1: `root`), when its first
    block has no equal in the cache.

    No identity can follow a number that was not there before, so that then the whole run is new. False, with nothing done, else.
    """
    if cache.num_twins or np.count_nonzero(cache.serial.take(blocks)):
        return False
    hashes = np.add.accumulate(block_hashes(words, np.arange(column, column + len(blocks))))
    hashes += cache.index.hashes[above] if above >= 0 else root_hash(root)
    homes = cache.index.homes(hashes)
    if cache.index.find_one(homes) >= 0:
        return False
    serials = cache.new_numbers(len(blocks)) + np.arange(len(blocks))
    parents = _after(int(cache.serial[above]) if above >= 0 else root, serials)
    cache.store(blocks, serials, parents, hashes, homes, np.array([above]))
    return True


def _identify_singly(cache: PrefixCache, blocks: Ints, columns: Ints, starts: Ints, above: Ints, roots: Ints) -> Ints:
    """`identify` block by block, for batches with equal contents or equal hashes among themselves."""
    canonical, run = blocks.copy(), np.zeros(len(blocks), np.int64)
    run[starts[1:]] = 1
    run = run.cumsum()
    beginning = np.zeros(1, np.int64)
    for i in range(len(blocks)):
        here = slice(i, i + 1)
        before = above[run[here]] if i == starts[run[i]] else canonical[i - 1 : i]
        canonical[i] = identify(cache, blocks[here], columns[here], beginning, before, roots[run[here]])[0]
    return canonical


def _shifted(values: Ints, starts: Ints, first: Ints) -> Ints:
    """Each value's predecessor in its run; runs begin at `starts` and have `first` before them."""
    result = np.empty_like(values)
    result[1:] = values[:-1]
    result[starts] = first
    return result


def _after(first: np.int64 | int, values: Ints) -> Ints:
    """`first`, then all `values [n]` but the last."""
    result = np.empty_like(values)
    result[0], result[1:] = first, values[:-1]
    return result


def _repeats(hashes: Hashes) -> bool:
    ordered = hashes.copy()
    ordered.sort()
    return bool(np.count_nonzero(ordered[1:] == ordered[:-1]))
