"""On CuPy: arrays on a device that is not the current one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cupy_case import SHAPE, Host

import cupaged
from cupaged import reference


@pytest.fixture
def elsewhere(cupy: Any) -> Iterator[Any]:
    """A device that is not the current one."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one CUDA device only")
    yield cupy.cuda.Device(1)
    assert cupy.cuda.Device().id == 0, "the current device was changed"


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
