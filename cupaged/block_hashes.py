"""Hashes of blocks' tokens, for all blocks of a prompt at once. They only find candidates, so they need to be fast and nothing more."""

from __future__ import annotations

from functools import cache

import numpy as np

from .array_types import Hashes, Ints, Tokens

_SHIFT, _HALF, _UNIT = np.array(29, np.uint64), np.array(32, np.uint64), np.array(1, np.uint64)
_ROOT = np.array(0xD6E8FEB86659FD93, np.uint64)
_MIX, _PLACE = np.array(0xBF58476D1CE4E5B9, np.uint64), np.array(0x9E3779B97F4A7C16, np.uint64)


def block_hashes(words: Tokens, columns: Ints) -> Hashes:
    """A hash of each block's tokens `[n, block_size]` and its place in the sequence; a prefix has their sum."""
    even = words.shape[1] % 2 == 0  # then two tokens at a time
    numbers = np.ascontiguousarray(words).view(np.uint64) if even else words.astype(np.uint64)
    mixed = numbers @ _factors(numbers.shape[1])
    mixed ^= mixed >> _SHIFT
    mixed *= _MIX
    mixed ^= mixed >> _HALF
    place = columns.view(np.uint64) * _PLACE
    place += _UNIT
    mixed *= place
    hashes: Hashes = mixed
    return hashes


@cache
def _factors(count: int) -> Hashes:
    return np.random.default_rng(0x5EED).integers(1 << 62, 1 << 63, count, np.uint64) | np.uint64(1)


def root_hash(root: Ints | int) -> Hashes:
    """The hash of the prefix without tokens that begins at `root`."""
    hashes: Hashes = np.array(root, np.uint64) * _ROOT
    return hashes
