"""Which thread block attends to which part of which sequence: the arithmetic of planning, in NumPy.

The keys of all units (a sequence, or `rows` of its packed query rows) are laid end to end and cut into equal shares of tokens, one
a thread block; a share may end one unit and begin the next ("stream-K"). Every KV head has the same schedule.

Source: Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .arrays import Array
from .groups import first_visible

MIN_SHARE = 128  # tokens: below this, launching and merging cost more than reading
LEAST_UNIT = 32  # tokens: a unit of fewer counts as so many where that is little against a share (`least_unit`)


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
    num_queries = starts[1:] - starts[:-1]
    packed = num_queries * group
    if takes is not None:
        packed *= (packed >= takes[0]) & (packed <= takes[1])
    before = lens if after else lens - num_queries
    row: Array | int = 0
    one_each = len(packed) > 0 and packed[packed.argmin()] > 0 and packed[packed.argmax()] <= rows  # every decode
    if one_each:
        sequence, first_row, last_row, length = np.arange(len(packed)), before, before + num_queries - 1, lens
    else:
        sequence, nth = _expand(-(-packed // rows))
        row = nth * rows
        first_row = before[sequence] + row // group
        last_row = before[sequence] + (np.minimum(row + rows, packed[sequence]) - 1) // group
        length = lens[sequence]
    low = first_visible(first_row, window, chunk)
    if skip is not None:
        low = np.maximum(low, skip[sequence])
    if one_each and not after and chunk is None:  # the last row is the sequence's last token: it sees all there is
        high = lens if window is None and skip is None else np.maximum(lens, low)
    else:
        high = np.maximum(_highest_key(last_row, length, causal, chunk), low)

    if num_splits is None:
        of, first, last, count, share_start = _equal_shares(low, high, tile, shares)
    else:
        base = first_visible(np.maximum(before, 0), window, chunk) // tile
        each = np.maximum(-(-(-(-lens // tile) - base) // num_splits), 1)[sequence] * tile
        of, first, last, count = _split(low, high, base[sequence] * tile, each)
        share_start = _deal(last - first, shares)

    units = np.empty((len(sequence), 4), np.int32)
    items = np.empty((len(of), 4), np.int32)
    in_parts = count * (count > 1)
    ends = in_parts.cumsum()
    partial = in_parts.take(of).nonzero()[0]  # items of units in several
    items[:, 0], items[:, 1], items[:, 2], items[:, 3] = of, first, last, -1
    items[partial, 3] = np.arange(len(partial))
    units[:, 0], units[:, 1], units[:, 2], units[:, 3] = sequence, row, ends - in_parts, count
    return Schedule(share_start, items, units, len(partial))


def _equal_shares(low: Array, high: Array, tile: int, shares: int) -> tuple[Array, Array, Array, Array, Array]:
    """Units laid end to end and cut into equal shares: owner, first and last token of every item, items a unit, `share_start`.

    What rounds is small against a share: an edge inside a unit is a multiple of a tile, or of a fraction of one where a tile is
    more than a 128th of a share; a unit counts as `least_unit` tokens, at most a 128th of a share, and an edge past the end of a
    shorter one goes to its begin. So no share is longer than their mean by more than a 128th of it.
    """
    size = high - low
    ends = size.cumsum()
    least = least_unit(int(ends[-1]) if len(ends) else 0, shares)
    if len(size) and size[size.argmin()] < least:
        size = np.maximum(size, least)
        ends = size.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    used = max(min(shares, total // MIN_SHARE), 1)
    grain = tile
    while grain > 1 and grain * 128 * used > total:
        grain //= 2
    edges = np.arange(1, used) * total // used
    unit = ends.searchsorted(edges, side="right")
    begin = low.take(unit)
    at = begin + size.take(unit) - ends.take(unit) + edges
    at -= at % grain
    inside = (at > begin) & (at < high.take(unit))  # other edges lie between two units
    cut, at = unit[inside], at[inside]

    # A cut adds an item, so that of unit u begins at item u + the cuts before it.
    begins = cut + np.arange(1, len(cut) + 1)  # items that begin at a cut
    extra = np.zeros(len(low) + len(cut), np.int64)
    extra[begins] = 1
    of = np.arange(len(extra)) - extra.cumsum()
    first, last = low.take(of), high.take(of)
    first[begins], last[begins - 1] = at, at
    share_start = np.empty(used + 1, np.int32)
    share_start[0], share_start[-1] = 0, len(of)
    share_start[1:-1] = unit + cut.searchsorted(unit)
    share_start[1:-1][inside] = begins
    return of, first, last, np.bincount(cut, minlength=len(low)) + 1, share_start


def least_unit(total: int, shares: int) -> int:
    """Tokens that a unit counts as at least, where all units have `total`: starting and ending one takes time too."""
    return min(max(total // shares, MIN_SHARE) // 128, LEAST_UNIT)


def _split(low: Array, high: Array, base: Array, each: Array) -> tuple[Array, Array, Array, Array]:
    """Units cut at `base` and every `each` tokens from there: owner, first and last token of every item, and items a unit."""
    start = (low - base) // each
    count = np.where(high > low, (high - 1 - base) // each - start + 1, 1)
    of, nth = _expand(count)
    edge = base[of] + (start[of] + nth) * each[of]
    first = np.maximum(low[of], edge)
    return of, first, np.maximum(np.minimum(high[of], edge + each[of]), first), count


def _deal(size: Array, shares: int) -> Array:
    """`share_start` of whole items: share s of the tokens holds the first token of its items."""
    begins = np.cumsum(size) - size
    used = max(min(shares, len(size)), 1)
    total = max(int(size.sum()), 1)
    share = np.minimum(((begins + 1) * used - 1) // total, used - 1)
    share_start = np.searchsorted(share, np.arange(used + 1)).astype(np.int32)
    share_start[-1] = len(size)
    return share_start


def _expand(count: Array) -> tuple[Array, Array]:
    """For counts [2, 0, 3]: owners [0, 0, 2, 2, 2] and numbers within an owner [0, 1, 0, 1, 2]."""
    of = np.repeat(np.arange(len(count)), count)
    return of, np.arange(len(of)) - (np.cumsum(count) - count)[of]


def _highest_key(position: Array, length: Array, causal: bool, chunk: int | None) -> Array:
    """One past the last key that a row at `position` may see."""
    if causal and chunk is None:
        return np.maximum(position + 1, 0)
    high = position + 1 if causal else length
    if chunk is not None:
        high = np.minimum(high, (position // chunk + 1) * chunk)
    return np.where(position >= 0, high, 0)
