"""On CuPy: what may be captured in a CUDA graph, and what calls on several streams share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from cupy_case import SHAPE, Host

import cupaged
from cupaged import reference
from cupaged.cuda import current_backend


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
