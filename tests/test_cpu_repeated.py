"""Calls through a cache that the CPU backend repeats without checking them again: the bits of checked calls, and refusals all the same."""

from __future__ import annotations

import numpy as np
import pytest

import cupaged

numba = pytest.importorskip("numba", reason="the CPU backend needs numba: pip install 'cupaged[cpu]'")

from cupaged import cpu, cpu_records  # noqa: E402


def decoding(
    rng: np.random.Generator, dtype: str = "float32", **sizes: int
) -> tuple[cupaged.KVCache, cupaged.BlockAllocator]:
    """Three sequences of one, two and several chunks in a cache of two layers whose unused slots are NaN."""
    allocator = cupaged.BlockAllocator(120, 16)
    cache = cupaged.KVCache(2, 120, 16, 3, 40, dtype=dtype, device="cpu", **sizes)
    cache.pool[...] = np.nan
    for name, n in (("A", 5), ("B", 300), ("C", 1100)):
        step = allocator.add_request(name, n)
        cache.begin(step)
        for layer in range(2):
            k, v = rng.standard_normal((2, n, 3, 40), np.float32).astype(cache.pool.dtype)
            cache.write(layer, k, v, step)
    return cache, allocator


def decode_steps(
    cache: cupaged.KVCache,
    allocator: cupaged.BlockAllocator,
    count: int,
    names: tuple[str, ...] = ("A", "B", "C"),
    **how: object,
) -> list[bytes]:
    """Results of all layers in so many steps, from the same rows whenever called."""
    rng = np.random.default_rng(7)
    results = []
    for _ in range(count):
        step = allocator.grow_batch(list(names), 1)
        cache.begin(step)
        for layer in range(2):
            fused = rng.standard_normal((len(names), 12, 40), np.float32).astype(cache.pool.dtype)
            cache.write(layer, fused[:, 6:9], fused[:, 9:], step)
            results.append(cache.attend(layer, fused[:, :6], step, **how).tobytes())
    return results


def everything(cache: cupaged.KVCache) -> bytes:
    return cache.pool.tobytes()


@pytest.mark.parametrize("sizes", [{}, {"layout": "NHD"}, {"dtype": "fp8_e4m3"}], ids=str)
@pytest.mark.parametrize("how", [{}, {"window": 37}, {"k_scale": 0.5, "v_scale": 2.0}], ids=str)
@pytest.mark.parametrize("in_parallel", [False, True])
def test_attention_that_stores_keys_first_is_a_write_and_an_attention(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, float], sizes: dict[str, str], in_parallel: bool
) -> None:
    if in_parallel:
        monkeypatch.setattr(cpu_records, "_SERIAL_COST", 0)
        monkeypatch.setattr(cpu_records, "_SERIAL_ELEMENTS", 0)
    scales = {name: x for name, x in how.items() if name.endswith("scale")}
    found = []
    for together in (False, True):
        rng = np.random.default_rng(0)
        allocator = cupaged.BlockAllocator(40, 16)
        cache = cupaged.KVCache(2, 40, 16, 3, 40, device="cpu", **{"dtype": "float32", **sizes})
        cache.pool[...] = 0
        results = []
        for number, n in enumerate((50, 1, 1, 7, 1, 1)):
            step = allocator.grow("A", n) if n != 50 else allocator.add_request("A", n)
            cache.begin(step)
            for layer in range(2):
                fused = rng.standard_normal((n, 12, 40), np.float32)
                q, k, v = fused[:, :6], fused[:, 6:9], fused[:, 9:]
                if number == 1:  # rows without scales are no reason to leave them out later
                    cache.write(layer, k, v, step)
                    results.append(cache.attend(layer, q, step, **how).tobytes())
                elif together:
                    results.append(cache.attend(layer, q, step, k=k, v=v, **how).tobytes())
                else:
                    cache.write(layer, k, v, step, **scales)
                    results.append(cache.attend(layer, q, step, **how).tobytes())
        found.append((results, everything(cache)))
    assert found[0] == found[1]


@pytest.mark.parametrize("repeated", [False, True])
def test_attention_that_stores_keys_first_stores_nothing_when_something_is_wrong(
    rng: np.random.Generator, repeated: bool
) -> None:
    cache, allocator = decoding(rng)
    names = ["A", "B", "C"]
    q, k = np.ones((3, 6, 40), np.float32), np.ones((3, 3, 40), np.float32)
    if repeated:
        for _ in range(2):
            step = allocator.grow_batch(names, 1)
            cache.begin(step)
            cache.attend(0, q, step, k=k, v=k)
    step = allocator.grow_batch(names, 1)
    cache.begin(step)
    before = everything(cache)
    for change, message in (
        ({"q": q[:2]}, "q: expected 3 rows"),
        ({"q": q[:, :5]}, "num_heads"),
        ({"q": q.astype(np.float64)}, "q: expected dtype"),
        ({"k": k[:2]}, "k: expected 3 rows"),
        ({"k": k[:, :2]}, "v: expected shape"),
        ({"v": k[:, :, ::-1]}, "v: expected head_dim to be contiguous"),
        ({"v": k.astype(np.float16)}, "v: expected shape .* float32"),
        ({"v": None}, "v: expected an array beside k, got None"),
        ({"k": None}, "k: expected an array beside v, got None"),
        ({"window": True}, "window"),
        ({"k_scale": 0.0}, "k_scale"),
        ({"out": q}, "out: expected an array other than q"),
    ):
        given: dict[str, object] = {"q": q, "k": k, "v": k, **change}
        with pytest.raises((TypeError, ValueError), match=message):
            cache.attend(0, given.pop("q"), step, **given)
        assert everything(cache) == before, message
    stale = step
    cache.begin(allocator.grow_batch(names, 1))
    with pytest.raises(RuntimeError, match="has not begun"):
        cache.attend(0, q, stale, k=k, v=k)
    assert everything(cache) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_serial_and_a_parallel_call_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, all_threads: None, dtype: str
) -> None:
    results = set()
    for serial_below, threads in ((1 << 60, 2), (0, 2), (0, 1), (1 << 18, 2)):
        if threads > numba.config.NUMBA_NUM_THREADS:
            continue
        monkeypatch.setattr(cpu_records, "_SERIAL_COST", serial_below)
        monkeypatch.setattr(cpu_records, "_SERIAL_ELEMENTS", serial_below)
        numba.set_num_threads(threads)
        cache, allocator = decoding(np.random.default_rng(0), dtype)
        steps = decode_steps(cache, allocator, 3)
        cache, allocator = decoding(np.random.default_rng(0), dtype)
        alone = [decode_steps(cache, allocator, 3, (name,)) for name in "ABC"]
        results.add((tuple(steps), tuple(map(tuple, alone))))
    assert len(results) == 1


@pytest.mark.parametrize("how", [{}, {"window": 37}, {"scale": 0.3, "softcap": 20.0, "causal": False}])
def test_repeated_calls_of_a_layer_are_what_checked_calls_are(
    monkeypatch: pytest.MonkeyPatch, how: dict[str, object]
) -> None:
    expected = []
    methods = (cpu.RepeatedAttention, "attend"), (cpu.RepeatedWrite, "write")
    with monkeypatch.context() as patch:
        for repeated, name in methods:
            patch.setattr(repeated, name, lambda *_: None)
        cache, allocator = decoding(np.random.default_rng(0))
        expected = decode_steps(cache, allocator, 4, **how)
    taken = []
    for repeated, name in methods:
        real = getattr(repeated, name)

        def counted(self: object, *args: object, real: object = real) -> object:
            result = real(self, *args)  # type: ignore[operator]
            taken.append(result is not None and result is not False)
            return result

        monkeypatch.setattr(repeated, name, counted)
    cache, allocator = decoding(np.random.default_rng(0))
    assert decode_steps(cache, allocator, 4, **how) == expected
    assert sum(taken) > 8, "no call was repeated: nothing was compared"


def test_a_call_unlike_the_earlier_one_is_checked(rng: np.random.Generator) -> None:
    cache, allocator = decoding(rng)
    names = ["A", "B", "C"]
    decode_steps(cache, allocator, 2)
    step = allocator.grow_batch(names, 1)
    cache.begin(step)
    q, k = np.zeros((3, 6, 40), np.float32), np.zeros((3, 3, 40), np.float32)
    cache.write(0, k, k, step)
    cache.attend(0, q, step)
    for wrong, message in (
        (q[:2], "rows"),
        (q[:, :5], "num_heads"),
        (q[:, :, :32], "head_dim"),
        (q[:, :, ::-1], "contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.attend(0, wrong, step)
    with pytest.raises(TypeError, match="dtype"):
        cache.attend(0, q.astype(np.float64), step)
    with pytest.raises(ValueError, match="window"):
        cache.attend(0, q, step, window=True)
    cache.attend(0, q, step, window=1)
    with pytest.raises(ValueError, match="window"):
        cache.attend(0, q, step, window=True)
    for wrong, message in ((k[:2], "rows"), (k[:, :2], "match the cache"), (k[:, :, ::-1], "contiguous")):
        with pytest.raises(ValueError, match=message):
            cache.write(0, wrong, wrong, step)
    with pytest.raises(ValueError, match="v:"):
        cache.write(0, k, k[:2], step)
    stale = step
    cache.begin(allocator.grow_batch(names, 1))
    with pytest.raises(RuntimeError, match="has not begun"):
        cache.attend(0, q, stale)
    with pytest.raises(RuntimeError, match="has not begun"):
        cache.write(0, k, k, stale)
