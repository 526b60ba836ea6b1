"""Planted faults: each is put into a small correct kernel, and must be reported or show as a wrong result."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from .conftest import Run
from .launcher import SimtLauncher
from .native import SimtError

# y[row] = sum of x[row, :n], n a multiple of 4; tiles of 256 columns pass through shared memory.
ROW_SUMS = """
__device__ __forceinline__ float warp_sum(float v) {
  for (int i = 16; i > 0; i /= 2) v += __shfl_xor_sync(0xffffffffu, v, i);
  return v;
}
extern "C" __global__ void __launch_bounds__(64) test(const Params p) {
  float* tile = reinterpret_cast<float*>(smem);  // [256]
  float* warp_sums = tile + 256;                 // [2]
  const float* row = p.x + (long long)blockIdx.x * p.n;
  const int t = threadIdx.x;
  float sum = 0.0f;
  for (int first = 0; first < p.n; first += 256) {
    const int i = first + t * 4;
    cp_async_16(tile + t * 4, row + (i < p.n ? i : 0), i < p.n);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // the tile is there
    for (int j = t; j < 256; j += 64) sum += tile[j];
    __syncthreads();  // the tile was read
  }
  sum = warp_sum(sum);
  if (t % 32 == 0) warp_sums[t / 32] = sum;
  __syncthreads();  // the sums are there
  if (t == 0) p.y[blockIdx.x] = warp_sums[0] + warp_sums[1];
}
"""
SHARED_BYTES = 258 * 4


def row_sums(run: Run, source: str = ROW_SUMS, rows: int = 5, n: int = 700, **options: Any) -> tuple[Any, Any]:
    x = np.random.default_rng().integers(-8, 9, (rows, n)).astype(np.float32)  # sums are exact
    y = np.full(rows, np.nan, np.float32)
    run(source, x=x, y=y, n=n, grid=(rows, 1, 1), block=(64, 1, 1), shared_bytes=SHARED_BYTES, **options)
    return y, x.sum(1)


def plant(old: str, new: str, source: str = ROW_SUMS) -> str:
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the kernel"
    return source.replace(old, new)


@pytest.mark.parametrize("kind", ["plain", "checked", "asan", "tsan"])
def test_the_correct_kernel_passes_in_every_build(run: Run, kind: str) -> None:
    got, expected = row_sums(run, kind=kind)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("barrier", ["__syncthreads();  // the tile is there", "__syncthreads();  // the tile was read",
                                     "__syncthreads();  // the sums are there"])  # fmt: skip
def test_a_missing_syncthreads_is_a_data_race(run: Run, barrier: str) -> None:
    with pytest.raises(SimtError, match=r"test\.cu:\d+: data race"):
        row_sums(run, plant(barrier, ""), kind="tsan")


@pytest.mark.parametrize("kind", ["checked", "asan"])
def test_a_read_past_an_array_is_seen(run: Run, kind: str) -> None:
    fault = plant("row + (i < p.n ? i : 0), i < p.n", "row + i, true")
    message = "read of 16 bytes outside every array" if kind == "checked" else "heap-buffer-overflow"
    with pytest.raises(SimtError, match=rf"(?s){message}"):
        row_sums(run, fault, rows=1, kind=kind)


@pytest.mark.parametrize("kind", ["checked", "asan"])
def test_a_plain_read_past_an_array_is_seen(run: Run, kind: str) -> None:
    fault = plant("p.y[blockIdx.x] = ", "p.y[blockIdx.x] = p.x[gridDim.x * p.n] + ")
    message = "read of 4 bytes outside every array" if kind == "checked" else "heap-buffer-overflow"
    with pytest.raises(SimtError, match=rf"test\.cu:2\d.*{message}"):
        row_sums(run, fault, kind=kind)


@pytest.mark.parametrize("kind", ["checked", "asan"])
def test_a_read_past_shared_memory_is_seen(run: Run, kind: str) -> None:
    fault = plant("warp_sums[0] + warp_sums[1]", "warp_sums[0] + warp_sums[1] + warp_sums[2]")
    message = "the launch has 1032 bytes" if kind == "checked" else "use-after-poison"
    with pytest.raises(SimtError, match=rf"test\.cu:2\d.*{message}"):
        row_sums(run, fault, kind=kind)


def test_a_write_past_shared_memory_is_seen_even_in_the_plain_build(run: Run) -> None:
    with pytest.raises(SimtError, match="write past shared memory: byte 1032"):
        row_sums(run, plant("if (t % 32 == 0) warp_sums[t / 32] = sum;", "if (t % 16 == 0) warp_sums[t / 16] = sum;"))


@pytest.mark.parametrize(
    "fault",
    [
        "if (t < 32) __syncthreads();",  # a part of the block
        "if (t == 5) return; __syncthreads();",  # a thread that ended
        "if (t < 32) __syncthreads(); else __syncwarp();",
    ],
)
def test_a_barrier_that_not_all_threads_reach_is_reported(run: Run, fault: str) -> None:
    with pytest.raises(
        SimtError, match=r"test\.cu:\d+: (barrier not reached by all|threads wait at different barriers)"
    ):
        row_sums(run, plant("__syncthreads();  // the sums are there", fault))


def test_threads_that_wait_at_different_barriers_are_reported(run: Run) -> None:
    fault = "if (t < 32) {\n __syncthreads();\n } else {\n __syncthreads();\n }"
    with pytest.raises(SimtError, match=r"threads wait at different barriers"):
        row_sums(run, plant("__syncthreads();  // the sums are there", fault))


def test_a_missing_wait_for_a_copy_gives_nan(run: Run) -> None:
    got, _ = row_sums(run, plant("cp_async_wait<0>();", ""), copies=0)
    assert np.isnan(got).all()


def test_a_missing_wait_for_a_copy_is_reported(run: Run) -> None:
    with pytest.raises(SimtError, match=r"test\.cu:18: read of shared memory at byte \d+, which a cp.async in flight"):
        row_sums(run, plant("cp_async_wait<0>();", ""), copies=0, kind="checked")


def test_a_wait_that_leaves_the_group_in_flight_is_reported(run: Run) -> None:
    with pytest.raises(SimtError, match="in flight will write"):
        row_sums(run, plant("cp_async_wait<0>();", "cp_async_wait<1>();"), copies=0, kind="checked")


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_a_correct_pipeline_does_not_care_when_copies_land(run: Run, copies: int) -> None:
    got, expected = row_sums(run, copies=copies)
    np.testing.assert_array_equal(got, expected)


def test_uninitialised_shared_memory_is_nan(run: Run) -> None:
    got, _ = row_sums(run, plant("if (t % 32 == 0)", "if (t == 0)"))
    assert np.isnan(got).all()


def test_uninitialised_shared_memory_is_reported(run: Run) -> None:
    with pytest.raises(SimtError, match=r"test\.cu:24: read of shared memory at byte 1028, which nobody wrote"):
        row_sums(run, plant("if (t % 32 == 0)", "if (t == 0)"), kind="checked")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("__shfl_xor_sync(i > 8 || threadIdx.x % 2 ? 0xffffffffu : 0x55555555u, v, i)", "lanes of warp . disagree"),
        ("threadIdx.x % 2 ? __shfl_xor_sync(0xffffffffu, v, i) : \n __shfl_xor_sync(0xffffffffu, v, i)", "lanes of warp . disagree"),
        ("threadIdx.x % 2 ? __shfl_xor_sync(0xffffffffu, v, i) : 0.0f", "lanes .* have ended|no thread can go on|disagree|barrier"),
        ("__shfl_xor_sync(0x0000ffffu, v, i)", "which the mask does not name"),
        ("__shfl_xor_sync(0xffffffffu << (threadIdx.x / 16 % 2 * 16) >> (16 - threadIdx.x / 16 % 2 * 16), v, i)", "does not name|overlaps"),
    ],
)  # fmt: skip
def test_lanes_that_disagree_at_a_shuffle_are_reported(run: Run, fault: str, message: str) -> None:
    with pytest.raises(SimtError, match=message):
        row_sums(run, plant("__shfl_xor_sync(0xffffffffu, v, i)", fault))


def test_lanes_that_disagree_at_a_vote_are_reported(run: Run) -> None:
    fault = "sum += __any_sync(t % 32 < 16 ? 0x0000ffffu : 0xffffffffu, 0);\n  sum = warp_sum(sum);"
    with pytest.raises(SimtError, match=r"disagree|does not name"):
        row_sums(run, plant("sum = warp_sum(sum);", fault))


@pytest.mark.parametrize(
    "fault",
    [
        "cp_async_16(tile + t * 4, row + 1, true);",
        "cp_async_16(tile + t * 4 + (t == 63 ? 0 : 1), row, true);",
        "*reinterpret_cast<float4*>(tile) = *reinterpret_cast<const float4*>(row + 1);",
        "store_vec(tile + t, load_vec<4>(row));",
    ],
)
def test_a_misaligned_16_byte_access_is_reported(run: Run, fault: str) -> None:
    kind = "checked" if "reinterpret_cast" in fault else "plain"
    with pytest.raises(SimtError, match=r"(test\.cu|types\.cuh):\d+: misaligned"):
        row_sums(run, plant("cp_async_16(tile + t * 4, row + (i < p.n ? i : 0), i < p.n);", fault), kind=kind)


def test_a_misaligned_ldmatrix_row_is_reported(run: Run) -> None:
    source = 'extern "C" __global__ void test(const Params p) { unsigned r[4]; ldmatrix_x4(r, smem + threadIdx.x * 16 + 8); }'
    with pytest.raises(SimtError, match="misaligned ldmatrix row of lane 0"):
        run(source, n=0, shared_bytes=1024)


@pytest.mark.parametrize("source", ["p.x[t] = load_global_4(p.x + 32 + t)", "p.x[t + 32] = __ldg(p.x + t)"])
def test_an_array_written_and_read_through_the_read_only_path_is_reported(run: Run, source: str) -> None:
    source = f'extern "C" __global__ void test(const Params p) {{ int t = threadIdx.x; {source}; }}'
    with pytest.raises(SimtError, match=r"test\.cu:1: an array of 256 bytes is written and read through"):
        run(source, x=np.zeros(64, np.uint32), kind="checked")


def test_signed_overflow_and_bad_shifts_are_reported(run: Run) -> None:
    source = 'extern "C" __global__ void test(const Params p) { p.y[0] = %s; }'
    y = np.zeros(1, np.int32)
    for expression, message in (("p.n * p.n", "signed integer overflow"), ("1 << p.m", "bad shift: 1 by 32")):
        with pytest.raises(SimtError, match=message):
            run(source % expression, y=y, n=2**30, m=32, kind="checked")


# The last block to arrive adds what all blocks stored, by an integer ticket.
TICKET = """
extern "C" __global__ void test(const Params p) {
  p.x[blockIdx.x * blockDim.x + threadIdx.x] = float(blockIdx.x);
  unsigned* ticket = reinterpret_cast<unsigned*>(smem);
  __syncthreads();  // the block has stored
  if (threadIdx.x == 0) {
    __threadfence();  // release
    ticket[0] = atomicAdd(p.ticket, 1u);
    __threadfence();  // acquire
  }
  __syncthreads();  // the ticket is there
  if (ticket[0] != gridDim.x - 1) return;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < gridDim.x * blockDim.x; i += blockDim.x) sum += p.x[blockDim.x * gridDim.x - 1 - i];
  p.y[threadIdx.x] = sum;
}
"""
FENCED = """    __threadfence();  // release
    ticket[0] = atomicAdd(p.ticket, 1u);
    __threadfence();  // acquire
"""


def ticket_sum(run: Run, source: str) -> Any:
    y = np.zeros(64, np.float32)
    arrays = {"x": np.zeros(320, np.float32), "y": y, "ticket": np.zeros(1, np.uint32)}
    run(source, **arrays, grid=(5, 1, 1), block=(64, 1, 1), shared_bytes=16, kind="tsan")
    return y


@pytest.mark.parametrize("how", [FENCED, "    ticket[0] = atomic_add_acq_rel(p.ticket, 1u);\n"])
def test_a_correct_ticket_is_no_data_race(run: Run, how: str) -> None:
    np.testing.assert_array_equal(ticket_sum(run, plant(FENCED, how, TICKET)), np.full(64, 10, np.float32))


@pytest.mark.parametrize(
    "fault",
    [
        "    __threadfence();  // release\n",
        "    __threadfence();  // acquire\n",
        "  __syncthreads();  // the block has stored\n",
        "  __syncthreads();  // the ticket is there\n",
    ],
)
def test_a_ticket_without_its_fence_or_barrier_is_a_data_race(run: Run, fault: str) -> None:
    with pytest.raises(SimtError, match="data race"):
        ticket_sum(run, plant(fault, "", TICKET))


def test_a_block_that_waits_for_another_is_reported(run: Run) -> None:
    # Nothing promises that two blocks are on the device at once.
    source = """
    extern "C" __global__ void test(const Params p) {
      atomicAdd(p.y, 1u);
      while (atomicAdd(p.y, 0u) < gridDim.x) {}
    }"""
    with pytest.raises(SimtError, match="waits here for another block"):
        run(source, y=np.zeros(1, np.uint32), grid=(2, 1, 1), block=(1, 1, 1))


def test_two_blocks_that_write_one_place_are_a_data_race(run: Run) -> None:
    source = 'extern "C" __global__ void test(const Params p) { p.y[threadIdx.x] = float(blockIdx.x); }'
    with pytest.raises(SimtError, match="data race"):
        run(source, y=np.zeros(32, np.float32), grid=(8, 1, 1), kind="tsan")


def test_limits_of_the_architecture_are_enforced(run: Run) -> None:
    empty = 'extern "C" __global__ void __launch_bounds__(128) test(const Params p) {}'
    for arch, limit in {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items():
        run(empty, n=0, arch=arch, shared_bytes=limit * 1024)
        with pytest.raises(SimtError, match=f"sm_{arch} has {limit * 1024} per block"):
            run(empty, n=0, arch=arch, shared_bytes=limit * 1024 + 1)
    for grid in ((1, 65536, 1), (1, 1, 65536), (2**31, 1, 1)):
        with pytest.raises(SimtError, match="grid"):
            run(empty, n=0, grid=grid)
    with pytest.raises(SimtError, match="the limit is 128 threads"):
        run(empty, n=0, block=(256, 1, 1))


def test_more_shared_memory_than_announced_is_refused(run: Run) -> None:
    launcher = run('extern "C" __global__ void test(const Params p) {}', n=0, shared_bytes=50 * 1024)
    (function,) = launcher._functions.values()
    with pytest.raises(SimtError, match="`get` announced 51200"):
        launcher.launch(function, (1, 1, 1), (32, 1, 1), np.zeros(1, [("n", "i4")]), 60 * 1024)


def test_parameters_of_another_size_are_refused(run: Run) -> None:
    launcher = run('extern "C" __global__ void test(const Params p) {}', n=0)
    (function,) = launcher._functions.values()
    with pytest.raises(SimtError, match="parameters of 8 bytes; the kernel's struct has 4"):
        launcher.launch(function, (1, 1, 1), (32, 1, 1), np.zeros(1, [("n", "i8")]))


def test_a_pointer_that_no_array_gave_is_refused() -> None:
    launcher = SimtLauncher()
    with pytest.raises(LookupError, match="parameter `y` holds 0x1000"):
        launcher._regions.of([(0, "y")], (0x1000).to_bytes(8, "little"))


def test_a_report_names_the_seed_that_repeats_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
    extern "C" __global__ void test(const Params p) {
      if (atomicAdd(p.y, 1) == 300) p.x[0] = 1.0f / threadIdx.x, __trap();
    }"""

    def arrived_last() -> tuple[str, float]:
        x = np.zeros(1, np.float32)
        with pytest.raises(SimtError, match="__trap") as caught:
            run(source, x=x, y=np.zeros(1, np.int32), grid=(8, 1, 1), block=(64, 1, 1))
        match = re.search(r"CUPAGED_SIMT_SEED=(\d+)", str(caught.value))
        assert match is not None
        return match[1], float(x[0])

    seed, who = arrived_last()
    monkeypatch.setenv("CUPAGED_SIMT_SEED", seed)
    assert arrived_last() == (seed, who)
