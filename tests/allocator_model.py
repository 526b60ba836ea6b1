"""A plain, slow model of the block allocator: lists, dicts, one request and one block at a time.

It follows the contract's words, not the arrays of `cupaged.allocator`. A request has a table for each group of layers, with -1 where a
block left the group's horizon.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cupaged import Group, OutOfBlocks


@dataclass
class ModelStep:
    """What a step must hold, as lists. Tables, slots and copies are those of each group."""

    tables: list[list[list[int]]] = field(default_factory=list)
    slots: list[list[int]] = field(default_factory=list)
    copies: list[list[tuple[int, int]]] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    query_start_loc: list[int] = field(default_factory=lambda: [0])
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    num_cached: list[int] = field(default_factory=list)


class Model:
    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        watermark: float = 0.0,
        prefix_caching: bool = False,
        host_blocks: int = 0,
        groups: Sequence[Group] = (Group(),),
    ) -> None:
        self.block_size = block_size
        self.groups = groups
        limits = [group.window or group.chunk for group in groups]
        self.anchor = limits.index(None) if None in limits else 0  # whose chain the prefix cache follows
        self.num_blocks = num_blocks
        self.reserve = math.ceil(watermark * num_blocks)
        self.caching = prefix_caching
        self.plain = list(range(num_blocks))  # free, without identity, first in, first out
        self.idle = []  # free, with identity, least recently used first
        self.owners = [0] * num_blocks
        self.tables: dict[Hashable, list[list[int]]] = {}
        self.lengths: dict[Hashable, int] = {}
        self.copies = 0
        # what is known: tokens of each block, identities by number, from the oldest to the newest
        self.known: dict[Hashable, int] = {}
        self.root_of: dict[Hashable, int] = {}
        self.tokens: list[list[int]] = [[] for _ in range(num_blocks)]
        self.content: dict[
            int, tuple[Any, tuple[int, ...]]
        ] = {}  # number -> (parent's number, or group and anchor's number; tokens)
        self.holders: dict[int, list[int]] = {}  # number -> blocks, the canonical one first
        self.roots: dict[Hashable, int] = {}
        self.numbers = 0
        self.queried = self.hit = 0
        # evicted requests: host table, length, known, root; what each host block knows and whether it had an identity
        self.away: dict[Hashable, tuple[list[int], int, int, int]] = {}
        self.host_free = list(range(host_blocks))
        self.host_owners = [0] * host_blocks
        self.host_tokens: list[list[int]] = [[] for _ in range(host_blocks)]
        self.host_named = [False] * host_blocks
        self.steps = 0
        self.held: dict[int, tuple[bool, list[list[int]]]] = {}  # by step: whether on the host, blocks of each request
        self.swapped_out = self.swapped_in = 0

    @property
    def free(self) -> list[int]:
        return self.plain + self.idle

    # ---- calls: one that raises leaves a mess, so that a failure is tried on a copy ----

    def call(self, method: str, *args: Any) -> Any:
        result = getattr(self, method)(*args)
        self.steps += isinstance(result, ModelStep)
        return result

    def copied(self) -> Model:
        other = copy.copy(self)
        other.__dict__ = {name: cloned(value) for name, value in self.__dict__.items()}
        return other

    def add_request(
        self, name: Hashable, n: int | None, token_ids: list[int] | None = None, key: Hashable = 0
    ) -> ModelStep:
        if name in self.tables or name in self.away:
            raise KeyError(name)
        if n is None:
            n = len(token_ids)
        if n < 0:
            raise ValueError(n)
        if token_ids is not None:
            n = min(n, len(token_ids))
        before, self_before = len(self.free), self.copied()
        self._start(name)
        try:
            cached, copied = self._attach(name, token_ids, key, n, partly=True)
            step = self._first_step(name, token_ids, n, cached, copied, before)
        except OutOfBlocks:
            # without the copy of a partly equal block, whose source must stay, it may be enough
            self.__dict__ = self_before.__dict__
            self._start(name)
            cached, copied = self._attach(name, token_ids, key, n, partly=False)
            step = self._first_step(name, token_ids, n, cached, copied, before)
        if token_ids is not None and self.caching:
            self.queried += len(token_ids)
            self.hit += cached
        if self.caching:
            if key not in self.roots:
                self.numbers += 1
                self.roots[key] = self.numbers
            self.root_of[name] = self.roots[key]
        return step

    def _first_step(
        self, name: Hashable, token_ids: list[int] | None, n: int, cached: int, copied: list[Any], before: int
    ) -> ModelStep:
        step = self._step()
        step.copies[0] += copied
        new = n if token_ids is None else min(n, len(token_ids) - cached)
        self._grow(name, new, step)
        self._finish(step, [name])
        step.num_cached = [cached]
        for source, _ in copied:
            self._drop([source])
        taken = before - len(self.free)
        if taken and taken + self.reserve > before:
            raise OutOfBlocks(taken, before)
        return step

    def _step(self) -> ModelStep:
        return ModelStep(*([[] for _ in self.groups] for _ in range(3)))

    def _finish(self, step: ModelStep, names: Sequence[Hashable]) -> None:
        for g, tables in enumerate(step.tables):
            tables += [list(self.tables[name][g]) for name in names]
        step.num_cached = [0] * len(names)

    def _attach(
        self, name: Hashable, token_ids: list[int] | None, key: Hashable, n: int, partly: bool
    ) -> tuple[int, list[Any]]:
        """Tokens found in the cache, and the copy of a partly equal block, whose source is held."""
        if token_ids is None or not self.caching or key not in self.roots:
            return 0, []
        size, most = self.block_size, len(token_ids) - 1
        chain = [self.roots[key]]
        while len(chain) * size <= most:
            words = tuple(token_ids[(len(chain) - 1) * size : len(chain) * size])
            child = next((c for c, content in self.content.items() if content == (chain[-1], words)), None)
            if child is None:
                break
            chain.append(child)
        columns = len(chain) - 1
        while any(self._served(g, chain[1:], columns) is None for g in range(len(self.groups))):
            columns -= 1
        cached = columns * size
        for g in range(len(self.groups)):
            self.tables[name][g] = self._served(g, chain[1:], columns)
            self._hold(self.tables[name][g])
        self.lengths[name] = self.known[name] = cached
        if len(self.groups) > 1:
            return cached, []
        rest = token_ids[cached : min(most, cached + size)]
        best, common = None, 0
        for child in reversed(self.content):
            if self.content[child][0] == chain[-1]:
                same = [a == b for a, b in zip(self.content[child][1], rest, strict=False)]
                length = same.index(False) if False in same else len(same)
                if length > common:
                    best, common = child, length
        if best is None or not n or not partly:
            return cached, []
        source = self.holders[best][0]
        self._hold([source])
        fresh = self._take()
        self.copies += 1
        self.tokens[fresh] = self.tokens[source][:common]
        self.tables[name][0].append(fresh)
        self.lengths[name] = self.known[name] = cached + common
        return cached + common, [(source, fresh)]

    def _served(self, g: int, chain: list[int], columns: int) -> list[int] | None:
        """The group's table when the first `columns` blocks of a chain are taken over, None when it lacks one that is still seen."""
        table = []
        for column, number in enumerate(chain[:columns]):
            if (column + 1) * self.block_size <= self.horizon(g, columns * self.block_size):
                table.append(-1)
            elif g == self.anchor:
                table.append(self.holders[number][0])
            else:
                beside = next((c for c, content in self.content.items() if content[0] == (g, number)), None)
                if beside is None:
                    return None
                table.append(self.holders[beside][0])
        return table

    def horizon(self, g: int, position: int) -> int:
        """The first token that a query at `position` sees."""
        window, chunk = self.groups[g].window, self.groups[g].chunk
        return next(
            j for j in range(position + 1)
            if (window is None or j > position - window) and (chunk is None or j // chunk == position // chunk)
        )  # fmt: skip

    def grow_batch(self, names: Sequence[Hashable], counts: Sequence[int]) -> ModelStep:
        self._check(names)
        if any(n < 0 for n in counts):
            raise ValueError(counts)
        for name, n in zip(names, counts, strict=True):
            for g, table in enumerate(self.tables[name] if n else []):
                gone = self.horizon(g, self.lengths[name]) // self.block_size
                self._drop(table[:gone])
                table[:gone] = [-1] * gone
        step = self._step()
        for name, n in zip(names, counts, strict=True):
            self._grow(name, n, step)
        self._finish(step, names)
        return step

    def commit(self, names: Sequence[Hashable], token_ids: Sequence[Sequence[int]]) -> None:
        self._check(names)
        for name, tokens in zip(names, token_ids, strict=True):
            if self.known[name] + len(tokens) > self.lengths[name]:
                raise ValueError(tokens)
        if self.caching:
            before = [self.known[name] for name in names]
            for name, tokens in zip(names, token_ids, strict=True):
                self._learn(name, tokens)
            for g in sorted(range(len(self.groups)), key=lambda g: g != self.anchor):
                for name, known in zip(names, before, strict=True):
                    self._adopt(name, g, known)

    def reset_prefix_cache(self) -> None:
        self.content, self.holders, self.roots = {}, {}, {}
        self.plain, self.idle = self.plain + self.idle, []
        self.root_of = dict.fromkeys(self.root_of, 0)
        self.away = {name: (*state[:3], 0) for name, state in self.away.items()}
        self.host_named = [False] * len(self.host_named)

    def fork_batch(self, parents: Sequence[Hashable], children: Sequence[Hashable]) -> None:
        for parent in parents:
            self._check([parent])
        for parent, child in zip(parents, children, strict=True):
            if child in self.tables or child in self.away:
                raise KeyError(child)
            self._start(child)
            self._share(child, self._state(parent))

    def reorder(self, names: Sequence[Hashable], parents: Sequence[int]) -> None:
        self._check(names)
        if any(not 0 <= p < len(names) for p in parents):
            raise ValueError(parents)
        old = [self._state(name) for name in names]
        for name, parent in zip(names, parents, strict=True):
            self._share(name, old[parent])
        for tables, *_ in old:
            for table in tables:
                self._drop(table)

    def truncate_batch(self, names: Sequence[Hashable], lengths: Sequence[int]) -> None:
        self._check(names)
        for name, length in zip(names, lengths, strict=True):
            if not 0 <= length <= self.lengths[name]:
                raise ValueError(length)
            columns = -(-length // self.block_size)
            for g, table in enumerate(self.tables[name]):
                if -1 in table[self.horizon(g, length) // self.block_size : columns]:
                    raise ValueError(length)
            for table in self.tables[name]:
                dropped = table[columns:]
                del table[columns:]
                self._drop(dropped)
            self.lengths[name] = length
            self.known[name] = min(self.known[name], length)

    def free_batch(self, names: Sequence[Hashable]) -> None:
        self._check([name for name in names if name not in self.away])
        if len(set(names)) < len(names):
            raise ValueError(names)
        for name in names:
            if name in self.away:
                self._drop_host(self._listed(self.away.pop(name)[0]))
            else:
                for table in self.tables.pop(name):
                    self._drop(table)
                del self.lengths[name], self.known[name], self.root_of[name]

    @staticmethod
    def _listed(tables: list[list[int]]) -> list[int]:
        """The blocks of a request, group after group."""
        return [block for table in tables for block in table if block >= 0]

    def evict(self, names: Sequence[Hashable], hold: bool) -> ModelStep:
        self._check(names)
        step, place, first = self._still(names), {}, []
        for name in names:
            for table in self.tables[name]:
                first.append([block for block in table if block >= 0 and block not in place])
                for block in first[-1]:
                    if not self.host_free:
                        raise OutOfBlocks(1, 0)
                    place[block] = self.host_free.pop(0)
                    self.host_tokens[place[block]] = list(self.tokens[block])
                    self.host_named[place[block]] = self.number(block) > 0
        step.swap_out = list(place.items())
        self.swapped_out += len(place)
        if hold:
            self.held[self.steps + 1] = False, first
            self._hold(list(place))
        for name in names:
            tables, *state = self._state(name)
            self.away[name] = ([[place.get(block, -1) for block in table] for table in tables], *state)
            for block in self._listed(tables):
                self.host_owners[place[block]] += 1
            for table in tables:
                self._drop(table)
            del self.tables[name], self.lengths[name], self.known[name], self.root_of[name]
        return step

    def restore(self, names: Sequence[Hashable], hold: bool) -> ModelStep:
        self._check(names, away=True)
        step, place = self._still(names), {}
        for name in names:  # what is cached is shared
            tables, number = self.away[name][0], self.away[name][3]
            for column, block in enumerate(tables[self.anchor]):
                content = (number, tuple(self.host_tokens[block]))
                number = next((n for n, c in self.content.items() if c == content), 0) if self.host_named[block] else 0
                if not number:
                    break
                place[block] = self.holders[number][0]
                for g, table in enumerate(tables):
                    beside = next((n for n, c in self.content.items() if c[0] == (g, number)), 0)
                    if g != self.anchor and table[column] >= 0 and beside:
                        place[table[column]] = self.holders[beside][0]
        for name in names:
            self._hold([place[block] for block in self._listed(self.away[name][0]) if block in place])
        moved: dict[int, int] = {}
        first = []
        for table in (table for name in names for table in self.away[name][0]):
            first.append([block for block in table if block >= 0 and block not in place and block not in moved])
            for block in first[-1]:
                moved[block] = self._take()
                self.owners[moved[block]] = 0
                self.tokens[moved[block]] = list(self.host_tokens[block])
            for block in table:
                if block in moved:
                    self.owners[moved[block]] += 1
        place |= moved
        step.swap_in = list(moved.items())
        self.swapped_in += len(moved)
        for name in names:
            tables, self.lengths[name], self.known[name], self.root_of[name] = self.away[name]
            self.tables[name] = [[place.get(block, -1) for block in table] for table in tables]
        for g in sorted(range(len(self.groups)), key=lambda g: g != self.anchor):
            for name in names:
                for column, block in enumerate(self.away[name][0][self.anchor]):
                    if not self.host_named[block]:
                        break
                    self._name(name, g, column, False)
        if hold:
            self.held[self.steps + 1] = True, first
            for block in moved:
                self.host_owners[block] += 1
        for name in names:
            self._drop_host(self._listed(self.away.pop(name)[0]))
        step.tables = [[list(self.tables[name][g]) for name in names] for g in range(len(self.groups))]
        step.seq_lens = [self.lengths[name] for name in names]
        return step

    def release_swapped(self, serial: int) -> None:
        if serial not in self.held:
            raise ValueError(serial)
        on_host, tables = self.held.pop(serial)
        for table in tables:
            (self._drop_host if on_host else self._drop)(table)

    def _still(self, names: Sequence[Hashable]) -> ModelStep:
        step = self._step()
        step.tables = [[[] for _ in names] for _ in self.groups]
        step.seq_lens, step.query_start_loc, step.num_cached = (
            [0] * len(names),
            [0] * (len(names) + 1),
            [0] * len(names),
        )
        return step

    def _drop_host(self, table: list[int]) -> None:
        for block in table:
            self.host_owners[block] -= 1
            if self.host_owners[block] == 0:
                self.host_free.append(block)

    # ---- single actions ----

    def _check(self, names: Sequence[Hashable], away: bool = False) -> None:
        """Each name once, and all of requests that are there; `away`: all of evicted ones."""
        for name in names:
            if name not in self.tables and name not in self.away:
                raise KeyError(name)
            if not away and name in self.away:
                raise ValueError(name)
        if len(set(names)) < len(names) or (away and any(name in self.tables for name in names)):
            raise ValueError(names)

    def _start(self, name: Hashable) -> None:
        self.tables[name] = [[] for _ in self.groups]
        self.lengths[name], self.known[name], self.root_of[name] = 0, 0, 0

    def number(self, block: int) -> int:
        """The number of a block's identity, 0 when it has none."""
        return next((number for number, blocks in self.holders.items() if block in blocks), 0)

    def _take(self) -> int:
        if self.plain:
            block = self.plain.pop(0)
        elif self.idle:
            block = self.idle.pop(0)
            self._forget(block)
        else:
            raise OutOfBlocks(1, 0)
        self.owners[block] = 1
        self.tokens[block] = []
        return block

    def _hold(self, blocks: list[int]) -> None:
        for block in blocks:
            if block >= 0:
                self.owners[block] += 1
                if block in self.idle:
                    self.idle.remove(block)

    def _state(self, name: Hashable) -> tuple[list[list[int]], int, int, int]:
        return [list(table) for table in self.tables[name]], self.lengths[name], self.known[name], self.root_of[name]

    def _share(self, name: Hashable, state: tuple[list[list[int]], int, int, int]) -> None:
        self.tables[name] = [list(table) for table in state[0]]
        for table in state[0]:
            self._hold(table)
        _, self.lengths[name], self.known[name], self.root_of[name] = state

    def _drop(self, table: list[int]) -> None:
        gone = []
        for block in table:
            if block < 0:
                continue
            self.owners[block] -= 1
            if self.owners[block] == 0:
                gone.append(block)
        self.plain += [block for block in gone if not self.number(block)]
        self.idle += [block for block in reversed(gone) if self.number(block)]

    def _forget(self, block: int) -> None:
        number = self.number(block)
        if number:
            self.holders[number].remove(block)
            if not self.holders[number]:
                del self.holders[number], self.content[number]

    def _grow(self, name: Hashable, n: int, step: ModelStep) -> None:
        length = self.lengths[name]
        for g, table in enumerate(self.tables[name]):
            if n and length % self.block_size:
                if self.owners[table[-1]] > 1:
                    fresh = self._take()
                    self.owners[table[-1]] -= 1
                    step.copies[g].append((table[-1], fresh))
                    self.copies += 1
                    self.tokens[fresh] = list(self.tokens[table[-1]])
                    table[-1] = fresh
                self._forget(table[-1])
                del self.tokens[table[-1]][length % self.block_size :]
            for position in range(length, length + n):
                if position % self.block_size == 0:
                    table.append(self._take())
                step.slots[g].append(table[-1] * self.block_size + position % self.block_size)
        self.lengths[name] = length + n
        step.seq_lens.append(length + n)
        step.query_start_loc.append(step.query_start_loc[-1] + n)

    def _learn(self, name: Hashable, tokens: Sequence[int]) -> None:
        size, table = self.block_size, self.tables[name][self.anchor]
        for position, token in enumerate(tokens, self.known[name]):
            known = self.tokens[table[position // size]]
            if position % size < len(known):
                if known[position % size] != token:
                    raise ValueError(token)
            else:
                known.append(token)
        self.known[name] += len(tokens)

    def _adopt(self, name: Hashable, g: int, before: int) -> None:
        """Give the blocks of group `g` that became full since `before` tokens were known their identities."""
        size = self.block_size
        settled = self.known[name] == self.lengths[name]
        for column in range(before // size, self.known[name] // size):
            self._name(name, g, column, settled)

    def _name(self, name: Hashable, g: int, column: int, replace: bool) -> None:
        """Give a full block its identity, or, where `replace` allows it, the canonical block its place."""
        table, anchors = self.tables[name][g], self.tables[name][self.anchor]
        block = table[column]
        if not self.root_of[name] or block < 0 or self.number(block):
            return
        if g == self.anchor:
            parent: Any = self.number(table[column - 1]) if column else self.root_of[name]
        else:
            parent = g, self.number(anchors[column])
        content = (parent, tuple(self.tokens[anchors[column]]))
        number = next((n for n, c in self.content.items() if c == content), None)
        if number is None:
            self.numbers += 1
            self.content[self.numbers], self.holders[self.numbers] = content, [block]
        elif replace and self.owners[block] == 1:
            canonical = self.holders[number][0]
            self._hold([canonical])
            table[column] = canonical
            self._drop([block])
        else:
            self.holders[number].append(block)

    def numbers_of_all(self) -> list[int]:
        """`number` of each block."""
        numbers = [0] * self.num_blocks
        for number, blocks in self.holders.items():
            for block in blocks:
                numbers[block] = number
        return numbers

    def stats(self) -> dict[str, Any]:
        used = sum(n > 0 for n in self.owners)
        slots = {
            table[position // self.block_size] * self.block_size + position % self.block_size
            for name, tables in self.tables.items()
            for table in tables
            for position in range(self.lengths[name])
            if table[position // self.block_size] >= 0
        }
        for on_host, held in self.held.values():
            slots |= {b * self.block_size + i for t in held for b in t for i in range(self.block_size) if not on_host}
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
            "host_blocks_used": sum(n > 0 for n in self.host_owners),
            "host_blocks_free": len(self.host_free),
            "swapped_out": self.swapped_out,
            "swapped_in": self.swapped_in,
            "blocks_cached": len(self.idle),
            "queried_tokens": self.queried,
            "hit_tokens": self.hit,
            "hit_rate": self.hit / self.queried if self.queried else None,
        }


def cloned(value: Any) -> Any:
    """A copy of nested lists and dicts, all else shared: `copy.deepcopy` takes twenty times as long."""
    if type(value) is list:
        return [cloned(item) for item in value] if value and type(value[0]) in (list, dict) else value.copy()
    if type(value) is dict:
        return {key: cloned(item) for key, item in value.items()}
    return value
