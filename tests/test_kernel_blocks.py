"""Steps in blocks smaller than the allocator's, as kernels want them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupaged import BlockAllocator, Group, TableMirror


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_steps_in_kernel_blocks_say_the_same(data: st.DataObject) -> None:
    """Two allocators run the same calls; the steps of one are in smaller blocks: same slots, same tables token by token."""
    per, size = data.draw(st.sampled_from([(2, 4), (4, 4), (3, 6), (1, 2)]))
    groups = data.draw(st.sampled_from([[Group()], [Group(), Group(window=5)]]))
    plain, fine = (
        BlockAllocator(30, size, groups, prefix_caching=True, host_blocks=30, kernel_block_size=kernel)
        for kernel in (None, size // per)
    )
    mirrors = [TableMirror(size // per) for _ in groups]
    for call in range(data.draw(st.integers(1, 15))):
        names, away = list(plain.lengths), plain.evicted
        here = [name for name in names if name not in away]
        kind = data.draw(st.sampled_from(["add", "grow", "grow", "fork", "truncate", "free", "evict", "restore"]))
        n = data.draw(st.integers(0, 9))
        name = data.draw(st.sampled_from(here)) if here else None
        steps = []
        for alloc in (plain, fine):
            try:
                if kind == "add":
                    steps.append(alloc.add_request(call, token_ids=np.zeros(n, np.int32)))
                    alloc.commit([call], np.zeros(n - int(steps[-1].num_cached[0]), np.int32))
                elif kind == "restore" and away:
                    steps.append(alloc.restore(away))
                elif kind == "evict" and here:
                    steps.append(alloc.evict([name]))
                elif kind == "grow" and here:
                    steps.append(alloc.grow_batch(here, n))
                elif kind == "fork" and here:
                    alloc.fork_request(name, [call])
                elif kind == "truncate" and here:
                    alloc.truncate(name, min(n, alloc.lengths[name]))
                elif kind == "free" and here:
                    alloc.free_request(name)
            except (MemoryError, ValueError):
                pass
        assert plain.free == fine.free
        if not steps:
            continue
        for g in range(len(groups)):
            one, other = (step.group(g) for step in steps)
            small = size // per
            assert (other.block_size, other.num_blocks) == (small, 30 * per)
            for field in ("slot_mapping", "seq_lens", "query_start_loc", "num_cached"):
                np.testing.assert_array_equal(getattr(one, field), getattr(other, field))
                assert getattr(one, field).dtype == getattr(other, field).dtype
            assert np.shares_memory(other.packed, other.block_tables) and other.block_tables.dtype == np.int32
            width = max(1, -(-int(one.seq_lens.max(initial=0)) // small))
            assert other.block_tables.shape == (len(one.rows), width)
            for row, length in enumerate(one.seq_lens.tolist()):
                for j in range(length):
                    block, piece = int(one.block_tables[row, j // size]), int(other.block_tables[row, j // small])
                    assert piece == (-1 if block < 0 else block * per + j % size // small)
            for pairs in ("copies", "swap_out", "swap_in"):
                expected = [(a * per + i, b * per + i) for a, b in getattr(one, pairs).tolist() for i in range(per)]
                assert [tuple(pair) for pair in getattr(other, pairs).tolist()] == expected
            mirrors[g].apply(other.delta)
            for row, length, table in zip(other.rows, other.seq_lens, other.block_tables, strict=True):
                used = -(-int(length) // small)
                assert mirrors[g].tables[row, :used].tolist() == table[:used].tolist()
                assert (mirrors[g].tables[row, used:] == -1).all()


def test_a_kernel_block_size_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel_block_size: expected a divisor of block_size = 16, got 12"):
        BlockAllocator(4, 16, kernel_block_size=12)


def test_an_empty_batch_makes_a_step_in_kernel_blocks_too() -> None:
    alloc = BlockAllocator(4, 16, kernel_block_size=4, host_blocks=4)
    for serial, step in enumerate([alloc.grow_batch([]), alloc.evict([]), alloc.restore([])], 1):
        assert (step.serial, step.block_tables.shape, step.query_start_loc.tolist()) == (serial, (0, 1), [0])


def test_kernel_blocks_past_int32_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"kernel_block_size: expected at most 2\*\*31 - 1 kernel blocks, got 1048576 blocks of 2048"
    ):
        BlockAllocator(2**20, 4096, kernel_block_size=2)
    with pytest.raises(ValueError, match=r"got 2097152 blocks of 1024; make it larger"):
        BlockAllocator(2**20, 4096, kernel_block_size=4, host_blocks=2**21)
    alloc = BlockAllocator(2**20, 4096, kernel_block_size=4)
    alloc.pool.take(2**20 - 1)
    step = alloc.add_request("A", 4095)
    assert step.block_tables[0, -1] == 2**30 - 1
    assert step.slot_mapping[-1] == 2**32 - 2
