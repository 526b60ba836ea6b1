"""Checks of arguments: each function raises TypeError or ValueError, or returns what the backend gets.

A message names the argument, what was expected and what came, and where it is not plain, the fix.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .arguments import choice, finite, host_array, is_real
from .arrays import DTYPES, FP8_DTYPES, LAYOUTS, Array, array_module, as_array, at_rest, device_of, is_cupy, pages_view


def dtype_name(x: Array) -> str:
    """The name of an array's dtype; one of foreign byte order has a name of its own."""
    return _dtype_name(x.dtype)


@lru_cache(maxsize=64)
def _dtype_name(dtype: np.dtype[Any]) -> str:
    return str(dtype.name) if dtype.isnative else str(dtype)


def _last_axis_strided(x: Array) -> bool:
    return bool(x.size and x.shape[-1] > 1 and x.strides[-1] != x.itemsize)


def check_rows(x: Array, name: str, shape: str) -> None:
    """`x` is an array of heads, one row a token; `shape` says so in words."""
    if x.ndim != 3:
        raise ValueError(f"{name}: expected {shape}, got shape {x.shape}")
    if dtype_name(x) not in DTYPES:
        raise TypeError(f"{name}: expected dtype {', '.join(DTYPES)}, got {dtype_name(x)}; cast it first")
    if _last_axis_strided(x):
        raise ValueError(f"{name}: expected head_dim to be contiguous, got strides {x.strides}; pass a contiguous copy")


_KV_DTYPES = (None, *DTYPES, *FP8_DTYPES)
_right_forms: dict[Any, str] = {}  # what `check_caches` says of host caches: it asks for nothing but their form


def check_caches(
    k_cache: Array,
    v_cache: Array,
    like: Array,
    layout: str,
    kv_dtype: str | None,
    *,
    writing: bool,
    names: tuple[str, str, str] = ("k_cache", "v_cache", "kv_dtype"),
) -> tuple[Array, Array, str]:
    """Both caches as HND views (classic as they are) and the name of what they hold; messages speak of `names`."""
    form = None
    if (
        type(k_cache) is type(v_cache) is type(like) is np.ndarray
        and type(layout) is str
        and layout == "HND"
        and (kv_dtype is None or type(kv_dtype) is str)
        and kv_dtype in _KV_DTYPES
        and not writing
    ):
        form = k_cache.dtype, v_cache.dtype, kv_dtype, k_cache.shape, v_cache.shape, k_cache.strides, v_cache.strides
        held = _right_forms.get(form)
        if held is not None:
            return k_cache, v_cache, held
    k_name, v_name, dtype_word = names
    choice(layout, "layout", LAYOUTS)
    if not (kv_dtype is None or isinstance(kv_dtype, str)):
        raise TypeError(f"{dtype_word}: expected None or a name, such as 'fp8_e4m3', got {kv_dtype!r}")
    for cache, name in ((k_cache, k_name), (v_cache, v_name)):
        if not isinstance(cache, np.ndarray) and not is_cupy(cache):
            raise TypeError(f"{name}: {_not_ours(cache)}")
        check_device(cache, name, like)
        if writing and isinstance(cache, np.ndarray) and not cache.flags.writeable:
            raise TypeError(f"{name}: {_READ_ONLY}")
        if cache.dtype != k_cache.dtype:
            raise TypeError(f"{v_name}: expected dtype {k_cache.dtype} as {k_name} has, got {v_cache.dtype}")
        k_classic = layout == "classic" and cache is k_cache
        if cache.ndim != (5 if k_classic else 4):
            raise ValueError(
                f"{name}: expected {_shape_of(layout, k_classic)} for layout {layout!r}, got shape {cache.shape}"
            )
        if _last_axis_strided(cache):
            raise ValueError(f"{name}: expected the last axis to be contiguous, got strides {cache.strides}")
    held = dtype_name(k_cache)
    if held == "uint8":
        if kv_dtype not in FP8_DTYPES:
            raise ValueError(f"{dtype_word}: expected {' or '.join(FP8_DTYPES)} for uint8 pages, got {kv_dtype!r}")
        held = kv_dtype
    elif held not in DTYPES:
        raise TypeError(f"{k_name}: expected dtype {', '.join(DTYPES)}, or uint8 for fp8, got {held}")
    elif kv_dtype not in (None, held):
        raise ValueError(
            f"{dtype_word}: expected None or {held}, as the pages are, got {kv_dtype!r}; fp8 pages come as uint8"
        )
    if layout == "classic":
        num_blocks, num_kv_heads, head_dim, block_size = v_cache.shape
        x = 16 // k_cache.itemsize
        if head_dim % x or block_size not in (8, 16, 32, 64, 128):
            raise ValueError(
                f"{v_name}: the classic layout needs head_dim % {x} == 0 and a block size of 8, 16, 32, 64 or 128, got shape "
                f"{v_cache.shape}; use layout='HND'"
            )
        wanted = (num_blocks, num_kv_heads, head_dim // x, block_size, x)
        if k_cache.shape != wanted:
            raise ValueError(f"{k_name}: expected {wanted} beside {v_name} {v_cache.shape}, got {k_cache.shape}")
        return k_cache, v_cache, held
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache: expected shape {k_cache.shape} as k_cache has, got {v_cache.shape}")
    if 0 in k_cache.shape[1:]:
        raise ValueError(f"k_cache: expected no empty axis after num_blocks, got shape {k_cache.shape}")
    if form is not None:
        if len(_right_forms) >= 256:
            _right_forms.clear()
        _right_forms[form] = held
    return pages_view(k_cache, layout), pages_view(v_cache, layout), held


_READ_ONLY = "expected a writable array, got a read-only one; make it with numpy.zeros or numpy.empty, or pass x.copy()"


def _not_ours(x: Any) -> str:
    return (
        f"expected a NumPy or CuPy array, which can be written, got {type(x).__name__}; make it with numpy or cupy, or pass "
        "tensor.numpy(), which shares the memory of a PyTorch tensor of the CPU"
    )


def _shape_of(layout: str, k_classic: bool) -> str:
    if layout == "HND":
        return "[num_blocks, num_kv_heads, block_size, head_dim]"
    if layout == "NHD":
        return "[num_blocks, block_size, num_kv_heads, head_dim]"
    return (
        "[num_blocks, num_kv_heads, head_dim // x, block_size, x]"
        if k_classic
        else "[num_blocks, num_kv_heads, head_dim, block_size]"
    )


def check_device(x: Array, name: str, like: Array) -> None:
    """`x` lies where `like` lies."""
    if is_cupy(x) != is_cupy(like):
        kinds = ("NumPy", "CuPy")
        raise TypeError(
            f"{name}: expected a {kinds[is_cupy(like)]} array as the other arguments are, got a {kinds[is_cupy(x)]} array"
        )
    if is_cupy(x) and x.device != like.device:
        raise ValueError(
            f"{name}: expected device {like.device.id}, where the other arguments are, got device {x.device.id}"
        )


def per_head(x: Any, name: str, num_heads: int, like: Array) -> Array | None:
    """`x` as contiguous float32 `[num_heads]` beside `like`; None stays None."""
    if x is None:
        return None
    a = _beside(x, name, like)
    if a.shape != (num_heads,):
        raise ValueError(f"{name}: expected [num_heads] = ({num_heads},), got shape {a.shape}")
    return a


def scales(x: Any, name: str, num_kv_heads: int, like: Array) -> Array:
    """A number or an array of scales as contiguous float32 `[num_kv_heads]` beside `like`, all above 0."""
    if isinstance(x, (int, float, np.generic)):
        value = finite(x, name, "a finite number above 0", 0.0)
        return _filled(value, num_kv_heads, like.device.id if is_cupy(like) else None)
    a = _beside(x, name, like)
    if a.size == 1 and a.shape != (num_kv_heads,):
        a = array_module(a).broadcast_to(a.reshape(1), (num_kv_heads,))
    if a.shape != (num_kv_heads,):
        raise ValueError(f"{name}: expected a number or [num_kv_heads] = ({num_kv_heads},), got shape {a.shape}")
    if not is_cupy(a) and not (np.isfinite(a) & (a > 0)).all():
        raise ValueError(f"{name}: expected finite values above 0, got {a}")
    if a.flags.c_contiguous:
        return a
    with device_of(a):
        not_captured(x, name, f"an array of [num_kv_heads] = ({num_kv_heads},)", a)
        return array_module(a).ascontiguousarray(a)


@lru_cache(maxsize=1 << 14)  # graphs keep their addresses: those of every layer's scales must not leave
def _filled(value: float, n: int, device: int | None) -> Array:
    """A constant vector, made once: the common scale of 1 must not cost an allocation a call."""
    if device is None:
        a = np.full(n, value, np.float32)
        a.flags.writeable = False
        return a
    return at_rest(np.full(n, value, np.float32), device)


def _beside(x: Any, name: str, like: Array) -> Array:
    """`x` as a contiguous float32 array on the side of `like`; raises TypeError unless it holds real numbers."""
    if is_cupy(x):
        check_device(x, name, like)
    else:
        x = host_array(x, name)
    if not is_real(x.dtype):
        raise TypeError(f"{name}: expected an array of numbers, got dtype {x.dtype}")
    if is_cupy(like):
        if is_cupy(x) and x.dtype == np.float32 and x.flags.c_contiguous:
            return x
        import cupy

        with device_of(like):
            not_captured(x, name, "a contiguous CuPy array of float32", like)
            return cupy.ascontiguousarray(cupy.asarray(x, np.float32))
    return np.ascontiguousarray(np.asarray(x, np.float32))


def not_captured(x: Any, name: str, expected: str, like: Array) -> None:
    """Raise RuntimeError while a stream of the device of `like` is captured: what is made of `x` is gone when the graph is replayed."""
    if not is_cupy(like):
        return
    import cupy

    stream = cupy.cuda.get_current_stream()
    if stream.ptr > 1 and stream.is_capturing():  # 0 and 1 are the legacy default stream, which cannot be captured
        raise RuntimeError(
            f"{name}: expected {expected} while a CUDA graph is captured, got {type(x).__name__} {getattr(x, 'dtype', '')} "
            f"{getattr(x, 'shape', '')}; each replay would copy between memory that is another's by then"
        )


def check_apart(x: Array, name: str, other: Array, other_name: str) -> None:
    """Raise ValueError for a result `x` that shares memory with `other`, which is read while `x` is written."""
    if is_cupy(x) or is_cupy(other):
        shared = is_cupy(x) and is_cupy(other) and x.data.ptr == other.data.ptr and x.size > 0
    else:
        shared = np.shares_memory(x, other)
    if shared:
        raise ValueError(
            f"{name}: expected an array other than {other_name}, got one that shares memory with it; {other_name} is still read while "
            f"{name} is written"
        )


def check_result(x: Any, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], like: Array) -> None:
    """`x` can be filled with a result: ours, writable, of this shape and dtype, beside `like`."""
    if not isinstance(x, np.ndarray) and not is_cupy(x):
        raise TypeError(f"{name}: {_not_ours(x)}")
    check_device(x, name, like)
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"{name}: expected {shape} {dtype}, got {x.shape} {x.dtype}")
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise TypeError(f"{name}: {_READ_ONLY}")
    if _last_axis_strided(x):
        raise ValueError(f"{name}: expected the last axis to be contiguous, got strides {x.strides}")


def stacked(x: Any, name: str) -> Array:
    """An array, or a list of arrays of one shape stacked along a new first axis."""
    if not isinstance(x, (list, tuple)):
        return as_array(x, name)
    parts = [as_array(part, name) for part in x]
    if not parts:
        raise ValueError(f"{name}: expected at least one part, got none")
    if any(part.shape != parts[0].shape for part in parts):
        raise ValueError(f"{name}: expected parts of one shape, got {[part.shape for part in parts]}")
    with device_of(parts[0]):
        return array_module(parts[0]).stack(parts)
