"""What one step hands to the device: tables, slots, lengths and copies, as they stood when the allocator made it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .array_types import Blocks, Int32s, Ints
from .groups import Group
from .shared_prefix import NOTHING, SharedPrefix, find_shared_prefix
from .tables import UNCHANGED, BlockTables, ranges

NO_PAIRS: Blocks = np.zeros((0, 2), np.int32)


class Step:
    """A snapshot; row i of every array is argument i of the call that made it. Host arrays, views of one piece of memory.

    Attributes:
        block_tables: `[num_seqs, max_blocks] int32`, -1 where no block is mapped; as wide as the longest sequence needs.
        seq_lens: `[num_seqs] int32`, tokens per sequence, this step's included.
        query_start_loc: `[num_seqs + 1] int32`; the new tokens of sequence i are `[query_start_loc[i], query_start_loc[i + 1])`.
        slot_mapping: `[num_tokens] int64`, where each new token goes.
        swap_out: `[n, 2] int32`, (block, host block): blocks to copy to the host before everything else, in any order.
        swap_in: `[n, 2] int32`, (host block, block): blocks to fill from the host then, in any order.
        copies: `[n, 2] int32`, (src, dst) blocks to copy after that and before the step's writes, in any order.
        num_cached: `[num_seqs] int32`, tokens found in the prefix cache.
        rows: `[num_seqs] int64`, the allocator's rows.
        packed: `int32`, the piece that holds tables, slots, lengths and query starts, so that a device copy is one transfer.
        origin: a number of the allocator's own, drawn when it was made; no other allocator has it.
        serial: 1, 2, 3 ... in the order in which the allocator made its steps, which is the order to execute them in.
        after: serial of the newest earlier step that had copies or swaps, 0 when there is none.
        block_size, num_blocks: of the allocator; in kernel blocks, as all of the step's block ids, when it has those.
        kind: window and chunk of the tables' group of layers.
        sharing: whether any block had more than one reference.
        device: where whoever executes the step may keep what belongs to it.

    With several groups of layers these are the first group's; `group(g)` has those of group g. Copies of all groups run before
    any writes; swaps of all groups are the step's own. A step may be pickled for another process; what `device` holds stays here.
    """

    __slots__ = (
        "_before", "_begin", "_copied", "_marked", "_others", "_per", "_shared_prefix", "after", "block_size", "block_tables",
        "copies", "device", "kind", "num_blocks", "num_cached", "origin", "other_groups", "packed", "query_start_loc", "rows", "seq_lens",
        "serial", "sharing", "slot_mapping", "swap_in", "swap_out",
    )  # fmt: skip

    block_tables: Blocks
    seq_lens: Int32s
    query_start_loc: Int32s
    slot_mapping: Ints
    swap_out: Blocks
    swap_in: Blocks
    copies: Blocks
    num_cached: Int32s
    rows: Ints
    packed: Int32s
    origin: int
    serial: int
    after: int
    block_size: int
    num_blocks: int
    kind: Group
    sharing: bool
    device: dict[object, Any]
    other_groups: tuple[Step, ...]  # steps of the groups after the first
    _begin: Ints | None  # first mapped columns, None: all 0
    _before: Ints  # lengths before the step
    _copied: Ints  # sequences whose table entry at that length changed by copy-on-write
    _marked: Int32s | None  # BlockTables.changed of this step's rows
    _others: Delta | None  # changes of other rows since the step before

    def __init__(self, tables: BlockTables, rows: Ints, columns: int, num_tokens: int) -> None:
        """Take the tables of `rows` and leave room for the rest; the allocator fills it in."""
        n = len(rows)
        slots = n * columns + (n * columns & 1)  # int64 values start at an even place
        size = slots + 2 * num_tokens + 2 * n + 1
        self._lay_out(tables.snapshot(rows, columns, size - n * columns)[:size], n, columns, num_tokens)
        self.kind, self._per = tables.group, 1
        self.rows = rows.copy()
        self.swap_out = self.swap_in = self.copies = NO_PAIRS
        self.other_groups = ()
        self.device = {}
        self._shared_prefix: SharedPrefix | None = None

    def __getstate__(self) -> dict[str, Any]:
        left_out = (
            "block_tables",
            "seq_lens",
            "query_start_loc",
            "slot_mapping",
            "device",
        )  # views of `packed`, and the executor's
        state = {name: getattr(self, name) for name in self.__slots__ if name not in left_out}
        return state | {"shape": (*self.block_tables.shape, len(self.slot_mapping))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lay_out(state["packed"], *state.pop("shape"))
        self.device = {}
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def shared_prefix(self) -> SharedPrefix:
        """Sequences of the step whose tables begin with the same blocks, found when it is first asked for."""
        if self._shared_prefix is None:
            where = (self.block_tables, self.seq_lens, self.query_start_loc)
            self._shared_prefix = find_shared_prefix(*where, self.block_size) if self.sharing else NOTHING
        return self._shared_prefix

    def _lay_out(self, packed: Int32s, n: int, columns: int, num_tokens: int) -> None:
        slots = n * columns + (n * columns & 1)
        lens = slots + 2 * num_tokens
        self.packed = packed
        self.block_tables = packed[: n * columns].reshape(n, columns)
        self.slot_mapping = packed[slots:lens].view(np.int64)
        self.seq_lens = packed[lens : lens + n]
        self.query_start_loc = packed[lens + n :]

    def to_kernel_blocks(self, per: int) -> None:
        """Speak of kernel blocks, `per` of which make a block: block b is b * per, b * per + 1 ... Slots stay what they are."""
        size = self.block_size // per
        n, num_tokens, columns = (
            len(self.rows),
            len(self.slot_mapping),
            max(-(-int(self.seq_lens.max(initial=0)) // size), 1),
        )
        parts = np.arange(per, dtype=np.int32)
        tables = np.where(
            self.block_tables[:, :, None] < 0, np.int32(-1), self.block_tables[:, :, None] * np.int32(per) + parts
        )
        before = self.slot_mapping, self.seq_lens, self.query_start_loc
        packed = np.zeros(n * columns + (n * columns & 1) + 2 * num_tokens + 2 * n + 1, np.int32)
        self._lay_out(packed, n, columns, num_tokens)
        self.block_tables[:] = tables.reshape(n, tables.shape[1] * per)[:, :columns]
        self.slot_mapping[:], self.seq_lens[:], self.query_start_loc[:] = before
        for name in ("swap_out", "swap_in", "copies"):
            pairs = getattr(self, name)[:, None] * np.int32(per) + parts[:, None]
            setattr(self, name, pairs.reshape(-1, 2).astype(np.int32))
        self.block_size, self.num_blocks, self._per = size, self.num_blocks * per, per

    def group(self, g: int) -> Step:
        """The step of group `g`. Raises IndexError for a group that is not there."""
        if not 0 <= g <= len(self.other_groups):
            raise IndexError(f"g: expected 0 to {len(self.other_groups)}, got {g}")
        return self.other_groups[g - 1] if g else self

    def keep_changes(self, tables: BlockTables, lengths: Ints, before: Ints, copied: Ints, per: int) -> None:
        """Note what `delta` will tell, and clear the marks: `before` are the lengths before the step, `lengths` those of all rows now,
        `per` kernel blocks make a block."""
        self._before, self._copied = before, copied
        self._begin = tables.begin.take(self.rows) if tables.limited else None
        self._marked = self._others = None
        if not tables.any_changed:
            return
        self._marked = tables.changed.take(self.rows)
        tables.changed[self.rows] = UNCHANGED
        tables.any_changed = False
        rows = (tables.changed != UNCHANGED).nonzero()[0]
        if not len(rows):
            return
        now = np.maximum(lengths[rows], 0)
        columns = -(-now // (tables.block_size // per))
        begin = np.minimum(tables.begin[rows] * per, columns)
        first = np.maximum(np.minimum(tables.changed[rows] * np.int64(per), columns), begin)
        blocks = tables.kernel_blocks(rows, first, columns, per)
        self._others = Delta(self.serial, rows, now, begin, first, blocks)
        tables.changed[rows] = UNCHANGED

    @property
    def delta(self) -> Delta:
        """What changed in all tables since the step before this one, for a `TableMirror`."""
        first = -(-self._before // self.block_size)
        first[self._copied] = self._before.take(self._copied) // (self.block_size * self._per) * self._per
        if self._marked is not None:
            np.minimum(first, self._marked * np.int64(self._per), out=first)
        told = self.seq_lens != self._before
        if self._marked is not None:
            told |= self._marked != UNCHANGED
        at = told.nonzero()[0]
        first, lengths = first[at], self.seq_lens[at].astype(np.int64)
        columns = -(-lengths // self.block_size)
        begin = np.zeros_like(first) if self._begin is None else self._begin.take(at) * self._per
        first = np.maximum(np.minimum(first, columns), begin)
        blocks = self.block_tables.reshape(-1).take(ranges(at * self.block_tables.shape[1] + first, columns - first))
        mine = Delta(self.serial, self.rows[at], lengths, begin, first, blocks)
        return mine if self._others is None else mine.joined(self._others)


def write_slots(slots: Ints, blocks: Blocks, offset: int, size: int) -> None:
    """Fill `slots [n]` with those of a piece of one sequence, which begins at `offset` in the first of its `blocks`."""
    starts = blocks - np.arange(len(blocks))  # where token 0 of the piece's first block would lie, seen from each block
    starts *= size
    np.add(starts.repeat(size)[offset : offset + len(slots)], np.arange(offset, offset + len(slots)), out=slots)


@dataclass(frozen=True, slots=True)
class Delta:
    """Changes of rows: plain arrays, to be pickled and sent.

    Row `rows[i]` now has `lengths[i]` tokens (0: none, or no request), no blocks in the columns before `begin[i]`, and its columns from
    `first[i]` on are the next ids of `blocks`.
    """

    serial: int
    rows: Ints  # [n]
    lengths: Ints  # [n]
    begin: Ints  # [n]
    first: Ints  # [n]
    blocks: Blocks  # [sum of columns of lengths[i], less first[i]]

    def joined(self, other: Delta) -> Delta:
        """The changes of both, which name different rows."""
        arrays = ("rows", "lengths", "begin", "first", "blocks")
        return Delta(self.serial, *(np.concatenate((getattr(self, name), getattr(other, name))) for name in arrays))
