"""What only the CPU backend promises: bits that no thread changes, exact number formats, and a working state without Numba or AVX."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import devices
import numpy as np
import pytest
from behaviour import Case, assert_close, make_case
from hypothesis import given, settings
from hypothesis import strategies as st

import cupaged
from cupaged.arrays import numpy_dtype

numba = pytest.importorskip("numba", reason="the CPU backend needs numba: pip install 'cupaged[cpu]'")

from cupaged import cpu, cpu_records  # noqa: E402
from cupaged.cpu_formats import E4M3, E5M2, F16, F32, store_row, widen_row  # noqa: E402
from cupaged.cpu_vector import HOST_FEATURES, WIDTH, entry, exp, exp_or_zero, load, store, tanh  # noqa: E402
from cupaged.cpu_work import FIELDS  # noqa: E402

FORMATS = ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
ROOT = Path(__file__).parent.parent


def run(case: Case) -> tuple[np.ndarray, np.ndarray]:
    return devices.cpu().paged_attention(*case.arguments(), **case.options)


def bits(result: tuple[np.ndarray, np.ndarray]) -> tuple[bytes, bytes]:
    out, lse = result
    return out.tobytes(), lse.tobytes()


@pytest.fixture
def any_size_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_records, "_SERIAL_COST", 0)
    monkeypatch.setattr(cpu_records, "_SERIAL_ELEMENTS", 0)


def several_chunks(rng: np.random.Generator, **how: object) -> Case:
    return make_case(
        rng, seq_lens=[1500, 3, 700, 0], query_lens=[1, 2, 40, 1], num_kv_heads=3, group=3, head_dim=40, block_size=16, **how
    )  # fmt: skip


@pytest.mark.parametrize("num_splits", [None, 3])
def test_bits_do_not_depend_on_the_number_of_threads(
    rng: np.random.Generator, any_size_in_parallel: None, all_threads: None, num_splits: int | None
) -> None:
    if numba.config.NUMBA_NUM_THREADS < 2:
        pytest.skip("one thread only: NUMBA_NUM_THREADS or this machine allows no second one")
    case = several_chunks(rng, num_splits=num_splits)
    results = set()
    for threads in (1, 2, numba.config.NUMBA_NUM_THREADS):
        numba.set_num_threads(threads)
        results |= {bits(run(case)) for _ in range(3)}
    assert len(results) == 1


def test_calls_from_several_threads_do_not_disturb_each_other(
    rng: np.random.Generator, any_size_in_parallel: None
) -> None:
    all_cases = [several_chunks(rng), make_case(rng, seq_lens=[900, 5], group=4, head_dim=64)]
    alone = [bits(run(case)) for case in all_cases]
    wrong: list[int] = []

    def work(n: int) -> None:
        for _ in range(10):
            if bits(run(all_cases[n % 2])) != alone[n % 2]:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("how", [{}, {"window": 37}, {"layout": "NHD"}])
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (3, 32), (4, 5), (7, 64)])
def test_no_bit_depends_on_how_many_heads_are_worked_on_together(
    rng: np.random.Generator, all_threads: None, group: int, block_size: int, how: dict[str, object]
) -> None:
    numba.set_num_threads(1)
    scales = np.array([0.5, 1, 2, 3, 0.1], np.float32)  # a head read as its neighbour would show
    case = make_case(
        rng, seq_lens=[150, 64, 1, 0, 97, 300], num_kv_heads=5, group=group, head_dim=40, block_size=block_size,
        dtype=["float32", "float16", "bfloat16"][group % 3], k_scale=scales, v_scale=scales[::-1].copy(), **how,
    )  # fmt: skip
    out, lse = run(case)
    heads = {int(cpu_records.workspace.params[FIELDS.index("heads")])}
    assert_close(case, out, lse)
    numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))  # with more threads fewer heads are put together
    for n in range(len(case.seq_lens)):
        one = slice(n, n + 1)
        alone = Case(case.q[one], case.k_cache, case.v_cache, case.block_tables[one], case.seq_lens[one], case.options)
        assert bits(run(alone)) == bits((out[one], lse[one]))
        heads.add(int(cpu_records.workspace.params[FIELDS.index("heads")]))
    if WIDTH < 16 and numba.config.NUMBA_NUM_THREADS > 1:
        assert len(heads) > 1, "always as many heads: nothing was compared"


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize(("dtype", "block_size"), [("float32", 16), ("bfloat16", 5), ("float16", 64)])
def test_a_block_that_is_not_mapped_counts_for_no_head(
    rng: np.random.Generator, all_threads: None, layout: str, dtype: str, block_size: int
) -> None:
    numba.set_num_threads(1)  # heads are put together
    case = make_case(
        rng, seq_lens=[300, 9, 130], num_kv_heads=5, group=2, head_dim=24, dtype=dtype, block_size=block_size, layout=layout,
        window=400,  # without one no block may be missing
    )  # fmt: skip
    case.block_tables[0, rng.permutation(300 // block_size)[:2]] = -1
    case.block_tables[1] = -1
    assert_close(case, *run(case))


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16, 40])
def test_every_kernel_merges_its_chunks(rng: np.random.Generator, kv_dtype: str, rows: int) -> None:
    # one to four rows, two tiles of them, then one and several vectors of rows; 513 = two chunks and one key
    fp8 = kv_dtype.startswith("fp8")
    for seq_lens in ([513], [300, 64, 1025]):
        case = make_case(
            rng, seq_lens=seq_lens, query_lens=[rows] * len(seq_lens), num_kv_heads=2, group=1, head_dim=24, block_size=16,
            dtype="float16" if fp8 else kv_dtype, kv_dtype=kv_dtype if fp8 else None, num_splits=2,
        )  # fmt: skip
        assert_close(case, *run(case))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "how",
    [{}, {"causal": False}, {"window": 70}, {"chunk": 64, "softcap": 5.0}, {"num_splits": 3}, {"scale": -0.3}],
    ids=str,
)
def test_row_tiles_that_share_a_copy_of_keys_each_see_their_own(
    rng: np.random.Generator, all_threads: None, dtype: str, how: dict[str, object]
) -> None:
    # the last tile of rows is not full; the first rows of the second sequence see nothing
    case = make_case(
        rng, seq_lens=[333, 180], query_lens=[200, 190], num_kv_heads=8, group=3, head_dim=24, block_size=16, dtype=dtype,
        alibi_slopes=np.linspace(-0.1, 0.3, 24, dtype=np.float32) if how.get("window") else None, **how,
    )  # fmt: skip
    out, lse = run(case)
    items, tiles = int(cpu_records.workspace.params[FIELDS.index("num_items")]), 8 * (-(-600 // 64) + -(-570 // 64))
    assert items < (how.get("num_splits") or 1) * tiles, "no tiles were put together: nothing was shared"
    assert_close(case, out, lse)
    numba.set_num_threads(1)
    assert bits(run(case)) == bits((out, lse))


@pytest.mark.parametrize("block_size", [5, 16, 24, 32])
@pytest.mark.parametrize("how", [{}, {"window": 50}, {"chunk": 64, "softcap": 5.0}, {"num_splits": 3}])
def test_bfloat16_prefill_by_the_matrix_unit(rng: np.random.Generator, block_size: int, how: dict[str, object]) -> None:
    if not cpu_records.allowed():
        pytest.skip("this processor has no matrix unit for bfloat16, or the system does not allow its use")
    case = make_case(
        rng, seq_lens=[300, 33, 9], query_lens=[70, 33, 4], head_dim=64, group=5, block_size=block_size, dtype="bfloat16", **how
    )  # fmt: skip
    out, lse = run(case)
    assert_close(case, out, lse)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_records, "allowed", lambda: False)
        without_out, without_lse = run(case)
    assert_close(case, without_out, without_lse)
    assert bits((out, lse)) != bits((without_out, without_lse)), "the matrix unit was not used"


@pytest.mark.parametrize("what", ["denormal queries", "huge queries", "tiny values", "huge scale"])
def test_numbers_that_the_matrix_unit_would_lose_go_the_usual_way(rng: np.random.Generator, what: str) -> None:
    case = make_case(
        rng, seq_lens=[40], query_lens=[40], head_dim=32, group=1, dtype="bfloat16", block_size=16, spare_columns=0
    )
    bf16 = case.q.dtype
    scale = 1.0
    if what == "denormal queries":  # logits come from denormal times huge
        case.q[:] = (case.q.astype(np.float32) * np.float32(1e-39)).astype(bf16)
        case.k_cache[:] = (case.k_cache.astype(np.float32) * np.float32(1e37)).astype(bf16)
    elif what == "huge queries":
        case.q[:] = (case.q.astype(np.float32) * np.float32(1e37)).astype(bf16)
        case.k_cache[:] = (case.k_cache.astype(np.float32) * np.float32(1e-39)).astype(bf16)
    elif what == "huge scale":
        scale = 1e30
        case.k_cache[:] = (case.k_cache.astype(np.float32) * np.float32(1e-39)).astype(bf16)
        case.q[:] = (case.q.astype(np.float32) * np.float32(1e9)).astype(bf16)
    else:
        case.v_cache[:] = (case.v_cache.astype(np.float32) * np.float32(1e-38)).astype(bf16)
    case.options["scale"] = scale
    out, lse = run(case)
    assert_close(case, out, lse)
    if what == "tiny values":
        assert np.count_nonzero(out) > out.size * 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_denormal_keys_values_and_queries_count(dtype: str) -> None:
    tiny = np.float32(1e-39)  # below the smallest normal number of both formats
    for rows in (1, 20):
        q = np.zeros((rows, 1, 8), numpy_dtype(dtype))
        k_cache, v_cache = np.zeros((2, 1, 1, 4, 8), numpy_dtype(dtype))
        v_cache[:] = tiny
        q[..., 0], k_cache[..., 0, 0] = 2e38, tiny  # logits 0.2 and 0: the tiny key must not be lost
        lse = np.empty((rows, 1), np.float32)
        out = cupaged.paged_attention(
            q, k_cache, v_cache, [[0]], [4], query_start_loc=[0, rows], causal=False, scale=1.0, lse=lse
        )
        seen = lse[:, 0] > -np.inf
        logit = float(q[0, 0, 0]) * float(k_cache[0, 0, 0, 0])
        np.testing.assert_allclose(lse[seen, 0], np.log(np.exp(logit) + 3), rtol=1e-6)
        np.testing.assert_allclose(out[seen].astype(np.float64), float(v_cache[0, 0, 0, 0]), rtol=1e-2)
        assert seen.sum() == min(rows, 4)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code_reads_as_its_value(kv_dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = codes.view(numpy_dtype(kv_dtype)).astype(np.float32)
    for rows in (1, 20):  # one visible key: the output is its value
        out = cupaged.paged_attention(
            np.zeros((rows, 1, 256), np.float32), np.zeros((1, 1, 1, 256), np.uint8), codes.reshape(1, 1, 1, 256),
            [[0]], [1], query_start_loc=[0, rows], kv_dtype=kv_dtype, causal=False,
        )  # fmt: skip
        np.testing.assert_array_equal(out[-1, 0], expected)


@entry
def _write(kind: int, source: int, target: int, count: int, scale: float) -> None:
    if kind == F16:
        store_row(F32, F16, source, target, count, scale)
    elif kind == E4M3:
        store_row(F32, E4M3, source, target, count, scale)
    else:
        store_row(F32, E5M2, source, target, count, scale)


@entry
def _read_half(source: int, target: int, count: int) -> None:
    widen_row(F16, source, target, count)


def encoded(x: np.ndarray, kind: int, dtype: np.dtype) -> np.ndarray:
    got = np.zeros(x.shape, dtype)
    _write(kind, x.ctypes.data, got.ctypes.data, x.size, np.float32(1))
    return got


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_small_formats_are_rounded_to_nearest_even(seed: int) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):  # NaN and overflow are among the inputs
        x = rng.integers(0, 2**32, 2048, dtype=np.uint32).view(np.float32)
        x = np.concatenate(
            [x, rng.standard_normal(2048).astype(np.float32) * np.float32(10.0) ** rng.integers(-12, 6, 2048)]
        )
        x = np.concatenate([x, x.astype(np.float16).astype(np.float32)]).astype(np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(encoded(x, F16, np.dtype(np.float16)), x.astype(np.float16))
    for kind, name, largest in ((E4M3, "fp8_e4m3", 448), (E5M2, "fp8_e5m2", 57344)):
        dtype = numpy_dtype(name)
        # ties lie between neighbours
        codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        codes = np.sort(codes[np.isfinite(codes)])
        both = np.concatenate([x, (codes[1:] + codes[:-1]) / 2, codes])
        expected = np.clip(both, -largest, largest).astype(dtype)
        np.testing.assert_array_equal(encoded(both, kind, dtype).astype(np.float32), expected.astype(np.float32))


def test_float16_is_read_exactly() -> None:
    half = np.arange(65536, dtype=np.uint16).view(np.float16)
    got = np.zeros(half.shape, np.float32)
    _read_half(half.ctypes.data, got.ctypes.data, half.size)
    np.testing.assert_array_equal(got, half.astype(np.float32))


@entry
def _map_exp(x: int, y: int, count: int) -> None:
    for at in range(0, 4 * count, 4 * WIDTH):
        store(y + at, exp(load(x + at)))


@entry
def _map_tanh(x: int, y: int, count: int) -> None:
    for at in range(0, 4 * count, 4 * WIDTH):
        store(y + at, tanh(load(x + at)))


def units_off(got: np.ndarray, exact: np.ndarray) -> float:
    """The largest error in units of the last place of float32, denormals' own unit where the result is one."""
    unit = np.maximum(np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64), 2.0**-149)
    return float((np.abs(got.astype(np.float64) - exact) / unit).max())


def test_exp_and_tanh_are_exact_to_float32_rounding(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-104, 0, 1 << 16), -(10.0 ** rng.uniform(-9, 2, 1 << 16))]).astype(np.float32)
    y = np.empty_like(x)
    _map_exp(x.ctypes.data, y.ctypes.data, x.size)
    assert units_off(y, np.exp(x.astype(np.float64))) < 1.5
    x = np.concatenate([x, -x, x / 100, -x / 100]).astype(np.float32)
    y = np.empty_like(x)
    _map_tanh(x.ctypes.data, y.ctypes.data, x.size)
    assert units_off(y, np.tanh(x.astype(np.float64))) < 2.6

    special = np.full(WIDTH, 0, np.float32)
    special[:4] = -np.inf, np.nan, -1e38, -104.5
    y = np.empty_like(special)
    _map_exp(special.ctypes.data, y.ctypes.data, WIDTH)
    np.testing.assert_array_equal(y[:5], [0, np.nan, 0, 0, 1])


@entry
def _map_exp_or_zero(x: int, y: int, count: int) -> None:
    for at in range(0, 4 * count, 4 * WIDTH):
        store(y + at, exp_or_zero(load(x + at)))


def test_exp_or_zero_is_exact_to_float32_rounding_until_it_is_zero(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.uniform(-87.3, 0, 1 << 16), -(10.0 ** rng.uniform(-9, 1.9, 1 << 16))]).astype(np.float32)
    y = np.empty_like(x)
    _map_exp_or_zero(x.ctypes.data, y.ctypes.data, x.size)
    exact = np.exp(x.astype(np.float64))
    fused = HOST_FEATURES.get("fma") or platform.machine().lower() in ("aarch64", "arm64")
    unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    # of every float32, with fused products: 0.73 units at most beside |x| / 20 of them
    assert (np.abs(y - exact) / unit < (0.8 - x / 20 if fused else 1.5 - x)).all()
    assert np.abs(y - exact).max() < (2.0**-24 if fused else 2.0**-22)
    x = np.full(2 * WIDTH, 0, np.float32)
    x[:7] = -np.inf, np.nan, -1e38, -88.5, -87.7, -90.0, -0.0
    y = np.empty_like(x)
    _map_exp_or_zero(x.ctypes.data, y.ctypes.data, x.size)
    np.testing.assert_array_equal(y[[0, 1, 2, 3, 5, 6, 7]], [0, np.nan, 0, 0, 0, 1, 1])
    assert y[4] < 2.0**-126


@pytest.mark.fuzz
def test_exp_and_tanh_of_every_float32() -> None:
    """Measured with 8 lanes: 0.92 units for exp, 2.55 for tanh (between 0.5 and 1; elsewhere 1.03)."""
    for function, exact, sign, low, high in (
        (_map_exp, np.exp, -1, 2.0**-25, 104.5),
        (_map_tanh, np.tanh, 1, 2.0**-13, 20.0),
    ):
        first, last = (int(np.float32(x).view(np.uint32)) for x in (low, high))
        for at in range(first, last, 1 << 22):
            x = sign * np.arange(at, at + (1 << 22), dtype=np.uint32).view(np.float32)
            y = np.empty_like(x)
            function(x.ctypes.data, y.ctypes.data, x.size)
            assert units_off(y, exact(x.astype(np.float64))) < (1 if function is _map_exp else 2.6)


def test_arrays_at_odd_addresses(rng: np.random.Generator) -> None:
    for dtype in ("float32", "float16"):
        case = make_case(rng, seq_lens=[70, 9], query_lens=[20, 2], head_dim=16, dtype=dtype)

        def shifted(x: np.ndarray) -> np.ndarray:
            raw = np.full(x.nbytes + x.itemsize, 0xFF, np.uint8)
            copy = raw[x.itemsize :].view(x.dtype).reshape(x.shape)  # one element off any vector's alignment
            copy[...] = x
            return copy

        moved = Case(shifted(case.q), shifted(case.k_cache), shifted(case.v_cache), *case.arguments()[3:], case.options)
        assert bits(run(moved)) == bits(run(case))


@pytest.mark.parametrize("kv_dtype", FORMATS)
@pytest.mark.parametrize("head_dim", [46, 128])
def test_parallel_writes_equal_the_reference(
    rng: np.random.Generator, any_size_in_parallel: None, kv_dtype: str, head_dim: int
) -> None:
    fp8 = kv_dtype.startswith("fp8")
    page_dtype = np.dtype(np.uint8) if fp8 else numpy_dtype(kv_dtype)
    source = numpy_dtype("bfloat16" if fp8 else kv_dtype)
    k, v = rng.standard_normal((2, 100, 3, head_dim)).astype(source)
    slots = rng.permutation(40 * 4)[:90].astype(np.int64)
    slots[::7] = -1
    for scale in (1.0, 0.3):
        pools = np.full((2, 40, 2, 3, 4, head_dim), 1, page_dtype)
        for pool, write in zip(pools, (cupaged.write_kv, cupaged.reference.write_kv), strict=True):
            how = {"kv_dtype": kv_dtype if fp8 else None, "k_scale": scale, "v_scale": scale}
            write(k, v, pool[:, 0], pool[:, 1], slots, **how)
        assert pools[0].tobytes() == pools[1].tobytes()


@pytest.mark.parametrize("contiguous", [True, False])
def test_copy_blocks_moves_whole_blocks(rng: np.random.Generator, contiguous: bool) -> None:
    pool = rng.standard_normal((9, 2, 3, 5))
    pool = pool if contiguous else rng.standard_normal((2, 9, 3, 5)).swapaxes(0, 1)
    expected = pool.copy()
    copies = np.array([[0, 3], [0, 5], [8, 1]], np.int32)
    expected[copies[:, 1]] = expected[copies[:, 0]]
    cpu.copy_blocks(pool, copies)
    np.testing.assert_array_equal(pool, expected)
    cpu.copy_blocks(pool, copies[:0])
    np.testing.assert_array_equal(pool, expected)


def in_python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_numba_one_warning_says_how_to_get_it() -> None:
    printed = in_python(
        """
        import sys, warnings
        sys.modules["numba"] = None
        import numpy as np, cupaged
        q = np.ones((1, 1, 8), np.float32)
        pages = np.ones((1, 1, 1, 8), np.float32)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                print(cupaged.paged_attention(q, pages, pages, [[0]], [1]).ravel()[0])
        print(len(caught), caught[0].message)
        try:
            import cupaged.cpu
        except ImportError as error:
            print(error)
        """
    )
    assert printed.startswith("1.0\n1.0\n1 ")
    assert printed.count("pip install 'cupaged[cpu]'") >= 2


@pytest.mark.parametrize("features", ["+sse2", "+avx2,+fma,+f16c,+sse4.2,+avx"])
def test_an_older_processor_gets_the_same_results(features: str, tmp_path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("older x86 processors are only imitated on x86")
    printed = in_python(
        """
        import numpy as np, behaviour, devices
        from cupaged.cpu_vector import WIDTH
        rng = np.random.default_rng()
        for how in ({"dtype": "float16", "group": 3}, {"query_lens": [20, 9], "kv_dtype": "fp8_e4m3", "dtype": "bfloat16"}):
            case = behaviour.make_case(rng, seq_lens=[70, 9], head_dim=24, **how)
            behaviour.assert_close(case, *devices.cpu().paged_attention(*case.arguments(), **case.options))
        print("width", WIDTH)
        """,
        NUMBA_CPU_NAME="generic" if features == "+sse2" else "haswell",
        NUMBA_CPU_FEATURES=features,
        NUMBA_CACHE_DIR=str(tmp_path),
    )
    assert printed == "width 8\n"


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    program = """
        import numpy as np, behaviour, devices
        case = behaviour.make_case(np.random.default_rng(0), seq_lens=[9], query_lens=[2])
        devices.cpu().paged_attention(*case.arguments(), **case.options)
        """
    in_python(program, NUMBA_CACHE_DIR=str(tmp_path))
    stored = sorted(p.stat().st_mtime_ns for p in tmp_path.rglob("*.nb*"))
    in_python(program, NUMBA_CACHE_DIR=str(tmp_path))
    assert stored
    assert sorted(p.stat().st_mtime_ns for p in tmp_path.rglob("*.nb*")) == stored


def test_no_two_specialisations_share_a_file_of_the_cache(tmp_path: Path) -> None:
    """Numba numbers the entries of one index file, and two processes that add one each at the same time take the same number."""
    program = """
        import numpy as np, cupaged
        for dtype, sinks in ((np.float32, np.zeros(8, np.float32)[::2]), (np.float16, None)):
            k = np.zeros((2, 4, 8), dtype)
            cache = np.zeros((1, 4, 4, 8), dtype)
            cupaged.write_kv(k, k, cache, cache.copy(), np.zeros(2, int))
            k.flags.writeable = False
            cupaged.merge_states(k[None], np.zeros((1, 2, 4), np.float32), sinks)
        """
    in_python(program, NUMBA_CACHE_DIR=str(tmp_path))
    indices, codes = ({path.name.split(".py3")[0] for path in tmp_path.rglob(f"*.{kind}")} for kind in ("nbi", "nbc"))
    assert indices == codes and len(codes) == len(list(tmp_path.rglob("*.nbc"))) > 3
