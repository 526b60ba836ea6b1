"""Speed of paged attention on a GPU, against the bandwidth that plain reading reaches in the same run, and against peers.

A case is timed three ways: calls one after the other ("eager"), the same calls captured in a CUDA graph ("graph"), and the host's
own time for a call, with plan and `out` and with neither. Every call reads another cache of a rotation that is larger than four times
the L2 cache, with block tables that are a random permutation of the pool. The yardstick is a kernel that only reads and sums the same
caches. Times are medians over repeated rounds of GPU events; bytes are the keys and values of visible tokens, once per KV head.

Needs CuPy alone. `python -m bench.gpu_check` runs it, and peers after it (gpu_peers.py), and `make bench`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import numpy as np

import cupaged
from cupaged import classic
from cupaged.arrays import FP8_DTYPES, numpy_dtype

READ_SUM = r"""
extern "C" __global__ void read_sum(const uint4* data, long long n, unsigned* out) {
  unsigned sum = 0;
  const long long stride = (long long)gridDim.x * blockDim.x;
  long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < n; i += 4 * stride) {
    const uint4 a = data[i], b = data[i + stride], c = data[i + 2 * stride], d = data[i + 3 * stride];
    sum += a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < n; i += stride) sum += data[i].x ^ data[i].y ^ data[i].z ^ data[i].w;
  if (sum == 0x9e3779b9u) out[0] = sum;  // keeps the loads
}
"""


@dataclass(frozen=True)
class Case:
    """One step: `batch` sequences of `context` tokens, the last `rows` of each as queries."""

    batch: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "float16"
    kv_dtype: str | None = None
    classic: bool = False  # also time the original kernels
    shared: int = 0  # tokens that all sequences begin with
    share_prefix: bool = True
    order: str | None = None  # "page", "layer": a pool of LAYERS layers in POOL_SHARE of the memory; None: of one layer
    rows: int = 1  # query rows of a sequence: 1 is decode, more is prefill

    @property
    def name(self) -> str:
        kv = f"{self.dtype}-{self.kv_dtype}" if self.kv_dtype else self.dtype
        more = f"-{'once' if self.share_prefix else 'each'}{self.shared}" if self.shared else ""
        more += f"-{self.order}-major" if self.order else ""
        more += f"-rows{self.rows}" if self.rows > 1 else ""
        return f"b{self.batch}-ctx{self.context}-h{self.num_heads}/{self.num_kv_heads}-d{self.head_dim}-bs{self.block_size}-{kv}{more}"

    @property
    def kv_bytes(self) -> int:
        item = numpy_dtype(self.kv_dtype or self.dtype).itemsize
        tokens = self.batch * (self.context - self.shared) + self.shared
        return 2 * tokens * self.num_kv_heads * self.head_dim * item

    @property
    def flop(self) -> int:
        """Operations of both products over the tokens that each row may see."""
        visible = self.rows * self.context - self.rows * (self.rows - 1) // 2
        return 4 * self.batch * self.num_heads * self.head_dim * visible


LAYERS, POOL_SHARE = 32, 0.7
CASES = (  # what matters most comes first: the rest may not fit into the time
    *(Case(batch, 4096, classic=batch in (8, 32)) for batch in (1, 8, 32, 34, 128)),
    *(Case(32, 4096, order=order) for order in ("page", "layer")),
    Case(32, 512, classic=True), Case(1, 32768), Case(8, 32768), Case(1, 131072),
    Case(1, 4096, rows=4096), Case(8, 512, rows=512), Case(1, 32768, rows=2048),
    *(Case(32, 4096, block_size=block_size) for block_size in (1, 64, 256)),
    Case(32, 4096, num_heads=32, num_kv_heads=32), Case(32, 4096, num_heads=32, num_kv_heads=4), Case(32, 4096, num_heads=64),
    Case(32, 4096, num_heads=28, num_kv_heads=4), Case(32, 4096, head_dim=64), Case(32, 4096, head_dim=256),
    Case(32, 4096, dtype="bfloat16"), Case(32, 4096, kv_dtype="fp8_e4m3"), Case(32, 4096, dtype="bfloat16", kv_dtype="fp8_e4m3"),
    Case(8, 4096, dtype="float32"),
    *(Case(b, n, shared=n - 256, share_prefix=on) for b, n in ((64, 4352), (8, 4352), (8, 1280)) for on in (True, False)),
)  # fmt: skip


@dataclass
class Result:
    """Microseconds a call, and the bandwidths that follow."""

    case: str
    kv_bytes: int
    flop: int
    read_gb_s: float
    eager_us: float
    graph_us: float
    host_us: float  # with plan and out
    host_alone_us: float  # with neither: metadata are compared, the result is allocated
    classic_us: dict[str, float] = field(default_factory=dict)  # "v1", "v2", captured
    peer_us: dict[str, float | str] = field(default_factory=dict)  # by name, captured; or why there is no time

    @property
    def gb_s(self) -> float:
        return self.kv_bytes / self.graph_us / 1e3

    @property
    def fraction(self) -> float:
        """Of the bandwidth that plain reading reaches."""
        return self.gb_s / self.read_gb_s

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "gb_s": self.gb_s,
            "fraction": self.fraction,
            "tflop_s": self.flop / self.graph_us / 1e6,
        }


@dataclass
class Arrays:
    """What a case attends over, on CuPy's current device; tables and lengths on the host."""

    pools: list[
        Any
    ]  # the rotation, each [blocks, 2, num_kv_heads, block_size, head_dim]; with `order`, pieces of one pool to be read
    layers: list[tuple[Any, Any]]  # keys and values of one call after the other
    tables: np.ndarray  # [batch, columns] int32
    lens: np.ndarray  # [batch] int32
    q: Any  # [batch * rows, num_heads, head_dim]


def arrays(case: Case) -> Arrays:
    """Random keys, values, queries, and tables that are a random permutation of the pool. Waits until all is there."""
    import cupy

    rng = np.random.default_rng(1)
    columns, alike = -(-case.context // case.block_size), case.shared // case.block_size
    needed = case.batch * (columns - alike) + alike
    page_dtype = np.dtype(np.uint8) if case.kv_dtype in FP8_DTYPES else numpy_dtype(case.dtype)
    block = (case.num_kv_heads, case.block_size, case.head_dim)
    if case.order is None:
        blocks = needed
        pools = [_random(cupy, (blocks, 2, *block), page_dtype) for _ in range(_copies(case))]
        layers = [(pool[:, 0], pool[:, 1]) for pool in pools]
    else:
        blocks = _pool_bytes() // (LAYERS * 2 * int(np.prod(block)) * page_dtype.itemsize)
        first = (blocks, LAYERS, 2) if case.order == "page" else (LAYERS, 2, blocks)
        pool = _random(cupy, (*first, *block), page_dtype)
        pools = list(
            pool.reshape(-1)[: case.kv_bytes * 8 // page_dtype.itemsize].reshape(8, -1)
        )  # what is read for comparison
        by_block = pool if case.order == "page" else cupy.moveaxis(pool, 2, 0)
        layers = [(by_block[:, i, 0], by_block[:, i, 1]) for i in range(LAYERS)]
    ids = rng.permutation(blocks)[:needed].astype(np.int32)
    tables = np.empty((case.batch, columns), np.int32)
    tables[:, :alike], tables[:, alike:] = ids[:alike], ids[alike:].reshape(case.batch, -1)
    lens = np.full(case.batch, case.context, np.int32)
    q = rng.standard_normal((case.batch * case.rows, case.num_heads, case.head_dim)).astype(np.float32)
    q = cupy.asarray(q.astype(numpy_dtype(case.dtype)))
    cupy.cuda.get_current_stream().synchronize()  # streams that do not wait for this one read all of it
    return Arrays(pools, layers, tables, lens, q)


def measure(case: Case, rounds: int = 7) -> Result:
    """Time one case on CuPy's current device."""
    import cupy

    made = arrays(case)
    layers, tables, lens, q = made.layers, made.tables, made.lens, made.q
    out, starts = cupy.empty_like(q), np.arange(case.batch + 1, dtype=np.int32) * case.rows
    plan = cupaged.plan(
        lens, tables, num_heads=case.num_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, block_size=case.block_size,
        dtype=case.dtype, kv_dtype=case.kv_dtype, share_prefix=case.share_prefix, device="cuda", query_start_loc=starts,
    )  # fmt: skip
    how = {"kv_dtype": case.kv_dtype, "share_prefix": case.share_prefix}

    def attend(i: int) -> None:
        cupaged.paged_attention(q, *layers[i % len(layers)], None, None, plan=plan, out=out, **how)

    def attend_alone(i: int) -> None:
        cupaged.paged_attention(q, *layers[i % len(layers)], tables, lens, query_start_loc=starts, **how)

    calls = max(len(layers), 10)
    result = Result(
        case.name, case.kv_bytes, case.flop, _read_bandwidth(made.pools, rounds), _eager(attend, calls, rounds),
        _captured(attend, calls, rounds), _host(attend, 200), _host(attend_alone, 200),
    )  # fmt: skip
    if case.classic:
        result.classic_us = _classic(case, made.pools, q, out, tables, lens, calls, rounds)
    return result


def _classic(
    case: Case, pools: list[Any], q: Any, out: Any, tables: np.ndarray, lens: np.ndarray, calls: int, rounds: int
) -> dict[str, float]:
    """The original kernels on the same bytes, seen in their layout."""
    import cupy

    x = 16 // pools[0].itemsize
    blocks, _, heads, size, dim = pools[0].shape
    caches = []
    for pool in pools:
        flat = pool.reshape(2, blocks, heads, size * dim)
        caches.append((flat[0].reshape(blocks, heads, dim // x, size, x), flat[1].reshape(blocks, heads, dim, size)))
    parts = -(-case.context // classic.PARTITION_SIZE)
    sums, tops = (cupy.empty((case.batch, case.num_heads, parts), np.float32) for _ in range(2))
    partial = cupy.empty((case.batch, case.num_heads, parts, dim), np.float32)
    tables, lens = cupy.asarray(tables, blocking=True), cupy.asarray(lens, blocking=True)
    rest = (case.num_kv_heads, dim**-0.5, tables, lens, size, case.context)

    def v1(i: int) -> None:
        classic.paged_attention_v1(out, q, *caches[i % len(caches)], *rest)

    def v2(i: int) -> None:
        classic.paged_attention_v2(out, sums, tops, partial, q, *caches[i % len(caches)], *rest)

    return {"v1": _captured(v1, calls, rounds), "v2": _captured(v2, calls, rounds)}


def _random(cupy: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """Small finite values of any dtype, the same 32 MiB over and over: made by NumPy, since `cupy.random` needs cuRAND."""
    filled = cupy.empty(shape, dtype)
    flat, bits = filled.reshape(-1).view(np.uint8), cupy.asarray(_random_bits(dtype.itemsize))
    for start in range(0, len(flat), len(bits)):
        flat[start : start + len(bits)] = bits[: len(flat) - start]
    return filled


@cache
def _random_bits(itemsize: int) -> np.ndarray:
    """`[2 ** 25] uint8`: random bits of floats whose exponents are moderate."""
    bits = np.random.default_rng(2).integers(0, 2**16, 2**24, np.uint16)
    bits &= {1: 0xBBBB, 2: 0xBBFF, 4: 0xBDFF}[itemsize]  # clears a high exponent bit of every element
    return bits.view(np.uint8)


def compile_kernels(cases: tuple[Case, ...]) -> None:
    """Compile what the cases need, side by side: one after the other it takes longer than the measuring."""
    configurations = {
        (c.num_heads, c.num_kv_heads, c.head_dim, c.dtype, c.kv_dtype, c.shared > 0 and c.share_prefix) for c in cases
    }

    def compile_one(configuration: tuple[Any, ...]) -> None:
        names = ("num_heads", "num_kv_heads", "head_dim", "dtype", "kv_dtype", "share_prefix")
        with suppress(Exception):  # the case itself says what is wrong
            cupaged.warmup(**dict(zip(names, configuration, strict=True)))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, sorted(configurations, key=str)))


def memory_needed(case: Case) -> int:
    """Bytes of device memory: the caches of the rotation, and room for what is not counted."""
    return (_pool_bytes() if case.order else (_copies(case) + 1) * case.kv_bytes) + (1 << 28)


def fits(case: Case, times: int = 1) -> bool:
    """Whether the device has the memory free that so many of the case need."""
    import cupy

    return times * memory_needed(case) <= 0.9 * cupy.cuda.Device().mem_info[0]


def _pool_bytes() -> int:
    import cupy

    return int(POOL_SHARE * cupy.cuda.Device().mem_info[1])


def _copies(case: Case) -> int:
    """How many caches the rotation has: more than four times the L2 cache."""
    return max(2, -(-4 * _l2_bytes() // case.kv_bytes) + 1)


def _l2_bytes() -> int:
    from cupaged.cuda import current_backend

    return current_backend().launcher.info.l2_bytes


@cache
def _reader() -> Any:
    import cupy

    return cupy.RawKernel(READ_SUM, "read_sum")


def _read_bandwidth(pools: list[Any], rounds: int) -> float:
    """GB/s of summing the pools, one launch each; the best grid of a few."""
    import cupy

    sink = cupy.zeros(1, np.uint32)
    best = 0.0
    for per_sm in (8, 16, 32):
        grid = cupy.cuda.Device().attributes["MultiProcessorCount"] * per_sm

        def read(i: int, grid: int = grid) -> None:
            pool = pools[i % len(pools)]
            _reader()((grid,), (256,), (pool, np.int64(pool.nbytes // 16), sink))

        best = max(best, pools[0].nbytes / _captured(read, max(len(pools), 10), rounds) / 1e3)
    return best


def _eager(call: Callable[[int], None], calls: int, rounds: int) -> float:
    return median(lambda: [call(i) for i in range(calls)], rounds) / calls


def _captured(call: Callable[[int], None], calls: int, rounds: int) -> float:
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for i in range(2):
            call(i)  # compiles and allocates
        stream.synchronize()
        stream.begin_capture()
        try:
            for i in range(calls):
                call(i)
        finally:
            graph = stream.end_capture()
        return median(graph.launch, rounds) / calls


def median(work: Callable[[], Any], rounds: int) -> float:
    """Microseconds of GPU time between two events around `work`, on the current stream."""
    import cupy

    times = []
    for i in range(rounds + 2):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        work()
        end.record()
        end.synchronize()
        if i >= 2:  # two rounds to warm up
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1e3)
    return float(np.median(times))


def _host(call: Callable[[int], None], calls: int) -> float:
    """Microseconds that the host spends on a call."""
    import cupy

    times = []
    for i in range(calls):
        if i % 20 == 0:
            cupy.cuda.get_current_stream().synchronize()  # the queue never fills
        start = time.perf_counter()
        call(i)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def table(results: list[dict[str, Any]]) -> str:
    """Lines for people."""
    head = f"{'case':44} {'MiB':>8} {'read GB/s':>9} {'graph us':>9} {'GB/s':>7} {'of read':>8} {'eager us':>9} {'host us':>8}  "
    head += f"{'alone':>7}  TFLOP/s, classic v1 / v2, peers us"
    lines = [head]
    for r in results:
        if "error" in r:
            lines.append(f"{r['case']:44} {r['error']}")
            continue
        others = [
            f"{r['tflop_s']:.1f}",
            " / ".join(f"{r['classic_us'][v]:.1f}" for v in ("v1", "v2") if v in r["classic_us"]),
        ]
        others += [f"{name} {us if isinstance(us, str) else f'{us:.1f}'}" for name, us in r["peer_us"].items()]
        lines.append(
            f"{r['case']:44} {r['kv_bytes'] / 2**20:8.1f} {r['read_gb_s']:9.0f} {r['graph_us']:9.1f} {r['gb_s']:7.0f} {r['fraction']:8.1%} "
            f"{r['eager_us']:9.1f} {r['host_us']:8.1f}  {r['host_alone_us']:7.1f}  {'  '.join(filter(None, others))}"
        )
    return "\n".join(lines)
