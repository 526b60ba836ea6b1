"""Bad arguments never reach a backend: one case a rule, and the message names the argument and what came."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cupaged
from cupaged import attention

F16 = np.float16


def attend_arguments(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "q": np.ones((2, 4, 16), np.float32),
        "k_cache": np.ones((6, 2, 4, 16), np.float32),
        "v_cache": np.ones((6, 2, 4, 16), np.float32),
        "block_tables": np.array([[0, 5, 1], [2, -1, -1]], np.int32),
        "seq_lens": np.array([9, 3], np.int32),
        "out": np.full((2, 4, 16), np.nan, np.float32),
    }
    return good | changes


def write_arguments(**changes: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "k": np.zeros((3, 2, 16), np.float32),
        "v": np.zeros((3, 2, 16), np.float32),
        "k_cache": np.ones((6, 2, 4, 16), np.float32),
        "v_cache": np.ones((6, 2, 4, 16), np.float32),
        "slot_mapping": np.array([0, -1, 23]),
    }
    return good | changes


def read_only(shape: tuple[int, ...]) -> np.ndarray:
    a = np.ones(shape, np.float32)
    a.flags.writeable = False
    return a


class Immutable:
    """An array of some other library, such as JAX, that offers DLPack but cannot be written."""

    def __init__(self, a: np.ndarray) -> None:
        self.a = a

    def __dlpack__(self, **how: Any) -> Any:
        return self.a.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


BAD_ATTENTION = [
    ({"q": "text"}, TypeError, "q: expected an array", "str"),
    ({"q": np.ones((4, 16), np.float32)}, ValueError, "q: expected [num_tokens, num_heads, head_dim]", "(4, 16)"),
    ({"q": np.ones((2, 4, 16))}, TypeError, "q: expected dtype float32", "float64"),
    ({"q": np.ones((2, 4, 16), ">f4")}, TypeError, "q: expected dtype float32", ">f4"),
    ({"q": np.ones((2, 4, 32), np.float32)[..., ::2]}, ValueError, "q: expected head_dim to be contiguous", "strides"),
    ({"q": np.ones((2, 4, 12), np.float32)}, ValueError, "q: expected head_dim to be a multiple of 8", "12"),
    ({"q": np.ones((2, 4, 264), np.float32)}, ValueError, "multiple of 8 from 8 to 256", "264"),
    ({"q": np.ones((2, 3, 16), np.float32)}, ValueError, "multiple of num_kv_heads = 2", "got 3"),
    ({"q": np.ones((3, 4, 16), np.float32)}, ValueError, "q: expected 2 rows", "got 3"),
    ({"layout": "DNH"}, ValueError, "layout: expected one of HND, NHD", "'DNH'"),
    ({"layout": "classic"}, ValueError, "cupaged.classic.paged_attention_v1", "classic"),
    ({"k_cache": [[1.0]]}, TypeError, "k_cache: expected a NumPy or CuPy array", "list"),
    ({"k_cache": Immutable(np.ones((6, 2, 4, 16), np.float32))}, TypeError, "k_cache: expected a NumPy or CuPy array", "Immutable"),
    ({"k_cache": np.ones((6, 2, 4, 16))}, TypeError, "v_cache: expected dtype float64", "float32"),
    ({"k_cache": np.ones((6, 2, 4, 16), int), "v_cache": np.ones((6, 2, 4, 16), int)}, TypeError, "k_cache: expected dtype", "int64"),
    ({"k_cache": np.ones((6, 2, 16), np.float32)}, ValueError, "k_cache: expected [num_blocks, num_kv_heads", "(6, 2, 16)"),
    ({"v_cache": np.ones((6, 2, 5, 16), np.float32)}, ValueError, "v_cache: expected shape (6, 2, 4, 16)", "(6, 2, 5, 16)"),
    ({"k_cache": np.ones((6, 2, 4, 32), np.float32)[..., ::2]}, ValueError, "k_cache: expected the last axis to be contiguous", "strides"),
    ({"q": np.ones((2, 4, 24), np.float32)}, ValueError, "k_cache: expected head_dim 24 as in q", "got 16"),
    ({"kv_dtype": "float16"}, ValueError, "kv_dtype: expected None or float32, as the pages are", "float16"),
    ({"kv_dtype": "fp8_e4m3"}, ValueError, "kv_dtype: expected None or float32, as the pages are", "fp8_e4m3"),
    (
        {"k_cache": np.ones((6, 2, 4, 16), np.uint8), "v_cache": np.ones((6, 2, 4, 16), np.uint8)},
        ValueError, "kv_dtype: expected fp8_e4m3 or fp8_e5m2 for uint8 pages", "None",
    ),
    ({"window": 0}, ValueError, "window: expected None or an integer of at least 1", "0"),
    ({"window": 2.5}, ValueError, "window: expected None or an integer", "2.5"),
    ({"chunk": -1}, ValueError, "chunk: expected None or an integer", "-1"),
    ({"num_splits": True}, ValueError, "num_splits: expected None or an integer", "True"),
    ({"softcap": 0.0}, ValueError, "softcap: expected None or a finite number above 0", "0.0"),
    ({"softcap": float("nan")}, ValueError, "softcap: expected", "nan"),
    ({"scale": float("inf")}, ValueError, "scale: expected a finite number", "inf"),
    ({"k_scale": 0.0}, ValueError, "k_scale: expected a finite number above 0", "0.0"),
    ({"v_scale": np.ones(3, np.float32)}, ValueError, "v_scale: expected a number or [num_kv_heads] = (2,)", "(3,)"),
    ({"k_scale": np.array([1.0, -2.0])}, ValueError, "k_scale: expected finite values above 0", "-2"),
    ({"alibi_slopes": np.ones(2)}, ValueError, "alibi_slopes: expected [num_heads] = (4,)", "(2,)"),
    ({"sinks": np.ones((1, 4))}, ValueError, "sinks: expected [num_heads] = (4,)", "(1, 4)"),
    ({"block_tables": None}, TypeError, "block_tables, seq_lens: expected int32 arrays when no plan", "None"),
    ({"block_tables": np.zeros((2, 3))}, TypeError, "block_tables: expected an int32 array", "float64"),
    ({"block_tables": np.zeros(6, np.int32)}, ValueError, "block_tables: expected 2 dimensions", "(6,)"),
    ({"block_tables": np.array([[0, 6, 1], [2, -1, -1]])}, ValueError, "row 0 column 1 expected a block id from 0 to 5", "got 6"),
    ({"block_tables": np.array([[0, 2, 1], [2**40, 0, 0]])}, ValueError, "block_tables: expected values that fit int32", str(2**40)),
    ({"block_tables": np.array([[0, -1, 1], [2, -1, -1]])}, ValueError, "row 0 column 1", "got -1"),
    ({"block_tables": np.array([[0, -2, 1], [2, -1, -1]]), "window": 4}, ValueError, "row 0 column 1", "got -2"),
    ({"seq_lens": np.array([13, 3])}, ValueError, "seq_lens: row 0 expected 0 to max_blocks * block_size = 3 * 4 = 12", "got 13"),
    ({"seq_lens": np.array([9, -1])}, ValueError, "seq_lens: row 1", "got -1"),
    ({"seq_lens": np.array([9])}, ValueError, "seq_lens: expected 2 entries", "got 1"),
    ({"query_start_loc": np.array([0, 2])}, ValueError, "query_start_loc: expected num_seqs + 1 = 3 entries", "got 2"),
    ({"query_start_loc": np.array([0, 2, 1])}, ValueError, "query_start_loc: expected a rising sequence", "[0 2 1]"),
    ({"query_start_loc": np.array([1, 1, 2])}, ValueError, "query_start_loc: expected a rising sequence that starts at 0", "[1 1 2]"),
    ({"query_start_loc": np.array([0, 1, 3])}, ValueError, "q: expected 3 rows, as many as query_start_loc ends with", "got 2"),
    ({"out": np.ones((2, 4, 8), np.float32)}, ValueError, "out: expected (2, 4, 16) float32", "(2, 4, 8)"),
    ({"out": np.ones((2, 4, 16), F16)}, ValueError, "out: expected (2, 4, 16) float32", "float16"),
    ({"out": read_only((2, 4, 16))}, TypeError, "out: expected a writable array", "read-only one; make it with numpy.zeros"),
    ({"out": [0]}, TypeError, "out: expected a NumPy or CuPy array", "list"),
    ({"lse": np.ones((2, 4), F16)}, ValueError, "lse: expected (2, 4) float32", "float16"),
]  # fmt: skip

BAD_WRITES = [
    ({"k": np.ones((3, 2, 16))}, TypeError, "k: expected dtype float32", "float64"),
    ({"k": np.ones((3, 2, 16), F16), "v": np.ones((3, 2, 16), F16)}, TypeError, "k: expected dtype float32 as the cache has", "float16"),
    ({"v": np.ones((2, 2, 16), np.float32)}, ValueError, "v: expected shape (3, 2, 16)", "(2, 2, 16)"),
    (
        {"k": np.ones((3, 4, 16), np.float32), "v": np.ones((3, 4, 16), np.float32)},
        ValueError, "k: expected [num_tokens, 2, 16]", "(3, 4, 16)",
    ),
    ({"k_cache": read_only((6, 2, 4, 16))}, TypeError, "k_cache: expected a writable array", "read-only one; make it with numpy.zeros"),
    ({"v_cache": Immutable(np.ones((6, 2, 4, 16), np.float32))}, TypeError, "v_cache: expected a NumPy or CuPy array", "Immutable"),
    ({"slot_mapping": np.array([0, 24, 1])}, ValueError, "row 1 expected a slot below num_blocks * block_size = 24", "got 24"),
    ({"slot_mapping": np.array([0, 1, 2, 3])}, ValueError, "slot_mapping: expected one dimension of at most 3 entries", "(4,)"),
    ({"slot_mapping": np.array([0.0, 1.0])}, TypeError, "slot_mapping: expected int64 or int32", "float64"),
    ({"slot_mapping": np.array([[0, 1]])}, ValueError, "slot_mapping: expected one dimension", "(1, 2)"),
    (
        {"layout": "classic", "k_cache": np.ones((6, 2, 4, 8, 4), np.float32), "v_cache": np.ones((6, 2, 16, 4), np.float32)},
        ValueError, "block size of 8, 16, 32, 64 or 128", "(6, 2, 16, 4)",
    ),
    (
        {"layout": "classic", "k_cache": np.ones((6, 2, 5, 8, 4), np.float32), "v_cache": np.ones((6, 2, 16, 8), np.float32)},
        ValueError, "k_cache: expected (6, 2, 4, 8, 4)", "(6, 2, 5, 8, 4)",
    ),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        def paged_attention(self, call: object) -> None:
            raise AssertionError("a bad argument reached the backend")

        write_kv = merge_states = paged_attention

    monkeypatch.setattr(attention, "backend_of", lambda x, classic=False: Backend())


@pytest.mark.parametrize(("changes", "error", "expected", "got"), BAD_ATTENTION)
def test_attention_refuses(changes: dict[str, Any], error: type[Exception], expected: str, got: str) -> None:
    arguments = attend_arguments(**changes)
    with pytest.raises(error) as raised:
        cupaged.paged_attention(**arguments)
    assert expected in str(raised.value) and got in str(raised.value)
    if isinstance(arguments["out"], np.ndarray) and "out" not in changes:
        assert np.isnan(arguments["out"]).all(), "out was touched"


@pytest.mark.parametrize(("changes", "error", "expected", "got"), BAD_WRITES)
def test_write_refuses(changes: dict[str, Any], error: type[Exception], expected: str, got: str) -> None:
    arguments = write_arguments(**changes)
    with pytest.raises(error) as raised:
        cupaged.write_kv(**arguments)
    assert expected in str(raised.value) and got in str(raised.value)


def test_results_share_no_memory_with_q_or_each_other() -> None:
    arguments = attend_arguments()
    fused = np.ones((2, 9, 16), np.float32)
    q, out = arguments["q"], arguments["out"]
    for name, other, changes in (
        ("out", "q", {"out": q}),
        ("out", "q", {"out": q[:]}),
        ("out", "q", {"q": fused[:, :4], "out": fused[:, 3:7]}),
        ("lse", "q", {"lse": q.reshape(-1)[-8:].reshape(2, 4)}),
        ("lse", "out", {"lse": out.reshape(-1)[:8].reshape(2, 4)}),
    ):
        with pytest.raises(
            ValueError, match=f"{name}: expected an array other than {other}, got one that shares memory"
        ):
            cupaged.paged_attention(**(arguments | changes))


def test_results_may_lie_between_the_rows_of_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    fused = np.ones((2, 9, 16), np.float32)
    out = cupaged.paged_attention(**attend_arguments(q=fused[:, :4], out=fused[:, 4:8]))
    assert out.base is fused and (fused == 1).all()


def test_merge_refuses() -> None:
    outs, lses = np.ones((2, 3, 4, 8), np.float32), np.ones((2, 3, 4), np.float32)
    for bad_outs, bad_lses, message in (
        (outs[0], lses, "outs: expected"),
        (outs.astype(float), lses, "outs: expected"),
        (outs, lses[:1], "lses: expected"),
        (outs, lses.astype(float), "lses: expected"),
        (outs[:0], lses[:0], "at least one part"),
        ([], lses, "at least one part"),
    ):
        with pytest.raises(ValueError, match=message):
            cupaged.merge_states(bad_outs, bad_lses)


def test_garbage_after_the_last_used_column_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    tables = np.array([[0, 5, 1], [2, 2**31 - 1, -7]], np.int32)
    assert np.isfinite(cupaged.paged_attention(**attend_arguments(block_tables=tables))).all()


def test_no_sequences_and_no_rows_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    none = {"q": np.ones((0, 4, 16), np.float32), "out": None}
    assert cupaged.paged_attention(
        **attend_arguments(**none, block_tables=np.zeros((0, 3), np.int32), seq_lens=np.zeros(0, np.int32))
    ).shape == (0, 4, 16)
    assert len(cupaged.paged_attention(**attend_arguments(**none, query_start_loc=np.zeros(3, np.int32)))) == 0
    cupaged.write_kv(**write_arguments(slot_mapping=[]))
