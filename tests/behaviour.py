"""Cases for attention over paged caches, the same for every backend, and the tolerance they are judged by.

A case holds random arrays in a pool whose unused memory is poisoned, with tables whose unused entries are garbage. The expected
values are the float64 oracle's. The tolerance is three times the error of plain float32 NumPy on the same inputs, or of NumPy doing
what tensor cores do, and the least that it may be: in a small case NumPy can be right by chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cupaged import reference
from cupaged.arrays import FP8_DTYPES, numpy_dtype

NAN_CODES = {"fp8_e4m3": 0x7F, "fp8_e5m2": 0x7E}


@dataclass(frozen=True)
class Case:
    """Arguments of one `paged_attention` call, on NumPy arrays."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    options: dict[str, Any]

    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.seq_lens

    def oracle(self) -> tuple[np.ndarray, np.ndarray]:
        options = {k: v for k, v in self.options.items() if k not in ("num_splits", "share_prefix")}
        return reference.paged_attention(*self.arguments(), **options)

    def poisoned(self, poison: float) -> Case:
        """The same case with every slot that no sequence owns set to `poison`."""
        caches = []
        for cache in (self.k_cache, self.v_cache):
            copy = cache.copy()
            pages = copy if self.options["layout"] == "HND" else copy.swapaxes(1, 2)
            owned = np.zeros((pages.shape[0], pages.shape[2]), bool)
            for table, n in zip(self.block_tables, self.seq_lens, strict=True):
                j = np.arange(n)
                blocks = table[j // pages.shape[2]]
                owned[blocks[blocks >= 0], (j % pages.shape[2])[blocks >= 0]] = True
            code = poison_code(poison, self.options["kv_dtype"], pages.dtype)
            pages.swapaxes(1, 2)[~owned] = code
            caches.append(copy)
        return replace(self, k_cache=caches[0], v_cache=caches[1])


def poison_code(poison: float, kv_dtype: str | None, dtype: np.dtype) -> Any:
    if kv_dtype in FP8_DTYPES:
        return np.asarray(poison, np.float32).astype(numpy_dtype(kv_dtype)).view(np.uint8)[()]
    return np.asarray(poison).astype(dtype)[()]


def tolerance(case: Case, out: np.ndarray, lse: np.ndarray, tensor_cores: bool = False) -> tuple[float, float]:
    """What an implementation in float32 may differ by from the oracle's `out` and `lse`: three times plain NumPy's error.

    Plain NumPy sums in several orders, since one order's error is a single draw; of one row and head even several are right by chance
    once in a hundred times, so that at least `least_error` is allowed. To this comes the rounding of the result itself. With
    `tensor_cores` and 16-bit queries NumPy rounds probabilities to 16 bits and cuts partial sums as tensor cores do.
    """
    rounds = tensor_cores and case.q.itemsize == 2
    worst_out = worst_lse = 0.0
    for order in range(3):
        got_out, got_lse = float32_attention(case, order, rounds)
        worst_out = max(worst_out, _gap(got_out.astype(case.q.dtype), out))
        worst_lse = max(worst_lse, _gap(got_lse, lse))
    eps = float(np.finfo(np.float32).eps)
    magnitude = float(np.abs(out).max(initial=0.0))
    finite = np.abs(lse[np.isfinite(lse)])
    least_out, least_lse = least_error(case, rounds)
    return (
        max(3 * worst_out, least_out) + 2 * eps * magnitude,
        max(3 * worst_lse, least_lse) + 2 * eps * float(finite.max(initial=1.0)),
    )


def least_error(case: Case, rounds: bool) -> tuple[float, float]:
    """What must be allowed to `out` and `lse` even where float32 NumPy is exact by chance.

    A logit may be off by 2 eps of c, its terms' magnitudes together: in whatever order eight lanes sum eight terms each, and of more
    terms the partial sums grow with the root of their number only. c holds 2 for the exponential, which may be off by 2^-22. To first
    order an error d of logit j moves lse by p_j d, and out by p_j d (v_j - out); one of the lse moves the share w that a sink leaves by
    w (1 - w). With `rounds` probabilities are rounded to 16 bits, by independent errors of at most half a unit in the last place: three
    times the root of the sum of squares is seven deviations.
    """
    o, eps = case.options, float(np.finfo(np.float32).eps)
    half_unit = 2.0**-11 if o["kv_dtype"] in FP8_DTYPES or case.q.dtype == np.float16 else 2.0**-8
    least_out = least_lse = 0.0
    for rows, h, k, v, mask, distance in heads(case):
        scale, cap = case.q.shape[2] ** -0.5 if o["scale"] is None else o["scale"], o["softcap"]
        q, k, v = case.q[rows, h].astype(np.float64), k.astype(np.float64), v.astype(np.float64)
        s, c = q @ k.T * scale, np.abs(q) @ np.abs(k).T * abs(scale)
        if cap is not None:
            s = cap * np.tanh(s / cap)
            c = c * (1 - (s / cap) ** 2) + np.abs(s)
        if o["alibi_slopes"] is not None:
            bias = float(o["alibi_slopes"][h]) * distance
            s, c = s + bias, c + np.abs(bias)
        s = np.where(mask, s, -np.inf)
        top = s.max(axis=1, keepdims=True, initial=-1e300)
        p = np.exp(s - top)
        total = np.maximum(p.sum(axis=1, keepdims=True), 1)
        p, lse = p / total, top + np.log(total)
        out = p @ v
        off = 2 * eps * p * (2 + c)
        off_out, off_lse = np.einsum("rj,rjd->rd", off, np.abs(v - out[:, None])), off.sum(axis=1, keepdims=True)
        if rounds:
            off_out += 3 * half_unit * np.sqrt(p**2 @ v**2)  # of the largest too: it is 1 over its own logit only
        if o["sinks"] is not None:
            sink = float(o["sinks"][h])
            with np.errstate(over="ignore"):
                w = 1 / (1 + np.exp(sink - lse))
            off_out = w * off_out + w * (1 - w) * (off_lse + 2 * eps * (2 + abs(sink) + np.abs(lse))) * np.abs(out)
        least_out, least_lse = max(least_out, float(off_out.max())), max(least_lse, float(off_lse.max()))
    return least_out, least_lse


def cut_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """`a @ b` in float32 as tensor cores were measured to do it: runs of 8 products are added exactly and cut toward zero.

    Source: Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores" (2021).
    """
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for k in range(0, a.shape[1], 8):
        exact = total + a[:, k : k + 8].astype(np.float64) @ b[k : k + 8].astype(np.float64)
        total = exact.astype(np.float32)
        total = np.where(np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total)
    return total


def heads(case: Case) -> Iterator[tuple[slice, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Per sequence and query head: rows of q, head, float32 keys and values, which of them each row sees, their distance from it."""
    o = case.options
    starts = o["query_start_loc"] if o["query_start_loc"] is not None else np.arange(len(case.seq_lens) + 1)
    for table, n, a, b in zip(case.block_tables, case.seq_lens, starts[:-1], starts[1:], strict=True):
        m = int(b - a)
        if m == 0 or n == 0:
            continue
        how = {"layout": o["layout"], "kv_dtype": o["kv_dtype"]}
        k, mapped = reference.gather(case.k_cache, table, n, scale=o["k_scale"], **how)
        v, _ = reference.gather(case.v_cache, table, n, scale=o["v_scale"], **how)
        mask = reference.visible_keys(m, n, causal=o["causal"], window=o["window"], chunk=o["chunk"]) & mapped
        k, v = (np.where(mask.any(axis=0)[:, None, None], x, 0).astype(np.float32) for x in (k, v))
        group = case.q.shape[1] // k.shape[1]
        for h in range(case.q.shape[1]):
            yield slice(a, b), h, k[:, h // group], v[:, h // group], mask, np.arange(n) - np.arange(n - m, n)[:, None]


def float32_attention(case: Case, order: int, tensor_cores: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's formula in float32, head_dim and keys summed in the `order`-th of several orders."""
    o = case.options
    f32 = np.float32
    product = cut_product if tensor_cores else np.matmul
    fp8 = o["kv_dtype"] in FP8_DTYPES
    head_dim = case.q.shape[2]
    scale = f32(head_dim**-0.5 if o["scale"] is None else o["scale"])
    out = np.zeros(case.q.shape, f32)
    lse = np.full(case.q.shape[:2], -np.inf, f32)
    shuffle = np.random.default_rng(order).permutation(head_dim) if order else np.arange(head_dim)
    for rows, h, k, v, mask, distance in heads(case):
        keys = np.random.default_rng(order).permutation(len(k)) if order else np.arange(len(k))
        s = product(case.q[rows, h].astype(f32)[:, shuffle], k[keys][:, shuffle].T) * scale
        if o["softcap"] is not None:
            s = f32(o["softcap"]) * np.tanh(s / f32(o["softcap"]))
        if o["alibi_slopes"] is not None:
            s = s + f32(o["alibi_slopes"][h]) * distance[:, keys].astype(f32)
        s = np.where(mask[:, keys], s, f32(-np.inf))
        top = s.max(axis=1)
        p = np.exp(s - np.where(top > -np.inf, top, f32(0))[:, None])
        total = p.sum(axis=1)
        with np.errstate(divide="ignore"):
            lse[rows, h] = top + np.log(total)
        if tensor_cores:
            p = p.astype(np.float16 if fp8 else case.q.dtype).astype(f32)
        out[rows, h] = product(p, v[keys]) / np.where(total > 0, total, f32(1))[:, None]
    return reference.apply_sinks(out, lse, o["sinks"]).astype(f32), lse


def _gap(got: np.ndarray, expected: np.ndarray) -> float:
    both = np.isfinite(got.astype(np.float64)) & np.isfinite(expected)
    return float(np.abs(got.astype(np.float64)[both] - expected[both]).max(initial=0.0))


def assert_close(case: Case, out: np.ndarray, lse: np.ndarray, tensor_cores: bool = False) -> None:
    """`out` and `lse` equal the oracle's within the tolerance; rows that see nothing are exactly 0 and -inf."""
    expected_out, expected_lse = case.oracle()
    tol_out, tol_lse = tolerance(case, expected_out, expected_lse, tensor_cores)
    out64 = np.asarray(out).astype(np.float64)
    empty = expected_lse == -np.inf
    assert np.isfinite(out64).all(), "an output is not finite"
    assert (out64[empty] == 0).all(), "a row without visible keys is not 0"
    np.testing.assert_array_equal(np.asarray(lse) == -np.inf, empty)
    error = np.abs(out64 - expected_out).max(initial=0.0)
    assert error <= tol_out, f"out differs by {error:.3g}, plain float32 allows {tol_out:.3g}"
    error = np.abs(np.asarray(lse, np.float64)[~empty] - expected_lse[~empty]).max(initial=0.0)
    assert error <= tol_lse, f"lse differs by {error:.3g}, plain float32 allows {tol_lse:.3g}"


def make_case(
    rng: np.random.Generator,
    *,
    seq_lens: list[int],
    query_lens: list[int] | None = None,  # None: decode
    num_kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: str = "float32",
    kv_dtype: str | None = None,  # None: as dtype
    layout: str = "HND",
    magnitude: float = 1.0,
    spare_columns: int = 1,
    shared: dict[int, tuple[int, int]] | None = None,  # sequence: (an earlier one, full blocks that it begins with too)
    **options: Any,
) -> Case:
    """Random queries and a poisoned pool, interleaved with other layers' memory, that holds random keys and values."""
    fp8 = kv_dtype in FP8_DTYPES
    page_dtype = np.dtype(np.uint8) if fp8 else numpy_dtype(kv_dtype or dtype)
    options = {
        "layout": layout, "query_start_loc": None, "scale": None, "causal": True, "window": None, "chunk": None, "softcap": None,
        "alibi_slopes": None, "sinks": None, "k_scale": 1.0, "v_scale": 1.0, "kv_dtype": kv_dtype if fp8 else None,
        "num_splits": None, "share_prefix": True, **options,
    }  # fmt: skip
    columns = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(columns) + 2
    ids = rng.permutation(num_blocks)
    # entries past the last used column: ids that would fault, and another sequence's
    tables = rng.choice(
        np.array([-1, 2**31 - 1, -(2**31), 0]), (len(seq_lens), max(columns, default=0) + spare_columns)
    )
    tables = tables.astype(np.int32)
    for row, used in enumerate(columns):
        tables[row, :used] = ids[sum(columns[:row]) :][:used]
    for row, (other, blocks) in sorted((shared or {}).items()):
        blocks = min(blocks, seq_lens[row] // block_size, seq_lens[other] // block_size)
        tables[row, :blocks] = tables[other, :blocks]
    shape = (num_kv_heads, block_size) if layout == "HND" else (block_size, num_kv_heads)
    pool = np.empty(
        (num_blocks, 3, 2, *shape, head_dim), page_dtype
    )  # page-major, three layers: the middle one is ours
    pool[:] = NAN_CODES[kv_dtype] if fp8 else np.nan
    k_cache, v_cache = pool[:, 1, 0], pool[:, 1, 1]
    for row, n in enumerate(seq_lens):
        j = np.arange(n)
        slots = tables[row, j // block_size].astype(np.int64) * block_size + j % block_size
        k = (rng.standard_normal((n, num_kv_heads, head_dim)) * magnitude).astype(numpy_dtype(dtype))
        v = rng.standard_normal((n, num_kv_heads, head_dim)).astype(numpy_dtype(dtype))
        scales = {name: options[name] for name in ("k_scale", "v_scale", "kv_dtype")}
        reference.write_kv(k, v, k_cache, v_cache, slots, layout=layout, **scales)
    if query_lens is not None:
        options["query_start_loc"] = np.cumsum([0, *query_lens]).astype(np.int32)
    rows = len(seq_lens) if query_lens is None else sum(query_lens)
    q = rng.standard_normal((rows, num_kv_heads * group, head_dim)).astype(numpy_dtype(dtype))
    case = Case(q, k_cache, v_cache, tables, np.array(seq_lens, np.int32), options)
    return _release_blocks(case, query_lens or [1] * len(seq_lens), block_size)


def _release_blocks(case: Case, query_lens: list[int], block_size: int) -> Case:
    """With a window or chunk, unmap the blocks that no row of their sequence can see, as an allocator would."""
    if case.options["window"] is None and case.options["chunk"] is None:
        return case
    tables = case.block_tables.copy()
    for row, (n, m) in enumerate(zip(case.seq_lens, query_lens, strict=True)):
        seen = reference.visible_keys(m, n, **{key: case.options[key] for key in ("causal", "window", "chunk")}).any(
            axis=0
        )
        for column in range(-(-int(n) // block_size)):
            if not seen[column * block_size : (column + 1) * block_size].any():
                tables[row, column] = -1
    return replace(case, block_tables=tables)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    head_dims: tuple[int, ...],
    block_sizes: tuple[int, ...],
    groups: tuple[int, ...],
    longest: tuple[int, ...] = (3, 20, 150),
) -> Case:
    """Any call that the contract allows, small."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_seqs = draw(st.integers(1, 5))
    block_size = draw(st.sampled_from(block_sizes))
    most = draw(st.sampled_from(longest))
    least = draw(st.sampled_from([0, most // 2]))
    seq_lens = draw(st.lists(st.integers(least, most), min_size=num_seqs, max_size=num_seqs))
    query_lens = draw(st.none() | st.lists(st.integers(0, 9), min_size=num_seqs, max_size=num_seqs))
    num_kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from(groups))
    num_heads = num_kv_heads * group
    dtype = draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    kv_dtype = draw(st.sampled_from([None, None, "fp8_e4m3", "fp8_e5m2"]))

    shared = {}
    for row in range(1, num_seqs):
        if draw(st.booleans()):
            shared[row] = (
                draw(st.integers(0, row - 1)),
                draw(st.integers(most // block_size // 2, most // block_size + 1)),
            )

    def sometimes(strategy: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | strategy)

    plain = draw(st.booleans())  # no window, chunk or fixed splits: prefixes may be shared

    def unless_plain(strategy: st.SearchStrategy[Any]) -> Any:
        return None if plain else sometimes(strategy)

    def scale_of() -> Any:
        return draw(st.sampled_from([1.0, 0.25, rng.uniform(0.1, 2.0, num_kv_heads).astype(np.float32)]))

    return make_case(
        rng, seq_lens=seq_lens, query_lens=query_lens, num_kv_heads=num_kv_heads, group=group,
        head_dim=draw(st.sampled_from(head_dims)), block_size=block_size, dtype=dtype, kv_dtype=kv_dtype,
        layout=draw(st.sampled_from(["HND", "NHD"])), causal=draw(st.booleans()),
        window=unless_plain(st.integers(1, most + 2)), chunk=unless_plain(st.integers(1, most + 2)),
        softcap=sometimes(st.sampled_from([0.5, 5.0, 50.0])), scale=sometimes(st.sampled_from([0.05, 0.7, -0.3])),
        alibi_slopes=rng.uniform(-0.3, 0.3, num_heads).astype(np.float32) if draw(st.booleans()) else None,
        sinks=rng.normal(0, 2, num_heads).astype(np.float32) if draw(st.booleans()) else None,
        k_scale=scale_of(), v_scale=scale_of(), num_splits=unless_plain(st.integers(1, 5)),
        spare_columns=draw(st.integers(0, 2)), shared=shared,
    )  # fmt: skip
