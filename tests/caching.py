"""Requests over a prefix cache, for the tests that take it example by example."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupaged import BlockAllocator, identify, prefix_match


def cached(num_blocks: int = 16, block_size: int = 4, **more: Any) -> BlockAllocator:
    return BlockAllocator(num_blocks, block_size, prefix_caching=True, **more)


def run(alloc: BlockAllocator, name: Any, tokens: list[int], key: Any = None) -> int:
    """A request that computes its whole prompt; returns how much of it was cached."""
    found = int(alloc.add_request(name, token_ids=tokens, extra_key=key).num_cached[0])
    alloc.commit([name], tokens[found:])
    return found


def one_hash(patch: pytest.MonkeyPatch) -> None:
    """All contents have the same hash from now on."""
    for module in (identify, prefix_match):
        patch.setattr(module, "block_hashes", lambda words, columns: np.zeros(len(words), np.uint64))
        patch.setattr(module, "root_hash", lambda root: np.zeros(np.shape(root), np.uint64))
