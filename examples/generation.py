"""Text generation on a paged KV cache: a batch of forked sequences for sampling, and beam search.

The allocator decides where keys and values go, the cache holds them, the model computes: an `Engine` joins the three and counts.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt
from decoding import Beams, Hypothesis, Logits, Samples
from gguf_file import InputError
from llama import Array, Llama

from cupaged import BlockAllocator, KVCache, Step


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
    prefix_caching: bool = False
    watermark: float = 0.0
    host_blocks: int = 0  # blocks of host memory for requests that are evicted
    kv_dtype: str = "float32"  # of keys and values in the cache: "float16" is half the bytes, and rounds
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        c = self.model.config
        self.alloc = BlockAllocator(
            self.num_blocks,
            self.block_size,
            prefix_caching=self.prefix_caching,
            watermark=self.watermark,
            host_blocks=self.host_blocks,
        )
        device = "cpu" if self.model.xp is np else "cuda"
        sizes = (c.num_layers, self.num_blocks, self.block_size, c.num_kv_heads, c.head_dim)
        try:
            self.cache = KVCache(*sizes, dtype=self.kv_dtype, device=device, host_blocks=self.host_blocks)
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
                wanted = slice(None) if at + len(piece) == len(prompt) else slice(0)
                logits = self.run(self.alloc.grow(request, len(piece)), piece, wanted)
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

    def run(
        self, step: Step, tokens: Sequence[int], wanted: slice | npt.NDArray[np.intp] | list[int] = slice(None)
    ) -> Logits:
        """Run the tokens of a step: logits `[wanted, vocab_size]` after the last token of each wanted sequence."""
        self._count(step)
        self.cache.begin(step)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            stored_q, stored_k, stored_v = (x.astype(self.kv_dtype, copy=False) for x in (q, k, v))
            return self.cache.attend(layer, stored_q, step, k=stored_k, v=stored_v).astype(q.dtype, copy=False)

        rows = (step.query_start_loc[1:] - 1)[wanted]
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


def inherit(
    alloc: BlockAllocator, sequences: Sequence[Hashable], parents: Sequence[int], fresh: Iterable[Hashable]
) -> list[Hashable]:
    """Requests for the next step of a search: number i has the tokens of `sequences[parents[i]]`; those of no one are freed.

    Takes no block: a first heir takes over its parent's blocks, further ones are forks. `fresh` gives ids for more of them.
    """
    if len(parents) == len(sequences):
        alloc.reorder(sequences, parents)
        return list(sequences)
    heirs: dict[int, Hashable] = {}
    new = iter(fresh)
    result = [heirs.setdefault(p, sequences[p]) if p not in heirs else next(new) for p in parents]
    forks = [(sequences[p], id) for p, id in zip(parents, result, strict=True) if id != sequences[p]]
    alloc.fork_batch([parent for parent, _ in forks], [id for _, id in forks])
    alloc.free_batch([id for i, id in enumerate(sequences) if i not in heirs])
    return result


def search(engine: Engine, prompt: Sequence[int], decoder: Samples | Beams) -> Iterator[None]:
    """Run a search by itself, alone on the engine, pass after pass. Its blocks come back when it ends or is left."""
    fresh = ((decoder, i) for i in count())
    sequences: list[Hashable] = [next(fresh)]
    logits = engine.prefill(sequences[0], prompt)[None]
    try:
        while True:
            sequences = inherit(engine.alloc, sequences, decoder.advance(logits), fresh)
            yield
            if not sequences:
                return
            logits = engine.decode(sequences, [tokens[-1] for tokens in decoder.live])
    finally:
        engine.alloc.free_batch(sequences)


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
    """Continue a prompt n times, in parallel, sharing the prompt's blocks: after each pass the `(sequence, token)` that it added."""
    samples = Samples(n, max_tokens, eos_ids, temperature, seed)
    passes = search(engine, prompt, samples)
    try:
        for _ in passes:
            if samples.added:
                yield samples.added
    finally:
        passes.close()


def beam_search(
    engine: Engine, prompt: Sequence[int], *, width: int, max_tokens: int, eos_ids: Sequence[int]
) -> list[Hypothesis]:
    """The best `width` continuations, best first. Beams are forks: only a block that is written while shared is copied."""
    beams = Beams(width, max_tokens, eos_ids)
    for _ in search(engine, prompt, beams):
        pass
    return beams.hypotheses


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
