"""Memory in pages, managed by cupaged's own `BlockAllocator`: plain, and with the sharing of parallel samples and of beams."""

from __future__ import annotations

import numpy as np

from ..allocator import BlockAllocator
from ..errors import OutOfBlocks
from .replay import Holding, Memory
from .traces import IntArray

WATERMARK = 0.01  # of the pool, left free at admission for those that run, as in vLLM


class Paged(Memory):
    """Blocks of `block_size` slots, taken as a request grows. A rest of the pool smaller than a block is not used."""

    grows = True

    def __init__(self, capacity: int, block_size: int, prefix_caching: bool = False) -> None:
        self.allocator = BlockAllocator(
            capacity // block_size, block_size, prefix_caching=prefix_caching, watermark=WATERMARK
        )
        self.capacity = capacity // block_size * block_size
        self.block_size = block_size
        self._sequences: dict[int, list[tuple[int, int]]] = {}  # request -> the allocator's ids of its sequences
        self._rows: dict[int, IntArray] = {}  # request -> rows of those
        self._cached: tuple[IntArray, IntArray, IntArray] | None = None  # see _members
        self._most_entries = 0

    @property
    def metadata_bytes(self) -> int:
        """4 bytes of block table per block of each sequence; 4 of reference count and 4 of queue per block of the pool."""
        return 4 * self._most_entries + 8 * self.allocator.num_blocks

    def can_hold(self, final: int) -> bool:
        return self._blocks(final) <= self.allocator.num_blocks - int(np.ceil(WATERMARK * self.allocator.num_blocks))

    def admit(self, request: int, tokens: int, final: int) -> bool:
        try:
            self.allocator.add_request((request, 0), tokens)
        except OutOfBlocks:
            return False
        self._enter(request, [(request, 0)])
        return True

    def release(self, request: int) -> None:
        self.allocator.free_batch(self._sequences.pop(request))
        del self._rows[request]

    def grow(self, requests: IntArray) -> bool:
        try:
            self.allocator.grow_batch(rows=self._members(requests)[0], n=1)
        except OutOfBlocks:
            return False
        return True

    def holding(self, requests: IntArray, lengths: IntArray, finals: IntArray) -> Holding:
        size, alloc = self.block_size, self.allocator
        counts = self._members(requests)[1]
        blocks = (lengths + (size - 1)) // size
        slots = blocks * size
        taken = (alloc.num_blocks - alloc.num_free) * size
        # Blocks before the last one of a sequence are full, shared or not, and the last one is its own.
        used = taken - int(((slots - lengths) * counts).sum())
        reservation = int(((np.minimum(slots, finals) - lengths) * counts).sum())
        entries = int((blocks * counts).sum())
        self._most_entries = max(self._most_entries, entries)
        return Holding(taken, used, reservation, entries * size)

    def stranded(self, final: int) -> bool:
        return False  # any free block serves any request

    def _enter(self, request: int, sequences: list[tuple[int, int]]) -> None:
        self._sequences[request] = sequences
        self._rows[request] = self.allocator.rows(sequences)
        self._cached = None

    def _members(self, requests: IntArray) -> tuple[IntArray, IntArray]:
        """Rows of all sequences of `requests`, and how many each request has. Most steps ask for the array of the step before."""
        if self._cached is None or self._cached[0] is not requests:
            rows = [self._rows[request] for request in requests.tolist()]
            counts = np.fromiter(map(len, rows), np.int64, len(rows))
            self._cached = requests, np.concatenate(rows) if rows else counts, counts
        return self._cached[1:]

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
