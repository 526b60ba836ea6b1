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


def decode_and_commit(n: int) -> float:
    """Nanoseconds of one token each with the prefix cache on, and its commit."""

    def begin() -> Iterator[None]:
        alloc = BlockAllocator(n * 40, SIZE, prefix_caching=True)
        for i in range(n):
            prompt = np.arange(i, i + 484 + i % 32, dtype=np.int32)
            alloc.add_request(i, len(prompt))
            alloc.commit([i], prompt)
        rows = alloc.rows(range(n))
        for tokens in np.random.default_rng(0).integers(0, 50_000, (STEPS + 3, n)).astype(np.int32):
            alloc.grow_batch(rows=rows, n=1)
            alloc.commit(rows=rows, token_ids=tokens)
            yield

    return mean_of_steps(5, begin)


def match(num_tokens: int = 100_000) -> float:
    """Nanoseconds of finding a cached prompt; a request that shares it comes and goes."""
    alloc, prompt = (
        BlockAllocator(num_tokens // SIZE + 100, SIZE, prefix_caching=True),
        np.arange(num_tokens, dtype=np.int32),
    )
    alloc.add_request("first", token_ids=prompt)
    alloc.commit(["first"], prompt)
    alloc.free_request("first")

    def begin() -> Iterator[None]:
        while True:
            assert alloc.add_request("again", 0, token_ids=prompt).num_cached[0] > num_tokens - 2 * SIZE
            alloc.free_request("again")
            yield

    return mean_of_steps(3, begin)


def take_with_eviction() -> float:
    """Nanoseconds per block of giving back 16,384 blocks with identities and taking them again, which evicts the content."""
    count, best = 16_384, math.inf
    alloc = BlockAllocator(count, SIZE, prefix_caching=True)
    for repeat in range(8):
        alloc.add_request("A", count * SIZE)
        alloc.commit(["A"], np.arange(repeat << 20, (repeat << 20) + count * SIZE, dtype=np.int32))
        blocks = np.array(alloc.tables["A"])
        began = time.perf_counter_ns()
        alloc.pool.release(blocks)
        taken = alloc.pool.take(count)
        best = min(best, time.perf_counter_ns() - began)
        alloc.pool.release(taken)  # the pool is full again, and the table of "A" stale: begin anew
        alloc = BlockAllocator(count, SIZE, prefix_caching=True)
    return best / count


def metadata_bytes() -> float:
    """Bytes of arrays per block of an allocator with a prefix cache, its tables aside."""
    alloc = BlockAllocator(1 << 14, SIZE, prefix_caching=True)
    arrays: dict[int, int] = {}
    objects: list[object] = [alloc.pool, alloc._cache]
    seen: set[int] = set()
    while objects:
        item = objects.pop()
        if isinstance(item, np.ndarray) and item.base is None:
            arrays[id(item)] = item.nbytes
        elif id(item) not in seen and type(item).__module__.startswith("cupaged"):
            seen.add(id(item))
            objects += vars(item).values()
    return sum(arrays.values()) / alloc.num_blocks


def replay(path: str, num_blocks: int) -> float:
    """Seconds of finding, allocating, committing and freeing every prompt of a Mooncake trace, 512 tokens made from each of its ids."""
    alloc, total = BlockAllocator(num_blocks, SIZE, prefix_caching=True), 0
    with open(path) as lines:
        for line in lines:
            entry = json.loads(line)
            ids = np.array(entry["hash_ids"], np.int32)
            prompt = (ids[:, None] * 512 + np.arange(512, dtype=np.int32)).reshape(-1)[: entry["input_length"]]
            began = time.perf_counter_ns()
            found = int(alloc.add_request("A", token_ids=prompt).num_cached[0])
            alloc.commit(["A"], prompt[found:])
            alloc.free_request("A")
            total += time.perf_counter_ns() - began
    return total / 1e9


def works(trace: str) -> list[Work]:
    table = [
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
        Work("cached prompt of 100,000 tokens found", lambda: match() / 1e3, "us", 2000, "match", 1 / 1e3, 10),
        Work(
            "one token each and commit, 1024",
            lambda: decode_and_commit(1024) / 1024,
            "ns/seq",
            250,
            "decode+cache:1024",
            1,
        ),
        Work("take with eviction and return, 16,384 blocks", take_with_eviction, "ns/block", 682 / 15, "evict", 1, 15),
        Work("metadata, stored tokens included", metadata_bytes, "B/block", 160),
    ]
    if trace:
        blocks = 500_000
        peer = f"replay:{trace}:{blocks}"
        table.append(Work("replay of a Mooncake trace", lambda: replay(trace, blocks), "s", math.inf, peer, 1, 10))
    return table


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
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="lines whose name has this in it")
    parser.add_argument(
        "--trace", default="", help="a Mooncake trace (JSON lines with hash_ids) to replay; takes minutes"
    )
    options = parser.parse_args()
    chosen = [work for work in works(options.trace) if options.only in work.name]
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
