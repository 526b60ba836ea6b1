"""What bounds decode on this processor: the same reads without the arithmetic, the same arithmetic without the reads.

`python bench/cpu_bounds.py`, about two minutes. First the two products of decode on 16 tokens in the first cache, on
one core: GB/s of pages, and the part of the peak of fused products, which is measured too. Then whole calls, in GB/s of K and V:

    in order    every byte of K and V read by all threads in the order of the addresses
    runs        the same in the order in which decode reads them: the heads of an item in one block, block after block
    prefetched  the same with the prefetches of decode: the next head's rows, or with several query heads the head's in the next block
    L2          decode where tables name the same few blocks again and again, so that nothing comes from beyond the second cache
    ours        decode, on shuffled tables

What is memory-bound cannot be faster than `runs`, and what prefetches not faster than `prefetched`; what is bound by arithmetic not
faster than `L2`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numba
import numpy as np
from numba import njit, types

from cupaged.cpu import address, run
from cupaged.cpu_formats import ITEM_BYTES, KV_CODES
from cupaged.cpu_products import LINE, scores, weigh
from cupaged.cpu_vector import (
    WIDTH,
    add,
    as_pointer,
    emit_prefetch,
    fma,
    load,
    operation,
    peek_long,
    poke_float,
    splat,
    store,
    total,
)  # fmt: skip
from cupaged.cpu_work import CALL, chunks_of, heads_of_item, kernel_of

bench = import_module(".cpu_attention", __package__) if __package__ else import_module("cpu_attention")
TOKENS = 16  # of the products in the first cache
TILE = 64  # tokens whose K decode reads before their V
L2_BYTES = 256 << 10
SHAPES = (  # dtype, heads, head_dim, block_size, batch, context
    ("float32", (32, 32), 128, 16, 64, 128), ("float32", (32, 8), 128, 16, 8, 2048), ("float32", (9, 3), 64, 16, 8, 16384),
    ("float16", (32, 32), 64, 32, 1, 2048), ("float16", (32, 32), 128, 16, 8, 2048), ("float16", (32, 8), 64, 16, 8, 2048),
    ("float16", (32, 8), 128, 16, 64, 2048), ("float16", (9, 3), 64, 16, 8, 16384), ("bfloat16", (32, 8), 128, 16, 64, 2048),
)  # fmt: skip

prefetch = operation(types.void, [types.int64], emit_prefetch)


@bench.uncached_worker
def _read_runs(params: int, number: int) -> None:
    p = numba.carray(
        as_pointer(params), 6, np.int64
    )  # addresses of runs, how many, bytes of one, runs ahead, sink, workers
    runs, size, ahead = p[0], p[2], p[3]
    step = 4 * WIDTH
    a = b = c = d = splat(0.0)
    first, last = p[1] * number // p[5], p[1] * (number + 1) // p[5]
    for r in range(first, last):
        begin = peek_long(runs + 8 * r)
        distance = peek_long(runs + 8 * min(r + ahead, last - 1)) - begin
        for x in range(begin, begin + size, 4 * step):
            if ahead:
                for line in range(0, 4 * step, LINE):
                    prefetch(x + distance + line)
            a, b = add(a, load(x)), add(b, load(x + step))
            c, d = add(c, load(x + 2 * step)), add(d, load(x + 3 * step))
    poke_float(p[4] + 64 * number, total(add(add(a, b), add(c, d))))


def item_of(ours: Any) -> tuple[int, int]:
    """How many KV heads and keys decode puts in one item of this configuration."""
    call = np.zeros(1, CALL)
    _, heads, _ = ours.q.shape
    call["num_seqs"], call["starts"], call["lens"] = len(ours.lens), address(ours.starts), address(ours.lens)
    call["num_kv_heads"], call["k_head"], call["causal"] = ours.k_cache.shape[1], ours.k_cache.strides[1], 1
    call["group"] = group = heads // ours.k_cache.shape[1]
    length, _, _ = chunks_of(call[0], 1, int(ours.lens[0]))
    return heads_of_item(call[0], kernel_of(group), numba.get_num_threads()), length


def runs_of(ours: Any) -> tuple[np.ndarray, int]:
    """Addresses of one head's rows in one block, in decode's order, and how many runs ahead decode prefetches."""
    heads, length = item_of(ours)
    kv_heads, size = ours.k_cache.shape[1:3]
    base, strides = address(ours.pool), ours.pool.strides
    runs = []
    for row, context in zip(ours.tables, ours.lens, strict=True):
        for begin in range(0, context, length):
            for head in range(0, kv_heads, heads):
                for j in range(begin, min(begin + length, context), TILE):
                    blocks = row[j // size : (min(j + TILE, begin + length, context) - 1) // size + 1].astype(np.int64)
                    within = np.arange(head, min(head + heads, kv_heads)) * strides[2]
                    runs += [(base + n * strides[1] + blocks[:, None] * strides[0] + within).ravel() for n in (0, 1)]
    return np.concatenate(runs), heads if ours.q.shape[1] > kv_heads else 1


def read_runs(ours: Any, prefetched: bool) -> Callable[[], None]:
    runs, ahead = runs_of(ours)
    threads = numba.get_num_threads()
    size = ours.k_cache[0, 0].nbytes
    assert runs.size * size == ours.pool.nbytes and size % (16 * WIDTH) == 0
    sink = np.zeros((threads, 16), np.float32)
    params = np.array([address(runs), runs.size, size, ahead * prefetched, address(sink), threads])

    def call() -> None:
        run(_read_runs.address, address(params), threads)
        assert sink.size and runs.size  # kept as long as this

    return call


def whole_call(shape: tuple[Any, ...], seconds: float, rounds: int) -> dict[str, float]:
    """GB/s of each kind of call on one configuration."""
    dtype, (heads, kv_heads), head_dim, block_size, batch, context = shape
    config = {
        "dtype": dtype, "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "block_size": block_size,
        "batch": batch, "context": context, "rows": 1,
    }  # fmt: skip
    ours = bench.Ours(config)
    few = max(1, L2_BYTES // ours.pool[0].nbytes)
    again = (np.arange(ours.tables.size, dtype=np.int32) % few).reshape(ours.tables.shape)

    def attend(plan: Any) -> Callable[[], None]:
        def call() -> None:
            ours.plan = plan
            ours.attend()

        return call

    calls = {
        "in order": bench.read_bandwidth(ours.pool), "runs": read_runs(ours, False), "prefetched": read_runs(ours, True),
        "L2": attend(ours.plan_of(again)), "ours": attend(ours.plan),
    }  # fmt: skip
    best = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            best[name] = min(best[name], bench.best_seconds(call, seconds))
    return {name: ours.pool.nbytes / t / 1e9 for name, t in best.items()}


def best_of(call: Callable[[], None]) -> float:
    call()
    times = []
    for _ in range(60):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


@njit
def _fused(rounds: int, place: int) -> None:
    a = b = c = d = e = f = g = h = i = j = splat(0.0)
    x = load(place)
    for _ in range(rounds):
        a, b, c, d, e = fma(x, x, a), fma(x, x, b), fma(x, x, c), fma(x, x, d), fma(x, x, e)
        f, g, h, i, j = fma(x, x, f), fma(x, x, g), fma(x, x, h), fma(x, x, i), fma(x, x, j)
    store(place, add(add(add(a, b), add(c, d)), add(add(add(e, f), add(g, h)), add(i, j))))


def peak() -> float:
    """Fused products of one core, in 1e9 operations a second: two each."""
    place, rounds = np.zeros(WIDTH, np.float32), 100_000
    return 2 * WIDTH * 10 * rounds / best_of(lambda: _fused(rounds, address(place))) / 1e9


def products(kv: int, rows: int, head_dim: int) -> tuple[float, float]:
    """GB/s of K and of V that one core multiplies out of its first cache."""

    @njit
    def keys(n: int, q: int, places: int, target: int) -> None:
        for _ in range(n):
            scores(kv, rows, q, places, 0, places, 0, target, head_dim, TOKENS)

    @njit
    def values(n: int, out: int, places: int, weights: int) -> None:
        for _ in range(n):
            weigh(kv, rows, weights, places, 0, places, 0, out, head_dim, TOKENS)

    row = head_dim * ITEM_BYTES[kv]
    page, query, weights = (
        np.zeros(TOKENS * row, np.uint8),
        np.zeros(rows * head_dim, np.float32),
        np.zeros(128, np.float32),
    )
    places = address(page) + np.minimum(np.arange(TOKENS * 2), TOKENS - 1) * row
    n = 2_000_000 // (TOKENS * head_dim)
    arguments = (n, address(query), address(places), address(weights))
    k, v = (n * page.nbytes / best_of(lambda call=call: call(*arguments)) / 1e9 for call in (keys, values))
    return k, v


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.06, help="a kind of call and round")
    arguments = parser.parse_args()
    top = peak()
    print(
        f"# {numba.get_num_threads()} threads, vectors of {WIDTH} float32; fused products of one core: {top:.0f} GFLOP/s"
    )
    print("pages     rows  dim   K GB/s  of peak   V GB/s  of peak")
    for name, kv in KV_CODES.items():
        for rows in (1, 3, 4):
            for head_dim in (64, 128):
                found = products(kv, rows, head_dim)
                cells = "".join(f"  {x:7.1f}  {2 * x / ITEM_BYTES[kv] * rows / top:7.2f}" for x in found)
                print(f"{name:<9} {rows:4} {head_dim:4}{cells}")
    print("pages     heads  dim  block  batch  context   MB  in order   runs  prefetched     L2   ours")
    for shape in SHAPES:
        dtype, heads, head_dim, block_size, batch, context = shape
        g = whole_call(shape, arguments.seconds, arguments.rounds)
        size = 2 * batch * context * heads[1] * head_dim * ITEM_BYTES[KV_CODES[dtype]] >> 20
        print(
            f"{dtype:<9} {heads[0]:>2}/{heads[1]:<2} {head_dim:4} {block_size:6} {batch:6} {context:8} {size:4} {g['in order']:9.1f} "
            f"{g['runs']:6.1f} {g['prefetched']:11.1f} {g['L2']:6.1f} {g['ours']:6.1f}"
        )


if __name__ == "__main__":
    main()
