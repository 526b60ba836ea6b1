"""Speed of the control plane beside vLLM's, in one run. `python bench/control_plane.py [--help]`

A step is everything a kernel needs: block tables, slots, lengths, query starts, copies. Sequences have about 500 tokens, blocks 16;
a figure is the mean of 64 steps, in the best of several rounds. The peer (`vllm.v1.core`) lives in another Python, named by the
environment variable CUPAGED_VLLM_PYTHON, and runs as one subprocess; without it its columns are empty.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupaged import BlockAllocator, BlockPool

SIZE = 16
STEPS = 64


@dataclass(frozen=True)
class Work:
    """One line of the table."""

    name: str
    measure: Callable[[], float]  # in `unit`
    unit: str
    goal: float
    peer: str = ""  # work of control_plane_peer.py
    per: float = 1.0  # the peer's figure in nanoseconds times this is in `unit`
    faster: float = 0.0  # goal for the ratio


def start(n: int, num_blocks: int, tokens: int = 484) -> tuple[BlockAllocator, np.ndarray]:
    """`n` sequences of `tokens` to `tokens + 31` tokens, and their rows."""
    alloc = BlockAllocator(num_blocks, SIZE)
    for i in range(n):
        alloc.add_request(i, tokens + i % 32)
    return alloc, alloc.rows(range(n))


def mean_of_steps(rounds: int, begin: Callable[[], Iterator[None]]) -> float:
    """Mean nanoseconds of a step, in the best of `rounds`; each `next` of what `begin` returns is a step, the first ones are not timed."""
    best = math.inf
    for _ in range(rounds):
        steps = begin()
        for _ in range(3):
            next(steps)
        gc.collect()
        gc.disable()
        began = time.perf_counter_ns()
        for _ in range(STEPS):
            next(steps)
        best = min(best, (time.perf_counter_ns() - began) / STEPS)
        gc.enable()
    return best


def decode(n: int, num_blocks: int = 0, by_rows: bool = True, tokens: int = 484, rounds: int = 7) -> float:
    """Nanoseconds of one token for each of `n` sequences."""

    def begin() -> Iterator[None]:
        alloc, rows = start(n, num_blocks or n * (tokens // SIZE + 8), tokens)
        names = list(range(n))
        while True:
            yield alloc.grow_batch(rows=rows, n=1) and None if by_rows else alloc.grow_batch(names, 1) and None

    return mean_of_steps(rounds, begin)


def verify(n: int) -> float:
    """Nanoseconds of 1 to 5 tokens each, then a cut to what was accepted."""

    def begin() -> Iterator[None]:
        alloc, rows = start(n, n * 60)
        random = np.random.default_rng(0)
        drafted = random.integers(1, 6, (STEPS + 3, n))
        lengths = 484 + np.arange(n) % 32 + np.cumsum(random.integers(1, drafted + 1), axis=0)
        for counts, accepted in zip(drafted, lengths, strict=True):
            alloc.grow_batch(rows=rows, n=counts)
            alloc.truncate_batch(rows=rows, lengths=accepted)
            yield

    return mean_of_steps(7, begin)


def beams(n: int) -> float:
    """Nanoseconds of a beam search step, width 4: reorder, then one token each."""

    def begin() -> Iterator[None]:
        alloc = BlockAllocator(n * 40, SIZE)
        for i in range(0, n, 4):
            alloc.add_request(i, 484 + i // 4 % 32)
            alloc.fork_request(i, [i + 1, i + 2, i + 3])
        rows = alloc.rows(range(n))
        parents = np.arange(n) // 4 * 4 + np.random.default_rng(0).integers(0, 4, (STEPS + 3, n))
        for chosen in parents:
            alloc.reorder(rows=rows, parents=chosen)
            alloc.grow_batch(rows=rows, n=1)
            yield

    return mean_of_steps(7, begin)


def long_contexts() -> float:
    """Nanoseconds per table entry that 256 sequences of 8192 columns cost more than 256 short ones."""
    entries = 256 * 8192
    return (decode(256, tokens=8192 * SIZE - 120, rounds=3) - decode(256)) / entries


def take_and_return() -> float:
    """Nanoseconds per block of taking 16,384 blocks and giving them back."""
    pool, count = BlockPool(20_000), 16_384

    def begin() -> Iterator[None]:
        while True:
            pool.release(pool.take(count))
            yield

    return mean_of_steps(5, begin) / count


def works() -> list[Work]:
    return [
        Work("one token each, 1024 by rows", lambda: decode(1024) / 1024, "ns/seq", 100, "decode:1024", 1, 100),
        Work(
            "one token each, 1024 by ids", lambda: decode(1024, by_rows=False) / 1024, "ns/seq", 180, "decode:1024", 1
        ),
        Work("one token each, 64 by rows", lambda: decode(64) / 1e3, "us/step", 60, "decode:64", 64 / 1e3),
        Work("one token each, 256 by rows", lambda: decode(256) / 1e3, "us/step", 60, "decode:256", 256 / 1e3),
        Work(
            "one token each, 4096 of 10 million blocks",
            lambda: decode(4096, 10_000_000, rounds=3) / 4096,
            "ns/seq",
            130,
        ),
        Work(
            "one token each, 65,536 of 10 million blocks",
            lambda: decode(65536, 10_000_000, rounds=1) / 65536,
            "ns/seq",
            130,
        ),
        Work("counts 1 to 5, then truncate, 1024", lambda: verify(1024) / 1024, "ns/seq", 250),
        Work("4 beams, reorder each step, 1024", lambda: beams(1024) / 1024, "ns/seq", 400),
        Work("256 sequences of 8192 columns: more", long_contexts, "ns/entry", 0.5),
        Work("take and return 16,384 blocks", take_and_return, "ns/block", 215 / 12, "take", 1, 12),
    ]


def run_peer(names: list[str]) -> dict[str, float]:
    """The peer's figures in nanoseconds, none of them without a peer."""
    python = os.environ.get("CUPAGED_VLLM_PYTHON")
    if not python:
        print("no peer: set CUPAGED_VLLM_PYTHON to a Python that can import vllm.v1.core", flush=True)
        return {}
    command = [python, str(Path(__file__).with_name("control_plane_peer.py")), *names]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    figures: dict[str, float] = json.loads(answer.splitlines()[-1])
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="lines whose name has this in it")
    options = parser.parse_args()
    chosen = [work for work in works() if options.only in work.name]
    peer = run_peer(sorted({work.peer for work in chosen if work.peer}))
    print(f"{'work':46} {'cupaged':>9} {'goal':>8}   {'unit':8} {'vLLM':>10} {'ratio':>7} {'goal':>6}")
    for work in chosen:
        figure = work.measure()
        line = f"{work.name:46} {figure:9.2f} {work.goal:8.1f}   {work.unit:8}"
        if work.peer in peer:
            other = peer[work.peer] * work.per
            line += f" {other:10.1f} {other / figure:6.0f}x"
            line += f" {work.faster:5.0f}x" if work.faster else ""
        print(line, flush=True)


if __name__ == "__main__":
    main()
