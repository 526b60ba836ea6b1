"""What a shared system prompt saves: the second of two prompts with the same first 500 tokens starts with the first one's blocks.

`python examples/shared_prompt.py` prints the tokens computed and the time to the first token of both, and how far the second one's
logits are from those of a run without the cache. Keys and values of the shared tokens are read where the first prompt left them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from generate import array_module
from generation import Logits, positions
from gguf_file import InputError, find_model
from llama import Array, Llama, load
from tokenizer import Tokenizer

from cupaged import BlockAllocator, KVCache

SHARED = 500  # tokens
RULES = (
    "You are the assistant of a library. Answer in one or two short sentences and in plain words. Name the shelf when a book is asked "
    "for, and the opening hours when a visit is. Never guess a title: say that you do not know it, and offer to search the catalogue. "
)
QUESTIONS = ("When are you open on Sunday?", "Where do I find books about the history of printing?")


@dataclass
class Start:
    """How a prompt began."""

    logits: Logits  # [vocab_size] after the last token
    computed: int  # tokens that went through the model
    seconds: float


class SharedPool:
    """A model on one pool of blocks, with the prefix cache on or off."""

    def __init__(self, model: Llama, num_blocks: int, *, prefix_caching: bool, block_size: int = 16) -> None:
        c = model.config
        self.model = model
        self.alloc = BlockAllocator(num_blocks, block_size, prefix_caching=prefix_caching)
        device = "cpu" if model.xp is np else "cuda"
        self.cache = KVCache(
            c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_dim, dtype="float32", device=device
        )

    def start(self, request: Hashable, prompt: Sequence[int]) -> Start:
        """Add a request and compute what the cache does not have of its prompt."""
        began = time.perf_counter()
        step = self.alloc.add_request(request, token_ids=prompt)
        self.cache.begin(step)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            return self.cache.attend(layer, q, step, k=k, v=v)

        new = np.asarray(prompt[int(step.num_cached[0]) :])
        logits = self.model.forward(new, positions(step), attend, slice(-1, None))[0]
        logits = np.asarray(logits if self.model.xp is np else self.model.xp.asnumpy(logits))
        self.alloc.commit([request], new)
        return Start(logits, len(new), time.perf_counter() - began)


def prompts(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Two prompts `[SHARED + about 20]` that differ in the question only."""
    rules = tokenizer.encode_prompt(RULES * (SHARED // 40))[:SHARED]
    first, second = (rules + tokenizer.encode_prompt(question) for question in QUESTIONS)
    return first, second


def main() -> int:
    """Print the figures. Returns 0, or 2 after one line when there is no model to run."""
    try:
        model, tokenizer = load(find_model(), array_module("auto"))
    except InputError as error:
        print(f"shared_prompt: {error}", file=sys.stderr)
        return 2
    first, second = prompts(tokenizer)
    SharedPool(model, 40, prefix_caching=False).start("warm-up", first)
    firsts, seconds = [], []
    for _ in range(5):
        pool = SharedPool(model, 80, prefix_caching=True)
        firsts.append(pool.start("first", first))
        seconds.append(pool.start("second", second))
    alone = SharedPool(model, 40, prefix_caching=False).start("second", second)
    before, after = (median(start.seconds for start in starts) for starts in (firsts, seconds))
    print(
        f"first prompt    {len(first):5} tokens {firsts[0].computed:5} computed {before * 1e3:8.1f} ms to its first token"
    )
    print(
        f"second prompt   {len(second):5} tokens {seconds[0].computed:5} computed {after * 1e3:8.1f} ms, {after / before:.1%} of it"
    )
    print(f"without the cache            {alone.computed:5} computed {alone.seconds * 1e3:8.1f} ms")
    print(f"logits differ by at most {np.abs(seconds[0].logits - alone.logits).max():.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
