"""The plan of a call that came without one: the layers of a step repeat the same metadata, which are checked and planned once.

What was planned is kept by value, so an array that is changed in place, or freed and made again at the same address, counts as
what it holds. Comparing costs one `memcmp` of the tables.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np

from .call_form import Form, remember
from .metadata import check_values, host_arrays
from .plan import Plan
from .repeated_calls import RepeatedCall


class _Known(NamedTuple):
    shape: tuple[int, ...]  # of the tables
    tables: bytearray
    lens: bytearray
    starts: bytearray | None  # None: one query a sequence
    plan: Plan

    def holds(self, tables: Any, lens: Any, starts: Any | None) -> bool:
        """Whether these contiguous int32 arrays are what was planned; of a bytearray, == compares bytes."""
        return bool(
            self.lens == lens
            and self.shape == tables.shape
            and (self.starts is None) == (starts is None)
            and (starts is None or self.starts == starts)
            and self.tables == tables
        )


class _Recent(threading.local):
    """Of one thread: a backend fills a plan's buffers on the current stream, and only the thread's own calls come after that."""

    def __init__(self) -> None:
        self.plans: dict[Any, _Known] = {}
        self.last: _Known | None = None  # the one that was asked for last


_recent = _Recent()
_INT32 = np.dtype(np.int32)


def recent_plan(form: Form, block_tables: Any, seq_lens: Any, query_start_loc: Any | None) -> Plan:
    """The plan of host metadata, checked. Raises what `host_metadata` raises."""
    tables, lens, starts = host_arrays(block_tables, seq_lens, query_start_loc)
    o = form.options
    key = (form.block_size, form.num_blocks, o.window, o.chunk)
    known = _recent.plans.get(key)
    if known is not None and known.holds(tables, lens, starts):
        _recent.last = known
        return known.plan
    checked = check_values(tables, lens, starts, form.block_size, form.num_blocks, o.window, o.chunk)
    plan = Plan(tables, lens, checked, form.block_size, form.num_blocks)
    if tables.size:
        kept = bytearray(tables), bytearray(lens), None if starts is None else bytearray(starts)
        plan.block_tables = np.frombuffer(kept[0], np.int32).reshape(tables.shape)
        plan.seq_lens = np.frombuffer(kept[1], np.int32)
        if kept[2] is not None:
            plan.query_start_loc = np.frombuffer(kept[2], np.int32)
        known = _recent.last = _Known(tables.shape, *kept, plan)
        remember(_recent.plans, key, known, 8)  # one for each window of a model's layers
    return plan


def last_call(block_tables: Any, seq_lens: Any, query_start_loc: Any | None) -> RepeatedCall | None:
    """What can be repeated of this thread's last call without a plan, if that came with the same metadata. Raises nothing."""
    known = _recent.last
    if known is None or known.plan.repeated is None or not (_comparable(block_tables) and _comparable(seq_lens)):
        return None
    if seq_lens.ndim != 1 or not (
        query_start_loc is None or (_comparable(query_start_loc) and query_start_loc.ndim == 1)
    ):
        return None
    call: RepeatedCall = known.plan.repeated
    return call if known.holds(block_tables, seq_lens, query_start_loc) else None


def _comparable(x: Any) -> bool:
    return type(x) is np.ndarray and x.dtype is _INT32 and x.flags.c_contiguous
