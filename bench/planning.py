"""Host time of the GPU path, on a machine that needs no GPU: planning a step, and one planned call of `paged_attention`.

A call goes to a launcher that launches nothing: what is left is checking, packing parameters and choosing kernels. CuPy's own time
for a launch comes on top (about 5 us on the hosts of data-centre GPUs).

    python -m bench.planning [--save]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np

import cupaged
from bench.results import Row, save, table
from cupaged import attention, cuda
from cupaged.arrays import Array
from cupaged.launcher import DeviceInfo
from cupaged.metadata import host_metadata
from cupaged.plan import Plan
from cupaged.schedule import make_schedule
from cupaged.shared_prefix import find_shared_prefix

GOAL_PLAN_US = 300  # 4096 sequences
GOAL_CALL_US, GOAL_PLAIN_US = 15, 30  # with plan and `out`, and without a plan; on the host of an H200


class NoLauncher:
    """A device whose memory is the host's and whose launches do nothing."""

    info = DeviceInfo("H200 of a benchmark", 90, 132, 227 << 10, 228 << 10, 50 << 20)

    def get(self, kernel: str, source: str, defines: Any, shared_bytes: int = 0) -> Any:
        return kernel

    def launch(self, *arguments: Any) -> None:
        pass

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, dtype).view(DeviceArray)

    def pinned(self, num_bytes: int) -> Array:
        return np.empty(num_bytes, np.uint8)

    def pointer(self, array: Array) -> int:
        return id(array) & -256  # as fast as CuPy tells it; nobody looks there

    def copy_async(self, dst: Array, src: Array) -> None:
        dst[...] = src

    def record(self) -> Any:
        return self

    def synchronize(self, event: Any) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def device(self) -> nullcontext[None]:
        return nullcontext()

    def stream(self) -> int:
        return 0


class DeviceArray(np.ndarray):
    """Stands for a CuPy array: plain NumPy arrays are metadata to be uploaded."""


def median_us(work: Callable[[], Any], calls: int) -> float:
    """Microseconds of one call, the median of 15 rounds of `calls`."""
    times = []
    for _ in range(15):
        began = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - began) / calls)
    return statistics.median(times) * 1e6


def schedules() -> list[Row]:
    # As in any program that has read a model: from the first large array that it frees on, the C library keeps freed memory. Before,
    # it gives that of 4096 sequences back to the system at every call and takes it again page by page, three times as long in all.
    np.ones(1 << 24, np.uint8)
    rng = np.random.default_rng(1)
    rows = []
    for batch in (1, 64, 256, 1024, 4096):
        lens, starts = rng.integers(1, 4097, batch).astype(np.int32), np.arange(batch + 1, dtype=np.int32)
        us = median_us(lambda: make_schedule(lens, starts, group=4, rows=8, tile=32, shares=49), 20)  # noqa: B023
        rows.append(
            Row("planning", f"schedule of {batch} sequences", us, "us", limit=GOAL_PLAN_US if batch == 4096 else None)
        )
    return rows


def calls() -> list[Row]:
    """A call's host time in a model's layers: with a plan; and without, where the first layer of a step plans for all of them."""
    batch, blocks, block_size, layers = 32, 32 * 256, 16, 32
    pool = np.empty((blocks, 2, 8, block_size, 128), np.float16)
    tables = np.arange(blocks, dtype=np.int32).reshape(batch, -1)
    lens, starts = np.full(batch, 4000, np.int32), np.arange(batch + 1, dtype=np.int32)
    q = np.zeros((batch, 32, 128), np.float16).view(DeviceArray)
    out, keys, values = np.empty_like(q), pool[:, 0].view(DeviceArray), pool[:, 1].view(DeviceArray)
    backend = cuda.Backend(NoLauncher())  # type: ignore[arg-type]
    model: dict[str, Any] = {
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "block_size": block_size,
        "dtype": "float16",
    }

    def planned_step() -> Plan:
        return cupaged.plan(lens, tables, device="cuda", **model)

    def next_layer() -> None:
        cupaged.paged_attention(q, keys, values, tables, lens, out=out)

    def first_layer() -> None:
        lens[0] ^= 1
        next_layer()

    def step() -> None:
        first_layer()
        for _ in range(layers - 1):
            next_layer()

    with (
        mock.patch.object(attention, "backend_of", lambda x, classic=False: backend),
        mock.patch.object(cuda, "current_backend", lambda: backend),
    ):
        plan = planned_step()
        figures = {
            "call with plan and out": (
                median_us(lambda: cupaged.paged_attention(q, keys, values, None, None, plan=plan, out=out), 200),
                GOAL_CALL_US,
            ),
            "call without, metadata of the call before": (median_us(next_layer, 100), GOAL_PLAIN_US),
            f"call without, mean of the {layers} layers of a step": (median_us(step, 4) / layers, GOAL_PLAIN_US),
            "call without, new metadata": (median_us(first_layer, 20), None),
            "of it: check of metadata": (
                median_us(lambda: host_metadata(tables, lens, starts, block_size=block_size, num_blocks=blocks), 50),
                None,
            ),
            "of it: search for shared prefixes": (
                median_us(lambda: find_shared_prefix(tables, lens, starts, block_size), 50), None
            ),
            "of it: schedule": (
                median_us(lambda: make_schedule(lens, starts, group=4, rows=8, tile=32, shares=49), 50), None
            ),
            "plan for the device": (median_us(planned_step, 20), None),
        }  # fmt: skip
    return [Row("planning", f"{work}, 32 of 4k", us, "us", limit=goal) for work, (us, goal) in figures.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="keep the figures under bench/results")
    options = parser.parse_args()
    rows = schedules() + calls()
    print(table(rows))
    if options.save:
        save("planning", rows, "python -m bench.planning --save")


if __name__ == "__main__":
    main()
