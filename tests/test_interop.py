"""Arrays of JAX, PyTorch and array_api_compat on the CPU: what they hold is read in place, and what comes back equals NumPy's answer.

Each library is optional; without it its tests are skipped. `pip install 'cupaged[interop]'` gets all of them.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupaged
from cupaged.arrays import as_array, numpy_dtype

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 16, 4


def library(name: str) -> Any:
    return pytest.importorskip(
        name, reason=f"{name} is not installed: pip install {name.replace('_', '-').split('.')[0]}"
    )


def jax_array(x: np.ndarray) -> Any:
    return library("jax.numpy").asarray(x)


def torch_tensor(x: np.ndarray) -> Any:
    torch = library("torch")
    if x.dtype == numpy_dtype("bfloat16"):
        return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(x.copy())


def compat_torch(x: np.ndarray) -> Any:
    library("array_api_compat"), library("torch")
    xp = importlib.import_module("array_api_compat.torch")
    return xp.asarray(torch_tensor(x), copy=True)


def compat_numpy(x: np.ndarray) -> Any:
    library("array_api_compat")
    return importlib.import_module("array_api_compat.numpy").asarray(x, copy=True)


FOREIGN = [jax_array, torch_tensor, compat_torch, compat_numpy]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("foreign", FOREIGN, ids=lambda f: f.__name__)
def test_everything_that_is_only_read_may_be_foreign(
    foreign: Callable[[np.ndarray], Any], dtype: str, rng: np.random.Generator
) -> None:
    """Queries, new keys and values, tables, lengths, slots, slopes, sinks and scales; the cache stays NumPy's."""
    q, k, v = (
        rng.standard_normal((n, heads, DIM)).astype(numpy_dtype(dtype))
        for n, heads in ((3, HEADS), (9, KV_HEADS), (9, KV_HEADS))
    )
    tables, lens, slots = np.array([[3, 1, 0]], np.int32), np.array([9], np.int32), np.r_[12:16, 4:8, 0]
    starts = np.array([0, 3], np.int32)
    options = {
        "alibi_slopes": np.linspace(0.1, 0.4, HEADS, dtype=np.float32), "sinks": np.linspace(-1, 1, HEADS, dtype=np.float32),
        "k_scale": np.array([0.5, 2], np.float32), "v_scale": np.array([3, 1], np.float32),
    }  # fmt: skip
    results = []
    for of in (lambda x: x, foreign):
        caches = [np.full((4, KV_HEADS, SIZE, DIM), np.nan, numpy_dtype(dtype)) for _ in "kv"]
        scales = {name: of(options[name]) for name in ("k_scale", "v_scale")}
        cupaged.write_kv(of(k), of(v), *caches, of(slots), **scales)
        given = {name: of(x) for name, x in options.items()}
        out = cupaged.paged_attention(of(q), *caches, of(tables), of(lens), query_start_loc=of(starts), **given)
        results.append(out)
    assert type(results[1]) is np.ndarray and results[1].dtype == numpy_dtype(dtype)
    np.testing.assert_array_equal(results[0].view(np.uint8), results[1].view(np.uint8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_is_read_where_it_lies_with_its_strides(dtype: str) -> None:
    torch = library("torch")
    base = torch.arange(2 * 3 * 8).to(getattr(torch, dtype)).reshape(3, 2, 8)
    there = as_array(base.transpose(0, 1)[:, 1:], "q")
    assert there.shape == (2, 2, 8) and there.dtype == numpy_dtype(dtype)
    base[2, 1, 7] = -1
    assert there[1, 1, 7] == -1, "a copy"
    assert as_array(base[:0], "q").shape == (0, 2, 8)


def test_what_was_read_outlives_the_array_it_came_from() -> None:
    torch = library("torch")
    there = as_array(torch.full((1000, 8), 3.0, dtype=torch.bfloat16), "q")
    gc.collect()
    others = [torch.zeros((1000, 8), dtype=torch.bfloat16) for _ in range(20)]
    assert (there == 3).all() and len(others) == 20


def test_a_tensor_that_records_gradients_is_refused_by_name() -> None:
    q = library("torch").zeros((1, HEADS, DIM), requires_grad=True)
    cache = np.zeros((1, KV_HEADS, SIZE, DIM), np.float32)
    with pytest.raises(TypeError, match=r"^q: NumPy cannot read this Tensor: .*detach"):
        cupaged.paged_attention(q, cache, cache, np.array([[0]]), np.array([1]))


@pytest.mark.parametrize("foreign", [jax_array, torch_tensor], ids=lambda f: f.__name__)
def test_caches_and_results_must_be_writable_arrays_of_our_own(foreign: Callable[[np.ndarray], Any]) -> None:
    cache, q = np.zeros((1, KV_HEADS, SIZE, DIM), np.float32), np.zeros((1, HEADS, DIM), np.float32)
    k = q[:, :KV_HEADS]
    where = np.array([[0]]), np.array([1])
    with pytest.raises(TypeError, match="k_cache: expected a NumPy or CuPy array"):
        cupaged.write_kv(k, k, foreign(cache), foreign(cache), np.array([0]))
    with pytest.raises(TypeError, match="out: expected a NumPy or CuPy array"):
        cupaged.paged_attention(q, cache, cache, *where, out=foreign(q))


def test_results_go_back_without_a_copy() -> None:
    """The other way: what NumPy holds is given to JAX and PyTorch as DLPack."""
    out = np.arange(8, dtype=np.float32)
    torch = library("torch")
    assert torch.from_dlpack(out).data_ptr() == out.ctypes.data


def test_a_jitted_function_gives_its_queries_and_takes_the_result() -> None:
    """The way to embed cupaged in JAX: projections under jit, attention between two jitted parts."""
    jax = library("jax")
    jnp = importlib.import_module("jax.numpy")
    alloc = cupaged.BlockAllocator(num_blocks=4, block_size=SIZE)
    cache = cupaged.KVCache(
        num_layers=1, num_blocks=4, block_size=SIZE, num_kv_heads=KV_HEADS, head_dim=DIM, dtype="float32", device="cpu"
    )
    before = jax.jit(lambda x: (x @ jnp.ones((8, HEADS * DIM))).reshape(-1, HEADS, DIM))
    after = jax.jit(lambda x: x.reshape(len(x), -1).sum(axis=1))
    step = alloc.add_request("A", 5)
    cache.begin(step)
    q = before(jnp.ones((5, 8)))
    cache.write(0, q[:, :KV_HEADS], q[:, :KV_HEADS], step)
    out = after(cache.attend(0, q, step))
    np.testing.assert_allclose(np.asarray(out), np.full(5, 8.0 * HEADS * DIM), rtol=1e-6)


def test_a_tensor_without_memory_is_refused_by_name() -> None:
    q = library("torch").zeros((1, HEADS, DIM), device="meta")
    cache = np.zeros((1, KV_HEADS, SIZE, DIM), np.float32)
    with pytest.raises(TypeError, match=r"^q: NumPy cannot read this Tensor: "):
        cupaged.paged_attention(q, cache, cache, np.array([[0]]), np.array([1]))


def test_bfloat16_goes_to_torch_and_back_over_the_same_memory() -> None:
    """NumPy does not exchange bfloat16 through DLPack; docs/embedding.md names the way around."""
    torch = library("torch")
    out = np.ones((2, HEADS, DIM), numpy_dtype("bfloat16"))
    there = torch.from_numpy(out.view(np.uint16)).view(torch.bfloat16)
    there[0] = 3
    assert (out[0] == 3).all() and as_array(there, "q").ctypes.data == out.ctypes.data


def test_memory_of_a_tensor_serves_as_cache() -> None:
    torch = library("torch")
    tensor = torch.zeros((2, KV_HEADS, SIZE, DIM))
    k = np.ones((1, KV_HEADS, DIM), np.float32)
    cupaged.write_kv(k, k, tensor.numpy(), tensor.numpy(), np.array([SIZE]))
    assert tensor[1, :, 0].eq(1).all() and tensor.sum() == KV_HEADS * DIM
