"""Counted cost of accesses: sectors of global requests, wavefronts of shared ones, for patterns whose cost is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .conftest import Run
from .launcher import SimtLauncher
from .native import Traffic


def only(launcher: SimtLauncher, space: str, write: bool) -> Traffic:
    (traffic,) = [t for t in launcher.traffic if t.space == space and t.write == write]
    return traffic


def traced(run: Run, body: str, **options: Any) -> SimtLauncher:
    return run(f'extern "C" __global__ void test(const Params p) {{ {body} }}', kind="checked", traced=True, **options)


def aligned(count: int) -> np.ndarray[Any, Any]:
    x = np.zeros(count + 64, np.float32)
    return x[-x.ctypes.data // 4 % 64 :][:count]


@pytest.mark.parametrize(
    ("index", "sectors", "ideal"),
    [
        ("threadIdx.x", 4, 4),  # 128 neighbouring bytes
        ("threadIdx.x + 1", 5, 4),  # the same, one element off
        ("threadIdx.x * 8", 32, 4),  # one element of each sector
        ("threadIdx.x / 8 * 8", 4, 1),  # four addresses
        ("0", 1, 1),
    ],
)
def test_sectors_of_a_global_read(run: Run, index: str, sectors: int, ideal: int) -> None:
    traffic = only(traced(run, f"p.y[0] = p.x[{index}];", x=aligned(256), y=aligned(1)), "global", False)
    assert (traffic.requests, traffic.accesses, traffic.units, traffic.ideal) == (1, 32, sectors, ideal)
    assert traffic.where == "test.cu:1" and traffic.lane_bytes == 4


@pytest.mark.parametrize(
    ("type_", "byte", "wavefronts", "ideal"),
    [
        ("float", "lane * 4", 1, 1),  # every bank once
        ("float", "lane * 8", 2, 1),  # every other bank twice
        ("float", "lane * 128", 32, 1),  # one bank
        ("float", "0", 1, 1),  # one word for all
        ("float", "lane % 2 * 128", 2, 1),  # two words of one bank
        ("float2", "lane * 8", 2, 2),  # two phases of 16 lanes
        ("float4", "lane * 16", 4, 4),  # four phases of 8 lanes
        ("float4", "lane * 128", 32, 4),  # 8 lanes in the same banks
        ("float4", "lane * 144", 4, 4),  # rows padded to an odd number of 16-byte units
        ("unsigned char", "lane", 1, 1),
    ],
)
def test_wavefronts_of_a_shared_write(run: Run, type_: str, byte: str, wavefronts: int, ideal: int) -> None:
    body = f"const int lane = threadIdx.x; using T = {type_}; *reinterpret_cast<T*>(smem + {byte}) = T();"
    traffic = only(traced(run, body, n=0, shared_bytes=8192), "shared", True)
    assert (traffic.requests, traffic.units, traffic.ideal) == (1, wavefronts, ideal)


@pytest.mark.parametrize(("stride", "wavefronts"), [(128, 32), (144, 4), (16, 4), (80, 4), (32, 8)])
def test_wavefronts_of_ldmatrix(run: Run, stride: int, wavefronts: int) -> None:
    body = f"""
    for (int i = threadIdx.x; i < 32 * {stride}; i += 32) smem[i] = 0;
    __syncwarp();
    unsigned r[4];
    ldmatrix_x4(r, smem + threadIdx.x * {stride});"""
    traffic = only(traced(run, body, n=0, shared_bytes=32 * stride), "shared", False)
    assert (traffic.lane_bytes, traffic.requests, traffic.units, traffic.ideal) == (16, 1, wavefronts, 4)


def test_an_asynchronous_copy_counts_on_both_sides(run: Run) -> None:
    body = "cp_async_16(smem + threadIdx.x * 16, p.x + threadIdx.x * 4); cp_async_commit(); cp_async_wait<0>();"
    launcher = traced(run, body, x=aligned(128), shared_bytes=512)
    assert only(launcher, "global", False).units == 16 and only(launcher, "shared", True).units == 4


def test_a_copy_of_nothing_reads_nothing(run: Run) -> None:
    body = "cp_async_16(smem + threadIdx.x * 16, p.x, false); cp_async_commit(); cp_async_wait<0>();"
    launcher = traced(run, body, x=aligned(128), shared_bytes=512)
    assert [t.space for t in launcher.traffic] == ["shared"]


def test_repetitions_and_divergence_are_requests_of_their_own(run: Run) -> None:
    body = """
    float sum = 0.0f;
    for (int i = 0; i < 3; ++i) sum += p.x[i * 32 + threadIdx.x % 32];
    if (threadIdx.x < 8) p.y[threadIdx.x] = sum;"""
    launcher = traced(run, body, x=aligned(96), y=aligned(32), grid=(2, 1, 1), block=(64, 1, 1))
    read, write = only(launcher, "global", False), only(launcher, "global", True)
    assert (read.requests, read.units) == (2 * 2 * 3, 2 * 2 * 3 * 4)
    assert (write.requests, write.accesses, write.units) == (2, 16, 2)


def test_tracing_needs_the_build_that_sees_accesses() -> None:
    with pytest.raises(ValueError, match='traced=True needs kind="checked"'):
        SimtLauncher(kind="plain", traced=True)
