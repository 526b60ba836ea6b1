"""Planning: every key of every row is given to exactly one item, shares are equal, and plans refuse what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupaged
from cupaged import reference
from cupaged.device_work import _Sizes
from cupaged.kernel_config import most_rows, rows_for
from cupaged.plan import Bounds
from cupaged.schedule import MIN_SHARE, Schedule, least_unit, make_schedule


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Lengths, queries and options of a step."""
    lens = draw(
        st.lists(st.sampled_from([0, 1, 5, 31, 32, 33, 100, 700]) | st.integers(0, 900), min_size=1, max_size=7)
    )
    queries = draw(st.lists(st.integers(0, 20), min_size=len(lens), max_size=len(lens)))
    if draw(st.booleans()):
        queries = [1] * len(lens)
    return {
        "seq_lens": np.array(lens, np.int32), "query_start_loc": np.cumsum([0, *queries]).astype(np.int32),
        "group": draw(st.sampled_from([1, 3, 4, 7, 20])), "rows": draw(st.sampled_from([1, 4, 8, 16])),
        "tile": draw(st.sampled_from([8, 16, 32])), "shares": draw(st.integers(1, 60)), "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(1, 300)), "chunk": draw(st.none() | st.integers(1, 300)),
        "num_splits": draw(st.none() | st.integers(1, 9)),
    }  # fmt: skip


def items_of(schedule: Schedule, unit: int) -> np.ndarray:
    return schedule.items[schedule.items[:, 0] == unit]


@given(steps())
@settings(max_examples=150)
def test_every_key_that_a_row_sees_lies_in_exactly_one_item_of_its_unit(step: dict[str, Any]) -> None:
    schedule = make_schedule(**step)
    lens, starts, group, rows = step["seq_lens"], step["query_start_loc"], step["group"], step["rows"]
    packed_rows = [set() for _ in lens]
    for number, (sequence, row, _, count) in enumerate(schedule.units):
        n, m = int(lens[sequence]), int(starts[sequence + 1] - starts[sequence])
        packed = range(row, min(row + rows, m * group))
        assert packed and not packed_rows[sequence] & set(packed)
        packed_rows[sequence] |= set(packed)
        seen = reference.visible_keys(m, n, causal=step["causal"], window=step["window"], chunk=step["chunk"])
        wanted = np.flatnonzero(seen[packed[0] // group : packed[-1] // group + 1].any(axis=0))
        items = items_of(schedule, number)
        assert len(items) == count
        covered = np.concatenate([np.arange(first, last) for _, first, last, _ in items])
        assert len(np.unique(covered)) == len(covered), "a key is in two items"
        assert np.isin(wanted, covered).all(), "a key is missed"
        if len(wanted):  # nothing outside the tiles of the visible keys is read
            assert covered.min() >= wanted[0] // step["tile"] * step["tile"] and covered.max() <= wanted[-1]
        else:
            assert not len(covered)
    for sequence, found in enumerate(packed_rows):
        assert len(found) == (starts[sequence + 1] - starts[sequence]) * group


@given(steps())
@settings(max_examples=150)
def test_partials_are_numbered_in_token_order_and_shares_hold_all_items(step: dict[str, Any]) -> None:
    schedule = make_schedule(**step)
    used = set()
    for number, (_, _, first_partial, count) in enumerate(schedule.units):
        items = items_of(schedule, number)
        assert (np.diff(items[:, 1]) > 0).all()
        if count == 1:
            assert items[0, 3] == -1
        else:
            assert items[:, 3].tolist() == list(range(first_partial, first_partial + count))
            assert not used & set(items[:, 3].tolist())
            used |= set(items[:, 3].tolist())
    assert used == set(range(schedule.num_partials))
    starts = schedule.share_start
    assert starts[0] == 0 and starts[-1] == len(schedule.items) and (np.diff(starts) >= 0).all()
    assert 1 <= len(starts) - 1 <= step["shares"]


@given(steps())
@settings(max_examples=150)
def test_a_graph_plan_has_room_for_every_schedule_within_its_bounds(step: dict[str, Any]) -> None:
    schedule = make_schedule(**step)
    bounds = Bounds(len(step["seq_lens"]), max(int(step["query_start_loc"][-1]), 1), 1)
    sizes = _Sizes.bound(bounds, step["group"], step["rows"], step["shares"], step["num_splits"])
    assert len(schedule.units) <= sizes.units and len(schedule.items) <= sizes.items
    assert schedule.num_partials <= sizes.partials and len(schedule.share_start) - 1 <= sizes.shares


@given(steps(), st.integers(1, 9))
@settings(max_examples=100)
def test_with_num_splits_the_cuts_of_a_sequence_do_not_depend_on_its_neighbours(
    step: dict[str, Any], splits: int
) -> None:
    step["num_splits"] = splits
    schedule = make_schedule(**step)
    for sequence in range(len(step["seq_lens"])):
        loc = step["query_start_loc"]
        alone = dict(
            step, seq_lens=step["seq_lens"][sequence : sequence + 1], shares=3,
            query_start_loc=np.array([0, loc[sequence + 1] - loc[sequence]], np.int32),
        )  # fmt: skip
        mine = np.flatnonzero(schedule.units[:, 0] == sequence)
        together = [items_of(schedule, unit)[:, 1:3].tolist() for unit in mine]
        by_itself = make_schedule(**alone)
        assert together == [items_of(by_itself, unit)[:, 1:3].tolist() for unit in range(len(by_itself.units))]


CONTEXTS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "equal": lambda rng, n: np.full(n, rng.integers(1, 5000)),
    "short": lambda rng, n: rng.integers(1, 400, n),
    "uniform": lambda rng, n: rng.integers(1, 8193, n),
    "long tailed": lambda rng, n: np.minimum(np.exp(rng.normal(6.5, 1.5, n)) + 1, 131072),
    "one long": lambda rng, n: np.r_[rng.integers(1, 300, n - 1), 100_000],
    "many empty": lambda rng, n: rng.integers(0, 2, n) * rng.integers(1, 5000, n),
}
CHIPS = {
    "A100": 108,
    "RTX 3090": 82,
    "RTX 4090": 128,
    "H100 and H200": 132,
    "B200": 148,
    "RTX 5090": 170,
}  # multiprocessors


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(("tile", "resident"), [(16, 1), (32, 3), (64, 2)])
def test_no_block_has_5_percent_more_than_its_part_at_any_batch_of_8_kv_heads(
    chip: str, tile: int, resident: int, rng: np.random.Generator
) -> None:
    """The longest share against all tokens over all blocks that the chip holds, those included that 8 heads leave idle.

    Where shares would be under 128 tokens, fewer blocks are used and the mean is that of those.
    """
    blocks = CHIPS[chip] * resident / 8  # of one KV head
    names = list(CONTEXTS)
    for batch in range(1, 257):
        for name in {names[batch % len(names)], "uniform"}:
            lens = np.asarray(CONTEXTS[name](rng, batch)).astype(np.int32)
            starts = np.arange(batch + 1, dtype=np.int32)
            schedule = make_schedule(lens, starts, group=4, rows=8, tile=tile, shares=int(blocks))
            tokens = schedule.items[:, 2] - schedule.items[:, 1]
            least = least_unit(int(lens.sum()), int(blocks))  # what a unit counts as at least
            counted = np.where(schedule.items[:, 3] < 0, np.maximum(tokens, least), tokens)
            shares = np.add.reduceat(counted, schedule.share_start[:-1])
            all_used = len(shares) == int(blocks)
            assert all_used or counted.sum() // MIN_SHARE == len(shares) or len(shares) == 1, "too few shares"
            assert shares.max() <= 1.05 * counted.sum() / (blocks if all_used else len(shares)), (batch, name)
            if lens.min() >= least:
                assert tokens.sum() == counted.sum() == lens.sum()


def test_units_hold_a_power_of_two_rows_that_registers_can_keep() -> None:
    assert [rows_for(128, group, 1) for group in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 71)] == [
        1,
        2,
        4,
        4,
        8,
        8,
        8,
        16,
        16,
        16,
        16,
    ]
    assert [rows_for(head_dim, 4, 30) for head_dim in (8, 128, 136, 256)] == [16, 16, 8, 8]
    assert all(most_rows(d) * -(-d // 128) * 4 <= 64 for d in range(128, 257, 8))


OPTIONS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 4, "dtype": "float16"}
LENS, TABLES = np.array([5, 2], np.int32), np.array([[0, 3], [1, -1]], np.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "num_heads: expected a multiple of num_kv_heads = 2, got 3"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected an integer of at least 1, got 0"),
        ({"head_dim": 20}, "head_dim: expected a multiple of 8 from 8 to 256, got 20"),
        ({"dtype": "int8"}, "dtype: expected one of float32, float16, bfloat16, got 'int8'"),
        ({"kv_dtype": "fp4"}, "kv_dtype: expected one of None, float32"),
        ({"window": 0}, "window: expected None or an integer of at least 1, got 0"),
        ({"device": "tpu"}, "device: expected one of None, cpu, cuda, got 'tpu'"),
        ({"max_seqs": 4}, r"max_tokens: expected an integer of at least 1, got None; .* go together"),
        ({"max_seqs": 4, "max_tokens": 4, "max_blocks": 2}, "device: expected 'cuda' for a plan with bounds, got None"),
        ({"max_seqs": 1, "max_tokens": 4, "max_blocks": 2, "device": "cuda"}, "max_seqs: the plan has room for 1, the step needs 2"),
        ({"slot_mapping": np.arange(3)}, r"slot_mapping: expected integers of shape \(2,\), got int64 \(3,\)"),
    ],
)  # fmt: skip
def test_plan_refuses_wrong_arguments(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cupaged.plan(LENS, TABLES, **{**OPTIONS, **change})


def test_plan_refuses_an_unmapped_block_and_names_the_row() -> None:
    with pytest.raises(ValueError, match="block_tables: row 1 column 0"):
        cupaged.plan(LENS, np.array([[0, 3], [-1, -1]], np.int32), **OPTIONS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, "plan: made for window=None, but the call has window=3"),
        ({"causal": False}, "plan: made for causal=True, but the call has causal=False"),
        ({"num_splits": 2}, "plan: made for num_splits=None, but the call has num_splits=2"),
    ],
)
def test_a_call_that_differs_from_its_plan_is_refused(options: dict[str, Any], message: str) -> None:
    plan = cupaged.plan(LENS, TABLES, **OPTIONS)
    cache = np.zeros((4, 2, 4, 64), np.float16)
    with pytest.raises(ValueError, match=message):
        cupaged.paged_attention(np.zeros((2, 4, 64), np.float16), cache, cache, None, None, plan=plan, **options)
    with pytest.raises(ValueError, match="q: expected 2 rows, one for each new token of the step, got 3"):
        cupaged.paged_attention(np.zeros((3, 4, 64), np.float16), cache, cache, None, None, plan=plan)
    with pytest.raises(ValueError, match="made for dtype='float16', but the call has dtype='float32'"):
        cupaged.paged_attention(np.zeros((2, 4, 64), np.float32), cache, cache, None, None, plan=plan)


def test_sizes_may_be_numpy_integers_of_any_width() -> None:
    sizes = {name: np.int8(x) if isinstance(x, int) else x for name, x in OPTIONS.items()}
    plan = cupaged.plan([150], np.arange(40)[None], **sizes, window=np.int8(100))  # 40 blocks of 4 tokens are no int8
    assert plan.options is not None
    assert {type(x) for x in (plan.block_size, plan.options.window, plan.options.head_dim)} == {int}


def test_a_plan_stays_what_was_checked_when_the_callers_arrays_change(rng: np.random.Generator) -> None:
    tables, lens, starts = TABLES.copy(), LENS.copy(), np.array([0, 1, 2], np.int32)
    plan = cupaged.plan(lens, tables, query_start_loc=starts, **OPTIONS)
    tables[:], lens[:], starts[:] = 2**30, 8, 0
    cache = rng.standard_normal((4, 2, 4, 64)).astype(np.float16)
    q = rng.standard_normal((2, 4, 64)).astype(np.float16)
    with_plan = cupaged.paged_attention(q, cache, cache, None, None, plan=plan)
    np.testing.assert_array_equal(with_plan, cupaged.paged_attention(q, cache, cache, TABLES, LENS))


def test_a_host_plan_serves_later_steps(rng: np.random.Generator) -> None:
    plan = cupaged.plan(LENS, TABLES, **OPTIONS)
    cache = rng.standard_normal((4, 2, 4, 64)).astype(np.float16)
    q = rng.standard_normal((3, 4, 64)).astype(np.float16)
    tables, lens = np.array([[2, 1], [0, -1], [3, 1]], np.int32), np.array([8, 3, 6], np.int32)
    step = SimpleNamespace(
        block_tables=tables, seq_lens=lens, query_start_loc=np.arange(4, dtype=np.int32), slot_mapping=np.arange(3),
        block_size=4, num_blocks=4,
    )  # fmt: skip
    plan.update(step)
    with_plan = cupaged.paged_attention(q, cache, cache, None, None, plan=plan)
    np.testing.assert_array_equal(with_plan, cupaged.paged_attention(q, cache, cache, tables, lens))
    assert plan.write_slots is step.slot_mapping
    with pytest.raises(ValueError, match="step: expected block_size 4 as the plan has, got 8"):
        plan.update(SimpleNamespace(**{**vars(step), "block_size": 8}))
    windowed = cupaged.BlockAllocator(4, 4, [cupaged.Group(window=2)])
    with pytest.raises(ValueError, match=r"step: expected tables of full attention.*window=2"):
        plan.update(windowed.add_request("A", 3))
    assert plan.write_slots is step.slot_mapping
