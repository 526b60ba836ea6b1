"""Arrays of other libraries: zero copy in, and errors that say what is missing."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cupaged
from cupaged.arrays import as_array, numpy_dtype


class HasDlpack:
    def __init__(self, a: np.ndarray) -> None:
        self.a = a

    def __dlpack__(self, **how: Any) -> Any:
        return self.a.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.a.__dlpack_device__()


class HasArray:
    def __init__(self, a: np.ndarray) -> None:
        self.a = a

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.a


class HasBoth(HasArray):
    """As JAX and PyTorch hold bfloat16 on the host: DLPack is there, but NumPy has no code for the dtype."""

    def __dlpack__(self, **how: Any) -> Any:
        raise BufferError("bfloat16")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def test_dlpack_arrays_come_without_a_copy() -> None:
    a = np.arange(6, dtype=np.float32)
    assert np.shares_memory(as_array(HasDlpack(a), "q"), a)


def test_bfloat16_comes_through_the_array_protocol() -> None:
    a = np.arange(6).astype(ml_dtypes.bfloat16)
    assert as_array(HasArray(a), "q") is a
    assert as_array(HasBoth(a), "q") is a


def test_a_tensor_on_a_gpu_that_records_gradients_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnDevice:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, **how: Any) -> Any:
            raise BufferError("detach it first")

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("records gradients")

    cupy = SimpleNamespace(from_dlpack=lambda x: x.__dlpack__(), ndarray=type(None))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    with pytest.raises(TypeError, match=r"^q: CuPy cannot read this OnDevice: detach it first"):
        as_array(OnDevice(), "q")


def test_attention_takes_foreign_arrays(rng: np.random.Generator) -> None:
    q, k = rng.standard_normal((1, 2, 8), np.float32), rng.standard_normal((3, 1, 8), np.float32)
    caches = [np.full((2, 1, 4, 8), np.nan, np.float32) for _ in range(2)]
    cupaged.write_kv(HasDlpack(k), HasDlpack(k), *caches, np.array([4, 5, 6]))
    out = cupaged.paged_attention(HasDlpack(q), *caches, np.array([[1]]), np.array([3]))
    expected, _ = cupaged.reference.dense_attention(q, k, k)
    assert type(out) is np.ndarray
    off = 2.0**-22 * (2 + np.abs(q).sum(axis=2).max() * np.abs(k).max() * 8**-0.5)  # a logit, by rounding
    np.testing.assert_allclose(out, expected, atol=off * np.abs(k).max())


def test_unknown_dtype_names_are_refused() -> None:
    with pytest.raises(
        ValueError, match="dtype: expected one of float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, got 'int8'"
    ):
        numpy_dtype("int8")


def test_bfloat16_without_ml_dtypes_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    numpy_dtype.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"needs the package ml_dtypes: pip install 'cupaged\[cpu\]'"):
        numpy_dtype("bfloat16")


def test_importing_the_package_imports_numpy_alone() -> None:
    heavy = ("numba", "cupy", "ml_dtypes", "gguf", "tqdm", "cupaged.cuda", "cupaged.cpu")
    code = f"import cupaged, sys; print(*sorted(m for m in {heavy} if m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_without_numba_the_reference_serves_and_one_warning_says_so() -> None:
    code = """
import sys, warnings
sys.modules["numba"] = None
import numpy as np, cupaged
cache = np.zeros((1, 1, 4, 8), np.float32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        out = cupaged.paged_attention(np.ones((1, 1, 8), np.float32), cache, cache, np.array([[0]]), np.array([4]))
assert (out == 0).all()
print(len(caught), caught[0].message, caught[0].filename)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("1 ") and printed.count("pip install 'cupaged[cpu]'") == 1
    assert printed.strip().endswith("<string>"), "the warning points at the line that called the package"
