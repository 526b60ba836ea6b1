"""Which backend works on arrays of a kind, and the oracle as one of them.

Those that compute are the modules `cuda` and `cpu`; each is imported when it is first needed.
"""

from __future__ import annotations

import sys
import warnings
from functools import lru_cache
from typing import Any

import numpy as np

from . import reference
from .arrays import Array, Attention, WriteKV, is_cupy


def backend_of(x: Array, *, classic: bool = False) -> Any:
    """The module that works on arrays of this kind: `cuda`, `cpu`, or the reference where Numba is absent.

    The CPU backend leaves the classic layout, kept for comparison, to the reference.
    """
    if is_cupy(x):
        from . import cuda

        return cuda.backend_for(x)
    return Reference if classic else _cpu_backend()


@lru_cache(maxsize=1)
def _cpu_backend() -> Any:
    try:
        from . import cpu
    except ImportError as error:
        text = f"the fast CPU backend is off, and the slow reference computes in its place: {error}"
        warnings.warn(text, stacklevel=_level_of_the_caller())
        return Reference
    return cpu


def _level_of_the_caller() -> int:
    """How many frames above whoever asks the first one outside this package is, as `warnings.warn` counts."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    return level


class Reference:
    """The oracle behind the interface of a backend."""

    @staticmethod
    def paged_attention(call: Attention) -> None:
        out, lse = reference.paged_attention(
            call.q, call.k_pages, call.v_pages, call.block_tables, call.seq_lens, query_start_loc=call.query_start_loc,
            scale=call.scale, causal=call.causal, window=call.window, chunk=call.chunk, softcap=call.softcap,
            alibi_slopes=call.alibi_slopes, sinks=call.sinks, k_scale=call.k_scale, v_scale=call.v_scale, kv_dtype=call.kv_dtype,
        )  # fmt: skip
        call.out[...] = out
        if call.lse is not None:
            call.lse[...] = lse

    @staticmethod
    def write_kv(call: WriteKV) -> None:
        reference.write_kv(
            call.k, call.v, call.k_pages, call.v_pages, call.slot_mapping,
            layout=call.layout, k_scale=call.k_scale, v_scale=call.v_scale, kv_dtype=call.kv_dtype,
        )  # fmt: skip

    @staticmethod
    def merge_states(outs: Array, lses: Array, sinks: Array | None, out: Array, lse: Array) -> None:
        out[...], lse[...] = reference.merge_states(outs, lses, sinks)

    @staticmethod
    def copy_blocks(pool: Array, copies: Array) -> None:
        pool[copies[:, 1]] = pool[copies[:, 0]]

    @staticmethod
    def host_pages(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.empty(shape, dtype)

    @staticmethod
    def swap_blocks(src: Array, dst: Array, pairs: Array) -> None:
        dst[pairs[:, 1]] = src[pairs[:, 0]]
