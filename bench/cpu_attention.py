"""Speed of attention on the CPU: decode and prefill beside peers, in one run. `python bench/cpu_attention.py [--help]`

Columns: best time a call, GB/s of visible K and V, fraction of the read bandwidth measured in the same moments over as many bytes, one
after another, with all threads, and how many times longer the peers take. Peers (torch, and vLLM's CPU kernel) live in another Python,
named by the environment variable CUPAGED_VLLM_PYTHON; it runs as one subprocess that takes turns with ours. Without it those columns
are empty, as they are for fp8 pages (`--kind fp8`, which puts float16 beside them). `numpy` gathers pages and multiplies in float32
with plain NumPy; it is left out where K and V are above 64 MB.

A long table can be measured in slices: with `--save FILE.json` rows of the same code that stand in the file are not measured again,
`--slice SECONDS` stops after so long, and the table printed and written to FILE.txt is that of all rows in the file.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import numpy as np

import cupaged
from cupaged.arrays import numpy_dtype
from cupaged.cpu import address, run
from cupaged.cpu_vector import WIDTH, add, as_pointer, fetch_add, load, poke_float, splat, total
from cupaged.cpu_work import SOURCE
from cupaged.metadata import host_metadata
from cupaged.plan import Plan

# run as a script or as part of the package
results = import_module(".results", __package__) if __package__ else import_module("results")
PIECE = 1 << 16  # bytes that a reader takes at a time
MOST_NUMPY = 64 << 20  # bytes of K and V up to which plain NumPy is measured
QUICK = {
    "batch": ["1", "8"],
    "context": ["512", "2048"],
    "block_size": ["16"],
    "head_dim": ["128"],
    "dtype": ["float32", "float16"],
}


# Not kept on disk: what a script has compiled is of a module that a package does not find.
uncached_worker = numba.cfunc(numba.types.void(numba.int64, numba.int64), error_model="numpy")


@uncached_worker
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
    time.sleep(0.03)  # threads of another contender may still be spinning
    call()  # what another contender pushed out of the caches comes back
    best, calls = math.inf, 0
    until = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        best, calls = min(best, end - start), calls + 1
        if end > until and (calls >= 5 or end > until + 10 * seconds):
            return best


def read_bandwidth(pool: np.ndarray) -> Callable[[], object]:
    """A call that reads all of `pool` with all threads and does nothing else."""
    sink = np.zeros((numba.get_num_threads(), 16), np.float32)
    params = np.array([0, address(pool), pool.nbytes // (16 * WIDTH) * (16 * WIDTH), address(sink)])

    def call() -> None:
        params[0] = 0
        run(_read.address, address(params), len(sink))  # which also keeps `sink` as long as this

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
        fp8 = c["dtype"].startswith("fp8")
        self.kv_dtype = c["dtype"] if fp8 else None
        pages = self.pool.view(np.uint8) if fp8 else self.pool
        self.k_cache, self.v_cache = pages[:, 0], pages[:, 1]
        self.tables = rng.permutation(shape[0]).astype(np.int32).reshape(c["batch"], columns)
        self.lens = np.full(c["batch"], c["context"], np.int32)
        self.starts = np.arange(c["batch"] + 1, dtype=np.int32) * c["rows"]
        queries = numpy_dtype("float16") if fp8 else dtype
        self.q = rng.standard_normal((c["batch"] * c["rows"], c["num_heads"], c["head_dim"]), np.float32).astype(
            queries
        )
        self.out = np.empty_like(self.q)
        self.plan = self.plan_of(self.tables)

    def plan_of(self, tables: np.ndarray) -> Plan:
        limits = {"block_size": self.pool.shape[3], "num_blocks": self.pool.shape[0]}
        return Plan(*host_metadata(tables, self.lens, self.starts, **limits), **limits)

    def attend(self) -> None:
        cupaged.paged_attention(
            self.q, self.k_cache, self.v_cache, None, None, plan=self.plan, out=self.out, kv_dtype=self.kv_dtype
        )

    def numpy(self) -> None:
        """Gather, convert, multiply: what one writes without a kernel."""
        _, _, kv_heads, _, dim = self.pool.shape
        for n, row in enumerate(self.tables):
            pages = self.pool[row].astype(np.float32)  # [columns, 2, kv_heads, block_size, head_dim]
            k, v = pages.transpose(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, dim)[:, :, : self.lens[n]]
            begin, end = self.starts[n : n + 2]
            m = end - begin
            # rows of a KV head: its query heads, each with m queries
            q = self.q[begin:end].astype(np.float32).swapaxes(0, 1).reshape(kv_heads, -1, dim)
            s = q @ k.swapaxes(1, 2) * np.float32(dim**-0.5)
            if m > 1:
                hidden = np.arange(self.lens[n]) > np.arange(m)[:, None] + (self.lens[n] - m)
                s = np.where(np.tile(hidden, (s.shape[1] // m, 1)), np.float32(-np.inf), s)
            s = np.exp(s - s.max(axis=2, keepdims=True))
            out = (s / s.sum(axis=2, keepdims=True)) @ v
            self.out[begin:end] = out.reshape(-1, m, dim).swapaxes(0, 1)


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

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self.process is None or self.process.stdin is None or self.process.stdout is None:
            return {}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        return dict(json.loads(answer)) if answer else {}

    def times(self, config: dict[str, Any], seconds: float) -> dict[str, float]:
        return self._ask({"config": config, "seconds": seconds})

    def versions(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self._ask({"versions": True}).items()) or "none"


def configurations(kind: str) -> Iterator[dict[str, Any]]:
    def all_of(batches: tuple[int, ...], contexts: tuple[int, ...], prefill: bool) -> Iterator[dict[str, Any]]:
        for dtype in ("fp8_e4m3", "fp8_e5m2", "float16") if kind == "fp8" else ("float32", "float16", "bfloat16"):
            for num_heads, num_kv_heads in ((32, 32), (32, 8), (9, 3)):
                for head_dim in (64, 128):
                    for block_size in (16, 32):
                        for batch in batches:
                            for context in contexts:
                                yield {
                                    "batch": batch, "context": context, "rows": context if prefill else 1, "num_heads": num_heads,
                                    "num_kv_heads": num_kv_heads, "head_dim": head_dim, "dtype": dtype, "block_size": block_size,
                                }  # fmt: skip

    if kind in ("decode", "fp8", "all"):
        yield from all_of((1, 8, 64), (128, 2048, 16384), False)
    if kind in ("prefill", "all"):
        yield from all_of((1,), (512, 2048), True)


def kv_bytes(c: dict[str, Any]) -> int:
    item = numpy_dtype(c["dtype"]).itemsize
    return int(2 * c["batch"] * c["context"] * c["num_kv_heads"] * c["head_dim"] * item)


def measure(config: dict[str, Any], peers: Peers, rounds: int, seconds: float, with_numpy: bool) -> dict[str, float]:
    """Each contender's best time over all rounds; contenders take turns within a round. NumPy has one turn, if any."""
    ours = Ours(config)
    ours.attend()
    read = read_bandwidth(ours.pool)
    times: dict[str, float] = {}
    for _ in range(rounds):
        found = {"ours": best_seconds(ours.attend, seconds), "read": best_seconds(read, seconds)}
        found |= peers.times(config, seconds)
        for name, t in found.items():
            times[name] = min(t, times.get(name, t))
    if with_numpy and kv_bytes(config) <= MOST_NUMPY:
        times["numpy"] = best_seconds(ours.numpy, 0.0)
    return times


def overhead() -> float:
    """Seconds of a call on one sequence of 16 tokens, one head, plan and output given: the median of single calls."""
    c = {
        "batch": 1,
        "context": 16,
        "rows": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 64,
        "dtype": "float32",
        "block_size": 16,
    }
    ours = Ours(c)
    times = []
    for _ in range(3000):
        start = time.perf_counter()
        ours.attend()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def table(rows: list[dict[str, Any]], head: list[str]) -> str:
    lines = [f"# {line}" for line in head]
    lines.append(
        "batch context rows heads    dim dtype    block       us   GB/s  of read  vllm/ours  gather/ours  sdpa/ours  numpy/ours"
    )
    ratios: dict[str, list[float]] = {}
    for c, t in ((row["config"], row["seconds"]) for row in rows):
        columns = []
        for name in ("vllm", "gather", "sdpa", "numpy"):
            columns.append("")
            if name in t:
                ratio = t[name] / t["ours"]
                kind = f"{'decode' if c['rows'] == 1 else 'prefill'} {name}"
                ratios.setdefault(kind, []).append(ratio)
                columns[-1] = f"{ratio:.2f}"
        lines.append(
            f"{c['batch']:5} {c['context']:7} {c['rows']:4} {c['num_heads']:2}/{c['num_kv_heads']:<2}  {c['head_dim']:5} {c['dtype']:8} "
            f"{c['block_size']:5} {t['ours'] * 1e6:8.1f} {kv_bytes(c) / t['ours'] / 1e9:6.2f} {t['read'] / t['ours']:8.2f} "
            f"{columns[0]:>10} {columns[1]:>12} {columns[2]:>10} {columns[3]:>11}".rstrip()
        )  # fmt: skip
    for name, found in sorted(ratios.items()):
        values = np.array(found)
        mean = np.exp(np.log(values).mean())
        lines.append(
            f"{name}/ours: geometric mean {mean:.2f}, least {values.min():.2f}, {(values < 1).sum()} of {values.size} rows below 1"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["decode", "prefill", "fp8", "all"], default="all")
    parser.add_argument(
        "--full", action="store_true", help="all rows; without it, --rows or --save a few, in about two minutes"
    )
    parser.add_argument(
        "--rows",
        "--only",
        nargs="*",
        default=[],
        help="name=value or name=value,value pairs that rows must have, such as dtype=float16 batch=1,8",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.05, help="a contender and round")
    parser.add_argument("--memory", type=float, default=2.0, help="GB of K and V; larger rows are left out")
    parser.add_argument("--save", type=Path, help="a JSON file that keeps rows; the table goes beside it as .txt")
    parser.add_argument("--slice", type=float, default=math.inf, help="stop after so many seconds")
    arguments = parser.parse_args()
    wanted = {name: values.split(",") for name, values in (pair.split("=") for pair in arguments.rows)}
    if not (arguments.full or wanted):
        wanted = QUICK
    chosen = [
        c for c in configurations(arguments.kind) if all(str(c[name]) in values for name, values in wanted.items())
    ]
    held: dict[str, Any] = {}
    if arguments.save and arguments.save.exists():
        held = json.loads(arguments.save.read_text())
    known = {json.dumps(row["config"]): row for row in held.get("rows", []) if row["code"] == SOURCE}
    fitting = [c for c in chosen if kv_bytes(c) <= arguments.memory * 1e9]
    to_do = [c for c in fitting if json.dumps(c) not in known]
    random.Random(0).shuffle(to_do)  # whatever part of a table is measured stands for all of it
    begin = time.perf_counter()
    peers = Peers()
    own = overhead()
    for n, c in enumerate(to_do):
        if time.perf_counter() - begin > arguments.slice:
            break
        seconds = measure(c, peers, arguments.rounds, arguments.seconds, True)
        known[json.dumps(c)] = {"config": c, "seconds": seconds, "code": SOURCE}
        done = 30 * (n + 1) // len(to_do)
        print(f"\r[{'#' * done}{'.' * (30 - done)}] {n + 1}/{len(to_do)} ", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    rows = [known[json.dumps(c)] for c in fitting if json.dumps(c) in known]
    head = [
        f"{time.strftime('%Y-%m-%d')}, {results.machine()['processor']}, {numba.get_num_threads()} threads, vectors of {WIDTH} float32",
        f"Python {platform.python_version()}, NumPy {np.__version__}, Numba {numba.__version__}; peers: {peers.versions()}",
        f"a call on 16 tokens: {own * 1e6:.0f} us",
        f"{len(fitting) - len(rows)} rows not measured yet; {len(chosen) - len(fitting)} left out: above {arguments.memory} GB of K and V",
    ]
    text = table(rows, head)
    print(text)
    if arguments.save:
        others = [row for key, row in known.items() if key not in {json.dumps(c) for c in fitting}]
        content = {
            "name": "cpu-attention", "command": "python bench/cpu_attention.py --full", "date": time.strftime("%Y-%m-%d"),
            "machine": results.machine(), "versions": results.versions(),
            "notes": {"peers": peers.versions(), "call on 16 tokens": f"{own * 1e6:.0f} us"},
            "rows": [{**figure(row), **row} for row in rows + others],
        }  # fmt: skip
        arguments.save.write_text(json.dumps(content, separators=(",", ":")).replace('{"group"', '\n{"group"') + "\n")
        arguments.save.with_suffix(".txt").write_text(text + "\n")


def figure(row: dict[str, Any]) -> dict[str, Any]:
    """A measured row as the result files have it."""
    c, us = row["config"], {name: seconds * 1e6 for name, seconds in row["seconds"].items()}
    decode = c["rows"] == 1
    work = (
        f"{'decode' if decode else 'prefill'} {c['batch']} x {c['context']}, heads {c['num_heads']}/{c['num_kv_heads']}, "
        f"dim {c['head_dim']}, {c['dtype']}, blocks of {c['block_size']}"
    )
    more = {
        "gb_s": kv_bytes(c) / us["ours"] / 1e3,
        "peers": {name: us[name] for name in ("gather", "sdpa", "numpy") if name in us},
    }
    # a prefill is bound by arithmetic: reading says nothing about it
    return asdict(
        results.Row("cpu-attention", work, us["ours"], "us", us.get("vllm"), us["read"] if decode else None, more)
    )


if __name__ == "__main__":
    main()
