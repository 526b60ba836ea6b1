"""Attention over shared prefixes: what attending once to a prefix gives is what attending to it for every sequence gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import behaviour
import numpy as np
import pytest
from behaviour import assert_close, make_case
from simt import build

import cupaged
from cupaged import cuda, reference, shared_work

if reason := build.unavailable():
    pytest.skip(reason, allow_module_level=True)

import simt_device


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing costs nothing, so that small cases share."""
    monkeypatch.setattr(shared_work, "LAUNCH_BYTES_PER_SM", -1)
    monkeypatch.setattr(shared_work, "SUM_BYTES", 0)


def run(case: behaviour.Case, backend: cuda.Backend | int = 90) -> tuple[np.ndarray, np.ndarray, list[str]]:
    return simt_device.attend(case, simt_device.backend(backend) if isinstance(backend, int) else backend)


def unshared(case: behaviour.Case) -> behaviour.Case:
    return replace(case, options={**case.options, "share_prefix": False})


def with_copies(case: behaviour.Case) -> behaviour.Case:
    """The same contents, every sequence in blocks of its own."""
    caches, tables, next_block = [[], []], case.block_tables.copy(), 0
    size = case.k_cache.shape[2 if case.options["layout"] == "HND" else 1]
    for row, n in enumerate(case.seq_lens):
        used = -(-int(n) // size)
        for copies, cache in zip(caches, (case.k_cache, case.v_cache), strict=True):
            copies.append(cache[tables[row, :used]])
        tables[row, :used] = next_block + np.arange(used)
        next_block += used
    k_cache, v_cache = (np.concatenate(copies) for copies in caches)
    return replace(case, k_cache=k_cache, v_cache=v_cache, block_tables=tables)


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint8), np.ascontiguousarray(b).view(np.uint8))


# two groups, one of them in two units' worth of rows; a sequence alone, an empty one, one without rows, a chunk of a prompt
MIXED: dict[str, Any] = {
    "seq_lens": [210, 200, 0, 190, 130, 60, 140, 90, 205, 131],
    "query_lens": [1, 2, 1, 1, 1, 20, 3, 0, 1, 1],
    "shared": {1: (0, 11), 3: (1, 11), 8: (0, 9), 6: (4, 7), 9: (4, 8)},
    "block_size": 16,
}


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "arch", "group", "head_dim"),
    [
        ("float16", None, 90, 2, 64), ("bfloat16", None, 80, 5, 24), ("bfloat16", "fp8_e4m3", 90, 4, 64),
        ("float16", "fp8_e5m2", 80, 1, 40), ("float16", None, 86, 3, 256), ("float32", None, 90, 3, 64),
        ("float16", "fp8_e4m3", 75, 2, 40),
    ],
)  # fmt: skip
def test_groups_beside_other_rows(
    dtype: str, kv_dtype: str | None, arch: int, group: int, head_dim: int, rng: np.random.Generator
) -> None:
    heads = 2 * group
    case = make_case(
        rng, group=group, head_dim=head_dim, dtype=dtype, kv_dtype=kv_dtype, layout="NHD", k_scale=0.5,
        v_scale=np.array([0.25, 3], np.float32), sinks=rng.normal(0, 2, heads).astype(np.float32), **MIXED,
    )  # fmt: skip
    out, lse, launched = run(case, arch)
    plain_out, plain_lse, plain_launched = run(unshared(case), arch)
    on_tensor_cores = arch >= 80 and dtype != "float32"
    assert launched == ["prefill" if on_tensor_cores else "decode", *plain_launched]
    assert_close(case, out, lse, tensor_cores=on_tensor_cores)
    assert_close(case, plain_out, plain_lse, tensor_cores=on_tensor_cores)


@pytest.mark.parametrize("how", [{"softcap": 3.0}, {"causal": False}, {"alibi_slopes": True}], ids=str)
def test_every_option_sees_a_prefix_as_it_sees_other_keys(how: dict[str, Any], rng: np.random.Generator) -> None:
    if "alibi_slopes" in how:
        how = {"alibi_slopes": rng.uniform(-0.3, 0.3, 4).astype(np.float32)}
    case = make_case(rng, group=2, head_dim=64, dtype="float16", **MIXED, **how)
    out, lse, launched = run(case)
    assert launched[0] == "prefill" and len(launched) == 3
    assert_close(case, out, lse, tensor_cores=True)


@pytest.mark.parametrize("how", [{"window": 50}, {"chunk": 64}, {"num_splits": 2}, {"share_prefix": False}], ids=str)
def test_without_sharing_no_bit_depends_on_whose_blocks_they_are(how: dict[str, Any], rng: np.random.Generator) -> None:
    case = make_case(rng, group=2, head_dim=64, dtype="float16", **MIXED, **how)
    case = replace(case, block_tables=np.where(case.block_tables < 0, 0, case.block_tables))
    out, lse, launched = run(case)
    assert launched == ["decode_mma", "prefill"]
    copied_out, copied_lse, _ = run(with_copies(case))
    same_bits(out, copied_out)
    same_bits(lse, copied_lse)


def test_a_prefix_far_above_or_below_the_rest(rng: np.random.Generator) -> None:
    """Merging keeps what logits far apart leave, in either order; the sink counts once."""
    case = make_case(
        rng, seq_lens=[100, 101, 102], group=2, head_dim=64, block_size=16, dtype="float32", shared={1: (0, 5), 2: (0, 5)},
        sinks=np.array([-1e5, 0.0, 2e4, 3.0], np.float32),
    )  # fmt: skip
    for magnitude in (3e3, -3e3):
        case.k_cache[case.block_tables[0, :5]] *= np.float32(magnitude)
        out, lse, launched = run(case)
        assert launched == ["decode", "decode"]
        assert_close(case, out, lse)


def test_nothing_but_the_arguments_decides_the_bits(rng: np.random.Generator) -> None:
    """Another order of blocks, warps and copies; another history of the workspace; poison where no sequence has tokens."""
    case = make_case(rng, group=2, head_dim=64, dtype="float16", **MIXED)
    out, lse, _ = run(case)
    for poison in (np.nan, np.inf):
        backend = cuda.Backend(simt_device.Launcher(90))
        for _ in range(2):
            again, again_lse, launched = run(case.poisoned(poison), backend)
            assert launched == ["prefill", "decode_mma", "prefill"]
            same_bits(again, out)
            same_bits(again_lse, lse)


@pytest.mark.parametrize("kind", ["checked", "asan", "tsan"])
def test_no_race_no_read_outside_and_nothing_uninitialised(kind: str, rng: np.random.Generator) -> None:
    for arch, dtype in ((90, "bfloat16"), (75, "float32")):
        case = make_case(
            rng, seq_lens=[150, 140, 0, 150], group=2, head_dim=40, block_size=5, dtype=dtype, kv_dtype="fp8_e4m3",
            shared={1: (0, 27), 3: (0, 26)},
        )  # fmt: skip
        out, lse, launched = run(case, cuda.Backend(simt_device.Launcher(arch, kind=kind, num_sms=3)))
        assert len(launched) == 2
        assert_close(case, out, lse, tensor_cores=arch >= 80)


def test_a_prefix_is_read_once(rng: np.random.Generator) -> None:
    """Bytes of keys and values that the kernels copied, counted from the addresses they used."""
    backend = simt_device.backend(90, kind="checked", traced=True)
    case = make_case(
        rng, seq_lens=[180] * 5, num_kv_heads=1, group=3, head_dim=64, block_size=16, dtype="float16",
        shared=dict.fromkeys(range(1, 5), (0, 10)),
    )  # fmt: skip
    put = backend.launcher.put  # aligned as device memory is
    case = replace(case, k_cache=put(case.k_cache), v_cache=put(case.v_cache))
    for shares, tokens in ((True, 160 + 5 * 20), (False, 5 * 180)):
        backend.launcher.traffic.clear()
        run(case if shares else unshared(case), backend)
        pages = [t for t in backend.launcher.traffic if t.space == "global" and t.where.startswith("paged_kv.cuh")]
        pages = [t for t in pages if t.lane_bytes == 16]  # others are block tables
        assert sum(t.accesses * t.lane_bytes for t in pages) == 2 * tokens * 64 * 2


def test_one_plan_shares_for_all_layers_and_calls_allocate_nothing(rng: np.random.Generator) -> None:
    """Beams of a request in a cache of two layers, step after step: what is shared is found once a step."""
    backend = simt_device.backend()
    launcher = backend.launcher
    with simt_device.in_place_of_a_gpu(backend), pytest.MonkeyPatch.context() as patch:
        alloc = cupaged.BlockAllocator(64, 16)
        cache = cupaged.KVCache(2, 64, 16, 2, 64, "float16", device="cpu")
        cache.pool[...] = np.nan
        searches: list[int] = []
        find = cupaged.steps.find_shared_prefix
        patch.setattr(cupaged.steps, "find_shared_prefix", lambda *a: (searches.append(1), find(*a))[1])

        def rows(n: int, heads: int) -> np.ndarray:
            return launcher.put(rng.standard_normal((n, heads, 64)).astype(np.float16))

        step = alloc.add_request("a", 100)
        cache.begin(step)
        for layer in range(2):
            cache.write(layer, rows(100, 2), rows(100, 2), step)
        alloc.fork_request("a", ["b", "c", "d"])
        for number in range(3):
            step = alloc.grow_batch(["a", "b", "c", "d"], [1, 1, 1, 1])
            cache.begin(step)
            q = rows(4, 4)
            for layer in range(2):
                cache.write(layer, rows(4, 2), rows(4, 2), step)
                launches = launcher.num_launches
                out, lse = cache.attend(layer, q, step, return_lse=True)
                assert launcher.num_launches == launches + 2
                cache.attend(layer, q, step, share_prefix=False)
                assert launcher.num_launches == launches + 3
                k_cache, v_cache = cache.layer(layer)
                expected, expected_lse = reference.paged_attention(
                    q, k_cache, v_cache, step.block_tables, step.seq_lens
                )
                np.testing.assert_allclose(out, expected, atol=4e-3)
                np.testing.assert_allclose(lse, expected_lse, atol=1e-4)
            assert len(searches) == number + 1
        plan = cupaged.plan(
            step.seq_lens, step.block_tables, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float16", device="cuda"
        )  # fmt: skip
        again = launcher.empty(out.shape, np.float16)
        with launcher.capture() as graph:  # the executor refuses allocation, compilation and synchronisation in here
            cupaged.paged_attention(q, k_cache, v_cache, None, None, plan=plan, out=again)
        graph.replay()
        same_bits(again, out)


def test_after_a_warmup_no_shared_step_compiles(rng: np.random.Generator) -> None:
    backend = cuda.Backend(simt_device.Launcher(90))
    with simt_device.in_place_of_a_gpu(backend):
        cupaged.warmup(num_heads=6, num_kv_heads=2, head_dim=64)
        compiled = set(backend.launcher.known)
        for count in (2, 12, 90):
            case = make_case(
                rng, seq_lens=[40] * count, group=3, head_dim=64, block_size=16, dtype="float16",
                shared=dict.fromkeys(range(1, count), (0, 2)),
            )  # fmt: skip
            case = replace(
                case, **{name: backend.launcher.put(getattr(case, name)) for name in ("q", "k_cache", "v_cache")}
            )
            _, _, launched = run(case, backend)
            assert launched == ["prefill", "decode_mma"]
        assert set(backend.launcher.known) == compiled
