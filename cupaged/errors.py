"""Exceptions of the control plane that say more than their built-in parents."""

from __future__ import annotations


class OutOfBlocks(MemoryError):
    """The pool has too few free blocks. The call that raised it changed nothing.

    Attributes:
        needed: blocks that the call would have taken out of the free queues.
        free: blocks that it could have taken.
    """

    def __init__(
        self, needed: int, free: int, hint: str = "free requests, or make the pool larger (num_blocks)"
    ) -> None:
        super().__init__(f"out of blocks: {needed} needed, {free} free; {hint}")
        self.needed = needed
        self.free = free
