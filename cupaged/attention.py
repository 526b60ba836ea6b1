"""The public operations on arrays: check once, dispatch once.

NumPy arrays run on the CPU, CuPy arrays on the GPU they lie on. Nothing wrong passes from here to a backend.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arguments import flag
from .arrays import DTYPES, FP8_DTYPES, Array, Attention, WriteKV, as_array, empty_beside, is_cupy, pages_view
from .backends import backend_of
from .call_form import Form, call_form, check_results
from .checks import (
    check_apart,
    check_caches,
    check_device,
    check_rows,
    dtype_name,
    per_head,
    scales,
    stacked,
)  # fmt: skip
from .metadata import check_given, check_slots, device_metadata
from .plan import Plan
from .recent_plan import last_call, recent_plan
from .repeated_calls import RepeatedCall, cannot_change


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array | None,
    seq_lens: Array | None,
    *,
    layout: str = "HND",
    query_start_loc: Array | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
    kv_dtype: str | None = None,
    num_splits: int | None = None,
    share_prefix: bool = True,
    plan: Plan | None = None,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention of `q` over keys and values in a paged cache, softmax kept in float32.

    Args:
        q: `[num_tokens, num_heads, head_dim]` float32, float16 or bfloat16. head_dim is a multiple of 8, at most 256.
        k_cache, v_cache: one layer's pages, `[num_blocks, num_kv_heads, block_size, head_dim]` for layout "HND",
            `[num_blocks, block_size, num_kv_heads, head_dim]` for "NHD"; any strides, head_dim contiguous. fp8 pages are uint8
            with `kv_dtype` "fp8_e4m3" or "fp8_e5m2".
        block_tables: `[num_seqs, max_blocks]` int32; -1 is an unmapped block, allowed below seq_len with `window` or `chunk`.
            Entries after the last used column are never read.
        seq_lens: `[num_seqs]` int32, visible tokens with those of this step. 0 gives `out` 0 and `lse` -inf.
        query_start_loc: `[num_seqs + 1]` int32, sequence i has query rows `[loc[i], loc[i + 1])`; None: one row each.
            Row r of m stands at position `seq_len - m + r`.
        scale: factor of `q.k`, 1 / sqrt(head_dim) by default.
        causal: a row sees no key after its own position.
        window: a row sees the last `window` keys up to its own. chunk: only keys of its own `chunk`-sized span.
        softcap: logits become `softcap * tanh(logit / softcap)`.
        alibi_slopes: `[num_heads]`, adds `slope * (key position - query position)`.
        sinks: `[num_heads]`, adds `exp(sink)` to the denominator; `lse` excludes it.
        k_scale, v_scale: a number or `[num_kv_heads]`; value = stored * scale.
        num_splits: cut every sequence's keys into this many parts; fixes a row's bits whatever its neighbours.
        share_prefix: on a GPU, attend once to blocks with which several tables begin, where that saves memory traffic. Only with
            metadata on the host and without `window`, `chunk`, `num_splits` and a graph plan; a row then stays the same to rounding.
        plan: from `cupaged.plan`; its metadata are used in place of `block_tables`, `seq_lens` and `query_start_loc`. Without one,
            metadata on the host are checked and planned at the first call that brings them, and compared at those that repeat them.
        out, lse: arrays to fill, like `q`, and `[num_tokens, num_heads]` float32.
        return_lse: also return the natural log of the sum of exp of the logits.

    Returns:
        `out [num_tokens, num_heads, head_dim]` in the dtype of `q`, or `(out, lse)`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; nothing has been written then.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (SOSP 2023);
    Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
    """
    plain = lse is None and alibi_slopes is None and sinks is None and return_lse is False
    repeated = None
    if plain:
        if plan is None:
            repeated = last_call(block_tables, seq_lens, query_start_loc)
        elif type(plan) is Plan:
            repeated = plan.repeated
    if repeated is not None:
        result = repeated.repeat(
            q, k_cache, v_cache, out, layout, kv_dtype, scale, causal, window, chunk, softcap, num_splits, share_prefix, k_scale, v_scale
        )  # fmt: skip
        if result is not None:
            return result
    given = k_cache, v_cache
    q, return_lse = as_array(q, "q"), flag(return_lse, "return_lse")
    form, key = call_form(
        q, k_cache, v_cache, out, lse, return_lse, layout, kv_dtype, scale, causal, window, chunk, softcap, num_splits, share_prefix,
        k_scale, v_scale, alibi_slopes is not None,
    )  # fmt: skip
    if plan is None:
        metadata, plan = _unplanned(q, form, block_tables, seq_lens, query_start_loc)
    else:
        _check_plan(plan, form, len(q))
        metadata = plan.block_tables, plan.seq_lens, plan.query_start_loc
    if layout == "NHD":
        k_cache, v_cache = pages_view(k_cache, layout), pages_view(v_cache, layout)
    call = _checked(
        form, key, q, k_cache, v_cache, metadata, plan, alibi_slopes, sinks, k_scale, v_scale, out, lse, return_lse
    )
    run_attention(call)
    options = layout, kv_dtype, scale, causal, window, chunk, softcap, num_splits, share_prefix, k_scale, v_scale
    if plain and plan is not None and len(q) and cannot_change(*options):
        _repeat(call, plan, given, options)
    return (call.out, call.lse) if return_lse else call.out


def _repeat(call: Attention, plan: Plan, caches: tuple[Array, Array], options: tuple[Any, ...]) -> None:
    """Let the next call with the same plan and options be taken as checked, where the backend can."""
    backend = backend_of(call.q)
    if not hasattr(backend, "RepeatedAttention"):
        return
    if any(type(x) is not np.ndarray for x in (call.q, call.out, *caches)):
        return
    attention = call.form.made.get("repeated")
    if attention is None:
        attention = call.form.made["repeated"] = backend.RepeatedAttention(call, *caches)
    if plan.host is None:
        plan.host = backend.StepRecord(plan)
    plan.repeated = RepeatedCall(attention, plan.host, *options)


def call_on_pages(
    q: Array,
    pages: tuple[Array, Array, str],
    plan: Plan,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
    num_splits: int | None = None,
    share_prefix: bool = True,
    out: Array | None = None,
    lse: Array | None = None,
    return_lse: bool = False,
) -> Attention:
    """A call of `paged_attention` over HND `pages`, which hold what the third says, for a plan: checked, for `run_attention`."""
    k_pages, v_pages, kv_dtype = pages
    return_lse = flag(return_lse, "return_lse")
    form, key = call_form(
        q, k_pages, v_pages, out, lse, return_lse, "HND", kv_dtype, scale, causal, window, chunk, softcap, num_splits, share_prefix,
        k_scale, v_scale, alibi_slopes is not None,
    )  # fmt: skip
    _check_plan(plan, form, len(q))
    metadata = plan.block_tables, plan.seq_lens, plan.query_start_loc
    return _checked(
        form, key, q, k_pages, v_pages, metadata, plan, alibi_slopes, sinks, k_scale, v_scale, out, lse, return_lse
    )


OPTIONS = tuple(call_on_pages.__kwdefaults__ or ())  # those of `paged_attention` that neither pages nor plan settle


def _unplanned(
    q: Array, form: Form, block_tables: Any, seq_lens: Any, query_start_loc: Any
) -> tuple[tuple[Array, Array, Array], Plan | None]:
    """Metadata of a call without a plan, checked, and the plan where they are on the host."""
    check_given(block_tables, seq_lens)
    plan = None
    if is_cupy(block_tables):
        metadata = device_metadata(block_tables, seq_lens, query_start_loc, q)
    else:
        plan = recent_plan(form, block_tables, seq_lens, query_start_loc)
        metadata = plan.block_tables, plan.seq_lens, plan.query_start_loc
    # Device metadata are not read back, so the count of rows is only known where it follows from a shape.
    expected = len(metadata[1]) if query_start_loc is None else len(q) if plan is None else plan.num_tokens
    if len(q) != expected:
        source = (
            "block_tables has rows (no query_start_loc: one query per sequence)"
            if query_start_loc is None
            else "query_start_loc ends with"
        )
        raise ValueError(f"q: expected {expected} rows, as many as {source}, got {len(q)}")
    return metadata, plan


def _check_plan(plan: Plan, form: Form, num_tokens: int) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected what cupaged.plan returns, got {type(plan).__name__}")
    if plan.block_size != form.block_size or plan.num_blocks > form.num_blocks:
        raise ValueError(
            f"plan: made for {plan.num_blocks} blocks of {plan.block_size} tokens, but the caches hold {form.num_blocks} blocks of "
            f"{form.block_size}; make the plan with this cache's sizes"
        )
    plan.check_rows(num_tokens)
    if plan.options is not None:
        plan.check_options(form.options)


def _checked(
    form: Form, key: Any, q: Array, k_pages: Array, v_pages: Array, metadata: tuple[Array, Array, Array], plan: Plan | None,
    alibi_slopes: Array | None, sinks: Array | None, k_scale: float | Array, v_scale: float | Array,
    out: Array | None, lse: Array | None, return_lse: bool,
) -> Attention:  # fmt: skip
    """A call whose form, plan and metadata are checked: what is left are the values of arrays for each head."""
    o = form.options
    if alibi_slopes is not None:
        alibi_slopes = per_head(alibi_slopes, "alibi_slopes", o.num_heads, q)
    if sinks is not None:
        sinks = per_head(sinks, "sinks", o.num_heads, q)
    k_scale = scales(k_scale, "k_scale", o.num_kv_heads, q) if form.k_scale is None else form.k_scale
    v_scale = scales(v_scale, "v_scale", o.num_kv_heads, q) if form.v_scale is None else form.v_scale
    if key is not None:
        check_results(form, key, q, out, lse)
    if out is None:
        out = empty_beside(q, q.shape, q.dtype)
    else:
        check_apart(out, "out", q, "q")
    if lse is not None:
        check_apart(lse, "lse", q, "q")
        check_apart(lse, "lse", out, "out")
    elif return_lse:
        lse = empty_beside(q, q.shape[:2], np.float32)
    return Attention(
        q, k_pages, v_pages, *metadata, form.scale, o.causal, o.window, o.chunk, form.softcap, alibi_slopes, sinks, k_scale, v_scale,
        o.kv_dtype, o.num_splits, plan, out, lse, form,
    )  # fmt: skip


def run_attention(call: Attention) -> None:
    """Run a checked call."""
    if len(call.q):
        backend_of(call.q).paged_attention(call)


def write_kv(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    *,
    layout: str = "HND",
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
    kv_dtype: str | None = None,
) -> None:
    """Scatter new keys and values into a paged cache, in place.

    Args:
        k, v: `[num_tokens, num_kv_heads, head_dim]`, in the dtype of the cache (any of the three for fp8 pages); any strides with
            head_dim contiguous, views of a fused QKV included. Any head_dim.
        k_cache, v_cache: one layer's pages as in `paged_attention`; layout "classic" is
            K `[num_blocks, num_kv_heads, head_dim // x, block_size, x]` with `x = 16 // itemsize`,
            V `[num_blocks, num_kv_heads, head_dim, block_size]`.
        slot_mapping: `[num_slots]` int64 or int32, `block_id * block_size + offset`; < 0 skips the row. Slots are distinct.
            Rows of `k` and `v` past `num_slots` are padding and not written.
        k_scale, v_scale: a number or `[num_kv_heads]`; stored = value / scale. fp8 saturates at its largest finite value.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came; the cache is unchanged then.
    """
    k, v = as_array(k, "k"), as_array(v, "v")
    check_rows(k, "k", "[num_tokens, num_kv_heads, head_dim]")
    pages = check_caches(k_cache, v_cache, k, layout, kv_dtype, writing=True)
    if layout == "classic":
        num_blocks, _, _, block_size = pages[1].shape
    else:
        num_blocks, _, block_size, _ = pages[0].shape
    slots = check_slots(slot_mapping, len(k), num_blocks * block_size, k)
    write_pages(k, v, pages, slots, "classic" if layout == "classic" else "HND", k_scale, v_scale)


def write_pages(
    k: Array,
    v: Array,
    pages: tuple[Array, Array, str],
    slots: Array,
    layout: str = "HND",
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
) -> WriteKV:
    """`write_kv` behind the checks that a step's layers share: of caches, of slot values; `k` has passed `check_rows`.

    Returns the call it made.
    """
    k_pages, v_pages, kv_dtype = pages
    if v.shape != k.shape or v.dtype != k.dtype:
        raise ValueError(f"v: expected shape {k.shape} and dtype {k.dtype} as k has, got {v.shape} and {v.dtype}")
    check_rows(v, "v", "[num_tokens, num_kv_heads, head_dim]")
    if kv_dtype not in FP8_DTYPES and k.dtype != k_pages.dtype:
        raise TypeError(f"k: expected dtype {k_pages.dtype} as the cache has, got {k.dtype}; cast k and v first")
    num_kv_heads = k_pages.shape[1]
    head_dim = v_pages.shape[2] if layout == "classic" else k_pages.shape[3]
    if k.shape[1:] != (num_kv_heads, head_dim):
        raise ValueError(
            f"k: expected [num_tokens, {num_kv_heads}, {head_dim}] to match the cache, got {k.shape}; is the layout right?"
        )
    call = WriteKV(
        k=k, v=v, k_pages=k_pages, v_pages=v_pages, slot_mapping=slots,
        k_scale=scales(k_scale, "k_scale", num_kv_heads, k), v_scale=scales(v_scale, "v_scale", num_kv_heads, k),
        kv_dtype=kv_dtype, layout=layout,
    )  # fmt: skip
    if len(slots):
        backend_of(k, classic=layout == "classic").write_kv(call)
    return call


def merge_states(outs: Any, lses: Any, sinks: Array | None = None) -> tuple[Array, Array]:
    """Combine attention over disjoint sets of keys into attention over their union, exactly.

    Args:
        outs: `[parts, tokens, heads, head_dim]`, or a list of `[tokens, heads, head_dim]`: partial outputs without sinks.
        lses: `[parts, tokens, heads]` float32, or a list. `(0, -inf)` is the identity, also with itself.
        sinks: `[heads]`, applied once, to `out` only. With sinks the result is final and not a state to merge again.

    Returns:
        `(out, lse)`: `[tokens, heads, head_dim]` in the dtype of `outs`, `[tokens, heads]` float32.
    """
    outs, lses = stacked(outs, "outs"), stacked(lses, "lses")
    if outs.ndim != 4 or dtype_name(outs) not in DTYPES:
        raise ValueError(
            f"outs: expected [parts, tokens, heads, head_dim] of {', '.join(DTYPES)}, got {outs.shape} {outs.dtype}"
        )
    if lses.shape != outs.shape[:3] or lses.dtype != np.float32 or is_cupy(lses) != is_cupy(outs):
        raise ValueError(f"lses: expected {outs.shape[:3]} float32 beside outs, got {lses.shape} {lses.dtype}")
    if not len(outs):
        raise ValueError("outs: expected at least one part, got none")
    check_device(lses, "lses", outs)
    out, lse = empty_beside(outs, outs.shape[1:], outs.dtype), empty_beside(outs, lses.shape[1:], np.float32)
    if lse.size:
        backend_of(outs).merge_states(outs, lses, per_head(sinks, "sinks", outs.shape[2], outs), out, lse)
    return out, lse
