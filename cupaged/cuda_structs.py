"""The parameter structs of the CUDA kernels, their compile-time constants, and what both say about addresses.

Each structured dtype here is the C struct `Params` of one source, which asserts its size (`kParamsBytes`); each `..._defines`
names every constant that source wants.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from .arrays import Array, numpy_dtype
from .kernel_config import MANY, KernelConfig
from .kernels import CUDA_TYPES

_PTR, _I64, _I32, _F32 = np.uint64, np.int64, np.int32, np.float32


def _struct(*fields: tuple[Any, ...]) -> np.dtype[Any]:
    """The C struct of a kernel's parameters: each entry is a type and the names that have it."""
    return np.dtype([(name, kind) for kind, *names in fields for name in names], align=True)


_SIDE = _struct((_PTR, "rows", "pages", "scale"), (_I64, "row_token", "row_head", "block", "head", "slot", "chunk"))
WRITE = np.dtype(
    [("k", _SIDE), ("v", _SIDE), ("slot_mapping", _PTR), ("num_slots", _I64), ("pool_slots", _I64),
     ("num_heads", _I32), ("block_size", _I32)],
    align=True,
)  # fmt: skip

MAX_PAIRS, OUTER_AXES, COPY_PER_THREAD = 448, 3, 4  # as in copy_blocks.cu
COPY = np.dtype(
    [
        ("src", _PTR), ("dst", _PTR), ("src_block", _I64), ("dst_block", _I64), ("src_stride", _I64, OUTER_AXES),
        ("dst_stride", _I64, OUTER_AXES), ("size", np.uint32, OUTER_AXES), ("run", np.uint32), ("pieces", np.uint32),
        ("padding", _I32), ("pairs", _I32, (MAX_PAIRS, 2)),
    ],
    align=True,
)  # fmt: skip

MERGE = _struct(
    (_PTR, "outs", "lses", "sinks", "out", "lse"),
    (_I64, "out_part", "out_row", "out_head", "out_dim", "lse_part", "lse_row", "lse_head", "num_states"),
    (_I32, "parts", "heads", "head_dim", "padding"),
)

ATTENTION = _struct(
    (_PTR, "k", "v"), (_I64, "k_block", "k_head", "k_slot", "v_block", "v_head", "v_slot"),
    (_PTR, "block_tables"), (_I64, "table_row"), (_I32, "max_blocks", "num_blocks", "block_size"), (np.uint32, "magic"),
    (_I32, "shift", "padding"),
    (_PTR, "q", "out", "lse"), (_I64, "q_token", "q_head", "out_token", "out_head", "lse_token"),
    (_PTR, "alibi_slopes", "sinks", "k_scale", "v_scale", "seq_lens", "query_start_loc", "share_start", "items", "units"),
    (_PTR, "partials", "partial_states", "tickets"),
    (_PTR, "shared_groups", "shared_rows", "first_shared_row", "shared_sums", "shared_states"),
    (_I32, "num_seqs", "num_tokens", "group", "num_kv_heads", "causal", "window", "chunk", "splits"), (_F32, "scale", "softcap"),
)  # fmt: skip

CLASSIC_PARTITION = 512  # tokens
CLASSIC = _struct(
    (_PTR, "q", "k_cache", "v_cache", "out", "partials", "max_logits", "exp_sums", "block_tables", "seq_lens", "alibi_slopes"),
    (_PTR, "k_scale", "v_scale"), (_I64, "q_seq", "q_head", "out_seq", "out_head", "k_block", "k_head", "v_block", "v_head", "table_row"),
    (_I32, "num_heads", "group", "max_partitions", "num_blocks", "max_blocks"),
    (_I32, "local_blocks", "vert_stride", "sparse_block", "head_step", "first_head"), (_F32, "scale"), (_I32, "max_seq_len"),
)  # fmt: skip


_CODES = {"<u8": "Q", "<i8": "q", "<u4": "I", "<i4": "i", "<f4": "f"}


@cache
def _packing(kind: np.dtype[Any]) -> struct.Struct:
    found = struct.Struct("@" + "".join(_CODES[kind[name].str] for name in kind.names or ()))
    assert found.size == kind.itemsize
    return found


def pack(kind: np.dtype[Any], values: Mapping[str, Any]) -> Array:
    """One struct of a flat kind; `values` has its fields, all of them, in their order.

    Many times faster than setting fields of an array one by one.
    """
    return np.frombuffer(_packing(kind).pack(*values.values()), kind)


# What differs between calls of a form on a plan: addresses, in the order of the struct.
ADDRESSES = (
    "k", "v", "block_tables", "q", "out", "lse", "alibi_slopes", "sinks", "k_scale", "v_scale", "seq_lens", "query_start_loc",
    "partials", "partial_states", "tickets", "shared_sums", "shared_states",
)  # fmt: skip


def _between(kind: np.dtype[Any], addresses: tuple[str, ...]) -> tuple[tuple[slice, ...], struct.Struct]:
    """Where the bytes between addresses lie, and the struct as addresses and such pieces."""
    assert kind.fields is not None
    pieces, form, end = [], "@", 0
    for start in (*(kind.fields[name][1] for name in addresses), kind.itemsize):
        if start > end:
            pieces.append(slice(end, start))
            form += f"{start - end}s"
        if start < kind.itemsize:
            form += "Q"
        end = start + 8
    return tuple(pieces), struct.Struct(form)


_PIECES, _AROUND = _between(ATTENTION, ADDRESSES)


def attention_pieces(values: Mapping[str, Any]) -> tuple[bytes, ...]:
    """What `pack_attention` puts between addresses, from a mapping as `pack` wants."""
    packed = pack(ATTENTION, values).tobytes()
    return tuple(packed[piece] for piece in _PIECES)


def pack_attention(
    pieces: tuple[bytes, ...], k: int, v: int, block_tables: int, q: int, out: int, lse: int, alibi_slopes: int, sinks: int,
    k_scale: int, v_scale: int, seq_lens: int, query_start_loc: int, partials: int, partial_states: int, tickets: int,
    shared_sums: int, shared_states: int,
) -> Array:  # fmt: skip
    """The struct of attention around the addresses of a call: what differs between calls of a form on a plan."""
    strides, pages, rows, schedule, groups, rest = pieces
    return np.frombuffer(
        _AROUND.pack(
            k, v, strides, block_tables, pages, q, out, lse, rows, alibi_slopes, sinks, k_scale, v_scale, seq_lens, query_start_loc,
            schedule, partials, partial_states, tickets, groups, shared_sums, shared_states, rest,
        ),
        ATTENTION,
    )  # fmt: skip


def decode_defines(
    config: KernelConfig, vec: int, planned: bool, softcap: bool, alibi: bool, block_size: int = 16
) -> dict[str, int | str]:
    """The constants of an attention kernel; `vec` is the width of an access to pages in bytes."""
    fewest, most = (0, MANY) if planned else config.takes  # a plan has chosen already
    return {
        **dict(config.defines), **dict(config.blocks(block_size)), "kVec": vec, "kPlanned": int(planned), "kSoftcap": int(softcap),
        "kAlibi": int(alibi), "kFewestRows": fewest, "kMostRows": most, "kParamsBytes": ATTENTION.itemsize,
    }  # fmt: skip


def write_defines(
    dtype: str, kv_dtype: str, head_dim: int, vec: int, classic: bool, slot_dtype: Any
) -> dict[str, int | str]:
    """The constants of write_kv.cu; `vec` is elements a thread moves at once."""
    x = 16 // numpy_dtype(kv_dtype).itemsize
    return {
        "kInputType": CUDA_TYPES[dtype], "kCacheType": CUDA_TYPES[kv_dtype], "kHeadDim": head_dim, "kVec": vec,
        "kKChunk": x if classic else head_dim, "kVChunk": 1 if classic else head_dim,
        "kSlotType": "int" if slot_dtype == np.int32 else "long long", "kParamsBytes": WRITE.itemsize,
    }  # fmt: skip


def copy_defines(vec: int) -> dict[str, int | str]:
    """The constants of copy_blocks.cu; `vec` is bytes a thread moves at once."""
    return {"kVec": vec, "kParamsBytes": COPY.itemsize}


def classic_defines(dtype: str, kv_dtype: str, head_dim: int, block_size: int, partition: int) -> dict[str, int | str]:
    """The constants of classic.cu; `partition` 0 is the single pass."""
    return {
        "kQueryType": CUDA_TYPES[dtype], "kCacheType": CUDA_TYPES[kv_dtype], "kHeadDim": head_dim, "kBlockSize": block_size,
        "kPartition": partition, "kParamsBytes": CLASSIC.itemsize,
    }  # fmt: skip


def merge_defines(dtype: str) -> dict[str, int | str]:
    """The constants of merge.cu."""
    return {"kQueryType": CUDA_TYPES[dtype], "kParamsBytes": MERGE.itemsize}


# ----------------------------------------------------------------------------------------------------------- addresses


def dtype_of(x: Array) -> str:
    return str(x.dtype.name)


def byte_strides(x: Array) -> list[int]:
    """Strides in bytes; those of axes of length 1 mean nothing and are 0."""
    return meaningful(x.shape, x.strides)


def meaningful(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Strides, 0 for axes of length 1."""
    return [0 if n == 1 else s for n, s in zip(shape, strides, strict=True)]


def power_of_two(*numbers: int) -> int:
    """The largest power of two up to 16 that divides all the numbers."""
    together = 16
    for n in numbers:
        together |= n
    return together & -together


def elements_per_access(row: int, item: int, arrays: tuple[Array, ...], pointer: Any) -> int:
    """How many elements of rows of `row` elements one access can take, for every address in the arrays."""
    steps = [row * item]
    for x in arrays:
        steps += [pointer(x), *byte_strides(x)[:-1]]
    return max(power_of_two(*steps) // item, 1)


@cache
def division_by(divisor: int) -> tuple[int, int]:
    """`(magic, shift)` with n // divisor == n * magic >> shift for every n below 2^31.

    Source: Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (1994).
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def merged_axes(src: Array, dst: Array) -> list[tuple[int, int, int]]:
    """The axes inside a block as (length, stride in src, stride in dst), with axes merged where both arrays allow it."""
    axes: list[tuple[int, int, int]] = []
    for n, a, b in zip(src.shape[1:], src.strides[1:], dst.strides[1:], strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1:] == (n * a, n * b):
            axes[-1] = (axes[-1][0] * n, a, b)
        else:
            axes.append((n, a, b))
    return axes
