"""Warp-wide instructions against facts that the executor's author did not make up.

Fragment layouts are written as CuTe writes them (shapes and strides of (thread, value) -> matrix index), taken from the headers
`cute/atom/mma_traits_sm80.hpp` and `copy_traits_sm75.hpp` of the PyPI package nvidia-cutlass 4.2, and evaluated here.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from .conftest import Run

# (shape, stride) of lane and of value; indices run fastest on the left. A: m + 16 k, B: n + 8 k, C: m + 16 n.
LANES, ROW_16X8 = (4, 8), (((4, 8), (2, 2)), ((32, 1), (16, 8)))
LAYOUTS = {
    16: ((((4, 8), (2, 2, 2)), ((32, 1), (16, 8, 128))), (((4, 8), (2, 2)), ((16, 1), (8, 64))), ROW_16X8),
    8: (ROW_16X8, (((4, 8), (2,)), ((16, 1), (8,))), ROW_16X8),
}
TYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}

MMA = """
extern "C" __global__ void test(const Params p) {
  unsigned a[4]; unsigned b[2]; float d[4];
  for (int i = 0; i < kDepth / 4; ++i) a[i] = p.a[threadIdx.x * (kDepth / 4) + i];
  for (int i = 0; i < kDepth / 8; ++i) b[i] = p.b[threadIdx.x * (kDepth / 8) + i];
  for (int i = 0; i < 4; ++i) d[i] = p.d[threadIdx.x * 4 + i];
  %s;
  for (int i = 0; i < 4; ++i) p.d[threadIdx.x * 4 + i] = d[i];
}
"""
CALLS = {16: "mma_m16n8k16_{}(d, a, b[0], b[1])", 8: "mma_m16n8k8_{}(d, a[0], a[1], b[0])"}


def indices(layout: Any) -> np.ndarray[Any, Any]:
    """[lane, value] -> index into the matrix, column by column."""

    def flat(shape: tuple[int, ...], stride: tuple[int, ...]) -> np.ndarray[Any, Any]:
        total = np.zeros(1, np.int64)
        for extent, step in zip(shape, stride, strict=True):
            total = (np.arange(extent)[:, None] * step + total[None, :]).reshape(-1)
        return total

    (lane_shape, value_shape), (lane_stride, value_stride) = layout
    return flat(lane_shape, lane_stride)[:, None] + flat(value_shape, value_stride)[None, :]


def mma(run: Run, a: Any, b: Any, c: Any, kind: str) -> np.ndarray[Any, Any]:
    """D = A B + C through fragments packed by the layouts above."""
    depth = a.shape[1]
    layout_a, layout_b, layout_c = (indices(layout) for layout in LAYOUTS[depth])
    registers_a = a.T.reshape(-1)[layout_a].astype(TYPES[kind]).view(np.uint32).copy()
    registers_b = b.reshape(-1)[layout_b].astype(TYPES[kind]).view(np.uint32).copy()  # B is [k, n]: n + 8 k
    registers_d = c.T.reshape(-1)[layout_c].astype(np.float32)
    run(MMA % CALLS[depth].format(kind), defines={"kDepth": depth}, a=registers_a, b=registers_b, d=registers_d)
    result = np.empty(16 * 8, np.float32)
    result[layout_c] = registers_d
    return result.reshape(8, 16).T


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("depth", LAYOUTS)
def test_mma_multiplies_the_matrices_of_cutes_layouts(
    run: Run, depth: int, kind: str, rng: np.random.Generator
) -> None:
    a = rng.integers(-8, 9, (16, depth)).astype(np.float64)  # every sum is exact in every format
    b = rng.integers(-8, 9, (depth, 8)).astype(np.float64)
    c = rng.integers(-99, 99, (16, 8)).astype(np.float64)
    np.testing.assert_array_equal(mma(run, a, b, c, kind), a @ b + c)


@pytest.mark.parametrize("kind", TYPES)
def test_mma_accumulates_in_float32(run: Run, kind: str, rng: np.random.Generator) -> None:
    a = rng.standard_normal((16, 16)).astype(TYPES[kind]).astype(np.float64)
    b = rng.standard_normal((16, 8)).astype(TYPES[kind]).astype(np.float64)
    c = rng.standard_normal((16, 8)).astype(np.float32).astype(np.float64)
    # Two sums, each cut toward zero: below 2^-23 of the largest partial sum each.
    bound = 2 * 2.0**-23 * (np.abs(a) @ np.abs(b) + np.abs(c))
    assert (np.abs(mma(run, a, b, c, kind) - (a @ b + c)) <= bound).all()


@pytest.mark.parametrize(("kind", "tiny"), [("f16", 2.0**-24), ("bf16", 2.0**-130)])
def test_mma_keeps_subnormal_inputs(run: Run, kind: str, tiny: float) -> None:
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    a[3, 5], b[5, 2] = tiny, 2.0**15
    assert mma(run, a, b, np.zeros((16, 8)), kind)[3, 2] == tiny * 2.0**15


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_places_elements_as_cutes_layouts_say(
    run: Run, count: int, transposed: bool, rng: np.random.Generator
) -> None:
    # (destination lane, destination bit) -> source bit; matrices lie one after another, 8 rows of 128 bits each.
    matrices = {1: (), 2: (2,), 4: (4,)}[count]
    layout: Any
    if transposed:
        layout = (((4, 8), (16, 2, *matrices)), ((256, 16), (1, 128, *(1024 for _ in matrices))))
    else:
        layout = (((32,), (32, *matrices)), ((32,), (1, *(1024 for _ in matrices))))
    bits = indices(layout).reshape(32, count, 32)
    elements = bits[:, :, ::16] // 16  # of the low and the high half of each register
    source = rng.permutation(64 * count).astype(np.uint16)
    order = rng.permutation(8 * count)  # rows stand anywhere: lane l points to row l
    got = np.zeros((32, count), np.uint32)
    kernel = f"""
    extern "C" __global__ void test(const Params p) {{
      unsigned short* rows = reinterpret_cast<unsigned short*>(smem);
      const int lane = threadIdx.x;
      for (int i = lane; i < {64 * count}; i += 32) rows[p.order[i / 8] * 8 + i % 8] = p.source[i];
      __syncwarp();
      unsigned r[{count}];
      ldmatrix_x{count}{"_trans" if transposed else ""}(r, rows + (lane < {8 * count} ? p.order[lane] * 8 : 0));
      for (int j = 0; j < {count}; ++j) p.got[lane * {count} + j] = r[j];
    }}"""
    run(kernel, source=source, order=order.astype(np.int32), got=got, shared_bytes=128 * count)
    expected = source[elements]
    np.testing.assert_array_equal(got, expected[..., 0] | expected[..., 1].astype(np.uint32) << 16)


def test_movmatrix_transposes_what_ldmatrix_left(run: Run, rng: np.random.Generator) -> None:
    # PTX ISA, movmatrix: the fragment of row t / 4, elements 2 (t % 4) and the next becomes that of the transposed matrix.
    matrix = rng.integers(0, 2**16, (8, 8), dtype=np.uint16)
    x, y = matrix.view(np.uint32).reshape(-1).copy(), np.zeros(32, np.uint32)
    run(
        'extern "C" __global__ void test(const Params p) { p.y[threadIdx.x] = movmatrix_trans(p.x[threadIdx.x]); }',
        x=x,
        y=y,
    )
    np.testing.assert_array_equal(y, np.ascontiguousarray(matrix.T).view(np.uint32).reshape(-1))


def test_shuffles_follow_the_programming_guide(run: Run) -> None:
    # CUDA C++ Programming Guide, "Warp Shuffle Functions": the source stays inside the lane's own section of `width` lanes.
    kernel = """
    extern "C" __global__ void test(const Params p) {
      const int lane = threadIdx.x;
      int* y = p.y + lane * 5;
      y[0] = __shfl_sync(0xffffffffu, lane, 5, 8);
      y[1] = __shfl_up_sync(0xffffffffu, lane, 3, 16);
      y[2] = __shfl_down_sync(0xffffffffu, lane, 3, 16);
      y[3] = __shfl_xor_sync(0xffffffffu, lane, 12, 8);
      y[4] = int(__shfl_sync(0xffffffffu, 1ll << 40 | lane, lane + 33) - (1ll << 40));
    }"""
    y = np.zeros((32, 5), np.int32)
    run(kernel, y=y)
    lane = np.arange(32)
    section = lane // 16 * 16
    np.testing.assert_array_equal(y[:, 0], lane // 8 * 8 + 5)
    np.testing.assert_array_equal(y[:, 1], np.where(lane - 3 >= section, lane - 3, lane))
    np.testing.assert_array_equal(y[:, 2], np.where(lane + 3 < section + 16, lane + 3, lane))
    # xor: a source past the section's end gives the lane's own value, one in an earlier section is read
    np.testing.assert_array_equal(y[:, 3], np.where((lane ^ 12) < lane // 8 * 8 + 8, lane ^ 12, lane))
    np.testing.assert_array_equal(y[:, 4], (lane + 33) % 32)


def test_votes_and_block_reductions(run: Run) -> None:
    kernel = """
    extern "C" __global__ void test(const Params p) {
      const int t = threadIdx.x;
      unsigned* y = p.y + t * 6;
      y[0] = __ballot_sync(0xffffffffu, t % 3 == 0);
      y[1] = __any_sync(0xffffffffu, t == 40);
      y[2] = __all_sync(0xffffffffu, t < 32);
      y[3] = __syncthreads_or(t == 50);
      y[4] = __syncthreads_and(t < 64);
      y[5] = __syncthreads_count(t % 2);
    }"""
    y = np.zeros((64, 6), np.uint32)
    run(kernel, y=y, block=(64, 1, 1))
    ballots = [sum(1 << lane for lane in range(32) if (lane + 32 * w) % 3 == 0) for w in (0, 1)]
    expected = [[ballots[t // 32], t >= 32, t < 32, 1, 1, 32] for t in range(64)]
    np.testing.assert_array_equal(y, np.array(expected, np.uint32))


def test_parts_of_a_warp_may_meet_on_their_own(run: Run) -> None:
    kernel = """
    extern "C" __global__ void test(const Params p) {
      const unsigned mask = threadIdx.x < 8 ? 0x000000ffu : 0xffffff00u;
      int sum = threadIdx.x < 8 ? __shfl_sync(mask, int(threadIdx.x), 3) : __shfl_sync(mask, int(threadIdx.x), 9);
      p.y[threadIdx.x] = sum;
    }"""
    y = np.zeros(32, np.int32)
    run(kernel, y=y)
    np.testing.assert_array_equal(y, np.where(np.arange(32) < 8, 3, 9))


def test_approximate_functions_stay_in_their_documented_error_and_use_it(run: Run, rng: np.random.Generator) -> None:
    kernel = """
    extern "C" __global__ void test(const Params p) {
      const int i = blockIdx.x * 32 + threadIdx.x;
      p.e[i] = exp2_approx(p.x[i]);
      p.r[i] = rcp_approx(p.x[i]);
    }"""
    x = rng.uniform(-30, 30, 3200).astype(np.float32)
    x[:5] = [0.0, -0.0, -np.inf, np.nan, -140.0]
    e, r = np.zeros_like(x), np.zeros_like(x)
    run(kernel, x=x, e=e, r=r, grid=(100, 1, 1))
    np.testing.assert_array_equal(e[:5], [1.0, 1.0, 0.0, np.nan, 0.0])  # subnormal results are flushed
    np.testing.assert_array_equal(r[:3], [np.inf, -np.inf, -0.0])
    exact = x[5:].astype(np.float64)
    for got, true, bound in ((e[5:], np.exp2(exact), 2.0**-22), (r[5:], 1 / exact, 2.0**-23)):
        error = np.abs(got / true - 1)
        assert error.max() <= bound and error.max() > 0.7 * bound


def test_the_errors_belong_to_the_device_model_and_not_to_the_schedule(run: Run) -> None:
    kernel = 'extern "C" __global__ void test(const Params p) { p.y[threadIdx.x] = exp2_approx(p.x[threadIdx.x]); }'
    x = np.linspace(-3, 3, 32, dtype=np.float32)
    results = []
    for seed, model in ((1, 0), (2, 0), (1, 1)):
        y = np.zeros(32, np.float32)
        run(kernel, x=x, y=y, seed=seed, model=model)
        results.append(y)
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).any()


def test_subnormal_numbers_are_flushed_to_zero(run: Run) -> None:
    x, y = np.full(1, 1e-38, np.float32), np.ones(2, np.float32)
    kernel = (
        'extern "C" __global__ void test(const Params p) { p.y[0] = p.x[0] * 0.1f; p.y[1] = p.x[0] * 0.1f * 1e6f; }'
    )
    run(kernel, x=x, y=y, block=(1, 1, 1))
    np.testing.assert_array_equal(y, [0, 0])


def test_blocks_and_threads_run_in_an_order_of_the_seed(run: Run) -> None:
    kernel = (
        'extern "C" __global__ void test(const Params p) { p.y[atomicAdd(p.n, 1)] = blockIdx.x * 64 + threadIdx.x; }'
    )
    orders = []
    for seed in (1, 2, 1):
        y = np.zeros(320, np.int32)
        run(kernel, y=y, n=np.zeros(1, np.int32), grid=(5, 1, 1), block=(64, 1, 1), seed=seed)
        np.testing.assert_array_equal(np.sort(y), np.arange(320))
        orders.append(y)
    assert (orders[0] != orders[1]).any()
    np.testing.assert_array_equal(orders[0], orders[2])


def test_grids_and_blocks_have_three_dimensions(run: Run) -> None:
    kernel = """
    extern "C" __global__ void test(const Params p) {
      const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      atomicAdd(p.y + block * 24 + thread, 1);
    }"""
    y = np.zeros(30 * 24, np.int32)
    run(kernel, y=y, grid=(5, 3, 2), block=(4, 3, 2))
    np.testing.assert_array_equal(y, 1)
