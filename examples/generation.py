"""Text generation on a paged KV cache: a batch of forked sequences for sampling, and beam search.

The allocator decides where keys and values go, the cache holds them, the model computes: an `Engine` joins the three and counts.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from gguf_file import InputError
from llama import Array, Llama

from cupaged import BlockAllocator, KVCache, Step

Logits = npt.NDArray[np.float32]


@dataclass
class Usage:
    """What a generation took. Blocks are those of the step that used the most."""

    decode_tokens: int = 0
    decode_times: list[float] = field(default_factory=list)  # seconds of each decode step
    peak_blocks: int = 0
    peak_unshared_blocks: int = 0  # what the sequences of that step would use without sharing
    copies: int = 0  # copy-on-write copies

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens of all sequences per second."""
        return self.decode_tokens / sum(self.decode_times)


@dataclass
class Engine:
    """A model with a pool of `num_blocks` blocks for the keys and values of every sequence that it works on."""

    model: Llama
    num_blocks: int
    block_size: int = 16
    prefill_chunk: int = 256  # most prompt tokens of one pass
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        c = self.model.config
        self.alloc = BlockAllocator(self.num_blocks, self.block_size)
        device = "cpu" if self.model.xp is np else "cuda"
        sizes = (c.num_layers, self.num_blocks, self.block_size, c.num_kv_heads, c.head_dim)
        try:
            self.cache = KVCache(*sizes, dtype="float32", device=device)
        except ValueError as error:
            raise InputError(f"the cache cannot hold this model's keys and values: {error}") from None

    def prefill(self, request: Hashable, prompt: Sequence[int]) -> Logits:
        """Add a request and run its prompt, in pieces of `prefill_chunk`: logits `[vocab_size]` after its last token.

        Raises OutOfBlocks, with the request freed again.
        """
        self.alloc.add_request(request, 0)
        try:
            for at in range(0, len(prompt), self.prefill_chunk):
                piece = prompt[at : at + self.prefill_chunk]
                last = at + len(piece) == len(prompt)
                logits = self.run(self.alloc.grow(request, len(piece)), piece, want_logits=last)
        except MemoryError:
            self.alloc.free_request(request)
            raise
        return np.asarray(logits[0])

    def decode(self, requests: Sequence[Hashable], tokens: Sequence[int]) -> Logits:
        """Append one token to each request and run them as one batch: logits `[len(requests), vocab_size]`."""
        start = time.perf_counter()
        logits = self.run(self.alloc.grow_batch(requests, 1), tokens)
        self.usage.decode_tokens += len(tokens)
        self.usage.decode_times.append(time.perf_counter() - start)
        return logits

    def run(self, step: Step, tokens: Sequence[int], *, want_logits: bool = True) -> Logits:
        """Run the tokens of a step: logits `[num_seqs, vocab_size]` of each sequence's last one (no rows if not wanted)."""
        self._count(step)
        self.cache.begin(step)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            self.cache.write(layer, k, v, step)
            return self.cache.attend(layer, q, step)

        rows = step.query_start_loc[1:] - 1 if want_logits else slice(0)
        logits = self.model.forward(np.asarray(tokens), positions(step), attend, rows)
        return np.asarray(logits if self.model.xp is np else self.model.xp.asnumpy(logits))

    def _count(self, step: Step) -> None:
        used = self.num_blocks - self.alloc.num_free
        if used >= self.usage.peak_blocks:
            self.usage.peak_blocks = used
            self.usage.peak_unshared_blocks = sum(-(-n // self.block_size) for n in self.alloc.lengths.values())
        self.usage.copies += len(step.copies)


def positions(step: Step) -> npt.NDArray[np.int64]:
    """Position of every row of a step in its own sequence: row r of m stands at `seq_len - m + r`."""
    starts = step.query_start_loc.astype(np.int64)
    counts = np.diff(starts)
    rows: npt.NDArray[np.int64] = np.arange(starts[-1]) + np.repeat(step.seq_lens - starts[1:], counts)
    return rows


def sample(
    engine: Engine,
    prompt: Sequence[int],
    *,
    n: int = 1,
    max_tokens: int,
    eos_ids: Sequence[int],
    temperature: float = 0.0,
    seed: int | None = None,
) -> Iterator[list[tuple[int, int]]]:
    """Continue a prompt n times, in parallel, sharing the prompt's blocks: after each pass the `(sequence, token)` that it added.

    Temperature 0 takes the most likely token. A sequence ends with an eos token, which is not yielded, or after `max_tokens`.
    """
    rng = np.random.default_rng(seed)
    requests = [("sample", i) for i in range(n)]
    logits = np.repeat(engine.prefill(requests[0], prompt)[None], n, axis=0)
    engine.alloc.fork_request(requests[0], requests[1:])
    running = list(range(n))
    try:
        for position in range(max_tokens):
            tokens = choose(logits, temperature, rng)
            ended = [token in eos_ids for token in tokens]
            engine.alloc.free_batch([requests[i] for i, end in zip(running, ended, strict=True) if end])
            added = [(i, int(token)) for i, token, end in zip(running, tokens, ended, strict=True) if not end]
            running = [i for i, _ in added]
            if not running:
                return
            yield added
            if position + 1 < max_tokens:
                logits = engine.decode([requests[i] for i in running], [token for _, token in added])
    finally:
        engine.alloc.free_batch([requests[i] for i in running])


def choose(logits: Logits, temperature: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """One token of each row of `logits [n, vocab_size]`: the most likely one at temperature 0, else drawn by softmax(logits / t)."""
    if temperature == 0:
        return np.asarray(logits.argmax(axis=1))
    scaled = logits.astype(np.float64) / temperature
    mass = np.exp(scaled - scaled.max(axis=1, keepdims=True)).cumsum(axis=1)
    return np.asarray((mass > rng.random((len(mass), 1)) * mass[:, -1:]).argmax(axis=1))


@dataclass(frozen=True)
class Hypothesis:
    """A continuation found by beam search, with its eos token if it has one."""

    tokens: tuple[int, ...]
    log_probability: float  # sum over the tokens

    @property
    def score(self) -> float:
        """Mean log probability of a token: hypotheses of different lengths are ranked by it."""
        return self.log_probability / len(self.tokens)


def beam_search(
    engine: Engine, prompt: Sequence[int], *, width: int, max_tokens: int, eos_ids: Sequence[int]
) -> list[Hypothesis]:
    """The best `width` continuations, best first.

    Each pass extends every beam by every token and keeps the `width` best extensions by total log probability; extensions that end
    in an eos token leave the beams as finished hypotheses. The search ends with `width` of them, or after `max_tokens`. Beams are
    forks: a kept extension takes over its parent's blocks, and only a block that is written while shared is copied.
    """
    requests = [("beam", i) for i in range(width)]
    logits = engine.prefill(requests[0], prompt)[None]
    engine.alloc.fork_request(requests[0], requests[1:])
    beams = [Hypothesis((), 0.0)]
    finished: list[Hypothesis] = []
    try:
        for _ in range(max_tokens):
            parents: list[int] = []
            extended: list[Hypothesis] = []
            for parent, hypothesis in extensions(beams, logits, width * (1 + len(eos_ids))):
                if hypothesis.tokens[-1] in eos_ids:
                    if len(parents) < width:  # a finished one has to beat the beams that go on
                        finished.append(hypothesis)
                elif len(parents) < width:
                    parents.append(parent)
                    extended.append(hypothesis)
            beams = extended
            if len(finished) >= width or len(beams[0].tokens) == max_tokens:
                break
            engine.alloc.reorder(requests, parents)
            logits = engine.decode(requests, [beam.tokens[-1] for beam in beams])
    finally:
        engine.alloc.free_batch(requests)
    return sorted(finished + beams, key=lambda hypothesis: -hypothesis.score)[:width]


def extensions(beams: list[Hypothesis], logits: Logits, n: int) -> list[tuple[int, Hypothesis]]:
    """The n most likely `(beam, beam extended by one token)`, best first; `logits [len(beams), vocab_size]`."""
    scaled = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    totals = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    totals += np.array([[beam.log_probability] for beam in beams])
    n = min(n, totals.size)
    best = np.argpartition(-totals, n - 1, axis=None)[:n]
    best = best[np.argsort(-totals.ravel()[best], kind="stable")]
    parents, tokens = np.divmod(best, logits.shape[1])
    return [
        (int(p), Hypothesis((*beams[p].tokens, int(t)), float(totals[p, t])))
        for p, t in zip(parents, tokens, strict=True)
    ]


def check_prompt(prompt: Sequence[int], max_tokens: int, context_length: int) -> int:
    """How many tokens may be generated: `max_tokens`, or fewer where the model's context ends.

    Raises InputError for an empty prompt or one that fills the context.
    """
    if not prompt:
        raise InputError("the prompt is empty")
    if len(prompt) >= context_length:
        raise InputError(
            f"the prompt has {len(prompt)} tokens, but the model's context ends at {context_length}; shorten the prompt"
        )
    return min(max_tokens, context_length - len(prompt))


def blocks_to_be_safe(prompt: int, max_tokens: int, sequences: int, block_size: int) -> int:
    """Blocks that `sequences` forks of one prompt can never exceed: the prompt's full blocks once, the rest for each."""
    shared = prompt // block_size
    return shared + sequences * (-(-(prompt + max_tokens) // block_size) - shared)
