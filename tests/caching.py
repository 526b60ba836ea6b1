"""Requests over a prefix cache, for the tests that take it example by example."""

from __future__ import annotations

from typing import Any

from cupaged import BlockAllocator


def cached(num_blocks: int = 16, block_size: int = 4, **more: Any) -> BlockAllocator:
    return BlockAllocator(num_blocks, block_size, prefix_caching=True, **more)


def run(alloc: BlockAllocator, name: Any, tokens: list[int], key: Any = None) -> int:
    """A request that computes its whole prompt; returns how much of it was cached."""
    found = int(alloc.add_request(name, token_ids=tokens, extra_key=key).num_cached[0])
    alloc.commit([name], tokens[found:])
    return found
