"""Which thread block attends to which part of which sequence: the arithmetic of planning, in NumPy.

The keys of all units (a sequence, or `rows` of its packed query rows) are laid end to end in tiles of `tile` tokens and cut into
equal shares, one a thread block; a share may end one unit and begin the next ("stream-K"). Every KV head has the same schedule.

Source: Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Array

MIN_SHARE = 128  # tokens: below this, launching and merging cost more than reading


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the decode kernel walks. All arrays are int32."""

    share_start: Array  # [shares + 1]: items of share s are [share_start[s], share_start[s + 1])
    items: (
        Array  # [num_items, 4]: unit, first token, last token (excluded), partial or -1 when the item is the whole unit
    )
    units: Array  # [num_units, 4]: sequence, first packed row, first partial, number of partials
    num_partials: int


def make_schedule(
    seq_lens: Array,  # [num_seqs] int32
    query_start_loc: Array,  # [num_seqs + 1] int32
    *,
    group: int,
    rows: int,
    tile: int,
    shares: int,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    num_splits: int | None = None,
    takes: tuple[int, int] | None = None,
    skip: Array | None = None,
    after: bool = False,
) -> Schedule:
    """Cut one step's work into at most `shares` equal shares.

    Packed row `r * group + g` of a sequence is query row r for head g of a KV head's group; a unit is `rows` of them. Keys that no
    row of a unit may see are not part of it. With `num_splits`, a sequence's keys are cut at edges that follow from its own length
    alone; the pieces are dealt out whole. `takes`: fewest and most packed rows of the sequences that count, others are left out.
    `skip`: how many first keys of each sequence are attended to elsewhere. `after`: every row stands after all keys.
    """
    lens, starts = seq_lens.astype(np.int64), query_start_loc.astype(np.int64)
    num_queries = np.diff(starts)
    packed = num_queries * group
    if takes is not None:
        packed = np.where((packed >= takes[0]) & (packed <= takes[1]), packed, 0)
    sequence, row = _units(packed, rows)
    # positions of the first and last query row of each unit
    before = lens if after else lens - num_queries
    first_row = before[sequence] + row // group
    last_row = before[sequence] + (np.minimum(row + rows, num_queries[sequence] * group) - 1) // group
    low = _lowest_key(first_row, window, chunk)
    if skip is not None:
        low = np.maximum(low, skip[sequence])
    high = _highest_key(last_row, lens[sequence], causal, chunk)
    first_tile = low // tile
    last_tile = np.maximum(-(-high // tile), first_tile)

    if num_splits is None:
        ends = np.cumsum(last_tile - first_tile)
        begins = ends - (last_tile - first_tile)
        total = int(ends[-1]) if len(ends) else 0
        used = max(min(shares, total // -(-MIN_SHARE // tile)), 1)
        # share s covers tiles [edge(s), edge(s + 1)) of the whole; item i of a unit lies in the unit's first share + i
        start = _share_of(begins, total, used)
        count = np.maximum(_share_of(ends - 1, total, used) - start + 1, 1)
        of, nth = _expand(count)
        number = start[of] + nth
        shift = begins[of] - first_tile[of]
        first = np.maximum(begins[of], _edge(number, total, used)) - shift
        last = np.maximum(np.minimum(ends[of], _edge(number + 1, total, used)) - shift, first)
    else:
        base = _lowest_key(np.maximum(before, 0), window, chunk) // tile
        each = np.maximum(-(-(-(-lens // tile) - base) // num_splits), 1)[sequence]
        base = base[sequence]
        start = (first_tile - base) // each
        count = np.where(last_tile > first_tile, (last_tile - 1 - base) // each - start + 1, 1)
        of, nth = _expand(count)
        first = np.maximum(first_tile[of], base[of] + (start[of] + nth) * each[of])
        last = np.maximum(np.minimum(last_tile[of], base[of] + (start[of] + nth + 1) * each[of]), first)
        begins = np.cumsum(last - first) - (last - first)
        total = int(begins[-1] + last[-1] - first[-1]) if len(of) else 0
        used = max(min(shares, len(of)), 1)
        number = _share_of(begins, total, used)

    split = count > 1
    first_partial = np.cumsum(np.where(split, count, 0)) - np.where(split, count, 0)
    items = np.empty((len(of), 4), np.int32)
    items[:, 0], items[:, 1], items[:, 2] = of, first * tile, np.minimum(last * tile, high[of])
    if skip is not None:  # ends inside a tile
        items[:, 1] = np.maximum(items[:, 1], skip[sequence][of])
    items[:, 3] = np.where(split[of], first_partial[of] + nth, -1)
    units = np.empty((len(sequence), 4), np.int32)
    units[:, 0], units[:, 1], units[:, 2], units[:, 3] = sequence, row, first_partial, count
    share_start = np.searchsorted(number, np.arange(used + 1)).astype(np.int32)
    share_start[-1] = len(items)
    return Schedule(share_start, items, units, int(count[split].sum()))


def _edge(share: Array, total: int, shares: int) -> Array:
    """The first of `total` tiles that belongs to a share, when all shares are equal to within a tile."""
    return share * total // shares


def _share_of(position: Array, total: int, shares: int) -> Array:
    """Which share holds a tile; a position past the end (an empty unit's) counts as the last tile."""
    return np.minimum(((position + 1) * shares - 1) // max(total, 1), shares - 1)


def _units(packed: Array, rows: int) -> tuple[Array, Array]:
    """Sequence and first packed row of every unit, for sequences of `packed` rows."""
    if len(packed) and packed.min() > 0 and packed.max() <= rows:
        return np.arange(len(packed)), np.zeros(len(packed), np.int64)
    of, nth = _expand(-(-packed // rows))
    return of, nth * rows


def _expand(count: Array) -> tuple[Array, Array]:
    """For counts [2, 0, 3]: owners [0, 0, 2, 2, 2] and numbers within an owner [0, 1, 0, 1, 2]."""
    of = np.repeat(np.arange(len(count)), count)
    return of, np.arange(len(of)) - (np.cumsum(count) - count)[of]


def _lowest_key(position: Array, window: int | None, chunk: int | None) -> Array:
    """The first key that a row at `position` may see (0 for a row before the first)."""
    low = np.zeros_like(position)
    if window is not None:
        low = np.maximum(low, position - (window - 1))
    if chunk is not None:
        low = np.maximum(low, position // chunk * chunk)
    return low


def _highest_key(position: Array, length: Array, causal: bool, chunk: int | None) -> Array:
    """One past the last key that a row at `position` may see."""
    high = position + 1 if causal else length
    if chunk is not None:
        high = np.minimum(high, (position // chunk + 1) * chunk)
    return np.where(position >= 0, high, 0)
