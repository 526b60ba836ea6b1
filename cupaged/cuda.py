"""The CUDA backend: every operation on one device, and the devices there are.

Every operation gets checked arguments. Device arrays are whatever the launcher's arrays are (CuPy's, or NumPy's on the CPU
executor of the tests); host metadata are plain `numpy.ndarray` and are uploaded through pinned memory. Nothing synchronises.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arguments import count, flag
from .arrays import Array, numpy_dtype
from .cuda_attention import AttentionKernels
from .cuda_cache import CacheKernels
from .cuda_classic import ClassicKernels
from .cuda_structs import copy_defines, merge_defines, power_of_two, write_defines
from .kernel_config import attention_kernels
from .launcher import CupyLauncher
from .plan import PlanOptions, plan_options
from .shared_work import prefix_kernels


class Backend(CacheKernels, AttentionKernels, ClassicKernels):
    """The operations on one device."""

    def warmup(self, options: PlanOptions, max_queries: int, block_size: int, softcap: bool, alibi: bool) -> None:
        """Compile the kernels of such calls, for arrays whose rows allow the widest accesses."""
        o = options
        group, itemsize, cache_itemsize = (
            o.num_heads // o.num_kv_heads,
            numpy_dtype(o.dtype).itemsize,
            numpy_dtype(o.kv_dtype).itemsize,
        )
        row = o.head_dim * cache_itemsize
        counts = {min(1 << i, max_queries) for i in range(max_queries.bit_length())} | {max_queries}
        configs = {
            config: None  # in order, each once
            for few in sorted({1, max_queries})
            for most in sorted(counts)
            for config in attention_kernels(
                self.launcher.info, o.head_dim, o.dtype, o.kv_dtype, group, group * min(few, most), group * most
            )
        }
        for config in configs:
            for planned in (True, False):
                self._kernel(config, power_of_two(row), block_size, planned=planned, softcap=softcap, alibi=alibi)
        for config in prefix_kernels(self.launcher.info, o) if o.share_prefix else ():
            self._kernel(config, power_of_two(row), block_size, planned=True, softcap=softcap, alibi=alibi)
        pieces = min(power_of_two(o.head_dim * itemsize) // itemsize, power_of_two(row) // cache_itemsize)
        for slots in (np.int64, np.int32):
            defines = write_defines(o.dtype, o.kv_dtype, o.head_dim, pieces, False, np.dtype(slots))
            self.launcher.get("write_kv", "write_kv.cu", defines)
        self.launcher.get("copy_blocks", "copy_blocks.cu", copy_defines(16))
        self.launcher.get("merge", "merge.cu", merge_defines(o.dtype))


_backends: dict[int, Backend] = {}


def backend(device_id: int) -> Backend:
    """The backend of one CUDA device. Raises RuntimeError for a device older than the kernels support."""
    found = _backends.get(device_id)
    # one for all threads: plans keep what they have on a device under its backend
    return found if found is not None else _backends.setdefault(device_id, Backend(CupyLauncher(device_id)))


def current_backend() -> Backend:
    """The backend of CuPy's current device. Raises ModuleNotFoundError without CuPy, RuntimeError without a GPU."""
    try:
        import cupy
    except ImportError as error:
        raise ModuleNotFoundError(
            "device: 'cuda' needs CuPy, which is not installed: pip install 'cupaged[cuda12x]' (or [cuda13x])"
        ) from error
    if not cupy.cuda.is_available():
        raise RuntimeError("device: 'cuda' found no GPU (CuPy is installed, but no CUDA device or driver is there)")
    return backend(cupy.cuda.Device().id)


def warmup(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str = "float16",
    kv_dtype: str | None = None,
    max_queries: int = 1,
    block_size: int = 16,
    softcap: bool = False,
    alibi: bool = False,
    share_prefix: bool = True,
) -> None:
    """Compile what a configuration needs on CuPy's current device, before the first request waits for it.

    Args:
        num_heads, num_kv_heads, head_dim, dtype, kv_dtype: as in `cupaged.plan`.
        max_queries: the most query rows that one sequence will have in a step: 1 for decode alone, the chunk size with prefill.
        block_size: of the cache: each power of two has kernels of its own; of other sizes odd ones have, and even ones.
        softcap, alibi, share_prefix: whether calls will use them; each prefix that is shared needs kernels for more rows.

    Compiled code stays in CuPy's cache on disk, so that a second process only loads it. Raises what `cupaged.plan` raises for
    wrong sizes, ModuleNotFoundError without CuPy and RuntimeError without a GPU.
    """
    options = plan_options(num_heads, num_kv_heads, head_dim, dtype, kv_dtype, None, None, None, True, share_prefix)
    count(max_queries, "max_queries")
    count(block_size, "block_size")
    softcap, alibi = flag(softcap, "softcap"), flag(alibi, "alibi")
    current_backend().warmup(options, int(max_queries), int(block_size), softcap, alibi)


def backend_for(x: Array) -> Any:
    """The backend of the device that holds the CuPy array `x`, whatever device is current."""
    import cupy

    if x.device.id == cupy.cuda.Device().id:
        return backend(x.device.id)
    return _Elsewhere(x.device)


class _Elsewhere:
    """A backend of a device that is not the current one: makes it current for the length of each call."""

    def __init__(self, device: Any) -> None:
        self._device = device

    def __getattr__(self, operation: str) -> Any:
        if not hasattr(Backend, operation):
            raise AttributeError(operation)

        def run(*arguments: Any) -> Any:
            with self._device:
                return getattr(backend(self._device.id), operation)(*arguments)

        return run
