"""Physical blocks: reference counts and the free queue, for those who keep tables of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged import BlockPool, OutOfBlocks


@given(num_blocks=st.integers(0, 12), data=st.data())
@settings(max_examples=150)
def test_random_histories_equal_lists(num_blocks: int, data: st.DataObject) -> None:
    pool, free, owners = BlockPool(num_blocks), list(range(num_blocks)), [0] * num_blocks
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(["take", "acquire", "release"]))
        count, ids = data.draw(st.integers(0, 6)), data.draw(st.lists(st.integers(-1, num_blocks), max_size=8))
        argument = np.array(ids, data.draw(st.sampled_from([np.int32, np.int64])))
        if action == "take" and count > len(free):
            with pytest.raises(OutOfBlocks) as caught:
                pool.take(count)
            assert (caught.value.needed, caught.value.free) == (count, len(free))
        elif action == "take":
            taken, free = free[:count], free[count:]
            for block in taken:
                owners[block] = 1
            got = pool.take(count)
            assert (got.tolist(), got.dtype) == (taken, np.int32)
        elif action == "acquire" and all(0 <= b < num_blocks and owners[b] for b in ids):
            for block in ids:
                owners[block] += 1
            pool.acquire(argument)
        elif action == "release" and all(0 <= b < num_blocks and owners[b] >= ids.count(b) for b in ids):
            for block in ids:
                owners[block] -= 1
                if not owners[block]:
                    free.append(block)
            pool.release(argument)
        elif action != "take":
            with pytest.raises(ValueError, match="blocks"):
                getattr(pool, action)(argument)
        pool.check()
        assert pool.free().tolist() == free
        assert pool.ref_count.tolist() == owners
        assert (pool.num_free, pool.num_used) == (len(free), num_blocks - len(free))
        assert pool.sharing == any(n > 1 for n in owners)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: p.take(5), OutOfBlocks, "5 needed, 2 free"),
        (lambda p: p.take(-1), ValueError, "count"),
        (lambda p: p.take(1.0), TypeError, "count"),
        (
            lambda p: p.take(3, drop=([2], None)),
            ValueError,
            "block 2 is released more often than the 0 times it is held",
        ),
        (lambda p: p.take(4, drop=([0], None)), OutOfBlocks, "4 needed, 3 free"),
        (lambda p: p.take(1, reuse=[3], drop=([0], None)), TypeError, "reuse, drop: expected one of the two at most"),
        (lambda p: p.acquire([3]), ValueError, "3 is free"),
        (lambda p: p.acquire([4]), ValueError, "from 0 to 3, got 4 to 4"),
        (lambda p: p.release([0, 1, 0]), ValueError, "block 0 is released more often than the 1 times it is held"),
        (lambda p: p.release([0.0]), TypeError, "blocks: expected integers"),
        (lambda p: p.release([[0]]), ValueError, "blocks: expected one dimension"),
        (lambda p: p.release([0, 1], np.array([1, 2])), ValueError, "tables: expected counts whose sum is 2"),
        (lambda p: p.release([0, 1], np.array([3, -1])), ValueError, "tables: expected counts whose sum is 2"),
    ],
)
def test_a_wrong_call_says_why_and_changes_nothing(call: Any, error: type[Exception], message: str) -> None:
    pool = BlockPool(4)
    pool.take(2)
    with pytest.raises(error, match=message):
        call(pool)
    assert (pool.free().tolist(), pool.ref_count.tolist(), pool.references) == ([2, 3], [1, 1, 0, 0], 2)
    pool.check()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.ref_count.__setitem__(0, 2), "references"),
        (lambda p: p.ref_count.__setitem__(3, 1), "a free block has references"),
        (lambda p: p.ref_count.__setitem__(0, -1), "negative"),
        (lambda p: p.ref_count.__setitem__(0, 0), "a block is lost"),
        (lambda p: p._queue.push(np.array([2])), "twice"),
    ],
)
def test_check_finds_damage(damage: Any, message: str) -> None:
    pool = BlockPool(5)
    pool.take(2)
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check()
