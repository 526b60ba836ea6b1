"""What peers take for the same attention on a GPU: FlashInfer on the very same pages, PyTorch's attention on a contiguous cache.

Both are optional; a peer that is absent, or lacks what a case asks for, is left out, and one that fails says why in place of its
time. Queries and pages reach PyTorch through DLPack. Calls are captured in a CUDA graph and timed like ours.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .gpu_attention import Case

WORKSPACE_BYTES = 256 << 20  # what FlashInfer asks for its partial results


def peer_times(
    case: Case, q: Any, pools: list[Any], tables: np.ndarray, calls: int, time: Callable[[Callable[[], Any]], float]
) -> dict[str, float | str]:
    """Microseconds a call of each peer, or why it has none.

    Args:
        q: `[batch * rows, num_heads, head_dim]`; pools: each `[blocks, 2, num_kv_heads, block_size, head_dim]`, both CuPy's.
        tables: `[batch, columns] int32` of the host; every sequence has `case.context` tokens.
        calls: how many calls a graph holds; time: microseconds of what a function enqueues on CuPy's current stream.
    """
    if find_spec("torch") is None or case.dtype == "float32" or case.order or case.shared:
        return {}
    import cupy
    import torch

    makers = {"sdpa": _sdpa}
    if find_spec("flashinfer") is not None:
        makers["flashinfer"] = _flashinfer
    found: dict[str, float | str] = {}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
        for name, make in makers.items():
            try:
                call = make(torch, case, q, pools, tables)
                if call is None:
                    continue
                for i in range(2):
                    call(i)  # compiles and allocates
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for i in range(calls):
                        call(i)
                found[name] = time(graph.replay) / calls
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"[:300]
            torch.cuda.empty_cache()
    return found


def _tensor(torch: Any, array: Any, dtype: str) -> Any:
    """A CuPy array as PyTorch's, without a copy: its bits as integers, since not every dtype goes through DLPack."""
    bits = array.view({1: np.uint8, 2: np.int16}[array.itemsize])
    return torch.from_dlpack(bits).view(
        getattr(torch, {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}.get(dtype, dtype))
    )


def _sdpa(torch: Any, case: Case, q: Any, pools: list[Any], tables: np.ndarray) -> Callable[[int], Any] | None:
    """PyTorch's attention on as many contiguous caches as there are pools."""
    if case.kv_dtype or case.rows not in (1, case.context):  # its causal mask is for rows that are the whole sequence
        return None
    queries = _tensor(torch, q, case.dtype).view(case.batch, case.rows, case.num_heads, case.head_dim).transpose(1, 2)
    shape = (2, case.batch, case.num_kv_heads, case.context, case.head_dim)
    caches = [torch.randn(shape, dtype=queries.dtype, device=queries.device) for _ in pools]
    grouped, causal = case.num_heads != case.num_kv_heads, case.rows > 1

    def call(i: int) -> Any:
        k, v = caches[i % len(caches)]
        return torch.nn.functional.scaled_dot_product_attention(queries, k, v, is_causal=causal, enable_gqa=grouped)

    return call


def _flashinfer(torch: Any, case: Case, q: Any, pools: list[Any], tables: np.ndarray) -> Callable[[int], Any]:
    """FlashInfer's wrappers, planned once: decode, on tensor cores where query heads share keys, or its FlashAttention-2 prefill."""
    import flashinfer

    queries = _tensor(torch, q, case.dtype)
    pages = [_tensor(torch, pool, case.kv_dtype or case.dtype) for pool in pools]

    def on_device(x: np.ndarray) -> Any:
        return torch.as_tensor(x.astype(np.int32), device=queries.device)

    columns = tables.shape[1]
    pages_of = (
        on_device(np.arange(case.batch + 1) * columns),
        on_device(tables.reshape(-1)),
        on_device(np.full(case.batch, case.context - (columns - 1) * case.block_size)),
    )
    shape = (case.num_heads, case.num_kv_heads, case.head_dim, case.block_size)
    dtypes = {"q_data_type": queries.dtype, "kv_data_type": pages[0].dtype}
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=queries.device)
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
