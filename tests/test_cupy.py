"""The package's own use of CuPy: what CuPy makes of the launcher's calls, and arrays on a device that is not the current one.

Tests here need a device, or what stands in for CUDA in tests/pretend; the last one runs them there, and GPU tests of other files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from simt import build

import cupaged
from cupaged import reference
from cupaged.arrays import as_array, numpy_dtype
from cupaged.cuda import current_backend

SHAPE = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": "float16"}


@pytest.fixture
def cupy() -> Any:
    module = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not module.cuda.is_available():
        pytest.skip("no CUDA device found")
    return module


@pytest.fixture
def elsewhere(cupy: Any) -> Iterator[Any]:
    """A device that is not the current one."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one CUDA device only")
    yield cupy.cuda.Device(1)
    assert cupy.cuda.Device().id == 0, "the current device was changed"


@pytest.fixture
def pretended(request: pytest.FixtureRequest) -> Any:
    """What CuPy called, where tests/pretend stands in for CUDA."""
    plugin = request.config.pluginmanager.get_plugin("pretend")
    if plugin is None:
        pytest.skip("CUDA itself is here, or nothing that stands in for it")
    return plugin.installed[0]


class Host:
    """Three sequences, their keys and values, and what the oracle says."""

    def __init__(self, rng: np.random.Generator) -> None:
        def random(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float16)

        self.q, self.k, self.v = random(3, 6, 64), random(20, 2, 16, 64), random(20, 2, 16, 64)
        self.tables = rng.permutation(20)[:15].reshape(3, 5).astype(np.int32)
        self.lens = np.array([70, 1, 33], np.int32)

    def check(self, cupy: Any, out: Any, **options: Any) -> None:
        expected, _ = reference.paged_attention(self.q, self.k, self.v, self.tables, self.lens, **options)
        np.testing.assert_allclose(cupy.asnumpy(out), expected, atol=4e-3)


# ---------------------------------------------------------------------------------------------------------- the launcher


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
def test_metadata_on_the_host_are_not_captured(cupy: Any, rng: np.random.Generator) -> None:
    """A replay would copy what a reused buffer holds by then."""
    host = Host(rng)
    q, k, v = map(cupy.asarray, (host.q, host.k, host.v))
    launcher = current_backend().launcher
    cupaged.paged_attention(q, k, v, host.tables, host.lens)
    slots = np.arange(3)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured"), launcher.capture():
        cupaged.write_kv(k[:3, :, 0], v[:3, :, 0], k, v, slots)
    cupaged.write_kv(k[:3, :, 0], v[:3, :, 0], k, v, slots)  # and goes on afterwards


@pytest.mark.gpu
def test_what_is_made_once_is_there_for_every_stream(cupy: Any, rng: np.random.Generator) -> None:
    """Constant vectors serve calls on any stream, also when the first call that needs one is captured."""
    host = Host(rng)
    q, k, v, tables, lens = map(cupy.asarray, (host.q, host.k, host.v, host.tables, host.lens))
    cupy.cuda.get_current_stream().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for options in ({"k_scale": 0.375}, {"v_scale": 1.625}):
        outs = []
        for stream in streams:
            with stream:
                outs.append(cupaged.paged_attention(q, k, v, tables, lens, **options))
        with streams[1]:
            host.check(cupy, outs[1], **options)
    plan, out = cupaged.plan(host.lens, host.tables, device="cuda", **SHAPE), cupy.empty_like(q)
    with current_backend().launcher.capture():
        cupaged.paged_attention(q, k, v, None, None, plan=plan, out=out, k_scale=1.125)
    host.check(cupy, cupaged.paged_attention(q, k, v, tables, lens, k_scale=1.125), k_scale=1.125)


@pytest.mark.gpu
@pytest.mark.parametrize("num_splits", [None, 3])
def test_a_plan_is_there_for_every_stream(cupy: Any, rng: np.random.Generator, num_splits: int | None) -> None:
    """Its copy to the device is enqueued where the plan is made; a write or a call on another stream waits for it."""
    host = Host(rng)
    new = rng.standard_normal((3, 2, 64)).astype(np.float16)
    slots = host.tables[np.arange(3), (host.lens - 1) // 16] * 16 + (host.lens - 1) % 16
    q, k, v, there = map(cupy.asarray, (host.q, host.k, host.v, new))
    cupy.cuda.get_current_stream().synchronize()

    def make_plan() -> Any:
        with cupy.cuda.using_allocator(None):  # memory that nobody used before
            return cupaged.plan(
                host.lens, host.tables, slot_mapping=slots, num_splits=num_splits, device="cuda", max_seqs=3, max_tokens=3,
                max_blocks=5, **SHAPE,
            )  # fmt: skip

    attending, writing = make_plan(), make_plan()
    with cupy.cuda.Stream(non_blocking=True):
        host.check(cupy, cupaged.paged_attention(q, k, v, None, None, plan=attending, num_splits=num_splits))
        cupaged.write_kv(there, there, k, v, writing.write_slots)
        reference.write_kv(new, new, host.k, host.v, slots)
        np.testing.assert_array_equal(cupy.asnumpy(k), host.k)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes", "k_scale"])
def test_host_values_of_heads_are_not_captured(cupy: Any, rng: np.random.Generator, name: str) -> None:
    host = Host(rng)
    q, k, v, tables, lens = map(cupy.asarray, (host.q, host.k, host.v, host.tables, host.lens))
    values = np.full(2 if name == "k_scale" else 6, 0.5, np.float32)
    with (
        pytest.raises(RuntimeError, match=f"{name}: expected a contiguous CuPy array of float32 while"),
        current_backend().launcher.capture(),
    ):
        cupaged.paged_attention(q, k, v, tables, lens, **{name: values})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "values"),
    [("sinks", np.ones(6, np.float16)), ("k_scale", np.ones(1, np.float32)), ("v_scale", np.ones(4, np.float32)[::2])],
    ids=["dtype", "one for all heads", "strides"],
)
def test_arrays_that_are_converted_first_are_not_captured(
    cupy: Any, rng: np.random.Generator, name: str, values: np.ndarray
) -> None:
    """A replay would write the converted values to memory that was freed after the capture."""
    host = Host(rng)
    q, k, v = map(cupy.asarray, (host.q, host.k, host.v))
    plan = cupaged.plan(host.lens, host.tables, device="cuda", **SHAPE)
    there = {name: cupy.asarray(values) if values.flags.c_contiguous else cupy.asarray(np.ones(4, np.float32))[::2]}
    out = cupy.empty_like(q)
    cupaged.paged_attention(q, k, v, None, None, plan=plan, out=out, **there)
    host.check(cupy, out, **{name: values})
    with (
        pytest.raises(RuntimeError, match=f"{name}: expected .* while a CUDA graph"),
        current_backend().launcher.capture(),
    ):
        cupaged.paged_attention(q, k, v, None, None, plan=plan, out=out, **there)
    slots = cupy.asarray(np.arange(6))[::2]
    with pytest.raises(RuntimeError, match="slot_mapping: expected a contiguous"), current_backend().launcher.capture():
        cupaged.write_kv(k[:3, :, 0], v[:3, :, 0], k, v, slots)


@pytest.mark.gpu
@pytest.mark.parametrize("metadata", ["host", "device", "plan of the host"])
def test_attention_is_captured_with_memory_of_its_own_alone(cupy: Any, rng: np.random.Generator, metadata: str) -> None:
    """What a stream has for calls that come one by one is freed when a larger call comes, and shared by graphs that may overlap."""
    host = Host(rng)
    q, k, v = map(cupy.asarray, (host.q, host.k, host.v))
    tables, lens, plan = host.tables, host.lens, None
    if metadata == "device":
        tables, lens = cupy.asarray(tables), cupy.asarray(lens)
    if metadata == "plan of the host":
        tables, lens, plan = None, None, cupaged.plan(lens, tables, **SHAPE)
    cupy.cuda.get_current_stream().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        out = cupaged.paged_attention(q, k, v, tables, lens, plan=plan)  # what a capture must not do is done
        host.check(cupy, out)
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="plan: attention in a CUDA graph needs memory of its own"):
            cupaged.paged_attention(q, k, v, tables, lens, plan=plan, out=out)
        stream.end_capture()
        host.check(cupy, cupaged.paged_attention(q, k, v, tables, lens, plan=plan))


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
def test_default_streams_of_threads_are_different_streams(cupy: Any) -> None:
    """All have the handle 2; calls on them run side by side, so each needs partial results of its own."""
    backend, both = current_backend(), Barrier(2)

    def mine() -> tuple[Any, Any]:
        with cupy.cuda.Stream.ptds:
            both.wait()  # so that they are two threads, alive at once
            return backend.launcher.stream(), backend._stream_workspace()

    with ThreadPoolExecutor(2) as threads:
        (one, workspace), (other, another) = (each.result() for each in [threads.submit(mine) for _ in range(2)])
    assert one != other and workspace is not another


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


# --------------------------------------------------------------------------------------------------------- foreign arrays


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


# ------------------------------------------------------------------------------------------------- devices beside the current


@pytest.mark.gpu
@pytest.mark.parametrize("metadata", ["host", "device", "plan"])
def test_attention_follows_its_arrays_to_their_device(
    cupy: Any, elsewhere: Any, rng: np.random.Generator, metadata: str
) -> None:
    host = Host(rng)
    options: dict[str, Any] = {"k_scale": np.array([0.5]), "sinks": np.ones(6), "alibi_slopes": np.ones(6) / 9}
    with elsewhere:
        q, k, v = map(cupy.asarray, (host.q, host.k, host.v))
        tables, lens = map(cupy.asarray, (host.tables, host.lens))
        plan = cupaged.plan(host.lens, host.tables, device="cuda", **SHAPE)
    where: dict[str, tuple[Any, ...]] = {
        "host": (host.tables, host.lens),
        "device": (tables, lens),
        "plan": (None, None),
    }
    out = cupaged.paged_attention(q, k, v, *where[metadata], plan=plan if metadata == "plan" else None, **options)
    assert out.device == elsewhere
    host.check(cupy, out, **options)


@pytest.mark.gpu
def test_a_plan_is_updated_on_its_own_device(cupy: Any, elsewhere: Any, rng: np.random.Generator) -> None:
    host = Host(rng)
    alloc = cupaged.BlockAllocator(20, 16)
    step = alloc.add_request("a", 40)
    with elsewhere:
        q, k, v = map(cupy.asarray, (host.q[:1], host.k, host.v))
        plan = cupaged.plan(
            step.seq_lens, step.block_tables, slot_mapping=np.array([39]), device="cuda", max_seqs=1, max_tokens=1, max_blocks=8, **SHAPE
        )  # fmt: skip
        elsewhere.synchronize()
    step = alloc.grow("a", 1)
    plan.update(step)
    expected, _ = reference.paged_attention(host.q[:1], host.k, host.v, step.block_tables, step.seq_lens)
    out = cupaged.paged_attention(q, k, v, None, None, plan=plan)
    np.testing.assert_allclose(cupy.asnumpy(out), expected, atol=4e-3)
    assert cupy.asnumpy(plan.write_slots).tolist() == step.slot_mapping.tolist()


@pytest.mark.gpu
def test_a_cache_stays_on_the_device_that_was_current_when_it_was_made(
    cupy: Any, elsewhere: Any, rng: np.random.Generator
) -> None:
    """Writes, attention, copies, swaps and gathering, all while another device is current."""
    with elsewhere:
        cache = cupaged.KVCache(2, 8, 16, 2, 64, device="cuda", host_blocks=8)
    alloc = cupaged.BlockAllocator(8, 16, host_blocks=8)
    step = alloc.add_request("a", 20)
    cache.begin(step)
    assert cache.pool.device == elsewhere
    k, v = (rng.standard_normal((20, 2, 64)).astype(np.float16) for _ in "kv")
    with elsewhere:
        there = cupy.asarray(k), cupy.asarray(v)
        q = cupy.asarray(rng.standard_normal((20, 6, 64)).astype(np.float16))
    for layer in range(2):
        cache.write(layer, *there, step)
        assert cache.attend(layer, q, step).device == elsewhere
    alloc.fork_request("a", ["b"])
    cache.begin(alloc.grow("b", 1))
    cache.begin(alloc.evict(["a"]))
    cache.begin(alloc.restore(["a"]))
    for name in ("a", "b"):
        for found, expected in zip(cache.gather(1, alloc.tables[name], 20), (k, v), strict=True):
            assert found.device == elsewhere
            np.testing.assert_array_equal(cupy.asnumpy(found), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["block_tables", "seq_lens", "sinks", "k_scale", "k_cache", "out"])
def test_arrays_on_different_devices_are_refused(
    cupy: Any, elsewhere: Any, rng: np.random.Generator, name: str
) -> None:
    host = Host(rng)
    call = {
        "q": host.q, "k_cache": host.k, "v_cache": host.v, "block_tables": host.tables, "seq_lens": host.lens,
        "sinks": np.ones(6, np.float32), "k_scale": np.ones(2, np.float32), "out": np.empty_like(host.q),
    }  # fmt: skip
    arrays = {key: cupy.asarray(x) for key, x in call.items()}
    with elsewhere:
        arrays[name] = cupy.asarray(call[name])
    with pytest.raises(ValueError, match=f"{name}: expected device 0, where the other arguments are, got device 1"):
        cupaged.paged_attention(**arrays)


# ------------------------------------------------------------------------------------------------------------ benchmarks


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


# --------------------------------------------------------------------------------------------------------- without a GPU


@pytest.mark.parametrize(
    "which",
    [
        ["tests/test_cupy.py"],
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
