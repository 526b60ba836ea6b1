"""Requests of several sequences that share blocks: parallel samples of one prompt, and the beams of a beam search.

All sequences of a request are forks of one: the prompt is shared, and a block is copied when a sequence first writes into it while
others hold it. Parallel samples then go their own ways. Beams are reordered before every token: each new beam continues one of the
old ones, so beams keep a common past and only their last tokens differ.

Which beam continues which is not assumed but played back from a record, `beam_parents.json`: beam search of SmolLM2-135M-Instruct on
ten prompts, written by `python bench/beam_divergence.py`. Each request follows the record from a place of its own, chosen at random.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources

import numpy as np

from ..errors import OutOfBlocks
from .paged import Paged
from .traces import IntArray

WIDTHS = (2, 4, 6)  # that the record has, those of the PagedAttention paper's figure 15


@cache
def beam_parents(width: int) -> IntArray:
    """The recorded steps of beam search, all prompts one after the other: `[steps, width]`, the parent of each beam, best beam first."""
    record = json.loads(resources.files(__package__).joinpath("beam_parents.json").read_text())
    steps = " ".join(record["parents"][str(width)]).split()
    return np.array([[int(digit) for digit in step] for step in steps])


class SharedSequences(Paged):
    """`width` sequences for each request: parallel samples, or with `parents [steps, width]` the beams of a beam search.

    The request's tokens, as the trace has them, are those of each sequence. When a preempted request is computed again, its samples
    share their prompt, and its beams all of their past, from which they part anew.
    """

    def __init__(
        self, capacity: int, block_size: int, width: int, parents: IntArray | None = None, seed: int = 0
    ) -> None:
        super().__init__(capacity, block_size)
        self.width = width
        self._parents = parents
        self._prompts: dict[int, int] = {}  # request -> tokens of its prompt
        self._single: list[int] = []  # requests that are one sequence so far
        self._starts: dict[int, int] = {}  # forked request -> its place in the record when the clock was 0
        self._clock = 0
        self._rng = np.random.default_rng(seed)

    def admit(self, request: int, tokens: int, final: int) -> bool:
        prompt = self._prompts.setdefault(request, tokens)
        shared = prompt if self._parents is None else tokens
        if not super().admit(request, shared, final):
            return False
        if shared == tokens:
            self._single.append(request)
            return True
        self._fork(request)
        try:
            self.allocator.grow_batch(self._sequences[request], tokens - shared)
        except OutOfBlocks:
            self.release(request)
            return False
        return True

    def release(self, request: int) -> None:
        super().release(request)
        if self._starts.pop(request, None) is None:
            self._single.remove(request)

    def begin_step(self, requests: IntArray) -> None:
        """Fork the requests whose prompt was written in the last step, then let every beam continue the one that the record says."""
        for request in self._single:
            self._fork(request)
        self._single.clear()
        if self._parents is not None and len(requests):
            starts = np.fromiter(map(self._starts.__getitem__, requests.tolist()), np.int64, len(requests))
            parents = self._parents[(starts + self._clock) % len(self._parents)]
            parents = parents + np.arange(len(requests))[:, None] * self.width
            self.allocator.reorder(rows=self._members(requests)[0], parents=parents.reshape(-1))
        self._clock += 1

    def _fork(self, request: int) -> None:
        first = (request, 0)
        children = [(request, i) for i in range(1, self.width)]
        self.allocator.fork_request(first, children)
        self._enter(request, [first, *children])
        self._starts[request] = int(self._rng.integers(2**31)) - self._clock
