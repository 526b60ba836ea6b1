"""Memory in contiguous pieces: a request reserves one piece for all the tokens it may come to hold, when it is admitted.

Two arenas hand out the pieces: first fit, and a buddy allocator (Knuth, The Art of Computer Programming 1, section 2.5).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from .replay import Holding, Memory
from .traces import IntArray


class FirstFit:
    """Pieces of any size from `capacity` slots: the lowest hole that is large enough gives its front part."""

    def __init__(self, capacity: int) -> None:
        self.holes = [(0, capacity)] if capacity else []  # (start, size), by start, no two of them adjacent

    @property
    def largest_hole(self) -> int:
        """Slots of the largest piece that could be taken now."""
        return max((size for _, size in self.holes), default=0)

    def take(self, size: int) -> int | None:
        """Start of a new piece of `size >= 1` slots, or None where no hole is large enough."""
        for i, (start, room) in enumerate(self.holes):
            if room >= size:
                self.holes[i : i + 1] = [(start + size, room - size)] if room > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Take back the piece at `start`; it becomes one hole with the holes on both sides of it."""
        i = bisect_left(self.holes, (start, 0))
        first = last = i
        if i > 0 and sum(self.holes[i - 1]) == start:
            first = i - 1
            start = self.holes[first][0]
            size += self.holes[first][1]
        if i < len(self.holes) and start + size == self.holes[i][0]:
            last = i + 1
            size += self.holes[i][1]
        self.holes[first:last] = [(start, size)]


class Buddy:
    """Pieces of 2^k slots, each at a multiple of its size: a larger block is halved, and two free halves become one again.

    A capacity that is no power of two begins as the largest powers of two it is a sum of.
    """

    def __init__(self, capacity: int) -> None:
        self._free: list[list[int]] = [[] for _ in range(capacity.bit_length())]  # by order: starts, ascending
        start = 0
        for order in reversed(range(capacity.bit_length())):
            if capacity >> order & 1:
                self._free[order].append(start)
                start += 1 << order

    @property
    def holes(self) -> list[tuple[int, int]]:
        """Free blocks as `(start, size)`, by start."""
        return sorted((start, 1 << order) for order, starts in enumerate(self._free) for start in starts)

    @property
    def largest_hole(self) -> int:
        """Slots of the largest piece that could be taken now."""
        return max((1 << order for order, starts in enumerate(self._free) if starts), default=0)

    def take(self, size: int) -> int | None:
        """Start of a new block of `size` slots, a power of two, from the smallest block that has room; None where there is none."""
        wanted = size.bit_length() - 1
        for order in range(wanted, len(self._free)):
            if self._free[order]:
                start = self._free[order].pop(0)
                for half in reversed(range(wanted, order)):
                    insort(self._free[half], start + (1 << half))
                return start
        return None

    def give(self, start: int, size: int) -> None:
        """Take back the block of `size` slots at `start`, and join it with its buddy for as long as that one is free."""
        order = size.bit_length() - 1
        while (buddy := start ^ 1 << order) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        insort(self._free[order], start)


class Contiguous(Memory):
    """One piece of an arena for each request, of `reserve(final)` slots: what it is thought to need, known or guessed at admission."""

    grows = False

    def __init__(self, capacity: int, arena: FirstFit | Buddy, reserve: Callable[[int], int]) -> None:
        self.capacity = capacity
        self._arena = arena
        self._reserve = reserve
        self._largest = arena.largest_hole
        self._pieces: dict[int, tuple[int, int]] = {}  # request -> (start, size)
        self._taken = 0
        self._most_pieces = 0  # and holes

    @property
    def metadata_bytes(self) -> int:
        """Two 64-bit numbers for each piece and each hole."""
        return 16 * self._most_pieces

    def can_hold(self, final: int) -> bool:
        return self._reserve(final) <= self._largest

    def admit(self, request: int, tokens: int, final: int) -> bool:
        size = self._reserve(final)
        start = self._arena.take(size)
        if start is None:
            return False
        self._pieces[request] = start, size
        self._taken += size
        self._most_pieces = max(self._most_pieces, len(self._pieces) + len(self._arena.holes))
        return True

    def release(self, request: int) -> None:
        start, size = self._pieces.pop(request)
        self._arena.give(start, size)
        self._taken -= size

    def stranded(self, final: int) -> bool:
        return final <= self.capacity - self._taken

    def holding(self, requests: IntArray, lengths: IntArray, finals: IntArray) -> Holding:
        used = int(lengths.sum())
        return Holding(self._taken, used, int(finals.sum()) - used)


def reserve_maximum(capacity: int, max_length: int) -> Contiguous:
    """Every request reserves the longest length there may be."""
    return Contiguous(capacity, FirstFit(capacity), lambda final: max_length)


def reserve_power_of_two(capacity: int) -> Contiguous:
    """Every request reserves the power of two at or above its final length, from a buddy allocator."""
    return Contiguous(capacity, Buddy(capacity), lambda final: 1 << (final - 1).bit_length())


def reserve_oracle(capacity: int) -> Contiguous:
    """Every request reserves its final length, which no real system can know, by first fit."""
    return Contiguous(capacity, FirstFit(capacity), lambda final: final)
