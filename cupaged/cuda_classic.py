"""The original PagedAttention kernels on a CUDA device, kept for comparison (`cupaged.classic`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .cuda_structs import CLASSIC, CLASSIC_PARTITION, byte_strides, classic_defines, dtype_of, power_of_two
from .cuda_upload import DeviceSide

if TYPE_CHECKING:
    from .classic import ClassicAttention


class ClassicKernels(DeviceSide):
    """Launches of classic.cu."""

    def classic_attention(self, call: ClassicAttention) -> None:
        """Launch classic.cu: a block is one query head of one sequence, and with partials one partition of its keys."""
        pointer, info = self.launcher.pointer, self.launcher.info
        num_seqs, num_heads, head_dim = call.q.shape
        num_kv_heads, _, block_size = call.v_cache.shape[1:]
        tables, lens = self._upload(call.block_tables), self._upload(call.seq_lens)
        params = np.zeros(1, CLASSIC)
        p = params[0]
        p["q"], p["k_cache"], p["v_cache"], p["out"] = (
            pointer(call.q),
            pointer(call.k_cache),
            pointer(call.v_cache),
            pointer(call.out),
        )
        p["block_tables"], p["seq_lens"] = pointer(tables), pointer(lens)
        p["alibi_slopes"] = 0 if call.alibi_slopes is None else pointer(call.alibi_slopes)
        p["k_scale"], p["v_scale"] = pointer(call.k_scale), pointer(call.v_scale)
        for name, x in (("q", call.q), ("out", call.out)):
            p[f"{name}_seq"], p[f"{name}_head"] = (s // x.itemsize for s in byte_strides(x)[:2])
        strides = [*byte_strides(call.k_cache)[:2], *byte_strides(call.v_cache)[:2]]
        if power_of_two(int(p["k_cache"]), int(p["v_cache"]), *strides) < 16 or not (
            call.k_cache[0, 0].flags.c_contiguous and call.v_cache[0, 0].flags.c_contiguous
        ):
            raise ValueError(
                f"key_cache, value_cache: expected the block of one head to be contiguous and aligned to 16 bytes, got strides "
                f"{call.k_cache.strides} and {call.v_cache.strides}; make the caches contiguous"
            )
        p["k_block"], p["k_head"], p["v_block"], p["v_head"] = strides
        p["table_row"] = p["max_blocks"] = tables.shape[1]
        p["num_heads"], p["group"], p["num_blocks"], p["scale"] = (
            num_heads,
            num_heads // num_kv_heads,
            len(call.k_cache),
            call.scale,
        )
        p["max_seq_len"] = call.max_seq_len
        if call.sparse is not None:
            s = call.sparse
            p["local_blocks"], p["vert_stride"], p["sparse_block"] = s.local_blocks, s.vert_stride, s.block_size
            p["head_step"], p["first_head"] = s.head_step, s.first_head
        partition, parts = 0, 1
        if call.partials is not None:
            partition = CLASSIC_PARTITION
            p["exp_sums"], p["max_logits"], p["partials"] = (pointer(x) for x in call.partials)
            p["max_partitions"] = call.partials[0].shape[2]
            parts = max(-(-call.max_seq_len // partition), 1)
        padded = min(-(-call.max_seq_len // block_size) * block_size, partition or 2**31)
        shared = 4 * (5 * head_dim + 8 + padded)
        if shared > info.shared_per_block:
            most = (info.shared_per_block // 4 - 5 * head_dim - 8) // block_size * block_size
            raise ValueError(
                f"max_seq_len: a single pass takes at most {most} tokens on {info.name}, got {call.max_seq_len}; use paged_attention_v2"
            )
        defines = classic_defines(dtype_of(call.q), call.kv_dtype, head_dim, block_size, partition)
        # one function for every length: compiled once, allowed all the shared memory there is
        most_shared = info.shared_per_block if partition == 0 else shared
        function = self.launcher.get("classic_attention", "classic.cu", defines, most_shared)
        self.launcher.launch(function, (num_heads * num_seqs, 1, parts), (128, 1, 1), params, shared)
        if partition:
            reduce = self.launcher.get("classic_reduce", "classic.cu", defines)
            self.launcher.launch(reduce, (num_heads * num_seqs, 1, 1), (128, 1, 1), params)
