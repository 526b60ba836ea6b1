"""The oracle: attention over a dense or a paged cache in plain NumPy, float64 inside, written to be read.

Every backend is tested against these functions, and they are the backend for NumPy arrays when Numba is absent. They check
nothing; the functions at the top of the package do. Positions, masks and the order of operations are the numerics contract:

    logit = softcap(scale * q.k) + alibi_slope * (j - i), then masks;   query row r of m stands at i = seq_len - m + r
"""

from __future__ import annotations

import math

import numpy as np

from .arrays import FP8_DTYPES, Array, numpy_dtype, pages_view


def dense_attention(
    q: Array,  # [m, num_heads, head_dim]
    k: Array,  # [n, num_kv_heads, head_dim]
    v: Array,  # [n, num_kv_heads, head_dim]
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,  # [num_heads]
    sinks: Array | None = None,  # [num_heads]
    mapped: Array | None = None,  # [n] bool: False hides a key from every row
) -> tuple[Array, Array]:
    """Attention of the last `m` of `n` positions of one sequence over all its keys.

    Returns `out [m, num_heads, head_dim]` and `lse [m, num_heads]`, both float64; a row that sees no key is 0 and -inf.
    `lse` excludes the sinks.
    """
    m, num_heads, head_dim = q.shape
    n, num_kv_heads, _ = k.shape
    mask = visible_keys(m, n, causal=causal, window=window, chunk=chunk)
    if mapped is not None:
        mask &= mapped
    seen = mask.any(axis=0)[:, None, None]
    group = num_heads // num_kv_heads
    k = np.repeat(np.where(seen, k.astype(np.float64), 0.0), group, axis=1)
    v = np.repeat(np.where(seen, v.astype(np.float64), 0.0), group, axis=1)

    # S = Q K^T, one [m, n] matrix a head
    logits = np.einsum("ihd,jhd->hij", q.astype(np.float64), k) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    if alibi_slopes is not None:
        distance = np.arange(n) - (n - m + np.arange(m))[:, None]
        logits += np.asarray(alibi_slopes, np.float64)[:, None, None] * distance
    logits = np.where(mask, logits, -np.inf)

    # O = softmax(S) V
    top = logits.max(axis=2, initial=-np.inf)
    p = np.exp(logits - np.where(top > -np.inf, top, 0.0)[:, :, None])
    total = p.sum(axis=2)
    out = np.einsum("hij,jhd->ihd", p, v) / np.where(total > 0, total, 1.0).T[:, :, None]
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total)).T
    return apply_sinks(out, lse, sinks), lse


def visible_keys(m: int, n: int, *, causal: bool, window: int | None, chunk: int | None) -> Array:
    """Which of `n` keys each of the last `m` rows may see, `[m, n]` bool. A row at a negative position sees none."""
    i = (n - m + np.arange(m))[:, None]
    j = np.arange(n)
    mask = np.broadcast_to(i >= 0, (m, n)).copy()
    if causal:
        mask &= j <= i
    if window is not None:
        mask &= j > i - window
    if chunk is not None:
        mask &= j // chunk == i // chunk
    return mask


def apply_sinks(out: Array, lse: Array, sinks: Array | None) -> Array:
    """Scale `out [..., heads, head_dim]` as if each head's denominator also had `exp(sink)`."""
    if sinks is None:
        return out
    with np.errstate(invalid="ignore"):  # -inf - -inf where neither a key nor a sink is there
        keep = np.exp(lse - np.logaddexp(lse, np.asarray(sinks, np.float64)))
    return out * np.where(lse > -np.inf, keep, 0.0)[..., None]


def merge_states(outs: Array, lses: Array, sinks: Array | None = None) -> tuple[Array, Array]:
    """Combine attention over disjoint sets of keys: `outs [parts, tokens, heads, head_dim]`, `lses [parts, tokens, heads]`.

    `(0, -inf)` is the identity. Returns float64 `(out, lse)`; Milakov and Gimelshein, "Online normalizer calculation for
    softmax" (2018), section 3.1.
    """
    lses = lses.astype(np.float64)
    top = lses.max(axis=0, initial=-np.inf)
    weights = np.exp(lses - np.where(top > -np.inf, top, 0.0))
    total = weights.sum(axis=0)
    weighted = np.where(weights[..., None] > 0, outs.astype(np.float64), 0.0) * weights[..., None]
    out = weighted.sum(axis=0) / np.where(total > 0, total, 1.0)[..., None]
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    return apply_sinks(out, lse, sinks), lse


def paged_attention(
    q: Array,  # [num_tokens, num_heads, head_dim]
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,  # [num_seqs, max_blocks]
    seq_lens: Array,  # [num_seqs]
    *,
    layout: str = "HND",
    query_start_loc: Array | None = None,  # [num_seqs + 1]
    k_scale: Array | float = 1.0,
    v_scale: Array | float = 1.0,
    kv_dtype: str | None = None,
    **how: object,
) -> tuple[Array, Array]:
    """Attention through block tables: gather each sequence's keys and values, then `dense_attention(**how)`.

    Takes every layout, the classic one too. Returns `out [num_tokens, num_heads, head_dim]` and `lse [num_tokens, num_heads]`
    in float64.
    """
    starts = np.arange(len(seq_lens) + 1) if query_start_loc is None else query_start_loc
    out = np.zeros(q.shape)
    lse = np.full(q.shape[:2], -np.inf)
    for table, n, first, last in zip(block_tables, seq_lens, starts[:-1], starts[1:], strict=True):
        if first == last:
            continue
        k, mapped = gather(k_cache, table, n, layout=layout, scale=k_scale, kv_dtype=kv_dtype)
        v, _ = gather(v_cache, table, n, layout=layout, scale=v_scale, kv_dtype=kv_dtype)
        out[first:last], lse[first:last] = dense_attention(q[first:last], k, v, mapped=mapped, **how)  # type: ignore[arg-type]
    return out, lse


def gather(
    cache: Array, table: Array, n: int, *, layout: str = "HND", scale: Array | float = 1.0, kv_dtype: str | None = None
) -> tuple[Array, Array]:
    """The first `n` tokens behind one block table row, `[n, num_kv_heads, head_dim]` float64, and which slots are mapped, `[n]`.

    Columns past the last used one are not read; tokens of unmapped blocks come as 0.
    """
    pages = _pages(cache, layout)
    block_size = pages.shape[2]
    ids = np.asarray(table[: -(-int(n) // block_size)])
    mapped = np.repeat(ids >= 0, block_size)[:n]
    tokens = pages[np.maximum(ids, 0)].swapaxes(1, 2)  # [blocks, block_size, num_kv_heads, ...]
    head_dim = math.prod(tokens.shape[3:])  # classic K keeps it in two axes
    tokens = tokens.reshape(len(ids) * block_size, tokens.shape[2], head_dim)[:n]
    if kv_dtype in FP8_DTYPES:
        tokens = tokens.view(numpy_dtype(kv_dtype))
    tokens = tokens.astype(np.float64) * np.asarray(scale, np.float64).reshape(-1, 1)
    return np.where(mapped[:, None, None], tokens, 0.0), mapped


def write_kv(
    k: Array,  # [num_tokens, num_kv_heads, head_dim]
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,  # [num_slots], num_slots <= num_tokens; < 0 skips
    *,
    layout: str = "HND",
    k_scale: Array | float = 1.0,
    v_scale: Array | float = 1.0,
    kv_dtype: str | None = None,
) -> None:
    """Store row t of `k` and `v` at `slot_mapping[t]`, as `value / scale`, rounded to nearest even.

    fp8 saturates at the largest finite value (e4m3: 448, e5m2: 57344); NaN stays NaN.
    """
    rows = np.flatnonzero(slot_mapping >= 0)
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        pages = _pages(cache, layout)
        block, offset = np.divmod(slot_mapping[rows], pages.shape[2])
        pages[block, :, offset] = _encode(new[rows], scale, kv_dtype, pages.dtype).reshape(
            len(rows), pages.shape[1], *pages.shape[3:]
        )


def _encode(new: Array, scale: Array | float, kv_dtype: str | None, dtype: np.dtype) -> Array:
    scaled = new.astype(np.float32) / np.asarray(scale, np.float32).reshape(-1, 1)
    if kv_dtype not in FP8_DTYPES:
        return scaled.astype(dtype)
    limit = 448.0 if kv_dtype == "fp8_e4m3" else 57344.0
    return np.clip(scaled, -limit, limit).astype(numpy_dtype(kv_dtype)).view(np.uint8)


def _pages(cache: Array, layout: str) -> Array:
    """A view `[num_blocks, num_kv_heads, block_size, head_dim]`; for classic K the last axis stays `[head_dim // x, x]`."""
    if layout != "classic":
        return pages_view(cache, layout)
    return cache.transpose(0, 1, 3, 2, 4) if cache.ndim == 5 else cache.swapaxes(2, 3)
