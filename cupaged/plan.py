"""Planning: every check that reads metadata values, once per step, so that no layer's call repeats it.

Host arrays only. Nothing here touches a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Array


@dataclass(frozen=True, slots=True)
class Plan:
    """Metadata of one step, checked: what `paged_attention(plan=...)` reads instead of checking again."""

    block_tables: Array  # [num_seqs, max_blocks] int32
    seq_lens: Array  # [num_seqs] int32
    query_start_loc: Array  # [num_seqs + 1] int32
    block_size: int
    num_blocks: int  # a pool needs at least this many

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])


def host_int32(x: object, name: str, ndim: int) -> Array:
    """Host metadata as a contiguous int32 array; other integer types are converted when every value fits."""
    a = np.asarray(x)
    if a.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected an int32 array, got dtype {a.dtype}; pass integers")
    if a.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimension{'s' * (ndim > 1)}, got shape {a.shape}")
    if a.dtype != np.int32 and a.size and (a.min() < -(2**31) or a.max() >= 2**31):
        raise ValueError(f"{name}: expected values that fit int32, got {a.min()} to {a.max()}")
    return np.ascontiguousarray(a, np.int32)


def check_metadata(
    block_tables: object,
    seq_lens: object,
    query_start_loc: object | None,
    *,
    block_size: int,
    num_blocks: int,
    window: int | None = None,
    chunk: int | None = None,
) -> Plan:
    """Check everything that reads metadata values. Raises ValueError or TypeError naming argument, row and value.

    Entries after a row's last used column are never looked at. An unmapped entry (-1) below `seq_len` is an error unless a
    window or chunk explains it.
    """
    lens = host_int32(seq_lens, "seq_lens", 1)
    tables = host_int32(block_tables, "block_tables", 2)
    num_seqs, max_blocks = tables.shape
    if len(lens) != num_seqs:
        raise ValueError(f"seq_lens: expected {num_seqs} entries, one per row of block_tables, got {len(lens)}")
    if query_start_loc is None:
        starts = np.arange(num_seqs + 1, dtype=np.int32)
    else:
        starts = host_int32(query_start_loc, "query_start_loc", 1)
        if len(starts) != num_seqs + 1:
            raise ValueError(f"query_start_loc: expected num_seqs + 1 = {num_seqs + 1} entries, got {len(starts)}")
        if starts[0] != 0 or (np.diff(starts) < 0).any():
            raise ValueError(
                f"query_start_loc: expected a rising sequence that starts at 0, got {_short(starts)}; "
                "row i's queries are [query_start_loc[i], query_start_loc[i + 1])"
            )
    bad = np.flatnonzero((lens < 0) | (lens > max_blocks * block_size))
    if bad.size:
        row = bad[0]
        raise ValueError(
            f"seq_lens: row {row} expected 0 to max_blocks * block_size = {max_blocks} * {block_size} = "
            f"{max_blocks * block_size}, got {lens[row]}; widen block_tables or shorten the sequence"
        )
    used = np.arange(max_blocks) < -(-lens // block_size)[:, None]
    bad_entry = used & ((tables >= num_blocks) | (tables < -1))
    if window is None and chunk is None:
        bad_entry |= used & (tables == -1)
    if bad_entry.any():
        row, column = (int(x) for x in np.argwhere(bad_entry)[0])
        entry = tables[row, column]
        fix = (
            "an unmapped entry below seq_len needs window= or chunk="
            if entry == -1
            else "the cache has fewer blocks than the table speaks of"
        )
        raise ValueError(
            f"block_tables: row {row} column {column} expected a block id from 0 to {num_blocks - 1}, got {entry}; {fix}"
        )
    return Plan(tables, lens, starts, block_size, num_blocks)


def _short(a: Array) -> str:
    return np.array2string(a, threshold=8, edgeitems=3)
