"""Exceptions of the control plane that say more than their built-in parents, how its checks fail, and what refuses to be copied."""

from __future__ import annotations

from typing import Any, NoReturn


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
        self._hint = hint

    def __reduce__(self) -> tuple[type, tuple[int, int, str]]:
        """What pickle calls: the arguments, where other exceptions give their message."""
        return type(self), (self.needed, self.free, self._hint)


def require(condition: Any, message: str, *values: object) -> None:
    """Raise AssertionError with `message.format(*values)` unless `condition` holds; unlike `assert` it stays under `python -O`.

    The message is made only then: arrays as text cost far more than the checks themselves.
    """
    if not condition:
        raise AssertionError(message.format(*values))


def refuse_copies(x: object, protocol: object) -> NoReturn:
    """`__reduce_ex__`, which copy, deepcopy and pickle call, of objects whose parts hold views of each other's arrays: in a copy they
    would be arrays of their own, and the first change would tear it apart."""
    raise TypeError(
        f"a {type(x).__name__} cannot be copied or pickled, since its parts share memory; make another one. Steps and deltas can be sent"
    )
