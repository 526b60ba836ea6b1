"""Calls like an earlier one, which are not checked again: the layers of a model, and its steps, differ in addresses and values only.

What an earlier call's checks found stands in a record; compiled code compares the forms of the new arrays with those that it was made
from, see `cpu_call`. Nothing here keeps an array but dtypes and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy import empty, ndarray

from .arrays import Array, Attention, WriteKV
from .cpu_arrays import FORM_WORDS, form_of
from .cpu_cache import WRITE_FIELDS
from .cpu_call import RECORD_BYTES, WRITE_BYTES
from .cpu_call import call as run_call
from .cpu_records import address, pack_attention, pack_write, parameters, threads_free
from .cpu_work import FIELDS
from .plan import Plan

_acquire, _release = threads_free.acquire, threads_free.release  # a `with` takes longer


class StepRecord:
    """What the calls of one step share."""

    __slots__ = ("arrays", "values", "where")

    def __init__(self, plan: Plan) -> None:
        tables, lens, starts = (
            np.ascontiguousarray(x) for x in (plan.block_tables, plan.seq_lens, plan.query_start_loc)
        )
        slots = (
            np.zeros(0, np.int64) if plan.slot_mapping is None else np.ascontiguousarray(plan.slot_mapping, np.int64)
        )
        self.arrays = tables, lens, starts, slots  # kept alive
        self.values = np.array(  # cpu_call.STEP
            [
                address(tables),
                address(lens),
                address(starts),
                tables.strides[0],
                len(tables),
                address(slots),
                len(slots),
            ]
        )
        self.where = address(self.values)


def page_addresses(pages: Sequence[tuple[Array, Array]]) -> Array:
    """The addresses of K and V of a cache's layers, `[layers, 2]` int64: what the calls below find the pages by."""
    return np.array([(address(k), address(v)) for k, v in pages], np.int64)


def _keep_scales(record: Array, fields: tuple[str, ...], call: Attention | WriteKV) -> None:
    """A record without addresses of arrays but those of the scales."""
    at = fields.index("k_scale")
    record[:at] = 0
    record[at : at + 2] = address(call.k_scale), address(call.v_scale)


class RepeatedWrite:
    """Writes like an earlier one, of other rows of the same form, to other layers and at other steps."""

    __slots__ = ("kept", "record", "where")

    def __init__(self, call: WriteKV) -> None:
        self.kept = call.k.dtype, call.k_scale, call.v_scale
        self.record = np.zeros(WRITE_BYTES // 8 + 2 * FORM_WORDS, np.int64)
        self.where = address(self.record)
        pack_write(self.record, call, call.slot_mapping)
        _keep_scales(self.record, WRITE_FIELDS, call)
        self.record[WRITE_FIELDS.index("num_slots")] = 0
        forms = form_of(call.k), form_of(call.v)
        for form in forms:
            form[3] = 0  # any number of rows
        self.record[WRITE_BYTES // 8 :] = np.concatenate(forms)

    def same(self, other: RepeatedWrite) -> bool:
        """Whether both repeat the same."""
        return np.array_equal(self.record, other.record)

    def write(self, pages: int, k: Any, v: Any, step: int) -> bool:
        """Whether rows were written: to the pages whose two addresses stand at `pages`, in the step whose record is at `step`."""
        _acquire()
        try:
            return bool(run_call(parameters, 0, step, 0, 0, pages, 0, self.where, id(k), id(v)))
        finally:
            _release()


class RepeatedAttention:
    """Attention like an earlier call without slopes, sinks and lse: whatever that call's checks found holds for these calls too."""

    __slots__ = ("kept", "record", "where")

    def __init__(self, call: Attention, k_cache: Array, v_cache: Array) -> None:
        self.kept = call.q.dtype, k_cache.dtype, call.k_scale, call.v_scale
        self.record = np.zeros(RECORD_BYTES // 8 + 4 * FORM_WORDS, np.int64)
        self.where = address(self.record)
        pack_attention(self.record, call)
        _keep_scales(self.record, FIELDS, call)
        for name in ("table_row", "num_seqs"):
            self.record[FIELDS.index(name)] = 0
        forms = [form_of(x) for x in (call.q, call.out, k_cache, v_cache)]
        for form in forms[:2]:
            form[3] = 0  # any number of rows
        self.record[RECORD_BYTES // 8 :] = np.concatenate(forms)

    def same(self, other: RepeatedAttention) -> bool:
        """Whether both repeat the same."""
        return np.array_equal(self.record, other.record)

    def attend(self, pages: int, q: Any, step: int, written: int, k: Any, v: Any) -> Array | None:
        """The result; `pages` and `step` as in `RepeatedWrite.write`. None for what is not like the earlier call, or not ready.

        If `written` is the address of a `RepeatedWrite`'s record and not 0, rows `k` and `v` are stored first.
        """
        if type(q) is not ndarray:
            return None
        out = empty(q.shape, q.dtype)
        _acquire()
        try:
            workers = run_call(parameters, self.where, step, id(q), id(out), pages, 0, written, id(k), id(v))
        finally:
            _release()
        return out if workers else None

    def over(self, q: Any, k_cache: Any, v_cache: Any, step: int, out: Any) -> Array | None:
        """The same over pages of the caller's own, in `out` if given."""
        if out is None:
            if type(q) is not ndarray:
                return None
            out = empty(q.shape, q.dtype)
        _acquire()
        try:
            workers = run_call(parameters, self.where, step, id(q), id(out), id(k_cache), id(v_cache), 0, 0, 0)
        finally:
            _release()
        return out if workers else None
