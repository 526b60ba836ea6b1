"""Which cached blocks continue which: for each identity a list of its children, newest first, as links in arrays.

Used to find the block that goes on like a prompt for some of its tokens. Almost every block is an only child, and those are linked by
arrays and need no unlinking; the others go one by one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from .array_types import Blocks, Ints
from .block_pool import BlockPool

_NONE = -1
_ZERO, _NO_BLOCK, _NO_CHILD = np.array(0), np.array(0, np.int32), np.array(_NONE, np.int32)
_ROOT = np.iinfo(np.int32).max  # `previous` of the first child of a root
_COMING = np.array(np.iinfo(np.int32).min, np.int32)  # `previous` of a block with an identity that is in no list yet


class Siblings:
    """Doubly linked lists. `serial` and `parent [num_blocks]` are the identities' numbers, which the owner fills.

    A link to a first child is void when that block is no child of this identity any more, which the numbers tell since none is used
    again: an only child leaves without being unlinked. In the same way a parent that lost its identity leaves its children linked to
    one another.
    """

    def __init__(self, pool: BlockPool, serial: Ints, parent: Ints) -> None:
        self._pool, self._serial, self._parent = pool, serial, parent
        self._child = np.full(pool.num_blocks, _NONE, np.int32)  # the first one, see `_first`
        self._next = np.full(pool.num_blocks, _NONE, np.int32)  # none, too, of a block that is in no list
        self._previous = np.full(pool.num_blocks, _NONE, np.int32)  # ~parent or _ROOT for the first one
        self._roots: dict[int, int] = {}  # first child of each root, by the root's number

    def add(self, blocks: Ints, parents: Ints) -> None:
        """Put `blocks[i]` in front of the children of block `parents[i]`, or of the root `parent[blocks[i]]` where that is -1."""
        self._previous[blocks] = _COMING  # now that the numbers agree, a void link to one of them would look true
        child = self._child.take(parents)
        linked = (child > _NO_CHILD) & (self._serial.take(child) > _ZERO)
        linked &= self._parent.take(child) == self._serial.take(parents)
        linked &= self._previous.take(child) != _COMING
        only = (parents >= _ZERO) & ~linked
        if np.count_nonzero(self._pool.last_of_each(parents)) < len(parents):
            only &= self._pool.occurrences(parents) == 1
        if np.count_nonzero(only) == len(blocks):
            self._child[parents], self._previous[blocks] = blocks, ~parents
            return
        lone = only.nonzero()[0]
        children, above = blocks.take(lone), parents.take(lone)
        self._child[above], self._previous[children] = children, ~above
        for block, parent in zip(blocks[~only].tolist(), parents[~only].tolist(), strict=True):
            self._add_first(block, parent)

    def add_run(self, blocks: Ints, parent: int) -> None:
        """`add` for a run of blocks, each the parent of the next, after block `parent` or, where that is -1, after a root."""
        narrow = blocks.astype(np.int32)
        self._child[blocks[:-1]] = narrow[1:]
        self._previous[blocks[1:]] = ~narrow[:-1]
        self._add_first(int(blocks[0]), parent)

    def _add_first(self, block: int, parent: int) -> None:
        self._previous[block] = _COMING
        first = self._first(parent, int(self._parent[block]))
        self._next[block], self._previous[block] = first, ~parent if parent >= 0 else _ROOT
        if first >= 0:
            self._previous[first] = block
        self._set_first(block, block)

    def remove(self, blocks: Blocks | Ints) -> None:
        """Take `blocks [n]` out of their lists, before they lose their identities."""
        alone = (self._previous.take(blocks) & self._next.take(blocks)) < _NO_BLOCK  # both are
        if np.count_nonzero(alone) == len(blocks):
            return
        for block in blocks[~alone].tolist():
            behind, before = int(self._next[block]), int(self._previous[block])
            if behind >= 0:
                self._previous[behind] = before
            if 0 <= before < _ROOT:
                self._next[before] = behind
            else:
                self._set_first(block, behind)
            self._next[block] = _NONE

    def replace(self, old: int, new: int) -> None:
        """Put `new` in the place of `old`, as a child and as a parent; they have one identity."""
        child = self._first(old, 0)
        self._child[new], self._next[new], self._previous[new] = child, self._next[old], self._previous[old]
        if child >= 0:
            self._previous[child] = ~new
        if self._next[new] >= 0:
            self._previous[self._next[new]] = new
        if 0 <= self._previous[new] < _ROOT:
            self._next[self._previous[new]] = new
        else:
            self._set_first(new, new)
        self._next[old] = _NONE

    def _first(self, parent: int, root: int) -> int:
        """The first child of block `parent`, or of `root` where that is -1."""
        if parent < 0:
            return self._roots.get(root, _NONE)
        child = int(self._child[parent])
        alive = child >= 0 and self._serial[child] > 0 and self._parent[child] == self._serial[parent]
        return child if alive and self._previous[child] != _COMING else _NONE

    def newest(self, parent: int, root: int, most: int) -> list[int]:
        """Up to `most` children of block `parent`, or of `root` where that is -1."""
        block = self._first(parent, root)
        found: list[int] = []
        while block >= 0 and len(found) < most:
            found.append(block)
            block = int(self._next[block])
        return found

    def roots(self) -> Iterable[int]:
        """Numbers of the roots that have children."""
        return self._roots

    def clear(self) -> None:
        """Empty all lists."""
        self._child.fill(_NONE)
        self._next.fill(_NONE)
        self._roots.clear()

    def check(self, entries: Blocks) -> None:
        """Raises AssertionError unless every entry whose parent is alive stands in that parent's list, and no other block in any."""
        others = np.ones(len(self._next), np.bool_)
        others[entries] = False
        if (self._next[others] != _NONE).any():
            raise AssertionError(
                f"blocks without identity are in lists: {(others & (self._next != _NONE)).nonzero()[0]}"
            )
        canonical = {int(self._serial[b]): int(b) for b in entries}
        listed = {int(b): self.newest(int(b), 0, len(entries) + 1) for b in entries}
        for block, children in listed.items():
            if len(set(children)) < len(children) or (self._parent[children] != self._serial[block]).any():
                raise AssertionError(f"block {block} has the children {children}, of {self._parent[children]}")
        for block in entries.tolist():
            parent = int(self._parent[block])
            siblings = listed[canonical[parent]] if parent in canonical else self.newest(-1, parent, len(entries))
            if (parent in canonical or parent in self._roots) and block not in siblings:
                raise AssertionError(f"block {block} is not among the children {siblings} of its parent")

    def _set_first(self, block: int, first: int) -> None:
        """The list in which `block` is first now begins with `first`."""
        parent = int(self._parent[block])
        previous = int(self._previous[block])
        if previous == _ROOT:
            if first >= 0:
                self._roots[parent] = first
            else:
                self._roots.pop(parent, None)
        elif self._serial[~previous] == parent:
            self._child[~previous] = first


def common_lengths(tokens: npt.NDArray[np.int32], rest: npt.NDArray[np.int32]) -> Ints:
    """How many tokens each row of `tokens [n, m]` has in common with `rest [m]`, from the front: `[n]`."""
    differs = np.ones((len(tokens), len(rest) + 1), np.bool_)
    np.not_equal(tokens, rest, out=differs[:, :-1])
    result: Ints = differs.argmax(1)
    return result
