"""The form of an attention call: all of it but addresses and values, so that calls of one form are checked once.

The layers of a step, and the decode steps of a batch, differ in addresses and values only. Whatever a check reads besides values is
part of the key here: types, shapes, strides, dtypes, devices, whether results can be written, and every option with its type where
an equal value of another type is refused (`window=True`). Arrays themselves are never kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arguments import choice, count, finite, flag
from .arrays import LAYOUTS, Array, is_cupy
from .checks import check_caches, check_result, check_rows, scales
from .plan import PlanOptions, same_options

_forms: dict[Any, Form] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What the checks of a call found, for all calls of its form."""

    options: PlanOptions
    num_blocks: int
    block_size: int
    scale: float
    softcap: float | None
    k_scale: Array | None  # [num_kv_heads] made of a number; None: each call brings an array
    v_scale: Array | None
    made: dict[Any, Any] = field(default_factory=dict)  # what a backend makes of the form


def call_form(
    q: Array, k_cache: Array, v_cache: Array, out: Array | None, lse: Array | None, return_lse: bool, layout: str, kv_dtype: str | None,
    scale: float | None, causal: bool, window: int | None, chunk: int | None, softcap: float | None, num_splits: int | None,
    share_prefix: bool, k_scale: float | Array, v_scale: float | Array, alibi: bool,
) -> tuple[Form, Any]:  # fmt: skip
    """The form of a call, checked; arguments as in `paged_attention`, `alibi`: whether there are slopes.

    Also returns None for a form that is known, else what to give to `check_results` when all other checks have passed. Raises
    TypeError and ValueError for whatever is wrong with arguments other than metadata, plan, slopes, sinks, arrays of scales, results.
    """
    number = type(k_scale) in (float, int), type(v_scale) in (float, int)
    found = None
    key: Any = ()  # of something that is not what it should be, or not what can be remembered
    try:
        if is_cupy(q):
            where: Any = (
                q.data.device_id, k_cache.data.device_id, v_cache.data.device_id, out is None or out.data.device_id,
                lse is None or lse.data.device_id,
            )  # fmt: skip
        else:
            where = out is None or out.flags.writeable, lse is None or lse.flags.writeable
        key = (
            type(q), q.shape, q.strides, q.dtype, type(k_cache), k_cache.shape, k_cache.strides, k_cache.dtype,
            type(v_cache), v_cache.shape, v_cache.strides, v_cache.dtype,
            out is None or (type(out), out.shape, out.strides, out.dtype),
            bool(return_lse) if lse is None else (type(lse), lse.shape, lse.strides, lse.dtype),
            where, layout, kv_dtype, scale, type(scale), causal, type(causal), window, type(window), chunk, type(chunk),
            softcap, type(softcap), num_splits, type(num_splits), share_prefix, type(share_prefix), number,
            k_scale if number[0] else None, v_scale if number[1] else None, alibi,
        )  # fmt: skip
        found = _forms.get(key)
    except (AttributeError, TypeError):
        key = ()
    if found is not None:
        return found, None
    found = _checked(
        q, k_cache, v_cache, layout, kv_dtype, scale, causal, window, chunk, softcap, num_splits, share_prefix,
        k_scale if number[0] else None, v_scale if number[1] else None,
    )  # fmt: skip
    return found, key


def check_results(form: Form, key: Any, q: Array, out: Array | None, lse: Array | None) -> None:
    """The last check of a new form, which is remembered then. Raises TypeError and ValueError."""
    if out is not None:
        check_result(out, "out", q.shape, q.dtype, q)
    if lse is not None:
        check_result(lse, "lse", q.shape[:2], np.dtype(np.float32), q)
    if key:
        remember(_forms, key, form, 1024)


def remember(store: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Put an entry into a cache, which is emptied first when it is full: what is still in use comes back at once."""
    if len(store) >= most:
        store.clear()
    store[key] = value


def _checked(
    q: Array, k_cache: Array, v_cache: Array, layout: str, kv_dtype: str | None, scale: float | None, causal: bool,
    window: int | None, chunk: int | None, softcap: float | None, num_splits: int | None, share_prefix: bool,
    k_scale: float | None, v_scale: float | None,
) -> Form:  # fmt: skip
    check_rows(q, "q", "[num_tokens, num_heads, head_dim]")
    choice(layout, "layout", LAYOUTS)
    if layout == "classic":
        raise ValueError("layout: 'classic' pages are read by cupaged.classic.paged_attention_v1 / paged_attention_v2")
    k_pages, _, held = check_caches(k_cache, v_cache, q, layout, kv_dtype, writing=False)
    _, num_heads, head_dim = q.shape
    num_blocks, num_kv_heads, block_size, cache_dim = k_pages.shape
    if head_dim % 8 or not 8 <= head_dim <= 256:
        raise ValueError(
            f"q: expected head_dim to be a multiple of 8 from 8 to 256, got {head_dim}; pad head_dim with zeros"
        )
    if cache_dim != head_dim:
        raise ValueError(f"k_cache: expected head_dim {head_dim} as in q, got {cache_dim}; is the layout right?")
    if num_heads % num_kv_heads:
        raise ValueError(f"q: expected num_heads to be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")
    for name, x in (("window", window), ("chunk", chunk), ("num_splits", num_splits)):
        count(x, name, optional=True)
    if softcap is not None:
        softcap = finite(softcap, "softcap", "None or a finite number above 0", 0.0)
    scale = head_dim**-0.5 if scale is None else finite(scale, "scale")
    return Form(
        same_options(
            num_heads, num_kv_heads, head_dim, str(q.dtype.name), held, window, chunk, num_splits, flag(causal, "causal"),
            flag(share_prefix, "share_prefix"),
        ),
        num_blocks, block_size, scale, softcap,
        None if k_scale is None else scales(k_scale, "k_scale", num_kv_heads, q),
        None if v_scale is None else scales(v_scale, "v_scale", num_kv_heads, q),
    )  # fmt: skip
