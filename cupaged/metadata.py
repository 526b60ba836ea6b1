"""Checks of a step's metadata: block tables, lengths, query starts, slots. Each raises TypeError or ValueError, or returns arrays.

On the host every value is read. What lies on a device is not copied back: its kind, shape and place are all that can be checked.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from .arguments import host_array, integers
from .arrays import Array, array_module, at_rest, device_of, is_cupy
from .checks import check_device, not_captured


def check_given(block_tables: object, seq_lens: object) -> None:
    """Raise TypeError for a call that brings neither a plan nor metadata."""
    if block_tables is None or seq_lens is None:
        raise TypeError("block_tables, seq_lens: expected int32 arrays when no plan is given, got None")


def host_int32(x: object, name: str, ndim: int) -> Array:
    """Host metadata as a contiguous int32 array; other integer types are converted when every value fits."""
    a = host_array(x, name)
    if a.dtype.kind not in "iu" and a.size:  # an empty list has no dtype of its own
        raise TypeError(f"{name}: expected an int32 array, got dtype {a.dtype}; pass integers")
    if a.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimension{'s' * (ndim > 1)}, got shape {a.shape}")
    if a.dtype != np.int32 and a.size and (a.min() < -(2**31) or a.max() >= 2**31):
        raise ValueError(f"{name}: expected values that fit int32, got {a.min()} to {a.max()}")
    return np.ascontiguousarray(a, np.int32)


def host_arrays(
    block_tables: object, seq_lens: object, query_start_loc: object | None
) -> tuple[Array, Array, Array | None]:
    """Tables, lengths and query starts as int32 arrays, whatever they hold; None stays None."""
    tables, lens = host_int32(block_tables, "block_tables", 2), host_int32(seq_lens, "seq_lens", 1)
    return tables, lens, None if query_start_loc is None else host_int32(query_start_loc, "query_start_loc", 1)


def host_metadata(
    block_tables: object,
    seq_lens: object,
    query_start_loc: object | None,
    *,
    block_size: int,
    num_blocks: int,
    window: int | None = None,
    chunk: int | None = None,
) -> tuple[Array, Array, Array]:
    """Tables, lengths and query starts (by default one query a sequence) as int32, checked; messages name argument, row and value.

    Entries after a row's last used column are never looked at. An unmapped entry (-1) below `seq_len` is an error unless a
    window or chunk explains it.
    """
    tables, lens, starts = host_arrays(block_tables, seq_lens, query_start_loc)
    return tables, lens, check_values(tables, lens, starts, block_size, num_blocks, window, chunk)


def check_values(
    tables: Array,
    lens: Array,
    starts: Array | None,
    block_size: int,
    num_blocks: int,
    window: int | None,
    chunk: int | None,
) -> Array:
    """`host_metadata` for what `host_arrays` returned; returns the query starts."""
    num_seqs, max_blocks = tables.shape
    if len(lens) != num_seqs:
        raise ValueError(f"seq_lens: expected {num_seqs} entries, one per row of block_tables, got {len(lens)}")
    if starts is None:
        starts = np.arange(num_seqs + 1, dtype=np.int32)
    elif len(starts) != num_seqs + 1:
        raise ValueError(f"query_start_loc: expected num_seqs + 1 = {num_seqs + 1} entries, got {len(starts)}")
    elif starts[0] != 0 or (starts[1:] < starts[:-1]).any():
        raise ValueError(
            f"query_start_loc: expected a rising sequence that starts at 0, got {_short(starts)}; "
            "row i's queries are [query_start_loc[i], query_start_loc[i + 1])"
        )
    if num_seqs:
        _check_lengths(lens, max_blocks, block_size)
        lowest = -1 if window is not None or chunk is not None else 0
        from_lowest = tables if lowest == 0 else tables + np.int32(1)
        bad = from_lowest.view(np.uint32) >= num_blocks - lowest  # both limits at once: what is too low wraps
        if bad.any():
            bad &= np.arange(max_blocks) < -(-lens[:, None] // block_size)
            if bad.any():
                _refuse_entry(tables, bad, num_blocks)
    return starts


def _check_lengths(lens: Array, max_blocks: int, block_size: int) -> None:
    longest = max_blocks * block_size
    as_unsigned = lens.view(np.uint32)
    if as_unsigned[as_unsigned.argmax()] > longest:
        row = int(np.argmax((lens < 0) | (lens > longest)))
        raise ValueError(
            f"seq_lens: row {row} expected 0 to max_blocks * block_size = {max_blocks} * {block_size} = {longest}, "
            f"got {lens[row]}; widen block_tables or shorten the sequence"
        )


def _refuse_entry(tables: Array, bad: Array, num_blocks: int) -> None:
    row, column = (int(x) for x in np.argwhere(bad)[0])
    entry = tables[row, column]
    unmapped = "an unmapped entry below seq_len needs window= or chunk="
    fix = unmapped if entry == -1 else "the cache has fewer blocks than the table speaks of"
    raise ValueError(
        f"block_tables: row {row} column {column} expected a block id from 0 to {num_blocks - 1}, got {entry}; {fix}"
    )


def _short(a: Array) -> str:
    return np.array2string(a, threshold=8, edgeitems=3)


def device_metadata(
    block_tables: Array, seq_lens: Array, query_start_loc: Array | None, like: Array
) -> tuple[Array, Array, Array]:
    """The same of what lies on the device of `like`, of whose values nothing is known."""
    check_device(block_tables, "block_tables", like)
    if block_tables.ndim != 2 or (not len(block_tables) and len(like)):
        raise ValueError(
            f"block_tables: expected a row of block ids for each sequence, got shape {block_tables.shape} beside {len(like)} queries"
        )
    if query_start_loc is None:
        query_start_loc = _positions(len(block_tables) + 1, like.device.id)
    wanted = (
        ("block_tables", block_tables, 2, len(block_tables)),
        ("seq_lens", seq_lens, 1, len(block_tables)),
        ("query_start_loc", query_start_loc, 1, len(block_tables) + 1),
    )
    for name, x, ndim, length in wanted:
        if not is_cupy(x):
            raise TypeError(
                f"{name}: expected a CuPy array as block_tables is, got {type(x).__name__}; pass all metadata on one side"
            )
        check_device(x, name, like)
        if x.dtype != np.int32 or x.ndim != ndim or len(x) != length or not x.flags.c_contiguous:
            raise ValueError(
                f"{name}: expected a contiguous int32 array of {length} rows and {ndim} dimensions, got {x.dtype} {x.shape}"
            )
    return block_tables, seq_lens, query_start_loc


def check_slots(slot_mapping: Any, num_tokens: int, num_slots: int, like: Array) -> Array:
    """Slots for at most `num_tokens` rows, contiguous, on either side; on the host all below `num_slots`."""
    slots = slot_mapping
    if not is_cupy(slots) and not isinstance(slots, np.ndarray):
        slots = host_array(slots, "slot_mapping")
    if is_cupy(slots):
        check_device(slots, "slot_mapping", like)
    if slots.ndim != 1 or len(slots) > num_tokens:
        raise ValueError(
            f"slot_mapping: expected one dimension of at most {num_tokens} entries, a row of k each, got {slots.shape}"
        )
    if slots.dtype not in (np.int64, np.int32):
        if not (slots.size == 0 or slots.dtype.kind in "iu"):
            raise TypeError(f"slot_mapping: expected int64 or int32, got {slots.dtype}")
        if not is_cupy(slots):
            slots = integers(slots, "slot_mapping")  # says what int64 cannot hold
        with device_of(slots):
            not_captured(slots, "slot_mapping", "int64 or int32", slots)
            slots = slots.astype(np.int64)
    if not is_cupy(slots) and slots.size and slots.max() >= num_slots:
        row = int(np.argmax(slots >= num_slots))
        raise ValueError(
            f"slot_mapping: row {row} expected a slot below num_blocks * block_size = {num_slots}, got {slots[row]}"
        )
    if slots.flags.c_contiguous:
        return slots
    with device_of(slots):
        not_captured(slots, "slot_mapping", "a contiguous array", slots)
        return array_module(slots).ascontiguousarray(slots)


@lru_cache(maxsize=64)
def _positions(n: int, device: int) -> Array:
    """0, 1, ... n - 1, made once."""
    return at_rest(np.arange(n, dtype=np.int32), device)
