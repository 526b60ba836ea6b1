"""Cache writes, block copies and swaps on a CUDA device: pack the parameter struct, launch on the current stream."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .arrays import Array, WriteKV
from .cuda_structs import (
    COPY,
    COPY_PER_THREAD,
    MAX_PAIRS,
    OUTER_AXES,
    WRITE,
    byte_strides,
    copy_defines,
    dtype_of,
    elements_per_access,
    merged_axes,
    power_of_two,
    write_defines,
)
from .cuda_upload import DeviceSide


class CacheKernels(DeviceSide):
    """Everything that moves keys and values."""

    def write_kv(self, call: WriteKV) -> None:
        """Launch write_kv.cu: a thread moves one piece of K and of V of one token."""
        slots = self._upload(call.slot_mapping)
        classic = call.layout == "classic"
        num_heads, head_dim = call.k.shape[1:]
        block_size = call.v_pages.shape[3 if classic else 2]
        pointer = self.launcher.pointer
        params = np.zeros(1, WRITE)
        for side, rows, pages, scale in (
            ("k", call.k, call.k_pages, call.k_scale),
            ("v", call.v, call.v_pages, call.v_scale),
        ):
            strides = [s // pages.itemsize for s in byte_strides(pages)]
            if not classic:
                block, head, slot, chunk = *strides[:3], 0
            elif side == "k":  # [num_blocks, num_kv_heads, head_dim // x, block_size, x]
                block, head, chunk, slot = strides[:4]
            else:  # [num_blocks, num_kv_heads, head_dim, block_size]
                block, head, chunk, slot = strides
            token, row_head = (s // rows.itemsize for s in byte_strides(rows)[:2])
            params[side] = (pointer(rows), pointer(pages), pointer(scale), token, row_head, block, head, slot, chunk)
        item, cache_item = call.k.itemsize, call.k_pages.itemsize
        vec = elements_per_access(head_dim, item, (call.k, call.v), pointer)
        if classic:
            vec = min(vec, elements_per_access(call.k_pages.shape[4], cache_item, (call.k_pages,), pointer))
        else:
            vec = min(vec, elements_per_access(head_dim, cache_item, (call.k_pages, call.v_pages), pointer))
        params["slot_mapping"], params["num_slots"] = pointer(slots), len(slots)
        params["pool_slots"], params["num_heads"], params["block_size"] = (
            call.k_pages.shape[0] * block_size,
            num_heads,
            block_size,
        )
        function = self.launcher.get(
            "write_kv",
            "write_kv.cu",
            write_defines(dtype_of(call.k), call.kv_dtype, head_dim, vec, classic, slots.dtype),
        )
        pieces = num_heads * (head_dim // vec)
        across = min(1 << (pieces - 1).bit_length(), 256)
        down = 256 // across
        self.launcher.launch(function, (-(-len(slots) // down), 1, 1), (across, down, 1), params)

    def copy_blocks(self, pool: Array, copies: Array) -> None:
        """`pool[dst] = pool[src]` for every row (src, dst) of the host array `copies`, in one launch for up to 448 of them."""
        self._copy(pool, pool, np.asarray(copies))

    def host_pages(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Pinned host memory for swapped blocks."""
        return self.launcher.pinned(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def swap_blocks(self, src: Array, dst: Array, pairs: Array) -> None:
        """`dst[to] = src[from]` between a pool on the device and one in pinned host memory, in either direction.

        Both have the block id as axis 0 and blocks of equal shape. Contiguous blocks go through the copy engines, runs of
        neighbouring ids as one piece; others through the copy kernel, which reads and writes pinned memory itself.
        """
        pairs = np.asarray(pairs)
        if not (
            src[:1].flags.c_contiguous
            and dst[:1].flags.c_contiguous
            and src.flags.c_contiguous
            and dst.flags.c_contiguous
        ):
            self._copy(src, dst, pairs)
            return
        breaks = np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1
        for run in np.split(pairs, breaks):
            if len(run):
                (a, b), n = run[0], len(run)
                self.launcher.copy_async(dst[b : b + n], src[a : a + n])

    def _copy(self, src: Array, dst: Array, pairs: Array) -> None:
        axes = merged_axes(src, dst)
        if 0 in src.shape[1:]:
            return
        run = axes.pop()[0] if axes and axes[-1][1:] == (src.itemsize, src.itemsize) else 1
        run_bytes = run * src.itemsize
        if len(axes) > OUTER_AXES:
            raise ValueError(
                f"pool: expected blocks of at most {OUTER_AXES} strided axes, got strides {src.strides}; make it contiguous"
            )
        pointer = self.launcher.pointer
        steps = [
            pointer(src),
            pointer(dst),
            byte_strides(src)[0],
            byte_strides(dst)[0],
            run_bytes,
            *(s for axis in axes for s in axis[1:]),
        ]
        vec = power_of_two(*steps)
        params = np.zeros(1, COPY)
        params["src"], params["dst"], params["src_block"], params["dst_block"] = steps[:4]
        size, src_stride, dst_stride = (
            np.ones(OUTER_AXES, np.uint32),
            np.zeros(OUTER_AXES, np.int64),
            np.zeros(OUTER_AXES, np.int64),
        )
        for i, (n, a, b) in enumerate(reversed(axes)):
            size[i], src_stride[i], dst_stride[i] = n, a, b
        params["size"], params["src_stride"], params["dst_stride"] = size, src_stride, dst_stride
        params["run"] = run_bytes // vec
        params["pieces"] = pieces = run_bytes // vec * int(size.prod(dtype=np.int64))
        function = self.launcher.get("copy_blocks", "copy_blocks.cu", copy_defines(vec))
        for start in range(0, len(pairs), MAX_PAIRS):
            some = pairs[start : start + MAX_PAIRS]
            params["pairs"][0, : len(some)] = some
            self.launcher.launch(function, (-(-pieces // (256 * COPY_PER_THREAD)), len(some), 1), (256, 1, 1), params)
