"""What `make demo` runs: a real model on the paged cache, then what it took.

One prompt is answered greedily, by beam search and by parallel sampling, then eight prompts are answered as one batch.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np
from generate import array_module, print_beams, print_samples
from generation import Engine, Usage, blocks_to_be_safe
from gguf_file import InputError, find_model
from llama import Array, Llama, load
from tokenizer import Tokenizer

PROMPT = "Why is the sky blue? Answer in two sentences."
PROMPTS = (
    "What is the capital of France?",
    "Name three primary colours.",
    "Write one sentence about the sea.",
    "How many days are there in a leap year, and how often does such a year come?",
    "What do bees make?",
    "Explain to a child what a computer does, in simple words that a child would use.",
    "Translate 'good morning' into Spanish.",
    "Give me a short recipe for pancakes. I have flour, milk, eggs, butter and a little sugar at home.",
)
WIDTH = 4
MAX_TOKENS = 64
BLOCK_SIZE = 16
KV_DTYPE = "float16"  # the model computes in float32; its keys and values are kept in half the bytes


def main() -> int:
    """Run the demo. Returns 0, or 2 after one line when there is no model to run."""
    try:
        model, tokenizer = load(find_model(), array_module("auto"))
    except InputError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    prompt = tokenizer.encode_prompt(PROMPT)
    start = time.perf_counter()
    print("making kernels for this processor, which takes a while the first time ...", file=sys.stderr)
    warm_up(model)
    print(f"kernels ready after {time.perf_counter() - start:.1f} s, compiled or read from the disk\n")

    def engine(sequences: int) -> Engine:
        return Engine(
            model, blocks_to_be_safe(len(prompt), MAX_TOKENS, sequences, BLOCK_SIZE), BLOCK_SIZE, kv_dtype=KV_DTYPE
        )

    print(f"prompt: {PROMPT}\n\ngreedy:")
    one = engine(1)
    print_samples(one, tokenizer, prompt, 1, MAX_TOKENS, 0.0, None, sys.stdout)
    print(f"\nbeam search, width {WIDTH}, with the mean log probability of a token:")
    beams = engine(WIDTH)
    print_beams(beams, tokenizer, prompt, WIDTH, MAX_TOKENS, sys.stdout)
    print(f"\nparallel sampling, n = {WIDTH}, temperature 0.8:")
    samples = engine(WIDTH)
    print_samples(samples, tokenizer, prompt, WIDTH, MAX_TOKENS, 0.8, None, sys.stdout)
    print(f"\na batch of {len(PROMPTS)} prompts, {MAX_TOKENS} tokens each:")
    batch = answer_batch(model, tokenizer)

    reserved = [len(prompt) + MAX_TOKENS] * WIDTH
    print_speed(one.usage, batch.usage, len(PROMPTS), model)
    print_blocks(
        {
            "beam search": (beams.usage, reserved),
            "sampling": (samples.usage, reserved),
            f"batch of {len(PROMPTS)}": (batch.usage, [len(tokenizer.encode_prompt(p)) + MAX_TOKENS for p in PROMPTS]),
        }
    )
    return 0


def warm_up(model: Llama) -> None:
    """Compile what decoding needs before it is timed: one token, and a batch, over more than one block."""
    engine = Engine(model, 3 * len(PROMPTS), BLOCK_SIZE, kv_dtype=KV_DTYPE)
    for request in range(len(PROMPTS)):
        engine.prefill(request, [1] * (BLOCK_SIZE + 1))
    for n in (1, len(PROMPTS)):
        engine.decode(list(range(n)), [1] * n)


def answer_batch(model: Llama, tokenizer: Tokenizer) -> Engine:
    """Decode all prompts as one batch, past their ends too, so that the batch stays whole; print the answers' first line."""
    prompts = [tokenizer.encode_prompt(prompt) for prompt in PROMPTS]
    num_blocks = sum(blocks_to_be_safe(len(p), MAX_TOKENS, 1, BLOCK_SIZE) for p in prompts)
    engine = Engine(model, num_blocks, BLOCK_SIZE, kv_dtype=KV_DTYPE)
    requests = list(range(len(prompts)))
    logits = np.stack([engine.prefill(request, prompt) for request, prompt in zip(requests, prompts, strict=True)])
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(MAX_TOKENS):
        tokens = logits.argmax(axis=1).tolist()
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
        logits = engine.decode(requests, tokens)
    for answer in answers:
        end = next((i for i, token in enumerate(answer) if token in tokenizer.eos_ids), len(answer))
        text = " ".join(tokenizer.decode(answer[:end]).split())
        print(f"- {text if len(text) <= 100 else text[:97] + '...'}")
    return engine


def print_speed(one: Usage, batch: Usage, sequences: int, model: Llama) -> None:
    """Tokens per second, and the time of a token against the time of one read of the weights."""
    token = median(one.decode_times)
    read = read_seconds(model.weights, model.xp)
    size = model.weights.nbytes
    print(f"\nspeed                    {'1 sequence':>12} {f'{sequences} sequences':>12}")
    print(f"tokens per second        {one.tokens_per_second:12.1f} {batch.tokens_per_second:12.1f}", end="")
    print(f"   {batch.tokens_per_second / one.tokens_per_second:.1f} times as many")
    print(f"time of a step, median   {token * 1e3:9.1f} ms {median(batch.decode_times) * 1e3:9.1f} ms")
    print(
        f"one read of the weights  {read * 1e3:9.1f} ms {'':12}   {size / 1e9:.2f} GB at {size / read / 1e9:.1f} GB/s, measured now"
    )
    print(f"step / read              {token / read:12.2f}")


def print_blocks(runs: dict[str, tuple[Usage, Sequence[int]]]) -> None:
    """Blocks of each run beside what reserving each sequence's longest length in one piece would have taken."""
    print(f"\nblocks of {BLOCK_SIZE} tokens      " + "".join(f"{name:>13}" for name in runs))
    rows: dict[str, Callable[[Usage, Sequence[int]], int]] = {
        "in use at the peak": lambda usage, _: usage.peak_blocks,
        "contiguous reservation": lambda _, lengths: sum(-(-length // BLOCK_SIZE) for length in lengths),
        "saved by sharing": lambda usage, _: usage.peak_unshared_blocks - usage.peak_blocks,
        "copy-on-write copies": lambda usage, _: usage.copies,
    }
    for name, count in rows.items():
        print(f"{name:<24}" + "".join(f"{count(*run):>13}" for run in runs.values()))


def read_seconds(weights: Array, xp: object = np, repeats: int = 5) -> float:
    """The shortest time in which all cores read `weights [n]` float32 once: the best of two kinds of read-only reduction."""
    if xp is not np:
        weights.max().get()  # compiles
        return min(_seconds(lambda: weights.max().get()) for _ in range(repeats))
    rows = weights[: len(weights) // 4096 * 4096].reshape(-1, 4096)
    ones = np.ones(4096, np.float32)
    cores = os.cpu_count() or 1
    parts = np.array_split(weights, cores)
    with ThreadPoolExecutor(cores) as threads:
        by_blas = min(_seconds(lambda: rows @ ones) for _ in range(repeats))
        by_threads = min(_seconds(lambda: list(threads.map(np.max, parts))) for _ in range(repeats))
    return min(by_blas, by_threads)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
