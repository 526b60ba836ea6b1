"""Which sequences of a step begin with the same blocks: found in the tables alone, for the whole batch at once.

Attention over a prefix that many sequences share needs its keys and values once, not once a sequence. What is found here is where
that is possible: it is a fact about tables. Whether it pays is the planner's question (`shared_work`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .array_types import Flags, Int32s, Ints

_LEVELS = 8  # how often groups are split into groups that share more: a bound on time, not on what is right
_WIDEST = 256  # columns that are compared at once


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Groups of sequences whose tables begin with the same blocks. A sequence belongs to at most one."""

    members: Ints  # sequences, those of a group next to one another, in batch order
    starts: Ints  # [num_groups + 1]: group i is members[starts[i]:starts[i + 1]], two sequences at least
    blocks: (
        Ints  # [num_groups]: full blocks that all of the group have in common and that lie below every query row of it
    )

    @property
    def num_groups(self) -> int:
        return len(self.blocks)


NOTHING = SharedPrefix(np.zeros(0, np.int64), np.zeros(1, np.int64), np.zeros(0, np.int64))


@dataclass(slots=True)
class _Level:
    """Disjoint groups, and which group of the level before each is a part of."""

    members: Ints
    of: Ints  # [len(members)] its group
    starts: Ints  # [num_groups + 1]
    parent: Ints  # [num_groups]
    common: Ints  # [num_groups] blocks

    @property
    def sizes(self) -> Ints:
        return np.diff(self.starts)


def find_shared_prefix(
    block_tables: Int32s, seq_lens: Int32s, query_start_loc: Int32s, block_size: int
) -> SharedPrefix:
    """The groups that save most reading: a block that n sequences share is read n - 1 times less.

    Args: host arrays as in `paged_attention`. Only blocks wholly below a sequence's first query row count, so that every row of a
    group sees every token of its prefix.

    Sequences that share their first block are compared; where some of them go on alike after the others differ, the smaller groups
    are taken instead if those save more together. Costs one sort of the first column where nothing is shared.
    """
    columns = block_tables.shape[1]
    if len(seq_lens) < 2 or not columns:
        return NOTHING
    first = np.sort(block_tables[:, 0])
    if (first[1:] != first[:-1]).all():  # as in most steps
        return NOTHING
    queries = np.diff(query_start_loc).astype(np.int64)
    below = np.where(queries > 0, (seq_lens - queries) // block_size, 0)
    rows = ((below > 0) & (block_tables[:, 0] >= 0)).nonzero()[0]
    flat = block_tables.reshape(-1)
    levels: list[_Level] = []
    level = _split(rows, np.zeros(len(rows), np.int64), flat.take(rows * columns))
    known = np.zeros(1, np.int64)  # columns that the groups of the level before have in common
    while len(level.parent) and len(levels) < _LEVELS:
        level.common = _common(level, block_tables, below, known.take(level.parent))
        levels.append(level)
        known = level.common
        depth = known.take(level.of)
        longer = below.take(level.members) > depth
        members, of = level.members[longer], level.of[longer]
        level = _split(members, of, flat.take(members * columns + depth[longer]))
    return _best(levels) if levels else NOTHING


def _split(members: Ints, of: Ints, key: Int32s) -> _Level:
    """Groups of the members that agree in `of` and `key`, without those of one."""
    order = np.lexsort((key, of)) if len(of) and of[-1] else np.argsort(key, kind="stable")
    members, of, key = members[order], of[order], key[order]
    fresh = np.ones(len(members) + 1, np.bool_)
    fresh[1:-1] = (key[1:] != key[:-1]) | (of[1:] != of[:-1])
    starts = fresh.nonzero()[0]
    sizes = np.diff(starts)
    kept = sizes > 1
    inside = np.repeat(kept, sizes)
    parent = of.take(starts[:-1][kept])
    sizes = sizes[kept]
    ends = sizes.cumsum()
    return _Level(
        members[inside], np.repeat(np.arange(len(sizes)), sizes), np.concatenate(([0], ends)), parent, np.zeros(0, np.int64)
    )  # fmt: skip


def _common(level: _Level, tables: Int32s, below: Ints, known: Ints) -> Ints:
    """How many blocks all members of each group have in common; `known` of them are known to be."""
    starts = level.starts[:-1]
    most = np.minimum.reduceat(below.take(level.members), starts)
    common, width = np.minimum(known + 1, most), 8
    going = common < most
    while going.any():
        first = int(common[going].min())
        part = tables[level.members, first : first + width]
        end = first + part.shape[1]
        differ = part[1:] != part[:-1]  # neighbours in a group
        alike = np.full(len(level.members), end)
        some = differ.any(axis=1).nonzero()[0]
        alike[some] = first + differ[some].argmax(axis=1)
        alike[starts[1:] - 1] = end  # a group's last and the next group's first
        alike = np.minimum.reduceat(alike, starts)
        common = np.where(going, np.maximum(np.minimum(alike, most), common), common)
        going &= (alike == end) & (common < most)
        width = min(2 * width, _WIDEST)
    return common


def _best(levels: list[_Level]) -> SharedPrefix:
    """Of groups within groups, those that save most."""
    worth: Ints = np.zeros(0, np.int64)  # of the level below, at best
    whole: list[Flags] = []  # whether a group is worth more than its parts
    for level, parts in zip(reversed(levels), [None, *reversed(levels)], strict=False):
        own = (level.sizes - 1) * level.common
        inner = np.zeros(len(own), np.int64)
        if parts is not None:
            np.add.at(inner, parts.parent, worth)
        whole.append(own >= inner)
        worth = np.maximum(own, inner)
    members, sizes, blocks = [], [], []
    open_ = np.ones(1, np.bool_)  # groups of the level above that are taken apart
    for level, takes in zip(levels, reversed(whole), strict=True):
        reached = open_.take(level.parent)
        taken = reached & takes
        members.append(level.members[taken.take(level.of)])
        sizes.append(level.sizes[taken])
        blocks.append(level.common[taken])
        open_ = reached & ~takes
    return SharedPrefix(
        np.concatenate(members), np.concatenate(([0], np.concatenate(sizes).cumsum())), np.concatenate(blocks)
    )
