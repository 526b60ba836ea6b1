"""The launcher protocol of `cupaged.launcher`, implemented by the executor: NumPy arrays are device arrays.

Work is a queue. A launch runs at once together with what stands before it; an asynchronous copy waits, as long as the program
allows, for the next launch, copy or synchronisation, so that a pinned buffer refilled too early shows as wrong data. With
`lazy=True` launches wait as well, until `synchronize` or `flush`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cupaged.kernels import flatten
from cupaged.launcher import Defines, DeviceInfo, Dim3

from . import build
from .native import Function, Launch, Native, SimtError, Traffic
from .regions import Regions, pointer_fields
from .worker import Worker

Array = np.ndarray[Any, Any]

_KIB = 1024
# Limits from the CUDA C++ Programming Guide, "Compute Capabilities"; multiprocessors and L2 of one chip of each.
DEVICES = {
    75: DeviceInfo("simt sm_75", 75, 40, 64 * _KIB, 64 * _KIB, 4 << 20),
    80: DeviceInfo("simt sm_80", 80, 108, 163 * _KIB, 164 * _KIB, 40 << 20),
    86: DeviceInfo("simt sm_86", 86, 84, 99 * _KIB, 100 * _KIB, 6 << 20),
    89: DeviceInfo("simt sm_89", 89, 128, 99 * _KIB, 100 * _KIB, 72 << 20),
    90: DeviceInfo("simt sm_90", 90, 132, 227 * _KIB, 228 * _KIB, 50 << 20),
    100: DeviceInfo("simt sm_100", 100, 148, 227 * _KIB, 228 * _KIB, 126 << 20),
    120: DeviceInfo("simt sm_120", 120, 170, 99 * _KIB, 100 * _KIB, 96 << 20),
}


@dataclass
class Graph:
    """Recorded work; arguments are copies."""

    launcher: SimtLauncher
    work: list[Callable[[], None]] = field(default_factory=list)

    def replay(self) -> None:
        for item in self.work:
            self.launcher._enqueue(item)
        self.launcher._run_due()


class SimtLauncher:
    """Runs kernels on the CPU as a device of architecture `arch` would, or says which rule they break.

    `seed` fixes the schedules (drawn anew by default; `CUPAGED_SIMT_SEED` repeats the one of a report), `model` the errors of
    approximate instructions, which a schedule must not change. `kind` is the build (build.py; default "plain", or
    `CUPAGED_SIMT_KIND`). `copies` says when asynchronous copies land inside a kernel: 0 late, 1 early, 2 at any time, -1 as the
    seed decides. `folder` replaces the package's CUDA sources, `num_sms` shrinks the device, `lazy` holds launches back until
    they are waited for, `traced` counts the cost of accesses in `traffic`.
    """

    def __init__(
        self,
        arch: int = 90,
        *,
        kind: str | None = None,
        seed: int | None = None,
        model: int = 0,
        num_sms: int | None = None,
        folder: Path | None = None,
        lazy: bool = False,
        copies: int = -1,
        traced: bool = False,
    ) -> None:
        base = DEVICES[arch]
        self.info = DeviceInfo(
            base.name, arch, num_sms or base.num_sms, base.shared_per_block, base.shared_per_sm, base.l2_bytes
        )
        kind = kind or os.environ.get("CUPAGED_SIMT_KIND", "plain")
        if kind not in build.KINDS:
            raise ValueError(f"kind is one of {', '.join(build.KINDS)}; got {kind!r}")
        if traced and kind != "checked":
            raise ValueError(f'traced=True needs kind="checked", which sees every access; got kind="{kind}"')
        self.kind, self.model, self.folder, self.lazy, self.copies = kind, model, folder, lazy, copies
        self.traced = traced
        self.traffic: list[Traffic] = []  # of traced launches
        self._machine: Any = Native(kind) if kind in ("plain", "checked") else Worker(kind)
        self._regions = Regions()
        self._repeated = os.environ.get("CUPAGED_SIMT_SEED")  # one launch's seed, taken for all
        self.seed = int.from_bytes(os.urandom(6), "little") if seed is None else seed
        self._launches = itertools.count()
        self._functions: dict[Any, Function] = {}
        self._announced: dict[Function, int] = {}  # shared memory that `get` was told of
        self._queue: list[Callable[[], None]] = []
        self._recording: Graph | None = None

    # ------------------------------------------------------------------------------------------------ functions

    def get(self, kernel: str, source: str, defines: Defines, shared_bytes: int = 0) -> Function:
        self._not_while_recording("get")
        key = (kernel, source, tuple(sorted(defines.items())), shared_bytes)
        if key not in self._functions:
            if shared_bytes > self.info.shared_per_block:
                raise SimtError(
                    f"{kernel} asks for {shared_bytes} bytes of shared memory; "
                    f"sm_{self.info.arch} has {self.info.shared_per_block} per block"
                )
            self._functions[key] = self._load(kernel, flatten(source, self.folder), defines)
            self._announced[self._functions[key]] = shared_bytes
        return self._functions[key]

    def _load(self, kernel: str, text: str, defines: Defines) -> Function:
        return self._machine.load(build.kernel(text, defines, self.info.arch, self.kind), kernel)

    # -------------------------------------------------------------------------------------------------- launches

    def launch(self, function: Function, grid: Dim3, block: Dim3, params: Array, shared_bytes: int = 0) -> None:
        self._check_launch(function, grid, block, params, shared_bytes)
        if 0 in grid:
            return
        seed = int(self._repeated or (self.seed + 0x9E3779B97F4A7C15 * next(self._launches)) % 2**64)
        launch = Launch(
            function, grid, block, params.tobytes(), shared_bytes, seed, self.model, self.copies, self.traced
        )
        fields = pointer_fields(params.dtype)
        self._submit(lambda: self._execute(launch, fields))

    def _check_launch(self, function: Function, grid: Dim3, block: Dim3, params: Array, shared_bytes: int) -> None:
        arch, limit = self.info.arch, self.info.shared_per_block
        threads = block[0] * block[1] * block[2]
        problem = None
        if params.size != 1 or params.nbytes != function.params_bytes:
            problem = f"parameters of {params.nbytes} bytes; the kernel's struct has {function.params_bytes}"
        elif params.nbytes > 4096:
            problem = f"parameters of {params.nbytes} bytes; the limit is 4096"
        elif shared_bytes > limit:
            problem = f"{shared_bytes} bytes of shared memory; sm_{arch} has {limit} per block"
        elif shared_bytes > max(self._announced[function], 48 * _KIB):
            problem = f"{shared_bytes} bytes of shared memory, but `get` announced {self._announced[function]}"
        elif threads < 1 or threads > min(1024, function.max_threads) or block[2] > 64:
            problem = f"block {block}; the limit is {min(1024, function.max_threads)} threads, z 64"
        elif min(grid) < 0 or grid[0] >= 2**31 or grid[1] > 65535 or grid[2] > 65535:
            problem = f"grid {grid}; the limits are 2147483647, 65535, 65535"
        if problem:
            raise SimtError(f"launch of {function.name}: {problem}")

    def _execute(self, launch: Launch, fields: list[tuple[int, str]]) -> None:
        try:
            regions = self._regions.of(fields, launch.params)
            self._machine.run(launch, regions)
        except (SimtError, LookupError) as error:
            raise SimtError(f"{launch.function.name}: {error} (CUPAGED_SIMT_SEED={launch.seed})") from None
        if launch.traced:
            self.traffic += self._machine.traffic(launch.function)

    # ---------------------------------------------------------------------------------------------------- memory

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self._not_while_recording("empty")
        return _aligned(shape, np.dtype(dtype))

    def pinned(self, num_bytes: int) -> Array:
        self._not_while_recording("pinned")
        return _aligned((num_bytes,), np.dtype(np.uint8))

    def pointer(self, array: Array) -> int:
        return self._regions.pointer(array)

    def copy_async(self, dst: Array, src: Array) -> None:
        if dst.nbytes != src.nbytes or not (dst.flags.c_contiguous and src.flags.c_contiguous):
            raise SimtError(f"copy_async needs two contiguous arrays of equal bytes, got {dst.nbytes} and {src.nbytes}")
        to, source = dst.reshape(-1).view(np.uint8), src.reshape(-1).view(np.uint8)
        self._submit(lambda: np.copyto(to, source), waits=True)

    # ---------------------------------------------------------------------------------------- order of the queue

    def record(self) -> object:
        return object()

    def wait(self, event: object) -> None:
        """One stream: everything is in order already."""

    def synchronize(self, event: object) -> None:
        self._not_while_recording("synchronize")
        self.flush()

    def flush(self) -> None:
        """Run everything that is queued."""
        while self._queue:
            self._queue.pop(0)()

    def device(self) -> nullcontext[None]:
        return nullcontext()

    def stream(self) -> int:
        return 0

    def capturing(self) -> bool:
        return self._recording is not None

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        self._not_while_recording("capture")
        self.flush()
        self._recording = graph = Graph(self)
        try:
            yield graph
        finally:
            self._recording = None

    def _submit(self, work: Callable[[], None], waits: bool = False) -> None:
        if self._recording is not None:
            self._recording.work.append(work)
            return
        self._enqueue(work)
        if not waits:
            self._run_due()

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)

    def _run_due(self) -> None:
        if not self.lazy:
            self.flush()

    def _not_while_recording(self, what: str) -> None:
        if self._recording is not None:
            raise SimtError(f"`{what}` while a graph is captured")


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Memory aligned to 256 bytes, every bit set: NaN in every float format, -1 in every integer."""
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.full(num_bytes + 256, 0xFF, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + num_bytes].view(dtype).reshape(shape)
