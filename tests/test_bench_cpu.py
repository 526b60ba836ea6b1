"""What the benchmarks of the CPU backend say they read is what decode reads."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba", reason="the CPU backend needs numba: pip install 'cupaged[cpu]'")

from bench import cpu_attention, cpu_bounds


@pytest.mark.parametrize(("num_kv_heads", "context"), [(3, 96), (32, 1200)])
def test_the_runs_that_are_read_are_all_of_keys_and_values_once(num_kv_heads: int, context: int) -> None:
    config = {
        "dtype": "float16", "num_heads": num_kv_heads, "num_kv_heads": num_kv_heads, "head_dim": 64, "block_size": 16, "batch": 2,
        "context": context, "rows": 1,
    }  # fmt: skip
    ours = cpu_attention.Ours(config)
    runs, _ = cpu_bounds.runs_of(ours)
    begin = ours.pool.ctypes.data
    np.testing.assert_array_equal(np.sort(runs), np.arange(begin, begin + ours.pool.nbytes, 16 * 64 * 2))
    ours.out[:] = 0
    for prefetched in (False, True):
        cpu_bounds.read_runs(ours, prefetched)()
    assert not ours.out.any()
    ours.attend()
    assert ours.out.any()
