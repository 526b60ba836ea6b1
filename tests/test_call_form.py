"""What is remembered of calls is never taken for another call: launches and refusals are those of a process that remembers nothing."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cupaged
from bench.planning import DeviceArray, NoLauncher
from cupaged import attention, call_form, cuda, recent_plan
from cupaged.arrays import numpy_dtype
from cupaged.cuda_structs import ADDRESSES, ATTENTION, attention_pieces, pack, pack_attention
from cupaged.launcher import DeviceInfo
from cupaged.metadata import host_metadata
from cupaged.plan import Plan
from cupaged.repeated_calls import RepeatedCall

BLOCKS, TOKENS, DIM = 24, 6, 16
OF_THE_WORK = ("block_tables", "seq_lens", "query_start_loc", "share_start", "items", "units", "partials", "partial_states",
               "tickets", "shared_groups", "shared_rows", "first_shared_row", "shared_sums", "shared_states")  # fmt: skip


class Recorder(NoLauncher):
    """A device that keeps what it is told to launch."""

    info = DeviceInfo("recorder", 90, 4, 227 << 10, 228 << 10, 50 << 20)

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def get(self, kernel: str, source: str, defines: Any, shared_bytes: int = 0) -> Any:
        return kernel, tuple(sorted(defines.items())), shared_bytes

    def launch(self, function: Any, grid: Any, block: Any, params: np.ndarray, shared_bytes: int = 0) -> None:
        """Keeps addresses of the caller's arrays as they are, and of the work's own what lies there."""
        p = params[0]
        shares = ints(p["share_start"], grid[0] + 1)
        items = ints(p["items"], 4 * shares[-1])
        units = ints(p["units"], 4 * (max(items[::4], default=-1) + 1))
        n = int(p["num_seqs"])
        work = (shares, items, units, ints(p["seq_lens"], n), ints(p["query_start_loc"], n + 1),
                ints(p["block_tables"], n * int(p["table_row"])), ints(p["first_shared_row"], n))  # fmt: skip
        there = [bool(p[name]) for name in OF_THE_WORK]
        rest = {name: p[name].item() for name in ATTENTION.names or () if name not in OF_THE_WORK}
        self.seen.append((function, grid, block, shared_bytes, rest, work, there))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.zeros(shape, dtype).view(DeviceArray)

    def pinned(self, num_bytes: int) -> np.ndarray:
        return np.zeros(num_bytes, np.uint8)

    def pointer(self, array: np.ndarray) -> int:
        return int(array.ctypes.data)


def ints(address: Any, count: int) -> list[int]:
    return list((ctypes.c_int32 * count).from_address(int(address))) if address else []


@contextmanager
def process(backend: cuda.Backend, forms: dict[Any, Any], plans: Any) -> Iterator[None]:
    """A process that remembers `forms` and `plans`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "backend_of", lambda x, classic=False: backend)
        patch.setattr(cuda, "current_backend", lambda: backend)
        patch.setattr(call_form, "_forms", forms)
        patch.setattr(recent_plan, "_recent", plans)
        yield


arena = np.zeros(1 << 17, np.uint8)  # every array below lies in here: other arrays come to lie at the same addresses


def lay(at: int, shape: tuple[int, ...], dtype: Any, order: tuple[int, ...], step: int = 1) -> np.ndarray:
    """An array at `at`, its axes laid out in `order`, outermost first; a row along the last has `step` times the room."""
    strides, size = [0] * len(shape), np.dtype(dtype).itemsize
    for axis in reversed(order):
        strides[axis], size = size, size * shape[axis] * (step if axis == order[-1] else 1)
    return np.ndarray(shape, dtype, arena.data, at, tuple(strides)).view(DeviceArray)


# Each entry: a field of a call and what it may be. The first is where a search begins; some are refused.
FIELDS: dict[str, list[Any]] = {
    "at": [0, 8, 2, 4096], "dtype": ["float16", "float32", "bfloat16"], "kv": ["same", "fp8_e4m3", "fp8_e5m2", "other"],
    "layout": ["HND", "NHD", "HND wide", "bad"], "v_layout": [False, True], "q_step": [1, 2],
    "out": [True, False, "step", "fixed", "short", "q", "over q", "into q"],
    "lse": [False, True, "strided", "bad"], "return_lse": [False, True, 1], "heads": [4, 2, 3], "tokens": [TOKENS, 4],
    "scale": [None, 0.5, float("nan"), True], "causal": [True, False, 1], "window": [None, 3, 1, True, 1.0, 0], "chunk": [None, 4, 1, True],
    "softcap": [None, 2.0, 1, True, -1.0], "num_splits": [None, 2, 1, True], "share_prefix": [True, False, 1],
    "k_scale": [1.0, 1, 2.0, True, -1.0, "array", "bad"], "v_scale": [1.0, 0.5, "array"], "alibi": [None, 0, 1, "bad"],
    "sinks": [None, 0, 1], "lens": [0, 1, 2, "many"], "tables": [0, 1, "hole", "wild"],
    "starts": [None, 0, 1], "planned": [False, True, "updated", "for any options"],
    "as_lists": [False, True],
}  # fmt: skip
LENS = {0: [9, 8, 3, 1, 5, 12], 1: [9, 8, 3, 1, 5, 11], 2: [0, 9, 9, 9, 9, 9], "many": [99, 1, 1, 1, 1, 1]}
STARTS = {0: [0, 1, 2, 3, 4, 5, 6], 1: [0, 0, 2, 3, 4, 4, 6]}
metadata = np.zeros((TOKENS, 4), np.int32), np.zeros(TOKENS, np.int32), np.zeros(TOKENS + 1, np.int32)


def make_call(f: dict[str, Any], plans: dict[Any, Any], device: str = "cuda") -> dict[str, Any]:
    """The arguments of a call; `plans` are those that this process has made."""
    n, fp8 = f["tokens"], f["kv"].startswith("fp8")
    dtype = numpy_dtype(f["dtype"])
    pages = np.dtype(np.uint8) if fp8 else dtype if f["kv"] == "same" else np.dtype(np.float64)
    shape = (BLOCKS, 4, 2, DIM) if f["layout"] == "NHD" else (BLOCKS, 2, 4, DIM)
    wide, at = 1 + (f["layout"] == "HND wide"), f["at"] * 4
    q = lay(at + 65536, (n, f["heads"], DIM), dtype, (0, 1, 2), f["q_step"])
    place = at + (65536 + dtype.itemsize * DIM if f["out"] == "into q" else 90112)
    out = {"q": q, "over q": q[:], False: None}.get(
        f["out"], lay(place, (n, f["heads"], DIM), dtype, (0, 1, 2), 1 + (f["out"] == "step"))
    )
    if f["out"] == "short":
        out = out[1:]
    if f["out"] == "fixed":
        out.flags.writeable = False
    lse = (
        None
        if not f["lse"]
        else lay(
            at + 106496,
            (n, f["heads"]),
            np.float64 if f["lse"] == "bad" else np.float32,
            (0, 1),
            1 + (f["lse"] == "strided"),
        )
    )
    tables, lens, starts = metadata  # changed in place: the same arrays hold other values
    lens[:] = LENS[f["lens"]]
    tables[:] = np.arange(TOKENS * 4).reshape(TOKENS, 4) // (1 if f["tables"] != 1 else 2)
    if f["tables"] in ("hole", "wild"):
        tables[1, 0] = -1 if f["tables"] == "hole" else BLOCKS
    if f["starts"] is not None:
        starts[:] = STARTS[f["starts"]]
    given: list[Any] = [tables, lens, None if f["starts"] is None else starts]
    if f["as_lists"]:
        given = [None if x is None else x.tolist() for x in given]
    plan = None
    options = {name: f[name] for name in ("window", "chunk", "num_splits", "causal", "share_prefix")}
    if f["planned"]:
        how = {"num_heads": f["heads"], "num_kv_heads": 2, "head_dim": DIM, "block_size": 4, "dtype": f["dtype"]}
        key = f["planned"], tuple(how.items()), f["kv"], tuple((name, type(x), x) for name, x in options.items())
        if f["planned"] is True:
            key = (*key, tables.tobytes(), lens.tobytes(), str(given[2]))
        holes = f["window"] is not None or f["chunk"] is not None
        if f["planned"] == "for any options":
            key = holes, tables.tobytes(), lens.tobytes(), str(given[2])
        plan = plans.get(key)
        if f["planned"] == "for any options":
            if plan is None:
                limits = {"block_size": 4, "num_blocks": BLOCKS, "window": 1 if holes else None}
                where = None if given[2] is None else starts.copy()
                checked = host_metadata(tables.copy(), lens.copy(), where, **limits)
                plan = plans[key] = Plan(*checked, limits["block_size"], limits["num_blocks"])
        elif plan is None:
            plan = plans[key] = cupaged.plan(
                lens.copy(), tables.copy(), query_start_loc=None if given[2] is None else starts.copy(), device=device,
                kv_dtype=f["kv"] if fp8 else None, **how, **options,
            )  # fmt: skip
        elif f["planned"] == "updated":
            where = starts if given[2] is not None else np.arange(TOKENS + 1, dtype=np.int32)
            limits = {"block_size": 4, "num_blocks": 2**31 - 1, "window": f["window"], "chunk": f["chunk"]}
            host_metadata(tables, lens, where, **limits)  # an allocator's steps are right
            plan.update(SimpleNamespace(block_tables=tables.copy(), seq_lens=lens.copy(), query_start_loc=where.copy(), slot_mapping=None,
                                        block_size=4, num_blocks=int(tables.max()) + 1))  # fmt: skip
        given = [None, None, None]
    per_head = [None if x is None else lay(114688 + 64 * i, (7 if x == "bad" else f["heads"],), np.float32, (0,)) if x != 0
                else np.zeros(f["heads"], np.float32) for i, x in enumerate((f["alibi"], f["sinks"]))]  # fmt: skip
    for x in per_head:
        if x is not None:
            x[:] = 0.5
    scales = [
        np.full(3 if x == "bad" else 2, 0.5, np.float32) if x in ("array", "bad") else x
        for x in (f["k_scale"], f["v_scale"])
    ]
    k = lay(at, shape, pages, (0, 1, 2, 3), wide)
    v = lay(at + 32768 // 2, shape, pages, (1, 0, 2, 3) if f["v_layout"] else (0, 1, 2, 3), wide)
    if device == "cpu":
        same = out is q
        q, k, v, out, lse = (x if x is None else x.view(np.ndarray) for x in (q, k, v, out, lse))
        out = q if same else out
    return {
        "q": q, "k_cache": k, "v_cache": v, "block_tables": given[0], "seq_lens": given[1], "query_start_loc": given[2],
        "out": out, "lse": lse,
        "layout": f["layout"].split()[0], "kv_dtype": f["kv"] if fp8 else None, "scale": f["scale"], "softcap": f["softcap"],
        "return_lse": f["return_lse"], "alibi_slopes": per_head[0], "sinks": per_head[1], "k_scale": scales[0], "v_scale": scales[1],
        "plan": plan, **options,
    }  # fmt: skip


def outcome(f: dict[str, Any], backend: cuda.Backend, plans: dict[Any, Any]) -> Any:
    """What the device is told, but for addresses that a call chooses itself; or the refusal."""
    recorder: Any = backend.launcher
    recorder.seen.clear()
    try:
        arguments = make_call(f, plans)
        result = cupaged.paged_attention(**arguments)
    except (TypeError, ValueError) as error:
        assert not recorder.seen
        return type(error), str(error)
    own = {name for name in ("out", "lse") if arguments[name] is None}
    own |= {name for name, x in (("k_scale", f["k_scale"]), ("v_scale", f["v_scale"])) if isinstance(x, str)}
    own |= {name for name, x in (("alibi_slopes", f["alibi"]), ("sinks", f["sinks"])) if x == 0}
    launches = [
        (*one, {name: bool(x) if name in own else x for name, x in rest.items()}, *work)
        for *one, rest, _work, _there in recorder.seen
        for work in [(_work, _there)]
    ]
    return launches, [x.shape for x in (result if isinstance(result, tuple) else (result,))]


class Process:
    """One that remembers, next to new ones that cannot."""

    def __init__(self) -> None:
        self.backend, self.forms, self.plans = cuda.Backend(Recorder()), {}, recent_plan._Recent()  # type: ignore[arg-type]
        self.made: dict[Any, Any] = {}

    def check(self, fields: dict[str, Any]) -> None:
        with process(self.backend, self.forms, self.plans):
            got = outcome(fields, self.backend, self.made)
        fresh = cuda.Backend(Recorder())  # type: ignore[arg-type]
        with process(fresh, {}, recent_plan._Recent()):
            assert got == outcome(fields, fresh, {})


FIRST = {name: choices[0] for name, choices in FIELDS.items()}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    "base",
    [{}, {"planned": True}, {"starts": 1, "k_scale": "array", "alibi": 1}, {"kv": "fp8_e4m3", "out": False}],
    ids=str,
)
def test_one_field_changes_and_changes_back(field: str, base: dict[str, Any]) -> None:
    remembers = Process()
    for one, other in itertools.permutations(FIELDS[field], 2):
        for value in (one, other):
            remembers.check({**FIRST, **base, field: value})


@settings(max_examples=60)
@given(st.data())
def test_a_process_that_remembers_does_what_one_without_memory_does(data: st.DataObject) -> None:
    remembers, fields = Process(), FIRST
    for _ in range(data.draw(st.integers(2, 12), label="calls")):
        for name in data.draw(st.lists(st.sampled_from(list(FIELDS)), max_size=2), label="changed"):
            fields = {**fields, name: data.draw(st.sampled_from(FIELDS[name]), label=name)}
        remembers.check(fields)


def host_outcome(f: dict[str, Any], plans: dict[Any, Any]) -> Any:
    """What a call on the CPU leaves in all memory and returns, or the refusal."""
    arena[:] = np.random.default_rng(0).integers(0, 256, arena.size, np.uint8)
    try:
        result = cupaged.paged_attention(**make_call(f, plans, "cpu"))
    except (TypeError, ValueError) as error:
        return type(error), str(error)
    return arena.tobytes(), [x.tobytes() for x in (result if isinstance(result, tuple) else (result,))]


class HostProcess:
    """The same for the CPU, with a count of the calls that were not checked again."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.plans: dict[Any, Any] = {}
        self.forms: dict[Any, Any] = {}
        self.recent, self.repeated = recent_plan._Recent(), 0
        real = RepeatedCall.repeat

        def counted(*arguments: Any) -> Any:
            result = real(*arguments)
            self.repeated += result is not None
            return result

        patch.setattr(RepeatedCall, "repeat", counted)

    def check(self, fields: dict[str, Any]) -> None:
        with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(call_form, "_forms", self.forms)
            patch.setattr(recent_plan, "_recent", self.recent)
            got = host_outcome(fields, self.plans)
            before = self.repeated
            patch.setattr(call_form, "_forms", {})
            patch.setattr(recent_plan, "_recent", recent_plan._Recent())
            assert got == host_outcome(fields, {})
            assert self.repeated == before


ON_THE_HOST = {**FIRST, "planned": "for any options"}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("base", [{}, {"layout": "NHD", "kv": "fp8_e4m3", "out": False}, {"planned": False}], ids=str)
def test_one_field_of_a_call_on_the_cpu_changes_and_changes_back(
    monkeypatch: pytest.MonkeyPatch, field: str, base: dict[str, Any]
) -> None:
    pytest.importorskip("numba")
    process = HostProcess(monkeypatch)
    for one, other in itertools.permutations(FIELDS[field], 2):
        for value in (one, one, other):
            process.check({**ON_THE_HOST, **base, field: value})
    assert process.repeated, "every call was checked: nothing was compared"


@settings(max_examples=60)
@given(st.data())
def test_a_process_on_the_cpu_that_remembers_does_what_one_without_memory_does(data: st.DataObject) -> None:
    pytest.importorskip("numba")
    with pytest.MonkeyPatch.context() as patch:
        process, fields = HostProcess(patch), ON_THE_HOST
        for _ in range(data.draw(st.integers(2, 12), label="calls")):
            for name in data.draw(st.lists(st.sampled_from(list(FIELDS)), max_size=2), label="changed"):
                fields = {**fields, name: data.draw(st.sampled_from(FIELDS[name]), label=name)}
            process.check(fields)


def test_a_struct_around_addresses_is_the_struct(rng: np.random.Generator) -> None:
    values: dict[str, Any] = {
        name: int(rng.integers(1, 2**31)) if kind.kind in "iu" else 0.25 for name, (kind, _) in (ATTENTION.fields or {}).items()
    }  # fmt: skip
    pieces = attention_pieces({name: 0 if name in ADDRESSES else x for name, x in values.items()})
    assert pack_attention(pieces, *(values[name] for name in ADDRESSES)).tobytes() == pack(ATTENTION, values).tobytes()


def test_metadata_that_come_again_are_copied_once_for_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on another stream cannot know that the first stream's copy has run."""
    recorder, stream = Recorder(), 0
    copies: list[int] = []
    monkeypatch.setattr(recorder, "copy_async", lambda dst, src: copies.append(stream))
    monkeypatch.setattr(recorder, "stream", lambda: stream)
    monkeypatch.setattr(recorder, "launch", lambda *arguments: None)
    backend = cuda.Backend(recorder)  # type: ignore[arg-type]
    with process(backend, {}, recent_plan._Recent()):
        for stream in (0, 0, 7, 0, 7):  # noqa: B007, what `lambda: stream` sees
            cupaged.paged_attention(**make_call(FIRST, {}))
        assert copies == [0, 7]
        stream = 0
        cupaged.paged_attention(**make_call({**FIRST, "lens": 1}, {}))
        assert copies == [0, 7, 0]


def test_what_was_planned_stays_when_the_callers_arrays_change() -> None:
    """The work for other options is made later, from the plan's own metadata."""
    remembers, recorder = Process(), Recorder()
    call = make_call(FIRST, {})
    names = ("block_tables", "seq_lens")
    with process(remembers.backend, remembers.forms, remembers.plans):
        copies = {name: call[name].copy() for name in names}
        cupaged.paged_attention(**call)
        for name in names:
            call[name][:] = 1
        remembers.backend.launcher.seen.clear()  # type: ignore[attr-defined]
        cupaged.paged_attention(**{**call, **copies, "num_splits": 2})
    with process(cuda.Backend(recorder), {}, recent_plan._Recent()):  # type: ignore[arg-type]
        cupaged.paged_attention(**{**call, **copies, "num_splits": 2})
    assert remembers.backend.launcher.seen == recorder.seen  # type: ignore[attr-defined]
