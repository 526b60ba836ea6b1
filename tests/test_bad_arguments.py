"""Every argument of every public function, given what it cannot be: the error names it, says what was expected and what came, and nothing
has changed.

`test_checks.py` has the rules that tie arguments to each other, one by one.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupaged
from cupaged import attention, classic

# What an argument of each kind must refuse, as makers: some of it can be changed in place.
TEXT: list[Any] = ["x", b"x", {}, object(), float, np.array(["a", "b"])]
NO_COUNT = [*TEXT, 1.5, 2.0, True, np.True_, 1j, np.array(2), float("nan"), np.float32(2)]
NO_INTEGER = [*NO_COUNT, [1]]
RAGGED = [np.ones((3, 4, 8), np.float32), np.ones((2, 4, 8), np.float32)]
KINDS: dict[str, list[Any]] = {
    "integer": [*NO_INTEGER, -1, None],
    "integer or none": [*NO_INTEGER, -1],
    "counts": [*NO_COUNT, -1, None, [1, 1, 1], [-1], [0.5]],
    "any integer": [*NO_INTEGER, 2**31, None],
    "number": [*TEXT, 1j, True, np.True_, [0.5], np.ones(2), float("nan"), float("inf"), np.float32("nan"), 1e300, 10**400],
    "positive": [*TEXT, 1j, True, np.True_, [[0.5], [1.0, 2.0]], float("nan"), float("inf"), 0, -0.5, 1e300, 1e-50,
                 np.float16(-1), np.zeros(2), np.ones(3), np.array([1, 1j]), np.array([True, True]), [None, None]],
    "flag": [*TEXT, None, 1, 0, 1.0, np.array(True), np.array([True, False])],
    "choice": [*TEXT, None, 1, ["HND"], ("cpu",), np.float16, np.array("HND")],
    "choice or none": [*TEXT, 1, ["float16"], np.float16, np.dtype("float16")],
    "array": [*TEXT, None, 1.0, [0.5], np.float32(1), np.array(1.0), np.zeros(0), np.ones((1,) * 7), RAGGED],
    "array or none": [*TEXT, 1.0, [0.5], np.array(1.0), np.zeros(0), np.ones((1,) * 7)],
    "per head or none": [*TEXT, 1.0, [0.5], [[0.5], [1.0, 2.0]], np.ones(5), np.ones(4, complex), np.ones(4, bool), ["1"] * 4, [None] * 4],
    "integers": [*TEXT, None, 1, [0.5], np.array(1), np.ones((1, 1, 1), int), [True, False], [[1], [1, 2]], ["1"], [2**64 - 1]],
    "integers or none": [*TEXT, 1, [0.5], np.array(1), np.ones((1, 1, 1), int), [True, False], [[1], [1, 2]], ["1"]],
    "plan": [*TEXT, 1, True, np.ones(2)],
    "step": [*TEXT, None, 1, True, np.ones(2)],
    "groups": [*TEXT[:2], object(), 1, [1], np.array(1), [], [None], float],
    "layers": ["x", object(), 1, np.array(1), [-1], [1.5], [True], [None], float],
    "id": [["A"], {}, {"A"}, np.array(2)],
    "key": [["A"], {"A"}, ("B", ["C"]), {"salt": ["A"]}, np.array(2)],
    "ids": ["A", b"A", 1, 1.5, object(), np.array("A"), float, [["A"]]],
    "calls": ["A", 1, object(), np.array(1), {"n": 1}, [1], [{"m": 1}], None],
    "index": [*TEXT, 1.5, True, -1, 99, [0], np.array(0), None],
}  # fmt: skip


def attention_arguments() -> dict[str, Any]:
    return {
        "q": np.ones((2, 4, 16), np.float32), "k_cache": np.ones((6, 2, 4, 16), np.float32),
        "v_cache": np.ones((6, 2, 4, 16), np.float32), "block_tables": np.array([[0, 5, 1], [2, -1, -1]], np.int32),
        "seq_lens": np.array([9, 3], np.int32),
    }  # fmt: skip


def write_arguments() -> dict[str, Any]:
    rows, pages = np.zeros((3, 2, 16), np.float32), np.ones((6, 2, 4, 16), np.float32)
    return {"k": rows, "v": rows + 1, "k_cache": pages, "v_cache": pages + 1, "slot_mapping": np.array([0, -1, 23])}


def plan_arguments() -> dict[str, Any]:
    given = attention_arguments()
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 4, "dtype": "float32"}
    return {"seq_lens": given["seq_lens"], "block_tables": given["block_tables"], **sizes}


def classic_arguments() -> dict[str, Any]:
    return {
        "out": np.full((2, 4, 16), np.nan, np.float32), "query": np.ones((2, 4, 16), np.float32),
        "key_cache": np.ones((6, 2, 4, 8, 4), np.float32), "value_cache": np.ones((6, 2, 16, 8), np.float32),
        "num_kv_heads": 2, "scale": 1.0,
        "block_tables": np.array([[0, 5], [2, -1]], np.int32), "seq_lens": np.array([9, 3], np.int32), "block_size": 8, "max_seq_len": 9,
    }  # fmt: skip


def partitioned_arguments() -> dict[str, Any]:
    sums, logits, outs = (np.ones((2, 4, 1, *rest), np.float32) for rest in ((), (), (16,)))
    return {**classic_arguments(), "exp_sums": sums, "max_logits": logits, "tmp_out": outs}


CACHE = {"num_layers": 2, "block_size": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
SCALES = dict.fromkeys(("k_scale", "v_scale"), "positive")
SIZES = dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "block_size"), "integer")
LIMITS = dict.fromkeys(("window", "chunk", "num_splits"), "integer or none")
ARRAYS = dict.fromkeys(("q", "k_cache", "v_cache"), "array")
CLASSIC = {
    **dict.fromkeys(("out", "query", "key_cache", "value_cache"), "array"), **SCALES, "scale": "number", "alibi_slopes": "per head or none",
    **dict.fromkeys(("block_tables", "seq_lens"), "integers"), "kv_cache_dtype": "choice",
    **dict.fromkeys(("num_kv_heads", "block_size", "max_seq_len", "tp_rank", "blocksparse_local_blocks"), "integer"),
    **dict.fromkeys(("blocksparse_vert_stride", "blocksparse_block_size"), "integer"), "blocksparse_head_sliding_step": "any integer",
}  # fmt: skip
FUNCTIONS: dict[str, tuple[Any, Callable[[], dict[str, Any]], dict[str, str]]] = {
    "paged_attention": (cupaged.paged_attention, attention_arguments, {
        **ARRAYS, **LIMITS, **SCALES, "block_tables": "integers", "seq_lens": "integers", "query_start_loc": "integers or none",
        "layout": "choice", "scale": "number", "softcap": "positive", "alibi_slopes": "per head or none", "sinks": "per head or none",
        "kv_dtype": "choice or none", "plan": "plan", "out": "array or none", "lse": "array or none",
        **dict.fromkeys(("causal", "share_prefix", "return_lse"), "flag"),
    }),
    "write_kv": (cupaged.write_kv, write_arguments, {
        **SCALES, **dict.fromkeys(("k", "v", "k_cache", "v_cache"), "array"), "slot_mapping": "integers", "layout": "choice",
        "kv_dtype": "choice or none",
    }),
    "merge_states": (cupaged.merge_states, lambda: {"outs": np.ones((2, 3, 4, 8), np.float32), "lses": np.ones((2, 3, 4), np.float32)},
                     {"outs": "array", "lses": "array", "sinks": "per head or none"}),
    "plan": (cupaged.plan, plan_arguments, {
        **SIZES, **LIMITS, "seq_lens": "integers", "block_tables": "integers", "query_start_loc": "integers or none",
        "slot_mapping": "integers or none", "dtype": "choice", "kv_dtype": "choice or none", "causal": "flag", "share_prefix": "flag",
        "device": "choice or none", **dict.fromkeys(("max_seqs", "max_tokens", "max_blocks"), "integer or none"),
    }),
    "warmup": (cupaged.warmup, lambda: {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}, {
        **dict.fromkeys(("num_heads", "num_kv_heads", "head_dim", "max_queries", "block_size"), "integer"),
        "dtype": "choice",
        "kv_dtype": "choice or none", **dict.fromkeys(("softcap", "alibi", "share_prefix"), "flag"),
    }),
    "paged_attention_v1": (cupaged.classic.paged_attention_v1, classic_arguments, CLASSIC),
    "paged_attention_v2": (cupaged.classic.paged_attention_v2, partitioned_arguments,
                           {**CLASSIC, **dict.fromkeys(("exp_sums", "max_logits", "tmp_out"), "array")}),
    "KVCache": (cupaged.KVCache, lambda: {**CACHE, "num_blocks": 6, "device": "cpu"}, {
        **dict.fromkeys(("num_layers", "num_blocks", "block_size", "num_kv_heads", "head_dim", "host_blocks"), "integer"),
        **dict.fromkeys(("dtype", "layout", "device", "order"), "choice"), "groups": "groups",
    }),
    "blocks_for": (cupaged.blocks_for, lambda: {**CACHE, "num_bytes": 10**6}, {
        **dict.fromkeys(("num_layers", "block_size", "num_kv_heads", "head_dim"), "integer"), "num_bytes": "number", "dtype": "choice",
        "groups": "groups",
    }),
    "BlockAllocator": (cupaged.BlockAllocator, lambda: {"num_blocks": 6, "block_size": 4}, {
        **dict.fromkeys(("num_blocks", "block_size", "host_blocks"), "integer"), "kernel_block_size": "integer or none",
        "watermark": "number", "groups": "groups", "prefix_caching": "flag", "record_events": "flag",
    }),
    "BlockPool": (cupaged.BlockPool, lambda: {"num_blocks": 4}, {"num_blocks": "integer"}),
    "TableMirror": (cupaged.TableMirror, lambda: {"block_size": 4}, {"block_size": "integer"}),
    "Group": (cupaged.Group, dict, {"layers": "layers", "window": "integer or none", "chunk": "integer or none"}),
}  # fmt: skip


def allocator() -> cupaged.BlockAllocator:
    """Two running requests, which share a block, an evicted one, cached blocks and free ones."""
    alloc = cupaged.BlockAllocator(12, 4, prefix_caching=True, host_blocks=4, record_events=True)
    alloc.add_request("A", 6)
    alloc.fork_request("A", ["B"])
    alloc.add_request("E", token_ids=[1, 2, 3, 4])
    alloc.commit(["E"], [[1, 2, 3, 4]])
    alloc.evict(["E"])
    return alloc


def seen_of(alloc: cupaged.BlockAllocator) -> Any:
    alloc.check()
    tables = dict(alloc.tables), dict(alloc.lengths), alloc.rows(["A", "B", "E"]).tolist()
    return alloc.free, tables, alloc.evicted, alloc.stats(), alloc.host_pool.free().tolist()


NEW = {"n": "counts", "token_ids": "integers or none", "extra_key": "key"}
METHODS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "add_request": ({"id": "N", "n": 3}, {"id": "id", **NEW}),
    "can_allocate": ({"n": 3}, NEW),
    "grow": ({"id": "A"}, {"id": "id", "n": "counts"}),
    "grow_batch": ({"ids": ["A", "B"]}, {"ids": "ids", "n": "counts", "rows": "integers or none"}),
    "blocks_needed": ({"ids": ["A"]}, {"ids": "ids", "n": "counts", "rows": "integers or none", "new": "calls", "restore": "ids"}),
    "commit": ({"ids": ["A"], "token_ids": [0] * 6}, {"ids": "ids", "token_ids": "integers", "rows": "integers or none"}),
    "fork_request": ({"id": "A", "children": ["C"]}, {"id": "id", "children": "ids"}),
    "fork_batch": ({"parents": ["A"], "children": ["C"]}, {"parents": "ids", "children": "ids"}),
    "reorder": ({"ids": ["A", "B"], "parents": [0, 0]}, {"ids": "ids", "parents": "integers", "rows": "integers or none"}),
    "truncate": ({"id": "A", "length": 1}, {"id": "id", "length": "counts"}),
    "truncate_batch": ({"ids": ["A"], "lengths": [1]}, {"ids": "ids", "lengths": "counts", "rows": "integers or none"}),
    "free_request": ({"id": "A"}, {"id": "id"}),
    "free_batch": ({"ids": ["A"]}, {"ids": "ids", "rows": "integers or none"}),
    "evict": ({"ids": ["A"]}, {"ids": "ids", "rows": "integers or none", "hold": "flag"}),
    "restore": ({"ids": ["E"]}, {"ids": "ids", "rows": "integers or none", "hold": "flag"}),
    "release_swapped": ({}, {"step": "step"}),
    "physical_slot": ({"id": "A", "position": 0}, {"id": "id", "position": "index", "group": "index"}),
    "group_tables": ({"group": 0}, {"group": "index"}),
    "rows": ({"ids": ["A"]}, {"ids": "ids"}),
}  # fmt: skip
OPTIONS = FUNCTIONS["paged_attention"][2]
CACHE_METHODS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "begin": ({}, {"step": "step"}),
    "layer": ({"layer": 0}, {"layer": "index"}),
    "write": (
        {"layer": 0, "k": np.ones((3, 2, 16), np.float32), "v": np.ones((3, 2, 16), np.float32)},
        {"layer": "index", "k": "array", "v": "array", "step": "step", **SCALES},
    ),
    "attend": (
        {"layer": 0, "q": np.ones((3, 4, 16), np.float32)},
        {"layer": "index", "q": "array", "step": "step", **{name: OPTIONS[name] for name in attention.OPTIONS}},
    ),
    "gather": (
        {"layer": 0, "table_row": [0], "seq_len": 1},
        {"layer": "index", "table_row": "integers", "seq_len": "integer", "start": "integer"},
    ),
}
POOL_METHODS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "take": ({"count": 1}, {"count": "integer", "reuse": "integers or none"}),
    "acquire": ({"blocks": [0]}, {"blocks": "integers"}),
    "release": ({"blocks": [0]}, {"blocks": "integers"}),
}
FREE_OF_RULES = {
    ("take", "drop"),
    ("release", "tables"),
    ("attend", "k"),
    ("attend", "v"),
}  # of the package's own, or given together


def cases(table: dict[str, Any], of: Any = None) -> list[Any]:
    """Every argument in turn; one that is not in the table fails here."""
    found = []
    for name, entry in table.items():
        function = getattr(of, name) if of is not None else entry[0]
        for argument, parameter in inspect.signature(function).parameters.items():
            if (
                argument != "self"
                and parameter.kind is not parameter.VAR_KEYWORD
                and (name, argument) not in FREE_OF_RULES
            ):
                found.append(pytest.param(name, argument, entry[-1][argument], id=f"{name}-{argument}"))
        found += [
            pytest.param(name, argument, kind, id=f"{name}-{argument}")
            for argument, kind in entry[-1].items()
            if argument not in inspect.signature(function).parameters
        ]
    return found


def refused(call: Callable[..., Any], arguments: dict[str, Any], name: str, state: Callable[[], Any]) -> None:
    """Assert that the call raises an error that names the argument, what was expected and what came, and that `state()` is as before."""
    before = state()
    value = arguments[name]
    try:
        call(**arguments)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        message = str(error.args[0])
        said = SAID_AS.get(name, (name,))
        assert message.split(": ")[0] in said, f"{name}={value!r}: {error!r}"
        assert "expected" in message and "got" in message, f"{name}={value!r}: {error!r}"
    else:
        raise AssertionError(f"{name}={value!r} was taken")
    assert state() == before, f"{name}={value!r} changed something"


# Single calls are batches of one, and an error may speak of an element.
SAID_AS = {
    **{name: (name, "id", "ids") for name in ("id", "ids")},
    **{name: (name, "id") for name in ("children", "restore")},
    "parents": ("parents", "ids"),
    **{name: (name, "block_tables, seq_lens") for name in ("block_tables", "seq_lens")},
    "length": ("length", "lengths"),
}


def bytes_of(arrays: Any) -> list[bytes]:
    return [x.tobytes() for x in arrays if isinstance(x, np.ndarray)]


@pytest.fixture
def no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a bad argument reaches it reaches after an earlier good call of the same form."""

    class Backend:
        def paged_attention(self, call: object) -> None:
            raise AssertionError("a bad argument reached the backend")

        write_kv = merge_states = classic_attention = paged_attention

    for module in (attention, classic):
        monkeypatch.setattr(module, "backend_of", lambda x, classic=False: Backend())


@pytest.mark.parametrize(("name", "argument", "kind"), cases(FUNCTIONS))
def test_functions_refuse(no_backend: None, name: str, argument: str, kind: str) -> None:
    function, make, _ = FUNCTIONS[name]
    for bad in KINDS[kind]:
        arguments = {**make(), argument: bad}
        refused(function, arguments, argument, lambda arguments=arguments: bytes_of(arguments.values()))


@pytest.mark.parametrize(("name", "argument", "kind"), cases(METHODS, cupaged.BlockAllocator))
def test_an_allocator_refuses(name: str, argument: str, kind: str) -> None:
    alloc = allocator()
    for bad in KINDS[kind]:
        given = {**METHODS[name][0], argument: bad}
        if argument == "rows":
            del given["ids"]
        refused(getattr(alloc, name), given, argument, lambda: seen_of(alloc))


@pytest.mark.parametrize(("name", "argument", "kind"), cases(POOL_METHODS, cupaged.BlockPool))
def test_a_pool_refuses(name: str, argument: str, kind: str) -> None:
    pool = cupaged.BlockPool(4)
    pool.take(3)
    for bad in KINDS[kind]:
        refused(
            getattr(pool, name),
            {**POOL_METHODS[name][0], argument: bad},
            argument,
            lambda: (pool.check(), pool.free().tolist(), pool.ref_count.tolist()),
        )


@pytest.mark.parametrize("known", [False, True], ids=["first", "repeated"])
@pytest.mark.parametrize(("name", "argument", "kind"), cases(CACHE_METHODS, cupaged.KVCache))
def test_a_cache_refuses(name: str, argument: str, kind: str, known: bool) -> None:
    alloc, cache = cupaged.BlockAllocator(6, 4), cupaged.KVCache(**CACHE, num_blocks=6, device="cpu")
    step = alloc.add_request("A", 3)
    cache.pool[:] = 1
    good, _ = CACHE_METHODS[name]
    if name != "begin":
        cache.begin(step)
        if known:
            for _ in range(3):  # by now the CPU backend takes what is like these calls without checking
                getattr(cache, name)(**good, **({"step": step} if name in ("write", "attend") else {}))
    for bad in KINDS[kind]:
        given = {**good, **({"step": step} if name in ("write", "attend") else {}), argument: bad}
        refused(getattr(cache, name), given, argument, lambda: (cache.pool.tobytes(), cache._begun))


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize(
    "make",
    [
        allocator,
        lambda: cupaged.BlockPool(4),
        lambda: cupaged.KVCache(**CACHE, num_blocks=6, device="cpu"),
        lambda: cupaged.plan(**plan_arguments()),
    ],
    ids=["BlockAllocator", "BlockPool", "KVCache", "Plan"],
)
def test_what_a_copy_would_tear_apart_cannot_be_copied(make: Callable[[], Any], take: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=f"a {type(make()).__name__} cannot be copied or pickled"):
        take(make())
