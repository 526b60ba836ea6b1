"""Continuous batching: jobs come and go at every step, long prompts come in pieces, and blocks that run out are taken back.

A `Job` is a prompt and a search over its continuations (`decoding.py`); all its sequences take their next token in the same step, so
that what it finds does not depend on the other jobs. Jobs are served in the order of arrival:

- A step computes at most `token_budget` tokens: first one for every sequence that generates, then pieces of prompts.
- A job joins when the blocks for all its known tokens are free beside those that the running jobs need for theirs and beside the
  watermark. What the prefix cache holds costs nothing.
- When a step lacks blocks, the youngest job gives its up: they go to the host if there is room, and are computed again otherwise.
  It joins again before any younger one, so the oldest job always goes on and every job ends.

The oldest first, the youngest preempted, recompute or swap: vLLM's policy (Kwon et al., 2023, section 4.5). Pieces of prompts beside
decoding: Sarathi-Serve (Agrawal et al., 2024).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from decoding import Beams, Logits, Samples
from generation import Engine, blocks_to_be_safe, inherit
from gguf_file import InputError

from cupaged import OutOfBlocks


@dataclass(eq=False)
class Job:
    """A prompt, the search over its continuations, and how much of its sequences is computed."""

    prompt: list[int]
    decoder: Samples | Beams  # holds the result
    advanced: list[float] = field(
        default_factory=list
    )  # when each round of tokens was there, on the clock of time.perf_counter
    sequences: list[Hashable] = field(default_factory=list)  # allocator ids; the first ones of decoder.live
    computed: list[int] = field(default_factory=list)  # tokens of each whose keys and values are there

    def __post_init__(self) -> None:
        self.fresh: Iterator[Hashable] = ((self, i) for i in count())

    def tokens(self, i: int) -> list[int]:
        """All tokens of sequence i, computed or not."""
        return [*self.prompt, *self.decoder.live[i]]

    @property
    def length(self) -> int:
        """Tokens of each sequence: a search extends all of them by one token at a time."""
        return len(self.prompt) + len(self.decoder.live[0])

    @property
    def missing(self) -> list[int]:
        """Tokens of each sequence in the allocator that are not computed, at least one."""
        return [self.length - n for n in self.computed]

    @property
    def whole(self) -> bool:
        """Whether the allocator has all sequences."""
        return len(self.sequences) == len(self.decoder.live)

    def source(self, i: int) -> tuple[int, int]:
        """The earlier sequence that shares most tokens with sequence i, and how many, its last one excepted."""
        live = self.decoder.live
        shared = [min(common_prefix(live[i], live[j]), len(live[i]) - 1) for j in range(i)]
        j = max(range(i), key=shared.__getitem__)
        return j, len(self.prompt) + shared[j]

    def blocks_of_absent(self, block_size: int) -> int:
        """Blocks for the sequences after the first that the allocator does not have, beside what they share with others."""
        absent = range(max(1, len(self.sequences)), len(self.decoder.live))
        return sum(-(-self.length // block_size) - self.source(i)[1] // block_size for i in absent)

    def pieces(self, budget: int) -> list[Piece]:
        """What to compute of this job with at most `budget` tokens: all that is missing, or as much of it as leaves each sequence
        its last token, since the search needs the logits of all in one step."""
        if self.whole and sum(self.missing) <= budget:
            return [Piece(self, i, n, True) for i, n in enumerate(self.missing)]
        pieces = []
        for i, n in enumerate(self.missing):
            n = min(n - 1, budget)
            budget -= n
            if n:
                pieces.append(Piece(self, i, n, False))
        return pieces


@dataclass(frozen=True)
class Piece:
    """`count` tokens of sequence `index` of a job, to be computed in this step; with `last`, its job needs the logits."""

    job: Job
    index: int
    count: int
    last: bool

    @property
    def tokens(self) -> list[int]:
        """The tokens themselves."""
        start = self.job.computed[self.index]
        return self.job.tokens(self.index)[start : start + self.count]


@dataclass
class Usage:
    """What the steps took, one entry each, and how often a job was preempted."""

    sequences: list[int] = field(default_factory=list)  # in the batch
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    swapped: int = 0
    recomputed: int = 0


class Scheduler:
    """Jobs on one engine. `submit` whenever a request comes, `step` until `idle`.

    Args:
        engine: with `prefix_caching`, prompts share what they have in common; its `watermark` counts when a job joins, its
            `host_blocks` take the blocks of preempted jobs.
        token_budget: most tokens of one step.
        max_sequences: most sequences that run at once; at most `token_budget`, so that each gets a token at every step.
    """

    def __init__(self, engine: Engine, token_budget: int = 256, max_sequences: int = 64) -> None:
        if not 1 <= max_sequences <= token_budget:
            raise ValueError(f"max_sequences: expected 1 to token_budget ({token_budget}), got {max_sequences}")
        self.engine, self.token_budget, self.max_sequences = engine, token_budget, max_sequences
        self.waiting: deque[Job] = deque()  # in the order of arrival, all younger than those that run
        self.running: list[Job] = []  # in the order of arrival
        self.usage = Usage()
        self._reserve = int(np.ceil(engine.watermark * engine.num_blocks))

    @property
    def idle(self) -> bool:
        """Whether no job is left."""
        return not self.running and not self.waiting

    def submit(self, prompt: Sequence[int], decoder: Samples | Beams) -> Job:
        """Queue a job. Raises InputError for one that could not run even alone."""
        size = self.engine.block_size
        needed = blocks_to_be_safe(len(prompt), decoder.max_tokens, decoder.width, size)
        if not prompt:
            raise InputError("the prompt is empty")
        if needed > self.engine.num_blocks - self._reserve:
            raise InputError(
                f"the request may need {needed} blocks of {size} tokens, but the pool has {self.engine.num_blocks} and keeps "
                f"{self._reserve} as its watermark; make the pool larger, or ask for fewer tokens or sequences"
            )
        if decoder.width > self.max_sequences:
            raise InputError(f"the request has {decoder.width} sequences, but at most {self.max_sequences} run at once")
        job = Job(list(prompt), decoder)
        self.waiting.append(job)
        return job

    def step(self) -> list[Job]:
        """Compute one batch. Returns the jobs that advanced; one with no sequences left has ended."""
        self._admit()
        pieces = self._plan()
        if not pieces:
            return []
        alloc = self.engine.alloc
        ids = [piece.job.sequences[piece.index] for piece in pieces]
        tokens = [piece.tokens for piece in pieces]
        step = alloc.grow_batch(ids, [piece.count for piece in pieces])
        self.usage.sequences.append(len(pieces))
        self.usage.tokens.append(len(step.slot_mapping))
        self.usage.blocks.append(alloc.num_blocks - alloc.num_free)
        logits = self.engine.run(step, np.concatenate(tokens), [i for i, piece in enumerate(pieces) if piece.last])
        alloc.commit(ids, tokens)
        for piece in pieces:
            piece.job.computed[piece.index] += piece.count
        advanced = list(dict.fromkeys(piece.job for piece in pieces if piece.last))
        start = 0
        for job in advanced:
            stop = start + len(job.sequences)
            self._advance(job, logits[start:stop])
            start = stop
        return advanced

    def _admit(self) -> None:
        """Let the oldest waiting jobs join, as many as find room."""
        alloc = self.engine.alloc
        places = self.max_sequences - sum(job.decoder.width for job in self.running)
        while self.waiting and self.waiting[0].decoder.width <= places and self._fits(self.waiting[0]):
            job = self.waiting.popleft()
            self.running.append(job)
            places -= job.decoder.width
            if job.sequences:
                self.engine.cache.begin(alloc.restore(job.sequences))
            else:
                job.sequences = [next(job.fresh)]
                step = alloc.add_request(job.sequences[0], 0, token_ids=job.tokens(0))
                job.computed = step.num_cached.tolist()

    def _fits(self, job: Job) -> bool:
        """Whether all known tokens of the job have room beside those of the running ones; one alone always has (`submit`)."""
        if not self.running:
            return True
        alloc, size = self.engine.alloc, self.engine.block_size
        ids = [id for other in self.running for id in other.sequences]
        missing = [n for other in self.running for n in other.missing]
        if job.sequences:
            needed = alloc.blocks_needed(ids, missing, restore=job.sequences)
            needed += sum(
                -(-job.length // size) - n // size for n in job.computed
            )  # they grow, a shared last block each
        else:
            needed = alloc.blocks_needed(ids, missing, new=[{"token_ids": job.tokens(0)}])
        needed += sum(other.blocks_of_absent(size) for other in (*self.running, job))
        return needed + self._reserve <= alloc.num_free

    def _plan(self) -> list[Piece]:
        """The pieces of the next step, after as many preemptions as it takes to have their blocks."""
        alloc = self.engine.alloc
        for job in self.running:
            self._fork_absent(job)
        while True:
            pieces: list[Piece] = []
            budget = self.token_budget
            for job in sorted(self.running, key=lambda job: sum(job.missing) > len(job.decoder.live)):
                pieces += job.pieces(budget)
                budget = self.token_budget - sum(piece.count for piece in pieces)
            ids = [piece.job.sequences[piece.index] for piece in pieces]
            if alloc.blocks_needed(ids, [piece.count for piece in pieces]) <= alloc.num_free:
                return pieces
            self._preempt()

    def _fork_absent(self, job: Job) -> None:
        """Sequences of a job that is computed again begin as forks, once what they share with another is there."""
        alloc = self.engine.alloc
        while not job.whole:
            j, shared = job.source(len(job.sequences))
            if job.computed[j] < shared:
                return
            id = next(job.fresh)
            alloc.fork_request(job.sequences[j], [id])
            alloc.truncate(id, shared)
            job.sequences.append(id)
            job.computed.append(shared)

    def _preempt(self) -> None:
        """Take the blocks of the youngest running job: to the host, or if that has no room, to be computed again."""
        job = self.running.pop()
        self.waiting.appendleft(job)
        alloc = self.engine.alloc
        try:
            self.engine.cache.begin(alloc.evict(job.sequences))
            self.usage.swapped += 1
        except OutOfBlocks:
            alloc.free_batch(job.sequences)
            job.sequences, job.computed = [], []
            self.usage.recomputed += 1

    def _advance(self, job: Job, logits: Logits) -> None:
        """Give a job the logits `[sequences, vocab_size]` of its sequences."""
        parents = job.decoder.advance(logits)
        job.sequences = inherit(self.engine.alloc, job.sequences, parents, job.fresh)
        job.computed = [job.computed[parent] for parent in parents]
        job.advanced.append(time.perf_counter())
        if not job.sequences:
            self.running.remove(job)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences have in common before they differ or one ends."""
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
