"""Lists of children: what leaves without being unlinked must not be found, nor found twice when it comes back."""

from __future__ import annotations

import numpy as np
import pytest

from cupaged.block_pool import BlockPool
from cupaged.siblings import Siblings


class Family:
    """Blocks 0 to 7; block 0 has an identity after root 1000, the others come and go as its children."""

    def __init__(self) -> None:
        self.serial, self.parent = np.zeros(8, np.int64), np.zeros(8, np.int64)
        self.lists = Siblings(BlockPool(8), self.serial, self.parent)
        self.next = 2
        self.serial[0], self.parent[0] = 1, 1000
        self.lists.add_run(np.array([0]), -1)

    def come(self, *blocks: int, as_run: bool = False) -> None:
        for block in blocks:
            self.serial[block], self.parent[block] = self.next, 1
            self.next += 1
        if as_run:
            self.lists.add_run(np.array(blocks), 0)
        else:
            self.lists.add(np.array(blocks), np.zeros(len(blocks), np.int64))
        self.check()

    def go(self, *blocks: int) -> None:
        self.lists.remove(np.array(blocks))
        self.serial[list(blocks)] = 0
        self.check()

    def check(self) -> None:
        self.lists.check(self.serial.nonzero()[0].astype(np.int32))

    def children(self) -> list[int]:
        return self.lists.newest(0, 1000, 8)


@pytest.mark.parametrize("as_run", [False, True])
def test_an_only_child_that_goes_and_comes_back_is_there_once(as_run: bool) -> None:
    family = Family()
    family.come(3, as_run=as_run)
    family.go(3)
    assert family.children() == []
    family.come(3, as_run=as_run)
    assert family.children() == [3]
    family.come(4)
    assert family.children() == [4, 3]


@pytest.mark.parametrize("order", [(3, 4), (4, 3)])
def test_an_only_child_comes_back_with_another_one(order: tuple[int, int]) -> None:
    family = Family()
    family.come(3)
    family.go(3)
    family.come(*order)
    assert family.children() == list(order[::-1])


def test_any_history_of_children_is_what_a_list_would_say(rng: np.random.Generator) -> None:
    family, expected = Family(), []
    for _ in range(400):
        there = rng.permutation(expected)[: rng.integers(0, 3)].tolist()
        absent = rng.permutation(sorted({*range(1, 8)} - {*expected}))[: rng.integers(0, 3)].tolist()
        if rng.random() < 0.5 and there:
            family.go(*there)
            expected = [block for block in expected if block not in there]
        elif absent:
            family.come(*absent)
            expected = absent[::-1] + expected
        assert family.children() == expected
