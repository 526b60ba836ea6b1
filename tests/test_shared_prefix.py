"""Shared prefixes in the control plane: what is found in tables, and what is taken because bytes say so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupaged
from cupaged import reference, shared_work
from cupaged.kernel_config import attention_kernels
from cupaged.launcher import DeviceInfo
from cupaged.plan import Bounds, Plan
from cupaged.schedule import make_schedule
from cupaged.shared_prefix import SharedPrefix, find_shared_prefix

H200 = DeviceInfo("H200", 90, 132, 227 << 10, 228 << 10, 50 << 20)
TURING = DeviceInfo("T4", 75, 40, 64 << 10, 64 << 10, 4 << 20)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Tables that grew out of one another, as forks and prefix hits leave them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, columns, block_size = draw(st.integers(0, 8)), draw(st.sampled_from([1, 3, 6, 40, 600])), draw(st.integers(1, 5))
    tables = rng.integers(0, 10**6, (n, columns)).astype(np.int32)
    for row in range(1, n):
        if rng.random() < 0.8:
            alike = rng.integers(0, columns + 1)
            tables[row, :alike] = tables[rng.integers(0, row), :alike]
    lens = np.full(n, columns * block_size) if draw(st.booleans()) else rng.integers(0, columns * block_size + 1, n)
    queries = rng.integers(0, 4, n) if draw(st.booleans()) else np.ones(n, int)
    return {
        "block_tables": tables, "seq_lens": lens.astype(np.int32), "block_size": block_size,
        "query_start_loc": np.cumsum([0, *queries]).astype(np.int32),
    }  # fmt: skip


def groups_of(found: SharedPrefix) -> list[tuple[list[int], int]]:
    return [
        (found.members[a:b].tolist(), int(blocks))
        for a, b, blocks in zip(found.starts[:-1], found.starts[1:], found.blocks, strict=True)
    ]


def most_saved(members: list[int], tables: list[list[int]], below: list[int], depth: int = 0) -> int:
    """The most blocks that one level of groups can save among sequences that agree in `depth` columns."""
    members = [m for m in members if below[m] >= max(depth, 1)]
    if len(members) < 2:
        return 0
    common = depth
    while all(below[m] > common for m in members) and len({tables[m][common] for m in members}) == 1:
        common += 1
    parts: dict[int, list[int]] = {}
    for m in members:
        if below[m] > common:
            parts.setdefault(tables[m][common], []).append(m)
    return max((len(members) - 1) * common, sum(most_saved(p, tables, below, common + 1) for p in parts.values()))


@given(batches())
@settings(max_examples=150)
def test_the_groups_found_are_those_that_save_most(batch: dict[str, Any]) -> None:
    found = find_shared_prefix(**batch)
    tables, lens, size = batch["block_tables"], batch["seq_lens"], batch["block_size"]
    queries = np.diff(batch["query_start_loc"])
    seen: set[int] = set()
    for members, blocks in groups_of(found):
        assert len(members) > 1 and not seen & set(members) and blocks > 0
        seen |= set(members)
        assert (tables[members, :blocks] == tables[members[0], :blocks]).all()
        assert (queries[members] > 0).all() and (lens[members] - queries[members] >= blocks * size).all()
    below = [max(int(n - m), 0) // size if m else 0 for n, m in zip(lens, queries, strict=True)]
    saved = sum((len(members) - 1) * blocks for members, blocks in groups_of(found))
    assert saved == most_saved(list(range(len(lens))), tables.tolist(), below)


def test_a_group_within_a_group_is_taken_when_it_saves_more() -> None:
    """Six requests begin with one block; three of them are beams with ten more in common."""
    tables = np.arange(6 * 12, dtype=np.int32).reshape(6, 12)
    tables[:, 0] = 7
    tables[[1, 3, 5], :11] = tables[1, :11]
    step = {"seq_lens": np.full(6, 12 * 4, np.int32), "query_start_loc": np.arange(7, dtype=np.int32), "block_size": 4}
    assert groups_of(find_shared_prefix(tables, **step)) == [([1, 3, 5], 11)]
    tables[:, :6] = tables[0, :6]  # now all of them share more than the three do beyond it
    assert groups_of(find_shared_prefix(tables, **step)) == [([0, 1, 2, 3, 4, 5], 6)]


def test_a_step_knows_what_its_sequences_share() -> None:
    alloc = cupaged.BlockAllocator(64, 4)
    alloc.add_request("a", 41)
    alloc.add_request("z", 20)
    assert alloc.grow_batch(["a", "z"], [1, 1]).shared_prefix.num_groups == 0
    alloc.fork_request("a", ["b", "c"])
    step = alloc.grow_batch(["z", "c", "a", "b"], [1, 1, 1, 1])
    # 42 tokens before this step: ten full blocks below each new token
    assert groups_of(step.shared_prefix) == [([1, 2, 3], 10)]
    assert step.shared_prefix is step.shared_prefix, "found once"
    # a query row inside the prefix makes what is below it the group's
    assert groups_of(alloc.grow_batch(["a", "b"], [1, 1]).shared_prefix) == [([0, 1], 10)]
    alloc.free_batch(["b", "c"])
    assert alloc.grow_batch(["a", "z"], [1, 1]).shared_prefix.num_groups == 0


def test_prompts_found_in_the_cache_share_their_blocks() -> None:
    alloc = cupaged.BlockAllocator(64, 4, prefix_caching=True)
    prompt = np.arange(21)
    alloc.add_request("a", token_ids=prompt)
    alloc.commit(["a"], [prompt])
    alloc.add_request("b", token_ids=np.append(prompt[:17], 99))
    alloc.commit(["b"], [np.array([99])])
    assert groups_of(alloc.grow_batch(["a", "b"], [1, 1]).shared_prefix) == [([0, 1], 4)]


# --------------------------------------------------------------------------------------------------------- what pays


def forks(count: int, tokens: int, own: int = 64, queries: int = 1, block_size: int = 16) -> dict[str, Any]:
    """Arguments of a plan: `count` sequences that begin with `tokens` in common and go on with `own`."""
    columns, alike = -(-(tokens + own) // block_size), tokens // block_size
    tables = np.arange(count * columns, dtype=np.int32).reshape(count, columns)
    tables[:, :alike] = tables[0, :alike]
    return {
        "seq_lens": np.full(count, tokens + own, np.int32), "block_tables": tables,
        "query_start_loc": np.arange(count + 1, dtype=np.int32) * queries, "block_size": block_size,
    }  # fmt: skip


def work_of(
    batch: dict[str, Any], info: DeviceInfo = H200, **options: Any
) -> tuple[shared_work.SharedWork | None, Plan]:
    shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "float16"}
    plan = cupaged.plan(**batch, **{**shape, **options})
    assert plan.options is not None
    o, group = plan.options, plan.options.num_heads // plan.options.num_kv_heads
    packed = np.diff(plan.query_start_loc) * group
    few = int(packed[packed <= 16].max(initial=1))
    kernels = attention_kernels(info, o.head_dim, o.dtype, o.kv_dtype, group, few, int(packed.max()))
    return shared_work.shared_work(info, plan, o, kernels), plan


def test_a_prefix_is_shared_when_the_bytes_it_saves_pay_for_a_launch() -> None:
    assert work_of(forks(64, 8192))[0] is not None
    assert work_of(forks(4, 32768))[0] is not None
    assert work_of(forks(2, 64))[0] is None, "64 tokens are read faster than one more kernel starts"
    assert work_of(forks(64, 16))[0] is None, "what goes through memory is more than what is saved"
    saved = [work_of(forks(8, tokens))[0] is not None for tokens in range(16, 4096, 16)]
    assert saved == sorted(saved), "longer prefixes never pay less"
    # at 4 KiB of keys and values a token, 7 reads of n tokens against what 132 multiprocessors read during a launch
    assert 300 <= 16 * (1 + saved.index(True)) <= 600
    half = [work_of(forks(8, tokens), kv_dtype="fp8_e4m3")[0] is not None for tokens in range(16, 4096, 16)]
    assert 1.8 * saved.index(True) <= half.index(True) <= 2.4 * saved.index(True), "fp8 pages save half as much"


@pytest.mark.parametrize(
    "options",
    [
        {"share_prefix": False}, {"window": 4096}, {"chunk": 8192}, {"num_splits": 2},
    ],
    ids=str,
)  # fmt: skip
def test_what_turns_sharing_off(options: dict[str, Any]) -> None:
    assert work_of(forks(64, 8192), **options)[0] is None


def test_a_graph_plan_never_shares() -> None:
    _, plan = work_of(forks(64, 8192))
    assert plan.options is not None
    kernels = attention_kernels(H200, 128, "float16", "float16", 4, 4, 4)
    assert shared_work.shared_work(H200, plan, plan.options, kernels) is not None
    bounded = replace(plan, bounds=Bounds(64, 64, 1024))
    assert shared_work.shared_work(H200, bounded, plan.options, kernels) is None


def test_cuda_cores_share_too_with_fewer_rows_to_a_unit() -> None:
    work, _ = work_of(forks(64, 8192), TURING)
    assert work is not None and work.config.kernel == "decode" and work.config.rows == 16
    assert work_of(forks(8, 8192), TURING, num_heads=32, num_kv_heads=1)[0] is None, "32 rows fill units by themselves"


def test_sequences_with_rows_enough_for_a_unit_stay_out() -> None:
    batch = forks(9, 8192, own=600)
    batch["query_start_loc"] = np.cumsum([0, *[1] * 8, 500]).astype(np.int32)  # a chunk of a prompt among decodes
    work, _ = work_of(batch)
    assert work is not None and work.config.kernel == "prefill"
    assert work.first_row.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, -1]
    assert work.groups.tolist() == [[0, 0, 8, 8192]] and work.skip.tolist() == [8192] * 8 + [0]
    np.testing.assert_array_equal(work.rows, [[i, 8791] for i in range(8)])


def test_of_several_groups_those_that_pay_are_taken() -> None:
    long, short = forks(8, 8192), forks(2, 16, own=8192 + 48)
    order = np.random.default_rng(0).permutation(10)
    tables = np.concatenate((long["block_tables"], 10**6 + short["block_tables"]))[order]
    work, _ = work_of({**forks(10, 0, own=8256), "block_tables": tables})
    assert work is not None
    first = order < 8
    assert (work.first_row >= 0).tolist() == first.tolist()
    assert work.groups.tolist() == [[int(np.flatnonzero(first)[0]), 0, 8, 8192]]


@given(batches(), st.sampled_from([1, 3, 4]), st.booleans())
@settings(max_examples=100)
def test_every_key_of_every_row_is_attended_to_once(batch: dict[str, Any], group: int, causal: bool) -> None:
    if not len(batch["seq_lens"]):
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_work, "LAUNCH_BYTES_PER_SM", -1)
        patch.setattr(shared_work, "SUM_BYTES", 0)
        work, plan = work_of(batch, num_heads=2 * group, num_kv_heads=2, causal=causal)
    lens, starts = plan.seq_lens, plan.query_start_loc
    counts = [np.zeros((m * group, n), int) for m, n in zip(np.diff(starts), lens, strict=True)]
    owner = np.repeat(np.arange(len(lens)), np.diff(starts))
    if work is not None:
        schedule = make_schedule(
            work.lengths, work.starts, group=group, rows=work.config.rows, tile=64, shares=7, causal=False, after=True
        )
        for unit, first, last, _ in schedule.items:
            number, row = schedule.units[unit, :2]
            leader, first_row, num_rows, tokens = work.groups[number]
            assert 0 <= first < last <= tokens
            for packed in range(row, min(row + work.config.rows, num_rows * group)):
                token, position = work.rows[first_row + packed // group]
                sequence = owner[token]
                blocks = -(-last // plan.block_size)
                assert (plan.block_tables[sequence, :blocks] == plan.block_tables[leader, :blocks]).all()
                r = token - starts[sequence]
                assert position == lens[sequence] - len(counts[sequence]) // group + r
                assert work.first_row[sequence] + r == first_row + packed // group
                counts[sequence][r * group + packed % group, first:last] += 1
    schedule = make_schedule(
        lens, starts, group=group, rows=8, tile=64, shares=7, causal=causal, skip=None if work is None else work.skip
    )
    for unit, first, last, _ in schedule.items:
        sequence, row = schedule.units[unit, :2]
        if first < last:
            counts[sequence][row : row + 8, first:last] += 1
    for count, m, n in zip(counts, np.diff(starts), lens, strict=True):
        seen = reference.visible_keys(int(m), int(n), causal=causal, window=None, chunk=None).repeat(group, axis=0)
        assert (count[seen] == 1).all() and (count <= 1).all()
