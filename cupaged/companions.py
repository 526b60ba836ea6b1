"""Cached blocks of the other groups: what a prompt finds beside the chain of the full-attention group.

A group with a window gives back its older blocks, so that it has no chain of its own to walk. A block of such a group is known by
the identity of the full-attention group's block in the same column, the anchor: its parent is the number of the anchor, tagged with
the group. So it stands for the same tokens after the same prefix, whatever has become of the blocks before it.
"""

from __future__ import annotations

import numpy as np

from .array_types import Flags, Ints, Tokens
from .groups import Group
from .prefix_cache import PrefixCache
from .prefix_match import find


class Companions:
    """Identities of blocks of every group but the anchor, the first one of full attention.

    Raises ValueError when no group is of full attention.
    """

    def __init__(self, cache: PrefixCache, groups: list[Group]) -> None:
        self._cache, self._groups = cache, groups
        full = [g for g, group in enumerate(groups) if not group.limited]
        if not full:
            raise ValueError(
                "prefix_caching: expected a group of full attention among several groups, whose blocks keep the chain of a prompt; "
                "add one, or leave prefix_caching off"
            )
        self.anchor = full[0]
        self.others = [g for g in range(len(groups)) if g != self.anchor]

    def parents(self, group: int, anchors: Ints) -> Ints:
        """Parents of the group's identities beside anchor blocks `anchors [n]`; negative, where numbers of identities are above 0."""
        return -(self._cache.serial.take(anchors) * len(self._groups) + group)

    def serve(self, anchors: Ints, tokens: Tokens, gone: Flags | None = None) -> tuple[list[Ints], int]:
        """Of a prompt's `tokens`, whose first blocks the anchor has as `anchors [m]`, the longest prefix that every group can serve.

        A group serves a prefix when it has all blocks that the next token sees. Returns these blocks of each group and the columns
        of the prefix. Blocks that are `gone [num_blocks]` are taken to have lost their identities.
        """
        size, count = self._cache.block_size, len(anchors)
        columns = np.arange(count)
        words = tokens[: count * size].reshape(count, size)
        lengths = np.arange(count + 1)  # in blocks
        served = np.ones(count + 1, np.bool_)
        found, needs = {}, {}
        for g in self.others:
            found[g] = find(self._cache, self.parents(g, anchors), columns, words, gone)
            missing = np.maximum.accumulate(np.where(found[g] >= 0, -1, columns))  # the last one up to each column
            needs[g] = lengths - self._groups[g].horizon(lengths * size) // size
            served[1:] &= columns - missing >= needs[g][1:]
        longest = int(served.nonzero()[0][-1])
        hits = [
            anchors[:longest] if g == self.anchor else found[g][longest - needs[g][longest] : longest]
            for g in range(len(self._groups))
        ]
        return hits, longest
