"""The package's own use of CuPy: what CuPy makes of the launcher's calls and of arrays.

Tests of this file and of test_cupy_streams.py and test_cupy_devices.py need a device, or what stands in for CUDA in tests/pretend; the last
one here runs them there, and GPU tests of other files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cupy_case import Host
from simt import build

import cupaged
from cupaged import reference
from cupaged.arrays import as_array, numpy_dtype
from cupaged.cuda import current_backend


@pytest.fixture
def pretended(request: pytest.FixtureRequest) -> Any:
    """What CuPy called, where tests/pretend stands in for CUDA."""
    plugin = request.config.pluginmanager.get_plugin("pretend")
    if plugin is None:
        pytest.skip("CUDA itself is here, or nothing that stands in for it")
    return plugin.installed[0]


@pytest.mark.gpu
def test_parameters_reach_the_driver_as_they_are(
    cupy: Any, pretended: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A struct passed by value is the struct's bytes, whatever CuPy does between."""
    launcher, packed = current_backend().launcher, []
    launch = type(launcher).launch
    monkeypatch.setattr(
        type(launcher),
        "launch",
        lambda self, function, grid, block, params, shared=0: (
            packed.append((grid, block, shared, params.tobytes())),
            launch(self, function, grid, block, params, shared),
        ),
    )
    host = Host(rng)
    del pretended.launches[:]
    out = cupaged.paged_attention(*map(cupy.asarray, (host.q, host.k, host.v)), host.tables, host.lens)
    host.check(cupy, out)
    pool = cupy.asarray(host.k)
    current_backend().copy_blocks(pool, np.array([[0, 1], [2, 3]]))
    np.testing.assert_array_equal(cupy.asnumpy(pool[1]), host.k[0])
    assert [each[1:] for each in pretended.launches] == packed
    assert len(packed) == 2 and len(packed[1][3]) > 3600, "attention, and the largest struct there is"


@pytest.mark.gpu
def test_an_argument_is_described_to_cupy_without_its_fields(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy reads `__array_interface__`, in which NumPy lists every field: 50 us a launch for the struct of attention."""
    given: list[Any] = []
    params = np.zeros(1, [("a", np.int64), ("b", np.int32, 3)])
    current_backend().launcher.launch(lambda *arguments, **_: given.extend(arguments[2]), (1, 1, 1), (1, 1, 1), params)
    assert given[0].__array_interface__["descr"] == [("", "|V20")]
    assert given[0].ctypes.data == params.ctypes.data


@pytest.mark.gpu
def test_pinned_memory_is_as_large_as_asked_and_never_lent_again(cupy: Any, pretended: Any) -> None:
    """CuPy's pool would take 2 MiB for 1 MiB and a byte, and hand the memory of a dropped cache out while it is written to."""
    launcher = current_backend().launcher
    pages = launcher.pinned((1 << 20) + 1)
    _, memory, *_ = pretended.block_of(launcher.pointer(pages))
    assert memory.nbytes == (1 << 20) + 1
    on_device = cupy.full(1 << 20, 7, np.uint8)
    launcher.copy_async(pages[: 1 << 20], on_device)
    del pages, memory
    again = launcher.pinned((1 << 20) + 1)
    again[:] = 3
    cupy.cuda.get_current_stream().synchronize()
    assert (again == 3).all()


@pytest.mark.gpu
def test_queries_without_a_sequence_are_refused_on_the_device_as_on_the_host(
    cupy: Any, rng: np.random.Generator
) -> None:
    host = Host(rng)
    q, k, v = map(cupy.asarray, (host.q, host.k, host.v))
    tables, lens, starts = np.empty((0, 5), np.int32), np.empty(0, np.int32), np.zeros(1, np.int32)
    with pytest.raises(ValueError, match="block_tables: expected a row of block ids"):
        cupaged.paged_attention(q, k, v, *map(cupy.asarray, (tables, lens)), query_start_loc=cupy.asarray(starts))
    with pytest.raises(ValueError, match="block_tables: expected a row of block ids"):
        cupaged.paged_attention(q, k, v, cupy.zeros((), np.int32), cupy.asarray(lens))
    with pytest.raises(ValueError, match="q: expected 0 rows"):
        cupaged.paged_attention(q, k, v, tables, lens, query_start_loc=starts)


@pytest.mark.gpu
def test_offsets_past_32_bits(cupy: Any, rng: np.random.Generator) -> None:
    """Blocks 3 GiB apart: a write, a copy and attention in the last one, 2^31 elements and 2^32 bytes behind the first."""
    stride = 3 << 30
    if cupy.cuda.Device().mem_info[0] < 3 * stride:
        pytest.skip("needs 9 GiB of free device memory")
    memory = cupy.empty(2 * stride + 8192, np.uint8)
    k_cache, v_cache = (
        cupy.ndarray((3, 2, 16, 64), np.float16, memory.data + offset, strides=(stride, 2048, 128, 2))
        for offset in (0, 4096)
    )
    host = Host(rng)
    k, v = (rng.standard_normal((20, 2, 64)).astype(np.float16) for _ in "kv")
    slots, tables, lens = np.r_[32:48, 16:20], np.array([[2, 1]], np.int32), np.array([20], np.int32)
    cupaged.write_kv(cupy.asarray(k), cupy.asarray(v), k_cache, v_cache, slots)
    reference.write_kv(k, v, host.k, host.v, slots)
    expected, _ = reference.paged_attention(host.q[:1], host.k, host.v, tables, lens)
    q = cupy.asarray(host.q[:1])
    np.testing.assert_allclose(
        cupy.asnumpy(cupaged.paged_attention(q, k_cache, v_cache, tables, lens)), expected, atol=4e-3
    )
    for pages in (k_cache, v_cache):
        current_backend().copy_blocks(pages, np.array([[2, 0]]))
    moved = np.array([[0, 1]], np.int32)
    np.testing.assert_allclose(
        cupy.asnumpy(cupaged.paged_attention(q, k_cache, v_cache, moved, lens)), expected, atol=4e-3
    )


@pytest.mark.gpu
def test_the_example_of_the_readme_runs(cupy: Any) -> None:
    page = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python cuda\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        exec(compile(block, "README.md", "exec"), names)
    assert names["out"].shape == (2, 8, 64) and np.isfinite(cupy.asnumpy(names["lse"])).all()


class ThroughDLPack:
    """An array of another library on a device: a tensor of JAX or PyTorch."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        return self.x.__dlpack__(**how)


class ThroughInterface:
    """The same through `__cuda_array_interface__` alone: an array of Numba."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.__cuda_array_interface__ = x.__cuda_array_interface__


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_foreign_device_arrays_come_without_a_copy(cupy: Any, rng: np.random.Generator, dtype: str) -> None:
    x = cupy.asarray(rng.standard_normal((3, 6, 64)).astype(numpy_dtype(dtype)))
    for kind in (ThroughDLPack,) if dtype == "bfloat16" else (ThroughDLPack, ThroughInterface):
        for stream in (cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)):
            with stream:
                found = as_array(kind(x), "x")
            assert found.data.ptr == x.data.ptr and found.dtype == x.dtype and found.shape == x.shape


@pytest.mark.gpu
def test_a_benchmark_measures_what_it_says(
    cupy: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The smallest case of `make gpu-check` runs to its report, one that fails does not stop the next, and needs nothing but CuPy."""
    from bench import gpu_attention, gpu_check

    if plugin := request.config.pluginmanager.get_plugin("pretend"):
        monkeypatch.setattr(plugin.installed[0], "skipped", {"read_sum"})
    small = gpu_attention.Case(2, 64, num_heads=6, num_kv_heads=2, head_dim=64, classic=True)
    impossible = gpu_attention.Case(2, 64, num_heads=6, num_kv_heads=4, head_dim=64)
    orders = [replace(small, classic=False, order=order) for order in ("page", "layer")]
    prefill = replace(small, classic=False, rows=3)
    monkeypatch.setattr(gpu_attention, "CASES", (impossible, small, *orders, prefill))
    monkeypatch.setattr(gpu_attention, "_pool_bytes", lambda: 1 << 22)
    monkeypatch.setattr(gpu_attention, "_l2_bytes", lambda: 1 << 16)
    report: dict[str, Any] = {"machine": gpu_check.describe(cupy), "attention": []}
    gpu_check.write(tmp_path, report)
    gpu_check.run_benchmarks(float("inf"), report["attention"], lambda: gpu_check.write(tmp_path, report))
    first, second, *others = report["attention"]
    assert "num_heads" in first["error"] and "error" not in second
    assert second["kv_bytes"] == 2 * 2 * 64 * 2 * 64 * 2 and min(second["host_us"], second["host_alone_us"]) > 0
    assert set(second["classic_us"]) == {"v1", "v2"}
    assert [each.get("error") for each in others] == [None] * 3 and others[0]["case"].endswith("-page-major")
    assert others[2]["flop"] == 4 * 2 * 6 * 64 * (62 + 63 + 64)
    text = (tmp_path / "gpu-check.txt").read_text()
    assert "tests: did not end" in text and small.name in text


@pytest.mark.parametrize(
    "which",
    [
        ["tests/test_cupy.py", "tests/test_cupy_streams.py", "tests/test_cupy_devices.py"],
        [
            "tests/test_cuda_graphs.py::test_one_captured_graph_serves_every_later_step[cuda-{}-1]",
            "tests/test_cuda.py::test_swapping_out_and_in_brings_the_blocks_back[cuda-page]",
            "tests/test_cuda.py::test_swapping_out_and_in_brings_the_blocks_back[cuda-layer]",
            "tests/test_behaviour.py::test_the_six_token_example[cuda]",
            "tests/test_behaviour.py::test_merging_parts_equals_attending_once[cuda-bfloat16]",
        ],
    ],
    ids=["own", "others"],
)
def test_gpu_tests_pass_on_cupy_itself(which: list[str]) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    if reason := build.unavailable():
        pytest.skip(reason)
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), str(root / "tests"), os.environ.get("PYTHONPATH", "")])
    options = ["-p", "pretend", "-p", "no:cacheprovider", "-m", "gpu", "-q", "--tb=short"]
    command = [sys.executable, "-m", "pytest", *options, *which]
    done = subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout
