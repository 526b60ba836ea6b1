"""What only the CPU backend promises: bits that no thread changes, and right results from every kernel, in any memory."""

from __future__ import annotations

import os
import signal
import threading
import time

import devices
import numpy as np
import pytest
from behaviour import Case, assert_close, make_case

import cupaged
from cupaged.arrays import numpy_dtype

numba = pytest.importorskip("numba", reason="the CPU backend needs numba: pip install 'cupaged[cpu]'")

from cupaged import cpu, cpu_records  # noqa: E402
from cupaged.cpu_vector import WIDTH  # noqa: E402
from cupaged.cpu_work import FIELDS  # noqa: E402

FORMATS = ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_is_forked_during_a_call_computes_the_same(
    rng: np.random.Generator, any_size_in_parallel: None, all_threads: None
) -> None:
    case, stop = several_chunks(rng), threading.Event()
    k, v = (np.zeros((4, 2, 4, 16), np.float32) for _ in range(2))
    rows = np.ones((3, 2, 16), np.float32)
    expected = bits(run(case))

    def work() -> None:
        while not stop.is_set():
            run(case)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        children = []
        for _ in range(3):
            time.sleep(0.02)
            child = os.fork()
            if child == 0:
                signal.alarm(30)  # ends a child that waits for ever
                try:
                    cupaged.write_kv(rows, rows, k, v, np.array([0, 5, 15]))
                    os._exit(int(bits(run(case)) != expected or k.sum() != rows.sum()))
                finally:
                    os._exit(2)
            children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    finally:
        stop.set()
        thread.join()


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
    # one to four rows, two tiles of them, then one and several vectors of rows; 513 = two chunks and one key; of 499 tokens
    # every row sees those from 250 on, so that the first chunk, up to 256, has six keys: not a whole vector of them
    fp8 = kv_dtype.startswith("fp8")
    for seq_lens, chunk in (([513], None), ([499], 250), ([300, 64, 1025], None)):
        case = make_case(
            rng, seq_lens=seq_lens, query_lens=[rows] * len(seq_lens), num_kv_heads=2, group=1, head_dim=24, block_size=16,
            dtype="float16" if fp8 else kv_dtype, kv_dtype=kv_dtype if fp8 else None, num_splits=2, chunk=chunk,
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
