"""What the package takes for an array: dtype names, page layouts, where arrays lie, foreign arrays, and the records that backends receive.

`attention.py` checks a call and fills one of the records below; a backend (`reference`, `cpu`, `cuda`) reads it and never checks again.
"""

from __future__ import annotations

import math
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .call_form import Form
    from .plan import Plan

Array = Any  # a NumPy or a CuPy array; CuPy's type cannot be named without importing it

DTYPES = ("float32", "float16", "bfloat16")
FP8_DTYPES = ("fp8_e4m3", "fp8_e5m2")
LAYOUTS = ("HND", "NHD", "classic")

_ML_DTYPES_NAMES = {"bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


class Attention(NamedTuple):
    """One checked attention call. Shapes as in `paged_attention`; pages are HND views unless the layout is classic."""

    q: Array  # [num_tokens, num_heads, head_dim]
    k_pages: Array  # [num_blocks, num_kv_heads, block_size, head_dim], strides of its own
    v_pages: Array  # the same shape, strides of its own
    block_tables: Array  # [num_seqs, max_blocks] int32
    seq_lens: Array  # [num_seqs] int32
    query_start_loc: Array  # [num_seqs + 1] int32
    scale: float
    causal: bool
    window: int | None
    chunk: int | None
    softcap: float | None
    alibi_slopes: Array | None  # [num_heads] float32
    sinks: Array | None  # [num_heads] float32
    k_scale: Array  # [num_kv_heads] float32
    v_scale: Array  # [num_kv_heads] float32
    kv_dtype: str
    num_splits: int | None
    plan: Plan | None
    out: Array  # [num_tokens, num_heads, head_dim]
    lse: Array | None  # [num_tokens, num_heads] float32
    form: Form  # what it has in common with other calls


class WriteKV(NamedTuple):
    """One checked cache write."""

    k: Array  # [num_tokens, num_kv_heads, head_dim]
    v: Array  # [num_tokens, num_kv_heads, head_dim]
    k_pages: Array  # HND views, or the classic arrays when layout is "classic"
    v_pages: Array
    slot_mapping: Array  # [num_slots] int32 or int64, num_slots <= num_tokens
    k_scale: Array  # [num_kv_heads] float32
    v_scale: Array  # [num_kv_heads] float32
    kv_dtype: str
    layout: str  # "HND" (an NHD cache is an HND view by now) or "classic"


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of one of our dtype names; bfloat16 and the fp8 formats come from `ml_dtypes`.

    Raises ValueError for an unknown name, ModuleNotFoundError when the name needs `ml_dtypes` and it is not installed.
    """
    if name in _ML_DTYPES_NAMES:
        try:
            import ml_dtypes
        except ModuleNotFoundError:
            raise ModuleNotFoundError(
                f"dtype {name!r} needs the package ml_dtypes: pip install 'cupaged[cpu]' (or [cuda12x], [cuda13x])"
            ) from None
        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES_NAMES[name]))
        return dtype
    if name in DTYPES:
        return np.dtype(name)
    raise ValueError(f"dtype: expected one of {', '.join(DTYPES + FP8_DTYPES)}, got {name!r}")


def pages_view(cache: Array, layout: str) -> Array:
    """A cache of layout HND or NHD as `[num_blocks, num_kv_heads, block_size, head_dim]`, without a copy."""
    return cache.transpose(0, 2, 1, 3) if layout == "NHD" else cache


def is_cupy(x: object) -> bool:
    """Whether `x` is a CuPy array; never imports CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)


def array_module(x: Array) -> Any:
    """The array module of `x`."""
    if is_cupy(x):
        import cupy

        return cupy
    return np


def device_of(x: Array) -> AbstractContextManager[Any]:
    """Makes the device of `x` current: arrays need not lie on the one that is, and what is made of them must lie beside them."""
    return x.device if is_cupy(x) else nullcontext()


def empty_beside(like: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """An uninitialised array on the device of `like`, whatever device is current."""
    if not is_cupy(like):
        return np.empty(shape, dtype)
    with device_of(like):
        return array_module(like).empty(shape, dtype)


def empty_pages(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Uninitialised pages from an array module. NumPy's begin on a cache line of 64 bytes, as CuPy's do anyway: else vectors of float32
    rows lie across two lines, which costs 6% where pages come from a cache."""
    if xp is not np:
        return xp.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 63, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


def at_rest(a: Array, device: int) -> Array:
    """`a` on a device, there for every stream. Copied on a stream of its own, so that a capture of the current one does not hold it."""
    import cupy

    with cupy.cuda.Device(device), cupy.cuda.Stream(non_blocking=True) as stream:
        there = cupy.asarray(a)
        stream.synchronize()
    return there


def as_array(x: Any, name: str) -> Array:
    """`x` as a NumPy or CuPy array, without a copy where the exchange protocols allow it.

    Device arrays come through `__cuda_array_interface__` or DLPack, host arrays through DLPack or `__array__`. Raises TypeError when `x`
    offers none of them, or refuses (a tensor that records gradients does).
    """
    if isinstance(x, np.ndarray) or is_cupy(x):
        return x
    library = "NumPy"
    try:
        # asked last: a tensor that records gradients raises something else than AttributeError
        if _on_cuda(x) or (not hasattr(x, "__dlpack_device__") and hasattr(x, "__cuda_array_interface__")):
            import cupy

            library = "CuPy"
            return cupy.from_dlpack(x) if hasattr(x, "__dlpack__") else cupy.asarray(x)
        if hasattr(x, "__dlpack__"):
            try:
                return np.from_dlpack(x)
            except (BufferError, RuntimeError, TypeError):  # dtypes NumPy does not exchange, bfloat16 first among them
                if (found := _bfloat16(x)) is not None:
                    return found
                if not hasattr(x, "__array__"):
                    raise
        if hasattr(x, "__array__"):
            return np.asarray(x)
    except (BufferError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name}: {library} cannot read this {type(x).__name__}: {error}") from error
    raise TypeError(
        f"{name}: expected an array (NumPy, CuPy, or anything with __dlpack__, __cuda_array_interface__ or __array__), "
        f"got {type(x).__name__}"
    )


def _bfloat16(x: Any) -> Array | None:
    """`x` through DLPack if that is how it holds bfloat16."""
    from .dlpack import bfloat16_from_dlpack

    try:
        return bfloat16_from_dlpack(x)
    except (BufferError, RuntimeError, TypeError):
        return None


def _on_cuda(x: Any) -> bool:
    device = getattr(x, "__dlpack_device__", None)
    return device is not None and int(device()[0]) in (2, 13)  # kDLCUDA, kDLCUDAManaged
