"""Exceptions of the control plane that say more than their built-in parents, and how its checks fail."""

from __future__ import annotations

from typing import Any


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


def require(condition: Any, message: str, *values: object) -> None:
    """Raise AssertionError with `message.format(*values)` unless `condition` holds; unlike `assert` it stays under `python -O`.

    The message is made only then: arrays as text cost far more than the checks themselves.
    """
    if not condition:
        raise AssertionError(message.format(*values))
