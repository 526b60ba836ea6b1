"""A plain, slow model of the block allocator: lists, dicts, one request and one block at a time.

It follows the contract's words, not the arrays of `cupaged.allocator`. A call works on a copy of the state that replaces it at the end,
so it happens whole or not at all.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupaged import BlockAllocator, OutOfBlocks, Step


@dataclass
class ModelStep:
    """What a step must hold, as lists."""

    tables: list[list[int]] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    query_start_loc: list[int] = field(default_factory=lambda: [0])
    slots: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Model:
    def __init__(self, num_blocks: int, block_size: int, watermark: float = 0.0) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.reserve = math.ceil(watermark * num_blocks)
        self.free = list(range(num_blocks))
        self.owners = [0] * num_blocks
        self.tables: dict[Hashable, list[int]] = {}
        self.lengths: dict[Hashable, int] = {}
        self.copies = 0

    # ---- every call: on a copy, then all at once ----

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        trial = copy.deepcopy(self)
        result = getattr(trial, method)(*args, **kwargs)
        self.__dict__ = trial.__dict__
        return result

    def add_request(self, name: Hashable, n: int) -> ModelStep:
        if name in self.tables:
            raise KeyError(name)
        self._start(name)
        needed = -(-max(n, 0) // self.block_size)
        if needed and needed + self.reserve > len(self.free):
            raise OutOfBlocks(needed, len(self.free))
        return self.grow_batch([name], [n])

    def grow_batch(self, names: Sequence[Hashable], counts: Sequence[int]) -> ModelStep:
        self._check(names)
        if any(n < 0 for n in counts):
            raise ValueError(counts)
        step = ModelStep()
        for name, n in zip(names, counts, strict=True):
            self._grow(name, n, step)
        for name in names:
            step.tables.append(list(self.tables[name]))
        return step

    def fork_batch(self, parents: Sequence[Hashable], children: Sequence[Hashable]) -> None:
        for parent in parents:
            if parent not in self.tables:
                raise KeyError(parent)
        for parent, child in zip(parents, children, strict=True):
            if child in self.tables:
                raise KeyError(child)
            self._start(child)
            self._share(child, self.tables[parent], self.lengths[parent])

    def reorder(self, names: Sequence[Hashable], parents: Sequence[int]) -> None:
        self._check(names)
        if any(not 0 <= p < len(names) for p in parents):
            raise ValueError(parents)
        old = [(self.tables[name], self.lengths[name]) for name in names]
        for name, parent in zip(names, parents, strict=True):
            self._start(name)
            self._share(name, *old[parent])
        for table, _ in old:
            self._drop(table)

    def truncate_batch(self, names: Sequence[Hashable], lengths: Sequence[int]) -> None:
        self._check(names)
        for name, length in zip(names, lengths, strict=True):
            if not 0 <= length <= self.lengths[name]:
                raise ValueError(length)
            columns = -(-length // self.block_size)
            kept, dropped = self.tables[name][:columns], self.tables[name][columns:]
            self.tables[name], self.lengths[name] = kept, length
            self._drop(dropped)

    def free_batch(self, names: Sequence[Hashable]) -> None:
        self._check(names)
        for name in names:
            self._drop(self.tables.pop(name))
            del self.lengths[name]

    # ---- single actions ----

    def _check(self, names: Sequence[Hashable]) -> None:
        for name in names:
            if name not in self.tables:
                raise KeyError(name)
        if len(set(names)) < len(names):
            raise ValueError(names)

    def _start(self, name: Hashable) -> None:
        self.tables[name], self.lengths[name] = [], 0

    def _take(self) -> int:
        if not self.free:
            raise OutOfBlocks(1, 0)
        block = self.free.pop(0)
        self.owners[block] = 1
        return block

    def _share(self, name: Hashable, table: list[int], length: int) -> None:
        for block in table:
            self.owners[block] += 1
        self.tables[name], self.lengths[name] = list(table), length

    def _drop(self, blocks: list[int]) -> None:
        for block in blocks:
            self.owners[block] -= 1
            if self.owners[block] == 0:
                self.free.append(block)

    def _grow(self, name: Hashable, n: int, step: ModelStep) -> None:
        table, length = self.tables[name], self.lengths[name]
        if n and length % self.block_size and self.owners[table[-1]] > 1:
            fresh = self._take()
            self.owners[table[-1]] -= 1
            step.copies.append((table[-1], fresh))
            self.copies += 1
            table[-1] = fresh
        for position in range(length, length + n):
            if position % self.block_size == 0:
                table.append(self._take())
            step.slots.append(table[-1] * self.block_size + position % self.block_size)
        self.lengths[name] = length + n
        step.seq_lens.append(length + n)
        step.query_start_loc.append(step.query_start_loc[-1] + n)

    def stats(self) -> dict[str, Any]:
        used = sum(n > 0 for n in self.owners)
        slots = {
            table[position // self.block_size] * self.block_size + position % self.block_size
            for name, table in self.tables.items()
            for position in range(self.lengths[name])
        }
        wasted = used * self.block_size - len(slots)
        return {
            "blocks_free": len(self.free),
            "blocks_used": used,
            "blocks_shared": sum(n > 1 for n in self.owners),
            "slots_used": len(slots),
            "slots_wasted": wasted,
            "utilization": used / self.num_blocks if self.num_blocks else 0.0,
            "fragmentation": wasted / (used * self.block_size) if used else 0.0,
            "copies": self.copies,
        }


def observe(alloc: BlockAllocator) -> dict[str, Any]:
    """Everything a caller can see of an allocator, as plain values that later calls do not change."""
    names = list(alloc.tables)
    stats = alloc.stats()
    return {
        "tables": dict(alloc.tables),
        "lengths": dict(alloc.lengths),
        "free": alloc.free,
        "num_free": alloc.num_free,
        "owners": alloc.pool.ref_count.tolist(),
        "rows": alloc.rows(names).tolist(),
        "stats": {name: getattr(stats, name) for name in stats.__dataclass_fields__},
    }


def assert_same(alloc: BlockAllocator, model: Model) -> None:
    """The allocator stands where the model stands, and its own check finds nothing."""
    alloc.check()
    seen = observe(alloc)
    assert seen["tables"] == model.tables
    assert seen["lengths"] == model.lengths
    assert seen["free"] == model.free
    assert seen["num_free"] == len(model.free)
    assert seen["owners"] == model.owners
    assert seen["stats"] == model.stats()


def assert_step(step: Step, expected: ModelStep) -> None:
    """Every array of a step, padding included."""
    width = max([1, *map(len, expected.tables)])
    tables = [table + [-1] * (width - len(table)) for table in expected.tables]
    np.testing.assert_array_equal(step.block_tables, np.array(tables, np.int32).reshape(-1, width))
    assert step.seq_lens.tolist() == expected.seq_lens
    assert step.query_start_loc.tolist() == expected.query_start_loc
    assert step.slot_mapping.tolist() == expected.slots
    assert [tuple(pair) for pair in step.copies.tolist()] == expected.copies
    dtypes = {
        name: getattr(step, name).dtype.name
        for name in ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "copies")
    }
    assert dtypes == dict.fromkeys(dtypes, "int32") | {"slot_mapping": "int64"}
    assert all(
        np.shares_memory(step.packed, array)
        for array in (step.block_tables, step.seq_lens, step.query_start_loc)
        if array.size
    )


class ShadowPages:
    """Pages that hold token names: what is written where, and what a table then reads."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.slots = np.full((num_blocks, block_size), -1)
        self.written = 0

    def run(self, step: Step) -> list[list[int]]:
        """Copies, then writes of new names; returns what each sequence wrote."""
        sources, targets = step.copies.T
        assert not set(sources.tolist()) & set(targets.tolist()), "a block is source and destination in one step"
        assert len(set(targets.tolist())) == len(targets), "a block is a destination twice in one step"
        self.slots[targets] = self.slots[sources]
        tokens = np.arange(self.written, self.written + len(step.slot_mapping))
        self.written += len(tokens)
        assert len(set(step.slot_mapping.tolist())) == len(tokens), "two tokens of one step have one slot"
        self.slots.reshape(-1)[step.slot_mapping] = tokens
        return [part.tolist() for part in np.split(tokens, step.query_start_loc[1:-1])] if len(step.seq_lens) else []

    def read(self, table: Sequence[int], length: int) -> list[int]:
        return self.slots[np.array(table, int)].reshape(-1)[:length].tolist()
