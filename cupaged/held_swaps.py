"""Blocks that a swap on another stream still reads: they stay out of their pool until the caller says that it has happened."""

from __future__ import annotations

import numpy as np

from .array_types import Blocks, Flags, Ints
from .block_pool import BlockPool
from .steps import Step


class HeldSwaps:
    """Steps of `evict` and `restore` with `hold=True`, and a reference to each block that their swaps read."""

    def __init__(self) -> None:
        self._held: dict[
            int, tuple[BlockPool, Blocks | Ints, Ints]
        ] = {}  # by step: pool, blocks, how many of each table

    def hold(self, step: Step, pool: BlockPool, sources: Blocks | Ints, first: Flags, sizes: Ints) -> None:
        """Keep `sources` of `pool` until `release` of this step.

        They stand where `first [m]` says in tables laid end to end, `sizes [n]` blocks each.
        """
        pool.acquire(sources)
        owners = np.repeat(np.arange(len(sizes)), sizes)[first]
        self._held[step.serial] = pool, sources, np.bincount(owners, minlength=len(sizes))

    def release(self, step: Step) -> None:
        """Let go of the sources of a step; raises ValueError when nothing of it is kept, TypeError for what is no step."""
        if not isinstance(step, Step):
            raise TypeError(f"step: expected the step that evict or restore gave, got {step!r}")
        if step.serial not in self._held:
            raise ValueError(
                f"step: number {step.serial} holds no blocks; release a step of evict or restore with hold=True, once"
            )
        pool, blocks, counts = self._held.pop(step.serial)
        pool.release(blocks, counts)

    def references(self, pool: BlockPool) -> Ints:
        """How often each block of `pool` is kept, `[num_blocks]`."""
        blocks = [blocks for of, blocks, _ in self._held.values() if of is pool]
        return np.bincount(np.concatenate([np.zeros(0, np.int32), *blocks]), minlength=pool.num_blocks)
