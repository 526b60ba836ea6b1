"""Speed of attention on the CPU: decode and prefill beside peers, in one run. `python bench/cpu_attention.py [--help]`

Columns: best time a call, GB/s of visible K and V, fraction of the read bandwidth measured in the same minutes over as many bytes with
all threads, and how many times longer the peers take. Peers (torch, and vLLM's CPU kernel) live in another Python, named by the
environment variable CUPAGED_VLLM_PYTHON; it runs as one subprocess that takes turns with ours. Without it those columns are empty.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numba
import numpy as np

import cupaged
from cupaged import reference
from cupaged.arrays import numpy_dtype
from cupaged.cpu import address, run
from cupaged.cpu_vector import WIDTH, add, as_pointer, fetch_add, load, poke_float, splat, total, worker
from cupaged.plan import check_metadata

PIECE = 1 << 16  # bytes that a reader takes at a time


@worker
def _read(params: int, number: int) -> None:
    p = numba.carray(as_pointer(params), 4, np.int64)  # counter, address, bytes, sink
    while True:
        at = fetch_add(params, PIECE)
        if at >= p[2]:
            break
        begin = p[1] + at
        a = b = c = d = splat(0.0)
        step = 4 * WIDTH
        for x in range(begin, begin + min(PIECE, p[2] - at), 4 * step):
            a, b = add(a, load(x)), add(b, load(x + step))
            c, d = add(c, load(x + 2 * step)), add(d, load(x + 3 * step))
        poke_float(p[3] + 64 * number, total(add(add(a, b), add(c, d))))


def best_seconds(call: Callable[[], object], seconds: float) -> float:
    call()  # what another contender pushed out of the caches comes back
    best = math.inf
    until = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        best = min(best, end - start)
        if end > until:
            return best


def read_bandwidth(pool: np.ndarray) -> Callable[[], object]:
    """A call that reads all of `pool` with all threads and does nothing else."""
    sink = np.zeros((numba.get_num_threads(), 16), np.float32)
    params = np.array([0, address(pool), pool.nbytes // (16 * WIDTH) * (16 * WIDTH), address(sink)])

    def call() -> None:
        params[0] = 0
        run(_read.address, address(params), numba.get_num_threads())

    return call


class Ours:
    """One configuration on this package."""

    def __init__(self, config: dict[str, Any]) -> None:
        c = config
        columns = -(-c["context"] // c["block_size"])
        rng = np.random.default_rng(0)
        dtype = numpy_dtype(c["dtype"])
        shape = (c["batch"] * columns, 2, c["num_kv_heads"], c["block_size"], c["head_dim"])
        raw = np.empty(math.prod(shape) * dtype.itemsize + 64, np.uint8)
        begin = -address(raw) % 64  # aligned as the peers' memory is
        self.pool = raw[begin : begin + raw.size - 64].view(dtype).reshape(shape)
        some = rng.standard_normal(1 << 16, np.float32).astype(dtype)
        flat = self.pool.reshape(-1)
        for at in range(0, flat.size, some.size):
            flat[at : at + some.size] = some[: flat.size - at]
        self.tables = rng.permutation(shape[0]).astype(np.int32).reshape(c["batch"], columns)
        self.lens = np.full(c["batch"], c["context"], np.int32)
        self.starts = np.arange(c["batch"] + 1, dtype=np.int32) * c["rows"]
        self.q = rng.standard_normal((c["batch"] * c["rows"], c["num_heads"], c["head_dim"]), np.float32).astype(dtype)
        self.out = np.empty_like(self.q)
        self.plan = check_metadata(self.tables, self.lens, self.starts, block_size=c["block_size"], num_blocks=shape[0])

    def attend(self) -> None:
        cupaged.paged_attention(self.q, self.pool[:, 0], self.pool[:, 1], None, None, plan=self.plan, out=self.out)

    def numpy(self) -> None:
        reference.paged_attention(
            self.q, self.pool[:, 0], self.pool[:, 1], self.tables, self.lens, query_start_loc=self.starts
        )


class Peers:
    """The subprocess with torch and vLLM, or nothing."""

    def __init__(self) -> None:
        python = os.environ.get("CUPAGED_VLLM_PYTHON")
        self.process = None
        if python:
            self.process = subprocess.Popen(
                [python, str(Path(__file__).with_name("cpu_peer.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=None if os.environ.get("CUPAGED_PEER_ERRORS") else subprocess.DEVNULL, text=True,
            )  # fmt: skip
            atexit.register(self.process.kill)  # torch may not end by itself when its input does

    def times(self, config: dict[str, Any], seconds: float) -> dict[str, float]:
        if self.process is None or self.process.stdin is None or self.process.stdout is None:
            return {}
        self.process.stdin.write(json.dumps({"config": config, "seconds": seconds}) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return dict(json.loads(answer)) if answer else {}


def configurations(kind: str) -> Iterator[dict[str, Any]]:
    def all_of(batches: tuple[int, ...], contexts: tuple[int, ...], prefill: bool) -> Iterator[dict[str, Any]]:
        for dtype in ("float32", "float16", "bfloat16"):
            for num_heads, num_kv_heads in ((32, 32), (32, 8), (9, 3)):
                for head_dim in (64, 128):
                    for block_size in (16, 32):
                        for batch in batches:
                            for context in contexts:
                                yield {
                                    "batch": batch, "context": context, "rows": context if prefill else 1, "num_heads": num_heads,
                                    "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype, "block_size": block_size,
                                }  # fmt: skip

    if kind in ("decode", "all"):
        yield from all_of((1, 8, 64), (128, 2048, 16384), False)
    if kind in ("prefill", "all"):
        yield from all_of((1,), (512, 2048), True)


def kv_bytes(c: dict[str, Any]) -> int:
    item = numpy_dtype(c["dtype"]).itemsize
    return int(2 * c["batch"] * c["context"] * c["num_kv_heads"] * c["head_dim"] * item)


def measure(config: dict[str, Any], peers: Peers, rounds: int, seconds: float, with_numpy: bool) -> dict[str, float]:
    """The median over rounds of each contender's best time; contenders take turns within a round."""
    ours = Ours(config)
    ours.attend()
    read = read_bandwidth(ours.pool)
    read()
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        found = {"ours": best_seconds(ours.attend, seconds), "read": best_seconds(read, seconds)}
        found |= peers.times(config, seconds)
        for name, t in found.items():
            times.setdefault(name, []).append(t)
    if with_numpy:
        times["numpy"] = [best_seconds(ours.numpy, 0.0)]
    return {name: float(np.median(t)) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["decode", "prefill", "all"], default="all")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="name=value or name=value,value pairs that rows must have, such as dtype=float16 batch=1,8",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.05, help="a contender and round")
    parser.add_argument("--memory", type=float, default=2.0, help="GB of K and V; larger rows are left out")
    parser.add_argument("--numpy", action="store_true", help="also plain NumPy (slow)")
    arguments = parser.parse_args()
    wanted = {name: values.split(",") for name, values in (pair.split("=") for pair in arguments.only)}
    peers = Peers()
    print(f"{numba.get_num_threads()} threads, vectors of {WIDTH} float32")
    print(
        "batch context rows heads    dim dtype    block       us   GB/s  of read  vllm/ours  gather/ours  sdpa/ours  numpy/ours"
    )
    left_out = 0
    ratios: dict[str, list[float]] = {}
    for c in configurations(arguments.kind):
        if any(str(c[name]) not in values for name, values in wanted.items()):
            continue
        if kv_bytes(c) > arguments.memory * 1e9:
            left_out += 1
            continue
        t = measure(c, peers, arguments.rounds, arguments.seconds, arguments.numpy)
        columns = []
        for name in ("vllm", "gather", "sdpa", "numpy"):
            ratio = t[name] / t["ours"] if name in t else math.nan
            ratios.setdefault(name, []).append(ratio)
            columns.append("" if math.isnan(ratio) else f"{ratio:.2f}")
        print(
            f"{c['batch']:5} {c['context']:7} {c['rows']:4} {c['num_heads']:2}/{c['num_kv_heads']:<2}  {c['head_dim']:5} {c['dtype']:8} "
            f"{c['block_size']:5} {t['ours'] * 1e6:8.1f} {kv_bytes(c) / t['ours'] / 1e9:6.2f} {t['read'] / t['ours']:8.2f} "
            f"{columns[0]:>10} {columns[1]:>12} {columns[2]:>10} {columns[3]:>11}", flush=True,
        )  # fmt: skip
    for name, values in ratios.items():
        known = np.array([v for v in values if not math.isnan(v)])
        if known.size:
            print(
                f"{name}/ours: geometric mean {np.exp(np.log(known).mean()):.2f}, least {known.min():.2f}, rows {known.size}"
            )
    if left_out:
        print(f"{left_out} rows left out: more than {arguments.memory} GB of K and V")


if __name__ == "__main__":
    sys.exit(main())
