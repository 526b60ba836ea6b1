"""Decode on a GPU under pytest-benchmark; `bench/gpu_attention.py` has the method and the cases."""

from __future__ import annotations

from typing import Any

import pytest

from bench.gpu_attention import CASES, Case, measure

cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'cupaged[cuda12x]' or [cuda13x]")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode(benchmark: Any, case: Case) -> None:
    if not cupy.cuda.is_available():
        pytest.skip("no CUDA device found")
    result = benchmark.pedantic(measure, args=(case,), rounds=1, iterations=1)
    benchmark.extra_info.update(result.as_dict())
    assert 0 < result.fraction < 1.2, "faster than reading the same bytes: something was not read"
