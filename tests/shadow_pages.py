"""Pages that stand for keys and values: what a step does to them, and what a query would then read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cupaged import Step


class ShadowPages:
    """Pages that hold, in place of keys and values, what those would depend on: one int for each sequence of tokens up to a slot."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self.slots = np.full((num_blocks, block_size), -1)
        self.host = np.full((host_blocks, block_size), -1)

    def run(self, step: Step, written: Sequence[Sequence[int]]) -> None:
        """Swaps, copies of all groups, then writes: `written[i]` are the new contents of sequence i, in group g as `of_group` says."""
        groups = [step.group(g) for g in range(len(step.other_groups) + 1)]
        out, to_host = step.swap_out.T
        from_host, in_ = step.swap_in.T
        sources, targets = np.concatenate([group.copies for group in groups]).T
        assert not {*out.tolist(), *sources.tolist()} & {*in_.tolist(), *targets.tolist()}, (
            "a block is source and destination"
        )
        assert not {*from_host.tolist()} & {*to_host.tolist()}, "a host block is source and destination in one step"
        for ids in (np.concatenate((in_, targets)), to_host):
            assert len(set(ids.tolist())) == len(ids), "a block is a destination twice in one step"
        self.host[to_host] = self.slots[out]
        self.slots[in_] = self.host[from_host]
        self.slots[targets] = self.slots[sources]
        assert [len(part) for part in written] == np.diff(step.query_start_loc).tolist()
        contents = [content for part in written for content in part]
        slots = np.concatenate([group.slot_mapping for group in groups])
        assert len(set(slots.tolist())) == len(groups) * len(contents), "two tokens of one step have one slot"
        for g, group in enumerate(groups):
            self.slots.reshape(-1)[group.slot_mapping] = self.of_group(contents, g)

    @staticmethod
    def of_group(contents: Sequence[int], g: int) -> list[int]:
        return [content + g * 10**9 for content in contents]

    def read(self, table: Sequence[int], first: int, length: int, on_host: bool = False) -> list[int]:
        """Tokens `[first, length)`, whose blocks must be mapped."""
        slots, size = self.host if on_host else self.slots, self.slots.shape[1]
        columns = [table[position // size] for position in range(first, length)]
        assert -1 not in columns, "a token that is still seen has no block"
        return [int(slots[block, position % size]) for position, block in enumerate(columns, first)]
