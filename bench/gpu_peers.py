"""What peers take for the same attention on a GPU: FlashInfer on the very same pages, PyTorch's attention on a contiguous cache.

    python -m bench.gpu_peers 120          # seconds in which cases may begin; a line of JSON for each (case, peer)

A process of its own, which `python -m bench.gpu_check` starts and stops: peers compile for minutes, and what goes wrong in them stays
there. PyTorch comes first, which compiles nothing; cases in the order of gpu_attention.py. A peer that is not installed, or lacks what
a case asks for, is left out; one that fails says why in place of its time. Queries and pages reach PyTorch through DLPack. Calls are
captured in a CUDA graph and timed like ours. Arguments are those that FlashInfer has had since 0.2 (looked up in 0.2.5, 0.5.3, 0.7).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from .gpu_attention import CASES, Arrays, Case, arrays, fits, median

WORKSPACE_BYTES = 256 << 20  # what FlashInfer asks for its partial results


def main(seconds: float) -> int:
    end = time.monotonic() + seconds
    if find_spec("torch") is None:
        return 0
    for name in PEERS:
        if find_spec(MODULES[name]) is None:
            continue
        for case in CASES:
            if time.monotonic() > end:
                return 0
            if offers(name, case) and fits(case, times=2):
                print(json.dumps({"case": case.name, "peer": name, "us": peer_time(name, case)}), flush=True)
    return 0


def offers(name: str, case: Case) -> bool:
    """Whether the peer can be asked for the case."""
    if case.dtype == "float32" or case.order or case.shared:
        return False
    # the causal mask of PyTorch is for rows that are the whole sequence
    return name != "sdpa" or (not case.kv_dtype and case.rows in (1, case.context))


def peer_time(name: str, case: Case, rounds: int = 7) -> float | str:
    """Microseconds of a call, or why there is no time."""
    import cupy
    import torch

    stream = cupy.cuda.Stream(non_blocking=True)
    try:
        with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            made = arrays(case)
            call, calls = PEERS[name](torch, case, made), max(len(made.pools), 10)
            for i in range(2):
                call(i)  # compiles and allocates
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for i in range(calls):
                    call(i)
            return median(graph.replay, rounds) / calls
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        made = call = graph = None
        gc.collect()
        torch.cuda.empty_cache()
        cupy.get_default_memory_pool().free_all_blocks()


def _tensor(torch: Any, array: Any, dtype: str) -> Any:
    """A CuPy array as PyTorch's, without a copy: its bits as integers, since not every dtype goes through DLPack."""
    bits = array.view({1: np.uint8, 2: np.int16}[array.itemsize])
    return torch.from_dlpack(bits).view(
        getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype))
    )


def _sdpa(torch: Any, case: Case, made: Arrays) -> Callable[[int], Any]:
    """PyTorch's attention on as many contiguous caches as there are pools."""
    shape = (case.batch, case.rows, case.num_heads, case.head_dim)
    queries = _tensor(torch, made.q, case.dtype).view(shape).transpose(1, 2)
    shape = (2, case.batch, case.num_kv_heads, case.context, case.head_dim)
    caches = [torch.randn(shape, dtype=queries.dtype, device=queries.device) for _ in made.pools]
    how: dict[str, bool] = {"is_causal": case.rows > 1}
    if case.num_heads != case.num_kv_heads:
        how["enable_gqa"] = True  # PyTorch 2.5 and newer

    def call(i: int) -> Any:
        k, v = caches[i % len(caches)]
        return torch.nn.functional.scaled_dot_product_attention(queries, k, v, **how)

    return call


def _flashinfer(torch: Any, case: Case, made: Arrays) -> Callable[[int], Any]:
    """FlashInfer's wrappers, planned once: decode, on tensor cores where query heads share keys, or its FlashAttention-2 prefill."""
    import flashinfer

    queries = _tensor(torch, made.q, case.dtype)
    pages = [_tensor(torch, pool, case.kv_dtype or case.dtype) for pool in made.pools]

    def on_device(x: np.ndarray) -> Any:
        return torch.as_tensor(x.astype(np.int32), device=queries.device)

    columns = made.tables.shape[1]
    pages_of = (
        on_device(np.arange(case.batch + 1) * columns),
        on_device(made.tables.reshape(-1)),
        on_device(np.full(case.batch, case.context - (columns - 1) * case.block_size)),
    )
    shape = (case.num_heads, case.num_kv_heads, case.head_dim, case.block_size)
    dtypes = {"q_data_type": queries.dtype, "kv_data_type": pages[0].dtype}
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=queries.device)  # newer ones want zeros
    if case.rows == 1:
        cores = case.num_heads >= 4 * case.num_kv_heads
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=cores)
        wrapper.plan(*pages_of, *shape, **dtypes)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
        wrapper.plan(on_device(np.arange(case.batch + 1) * case.rows), *pages_of, *shape, causal=True, **dtypes)

    def call(i: int) -> Any:
        return wrapper.run(queries, pages[i % len(pages)])

    return call


PEERS: dict[str, Callable[[Any, Case, Arrays], Callable[[int], Any]]] = {"sdpa": _sdpa, "flashinfer": _flashinfer}
MODULES = {"sdpa": "torch", "flashinfer": "flashinfer"}


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
