"""vLLM's original entry points: one query a sequence over the classic layout, in a single pass (v1) or in partitions (v2).

Kept for what is written against them, and as the baseline of the fast kernels. Argument names and order are the original ones; on
NumPy arrays the oracle computes. Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention" (SOSP 2023), section 5.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import reference
from .arguments import choice, finite, integer
from .arrays import DTYPES, FP8_DTYPES, Array, as_array, is_cupy
from .backends import backend_of
from .checks import check_apart, check_caches, check_result, check_rows, per_head, scales
from .metadata import check_given, device_metadata, host_metadata

_MOST = 2**31 - 1
PARTITION_SIZE = 512  # tokens of one partition of v2; CLASSIC_PARTITION of cuda_structs.py


@dataclass(frozen=True, slots=True)
class BlockSparse:
    """Which blocks of `block_size` keys a head looks at, counted from the query's own block backwards.

    The last `local_blocks`; and every `vert_stride`-th, at an offset that moves by `head_step` from one query head to the next
    (negative: by -head_step from one KV head to the next). `first_head` is the number of heads on earlier ranks.
    """

    local_blocks: int
    vert_stride: int
    block_size: int
    head_step: int
    first_head: int

    def mask(self, seq_len: int, head: int, group: int) -> Array:
        """`[seq_len]` bool: the keys that query head `head` sees."""
        theirs = np.arange(seq_len) // self.block_size
        mine = (seq_len - 1) // self.block_size
        if self.head_step >= 0:
            offset = (self.first_head + head) * self.head_step + 1
        else:
            offset = (self.first_head + head) // group * -self.head_step + 1
        return (theirs > mine - self.local_blocks) | ((theirs + offset) % self.vert_stride == 0)


@dataclass(frozen=True, slots=True)
class ClassicAttention:
    """One checked call."""

    q: Array  # [num_seqs, num_heads, head_dim]
    k_cache: Array  # [num_blocks, num_kv_heads, head_dim // x, block_size, x]
    v_cache: Array  # [num_blocks, num_kv_heads, head_dim, block_size]
    block_tables: Array  # [num_seqs, max_blocks] int32
    seq_lens: Array  # [num_seqs] int32
    max_seq_len: int
    scale: float
    alibi_slopes: Array | None  # [num_heads] float32
    k_scale: Array  # [num_kv_heads] float32
    v_scale: Array
    kv_dtype: str
    sparse: BlockSparse | None
    out: Array
    partials: tuple[Array, Array, Array] | None  # exp_sums, max_logits, tmp_out of v2


def paged_attention_v1(
    out: Array,
    query: Array,
    key_cache: Array,
    value_cache: Array,
    num_kv_heads: int,
    scale: float,
    block_tables: Array,
    seq_lens: Array,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Array | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention in a single pass, logits of a whole sequence in shared memory.

    Args:
        out, query: `[num_seqs, num_heads, head_dim]`, one query a sequence, at its last position. `out` is filled.
        key_cache: `[num_blocks, num_kv_heads, head_dim // x, block_size, x]`, `x = 16 // itemsize`.
        value_cache: `[num_blocks, num_kv_heads, head_dim, block_size]`.
        block_tables, seq_lens: `[num_seqs, max_blocks]` and `[num_seqs]` int32.
        block_size: 8, 16, 32, 64 or 128. max_seq_len: at least the longest of `seq_lens`.
        kv_cache_dtype: "auto" (as the cache's dtype), or "fp8" ("fp8_e4m3"), "fp8_e5m2" for uint8 caches.
        blocksparse_vert_stride: above 1 turns block-sparse attention on: a head sees the last `blocksparse_local_blocks` blocks of
            `blocksparse_block_size` keys, and every `blocksparse_vert_stride`-th.

    Raises:
        TypeError, ValueError: naming the argument; also when `max_seq_len` does not fit shared memory (use v2).
    """
    _run(
        out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes,
        kv_cache_dtype, k_scale, v_scale, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
        blocksparse_head_sliding_step, None,
    )  # fmt: skip


def paged_attention_v2(
    out: Array,
    exp_sums: Array,
    max_logits: Array,
    tmp_out: Array,
    query: Array,
    key_cache: Array,
    value_cache: Array,
    num_kv_heads: int,
    scale: float,
    block_tables: Array,
    seq_lens: Array,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Array | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float | Array = 1.0,
    v_scale: float | Array = 1.0,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention in partitions of `PARTITION_SIZE` tokens, merged by a second kernel; other arguments as in `paged_attention_v1`.

    Args:
        exp_sums, max_logits: `[num_seqs, num_heads, max_num_partitions]` float32, filled.
        tmp_out: `[num_seqs, num_heads, max_num_partitions, head_dim]` float32 whatever the dtype of `out`, filled.
    """
    _run(
        out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len, alibi_slopes,
        kv_cache_dtype, k_scale, v_scale, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
        blocksparse_head_sliding_step, (exp_sums, max_logits, tmp_out),
    )  # fmt: skip


def _run(
    out: Array, query: Array, key_cache: Array, value_cache: Array, num_kv_heads: int, scale: float, block_tables: Array,
    seq_lens: Array, block_size: int, max_seq_len: int, alibi_slopes: Array | None, kv_cache_dtype: str, k_scale: float | Array,
    v_scale: float | Array, tp_rank: int, local_blocks: int, vert_stride: int, sparse_block_size: int, head_step: int,
    partials: tuple[Array, Array, Array] | None,
) -> None:  # fmt: skip
    query = as_array(query, "query")
    check_rows(query, "query", "[num_seqs, num_heads, head_dim]")
    num_kv_heads, block_size = integer(num_kv_heads, "num_kv_heads", 1), integer(block_size, "block_size", 1)
    max_seq_len, tp_rank = integer(max_seq_len, "max_seq_len", 0), integer(tp_rank, "tp_rank", 0)
    local_blocks = integer(local_blocks, "blocksparse_local_blocks", 0)
    vert_stride = integer(vert_stride, "blocksparse_vert_stride", 0)
    sparse_block_size = integer(sparse_block_size, "blocksparse_block_size", 0)
    head_step = integer(head_step, "blocksparse_head_sliding_step", -_MOST, _MOST)
    choice(kv_cache_dtype, "kv_cache_dtype", ("auto", "fp8", *FP8_DTYPES, *DTYPES))
    num_seqs, num_heads, head_dim = query.shape
    kv_dtype = {"auto": None, "fp8": "fp8_e4m3"}.get(kv_cache_dtype, kv_cache_dtype)
    k_pages, v_pages, kv_dtype = check_caches(
        key_cache, value_cache, query, "classic", kv_dtype, writing=False,
        names=("key_cache", "value_cache", "kv_cache_dtype"),
    )  # fmt: skip
    if v_pages.shape[1:] != (num_kv_heads, head_dim, block_size):
        raise ValueError(
            f"value_cache: expected [num_blocks, {num_kv_heads}, {head_dim}, {block_size}], got {v_pages.shape}"
        )
    if not 8 <= head_dim <= 256 or num_heads % num_kv_heads:
        raise ValueError(
            f"query: expected head_dim from 8 to 256 and num_heads a multiple of num_kv_heads = {num_kv_heads}, got {query.shape}"
        )
    check_given(block_tables, seq_lens)
    if is_cupy(block_tables):
        tables, lens, _ = device_metadata(block_tables, seq_lens, None, query)
    else:
        tables, lens, _ = host_metadata(block_tables, seq_lens, None, block_size=block_size, num_blocks=len(k_pages))
    if len(lens) != num_seqs:
        raise ValueError(f"query: expected {len(lens)} rows, one per row of block_tables, got {num_seqs}")
    if isinstance(lens, np.ndarray) and max_seq_len < lens.max(initial=0):
        raise ValueError(f"max_seq_len: expected at least {lens.max()}, the longest of seq_lens, got {max_seq_len}")
    check_result(out, "out", query.shape, query.dtype, query)
    check_apart(out, "out", query, "query")
    if partials is not None:
        parts = max(-(-max_seq_len // PARTITION_SIZE), 1)
        shape = (
            num_seqs,
            num_heads,
            max(parts, partials[0].shape[2]) if getattr(partials[0], "ndim", 0) == 3 else parts,
        )
        for x, name, wanted in zip(
            partials, ("exp_sums", "max_logits", "tmp_out"), (shape, shape, (*shape, head_dim)), strict=True
        ):
            check_result(x, name, wanted, np.dtype(np.float32), query)
            if not x.flags.c_contiguous:
                raise ValueError(f"{name}: expected a contiguous array, got strides {x.strides}")
    sparse = None
    if vert_stride > 1:
        if sparse_block_size < 1 or sparse_block_size % block_size:
            raise ValueError(
                f"blocksparse_block_size: expected a multiple of block_size = {block_size}, got {sparse_block_size}"
            )
        sparse = BlockSparse(local_blocks, vert_stride, sparse_block_size, head_step, tp_rank * num_heads)
    call = ClassicAttention(
        query, k_pages, v_pages, tables, lens, max_seq_len, finite(scale, "scale"),
        per_head(alibi_slopes, "alibi_slopes", num_heads, query),
        scales(k_scale, "k_scale", num_kv_heads, query), scales(v_scale, "v_scale", num_kv_heads, query), kv_dtype, sparse, out, partials,
    )  # fmt: skip
    if num_seqs:
        on_device: Any = getattr(backend_of(query, classic=True), "classic_attention", None)
        (on_device or _on_host)(call)


def _on_host(call: ClassicAttention) -> None:
    """The oracle, head by head where heads see different keys; of v2's partials nothing is filled."""
    group = call.q.shape[1] // call.v_cache.shape[1]
    for i, (table, n) in enumerate(zip(call.block_tables, call.seq_lens, strict=True)):
        k, mapped = reference.gather(
            call.k_cache, table, n, layout="classic", scale=call.k_scale, kv_dtype=call.kv_dtype
        )
        v, _ = reference.gather(call.v_cache, table, n, layout="classic", scale=call.v_scale, kv_dtype=call.kv_dtype)
        for head in range(call.q.shape[1]):
            heads, kv_heads = slice(head, head + 1), slice(head // group, head // group + 1)
            call.out[i : i + 1, heads], _ = reference.dense_attention(
                call.q[i : i + 1, heads], k[:, kv_heads], v[:, kv_heads], scale=call.scale,
                alibi_slopes=None if call.alibi_slopes is None else call.alibi_slopes[heads],
                mapped=mapped if call.sparse is None else mapped & call.sparse.mask(int(n), head, group),
            )  # fmt: skip
