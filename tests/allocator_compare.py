"""What callers see of an allocator, and whether it is what the model says."""

from __future__ import annotations

from typing import Any

import numpy as np
from allocator_model import Model, ModelStep

from cupaged import BlockAllocator, Step


def observe(alloc: BlockAllocator) -> dict[str, Any]:
    """Everything a caller can see of an allocator, as plain values that later calls do not change."""
    names = list(alloc.tables)
    stats = alloc.stats()
    return {
        "tables": {name: [alloc.group_tables(g)[name] for g in range(len(alloc.groups))] for name in names},
        "lengths": dict(alloc.lengths),
        "free": alloc.free,
        "num_free": alloc.num_free,
        "owners": alloc.pool.ref_count.tolist(),
        "rows": alloc.rows(names).tolist(),
        "identities": alloc._cache.serial.tolist() if alloc._cache else [0] * alloc.num_blocks,
        "evicted": alloc.evicted,
        "host_free": alloc.host_pool.free().tolist(),
        "host_owners": alloc.host_pool.ref_count.tolist(),
        "host_tables": [
            alloc._preemption.host_tables[row].blocks.tolist() for row in alloc.rows(alloc.evicted).tolist()
        ],
        "stats": {name: getattr(stats, name) for name in stats.__dataclass_fields__},
    }


def assert_same(alloc: BlockAllocator, model: Model) -> None:
    """The allocator stands where the model stands, and its own check finds nothing."""
    alloc.check()
    seen = observe(alloc)
    assert seen["tables"] == model.tables | {name: [[] for _ in model.groups] for name in model.away}
    assert seen["lengths"] == model.lengths | {name: state[1] for name, state in model.away.items()}
    assert seen["evicted"] == list(model.away)
    assert seen["host_tables"] == [model._listed(state[0]) for state in model.away.values()]
    assert (seen["host_free"], seen["host_owners"]) == (model.host_free, model.host_owners)
    assert seen["free"] == model.free
    assert seen["num_free"] == len(model.free)
    assert seen["owners"] == model.owners
    assert seen["identities"] == [model.number(block) for block in range(model.num_blocks)]
    assert seen["stats"] == model.stats()


def assert_alike(alloc: BlockAllocator, model: Model) -> None:
    """What `assert_same` compares of blocks, tables and lengths, read from the arrays at a tenth of its cost; no `check`, no stats."""
    requests = alloc._requests
    assert alloc.pool.free().tolist() == model.free
    assert alloc.pool.ref_count.tolist() == model.owners
    if alloc._cache:
        assert alloc._cache.serial.tolist() == model.numbers_of_all()
    lengths = requests.lengths.tolist()
    assert {name: lengths[row] for name, row in requests.row_of.items()} == model.lengths
    assert lengths.count(-1) == len(lengths) - len(model.lengths)
    for g, tables in enumerate(requests.groups):
        of_row = tables.tables.tolist()
        for name, row in requests.row_of.items():
            table = model.tables[name][g]
            assert of_row[row] == table + [-1] * (len(of_row[row]) - len(table))
    assert list(requests.evicted) == list(model.away)
    assert alloc.host_pool.free().tolist() == model.host_free
    assert alloc.host_pool.ref_count.tolist() == model.host_owners


def assert_step(step: Step, expected: ModelStep, wholly: bool = True) -> None:
    """Every array of a step, padding included, and `wholly` where it lies and of which dtype it is."""
    for g in range(len(expected.tables)):
        _assert_group(step.group(g), expected, g)
        if wholly:
            _assert_layout(step.group(g))


def _assert_group(step: Step, expected: ModelStep, g: int) -> None:
    width = max([1, *map(len, expected.tables[g])])
    tables = [table + [-1] * (width - len(table)) for table in expected.tables[g]]
    assert step.block_tables.shape == (len(tables), width)
    assert step.block_tables.tolist() == tables
    assert step.seq_lens.tolist() == expected.seq_lens
    assert step.query_start_loc.tolist() == expected.query_start_loc
    assert step.slot_mapping.tolist() == expected.slots[g]
    assert [tuple(pair) for pair in step.copies.tolist()] == expected.copies[g]
    for name in ("swap_out", "swap_in"):
        assert [tuple(pair) for pair in getattr(step, name).tolist()] == ([] if g else getattr(expected, name))
    assert step.num_cached.tolist() == expected.num_cached


def _assert_layout(step: Step) -> None:
    dtypes = {
        name: getattr(step, name).dtype.name
        for name in ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "copies", "swap_out", "swap_in")
    }
    assert dtypes == dict.fromkeys(dtypes, "int32") | {"slot_mapping": "int64"}
    assert all(
        np.shares_memory(step.packed, array)
        for array in (step.block_tables, step.seq_lens, step.query_start_loc)
        if array.size
    )
