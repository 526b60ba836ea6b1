"""The command `python -m cupaged generate`: one prompt, and its continuation, continuations or beams as text."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from generation import Engine, beam_search, blocks_to_be_safe, check_prompt, sample
from gguf_file import InputError, find_model
from llama import load
from tokenizer import Tokenizer

from cupaged import OutOfBlocks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("prompt", help="what to say to the model")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--beam", type=at_least_one, metavar="N", help="beam search of width N")
    how.add_argument("--n", type=at_least_one, default=1, metavar="N", help="N continuations, sampled in parallel")
    parser.add_argument(
        "--max-tokens", type=at_least_one, default=128, metavar="N", help="stop after N tokens (default 128)"
    )
    parser.add_argument(
        "--temperature", type=not_negative, metavar="T",
        help="0 takes the most likely token, higher values vary more (default 0, or 0.8 when --n is above 1)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=at_least_zero, metavar="N", help="seed of the sampling (default: a new one every time)"
    )
    parser.add_argument(
        "--block-size", type=at_least_one, default=16, metavar="N", help="token slots of a block (default 16)"
    )
    parser.add_argument("--num-blocks", type=at_least_one, metavar="N", help="blocks in the pool (default: enough)")
    add_kv_dtype(parser)
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto", help="where to run (default auto)")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="a Llama in GGUF (default: the model package)")


def add_kv_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-dtype", choices=("float32", "float16"), default="float32",
        help="of keys and values in the cache: float16 is half the bytes (default float32)",
    )  # fmt: skip


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns 0, or 2 after one line on stderr."""
    try:
        run(args, sys.stdout)
    except InputError as error:
        print(f"cupaged: {error}", file=sys.stderr)
        return 2
    return 0


def run(args: argparse.Namespace, out: TextIO) -> None:
    """Generate and print. Raises InputError for input that cannot be used, a pool that is too small included."""
    model, tokenizer = load(args.model or find_model(), array_module(args.device))
    prompt = tokenizer.encode_prompt(args.prompt)
    max_tokens = check_prompt(prompt, args.max_tokens, model.config.context_length)
    enough = blocks_to_be_safe(len(prompt), max_tokens, args.beam or args.n, args.block_size)
    num_blocks = args.num_blocks or enough
    try:
        engine = Engine(model, num_blocks, args.block_size, kv_dtype=args.kv_dtype)
        if args.beam:
            print_beams(engine, tokenizer, prompt, args.beam, max_tokens, out)
        else:
            temperature = (0.0 if args.n == 1 else 0.8) if args.temperature is None else args.temperature
            print_samples(engine, tokenizer, prompt, args.n, max_tokens, temperature, args.seed, out)
    except OutOfBlocks as error:
        raise InputError(
            f"out of blocks: a step needed {error.needed} and {error.free} of {num_blocks} were free; raise --num-blocks, {enough} are "
            f"enough for this prompt and --max-tokens {max_tokens}"
        ) from None
    except MemoryError as error:
        raise InputError(f"out of memory: {error}; lower --num-blocks from {num_blocks}, or --max-tokens") from None


def print_samples(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    n: int,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    out: TextIO,
) -> None:
    """One continuation as it comes, or n of them, numbered, once all have ended."""
    texts = [""] * n
    streams = [tokenizer.stream() for _ in range(n)]
    steps = sample(
        engine, prompt, n=n, max_tokens=max_tokens, eos_ids=tokenizer.eos_ids, temperature=temperature, seed=seed
    )
    try:
        for added in steps:
            for i, token in added:
                piece = streams[i].push(token)
                texts[i] += piece
                if n == 1:
                    print(piece, end="", file=out, flush=True)
    finally:
        if n == 1 and texts[0]:
            print(streams[0].end(), file=out)
    if n > 1:
        for i, (text, stream) in enumerate(zip(texts, streams, strict=True), 1):
            print(f"[{i}] {(text + stream.end()).strip()}", file=out)


def print_beams(
    engine: Engine, tokenizer: Tokenizer, prompt: Sequence[int], width: int, max_tokens: int, out: TextIO
) -> None:
    """The hypotheses, best first, each after its mean log probability of a token."""
    for hypothesis in beam_search(engine, prompt, width=width, max_tokens=max_tokens, eos_ids=tokenizer.eos_ids):
        print(f"[{hypothesis.score:.3f}] {tokenizer.decode(hypothesis.tokens).strip()}", file=out)


def array_module(device: str) -> Any:
    """numpy or cupy. Raises InputError when "cuda" is asked for and is not there."""
    if device == "cpu":
        return np
    from cupaged.info import cuda_devices

    names, missing = cuda_devices()
    if names:
        try:
            import cupy
            import cupy.cublas  # multiplies the model's matrices
        except ImportError as error:
            missing = f"CuPy finds no cuBLAS: pip install 'cupy-cuda12x[ctk]' (or cupy-cuda13x) ({error})"
        else:
            return cupy
    if device == "cuda":
        raise InputError(f"--device cuda: {missing}")
    return np


def at_least_one(text: str) -> int:
    """An option that counts something."""
    return _whole(text, 1)


def at_least_zero(text: str) -> int:
    """An option that is a seed."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text}")
    return int(text)


def not_negative(text: str) -> float:
    """An option that is a finite number of at least 0."""
    try:
        x = float(text)
    except ValueError:
        x = -1.0
    if not 0 <= x < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text}")
    return x
