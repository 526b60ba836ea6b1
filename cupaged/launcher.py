"""How the host side reaches a device: one small protocol, and CuPy's implementation of it.

The host side of the GPU path (planning, workspace, argument packing, dispatch) speaks to a `Launcher` and to nothing else. The
tests have a second implementation that runs the same CUDA sources on the CPU, over NumPy arrays, so this protocol is also the
list of everything the package asks of a device.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np

from .arrays import Array
from .kernels import MIN_ARCH, Specialisation, compile_function

Defines = Mapping[str, int | str]  # specialisation constants: -DkHeadDim=64, -DkQueryType=__half
Dim3 = tuple[int, int, int]
_PER_THREAD = 2  # cudaStreamPerThread


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What planning needs to know of a device."""

    name: str
    arch: int  # 80 for sm_80
    num_sms: int
    shared_per_block: int  # bytes of dynamic shared memory one block may ask for (the opt-in limit)
    shared_per_sm: int  # bytes
    l2_bytes: int


class Graph(Protocol):
    """Launches and copies recorded by `Launcher.capture`, with their arguments frozen by value."""

    def replay(self) -> None:
        """Enqueue everything that was recorded on the current stream."""


class Launcher(Protocol):
    """One device and its current stream. No method synchronises except `synchronize`.

    Arrays are those of the implementation (CuPy's on a device, NumPy's on the executor). A function is an opaque object that
    `get` returned; it stays valid as long as the launcher.
    """

    @property
    def info(self) -> DeviceInfo: ...

    def get(self, kernel: str, source: str, defines: Defines, shared_bytes: int = 0) -> Any:
        """The function `kernel` of file `source` ("decode.cu"), specialised by `defines`; compiled on first use, then cached.

        `shared_bytes` is the most dynamic shared memory a launch of it will ask for. Raises `kernels.CompileError` with kernel,
        specialisation, options and the compiler's log.
        """

    def launch(self, function: Any, grid: Dim3, block: Dim3, params: Array, shared_bytes: int = 0) -> None:
        """Enqueue one launch. `params` is a structured NumPy array of size 1, passed by value; a grid with a 0 launches nothing."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Uninitialised device memory, aligned to 256 bytes."""

    def pinned(self, num_bytes: int) -> Array:
        """Page-locked host memory as a NumPy uint8 array, reachable by `copy_async` and by kernels."""

    def pointer(self, array: Array) -> int:
        """The address of the first element, of a device array or of a pinned host array."""

    def copy_async(self, dst: Array, src: Array) -> None:
        """Enqueue a copy between two contiguous arrays of equal bytes; each is a device array or a pinned host array.

        The source is read when the copy runs, not when it is enqueued.
        """

    def record(self) -> Any:
        """An event after everything enqueued on the current stream so far."""

    def wait(self, event: Any) -> None:
        """Later work on the current stream waits for `event`; the host does not."""

    def synchronize(self, event: Any) -> None:
        """The host waits for `event`."""

    def device(self) -> AbstractContextManager[Any]:
        """Makes the device current for the length of a `with` block."""

    def stream(self) -> Hashable:
        """A key of the current stream, for caches that must not be shared between streams."""

    def capturing(self) -> bool:
        """Whether work on the current stream is recorded now instead of run."""

    def capture(self) -> AbstractContextManager[Graph]:
        """Record instead of run: `with launcher.capture() as graph: ...` then `graph.replay()`, any number of times.

        Nothing may be compiled, allocated or synchronised inside the block.
        """


class CupyLauncher:
    """The launcher of one CUDA device. Methods are called with that device current; work goes to CuPy's current stream."""

    def __init__(self, device_id: int) -> None:
        import cupy

        self._cupy = cupy
        self._device = cupy.cuda.Device(device_id)
        arch = int(self._device.compute_capability)
        if arch < MIN_ARCH:
            raise RuntimeError(
                f"device {device_id} has compute capability {arch / 10}; cupaged's kernels need {MIN_ARCH / 10} (Turing) or newer"
            )
        about = self._device.attributes
        self.info = DeviceInfo(
            name=cupy.cuda.runtime.getDeviceProperties(device_id)["name"].decode(),
            arch=arch,
            num_sms=about["MultiProcessorCount"],
            shared_per_block=about["MaxSharedMemoryPerBlockOptin"],
            shared_per_sm=about["MaxSharedMemoryPerMultiprocessor"],
            l2_bytes=about["L2CacheSize"],
        )
        self._functions: dict[tuple[Specialisation, int], Any] = {}

    def get(self, kernel: str, source: str, defines: Defines, shared_bytes: int = 0) -> Any:
        key = (Specialisation.of(kernel, source, defines), shared_bytes)
        if key not in self._functions:
            self._functions[key] = compile_function(key[0], self.info.arch, shared_bytes)
        return self._functions[key]

    def launch(self, function: Any, grid: Dim3, block: Dim3, params: Array, shared_bytes: int = 0) -> None:
        if 0 not in grid:
            function(grid, block, (params.view(_fieldless(params.itemsize)),), shared_bytes)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._cupy.empty(shape, dtype)

    def pinned(self, num_bytes: int) -> Array:
        # not from CuPy's pool, which takes the next power of two and hands out again what a copy may still be reading
        cuda = self._cupy.cuda
        memory = cuda.PinnedMemory(max(num_bytes, 1), cuda.runtime.hostAllocPortable)
        return np.frombuffer(cuda.PinnedMemoryPointer(memory, 0), np.uint8, num_bytes)

    def pointer(self, array: Array) -> int:
        return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)

    def copy_async(self, dst: Array, src: Array) -> None:
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(self.pointer(dst), self.pointer(src), src.nbytes, runtime.memcpyDefault, self._handle())

    def record(self) -> Any:
        return self._cupy.cuda.get_current_stream().record(self._cupy.cuda.Event(disable_timing=True))

    def wait(self, event: Any) -> None:
        self._cupy.cuda.get_current_stream().wait_event(event)

    def synchronize(self, event: Any) -> None:
        event.synchronize()

    def device(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._device
        return found

    def stream(self) -> Hashable:
        handle = self._handle()
        # every thread has a default stream of its own under this one handle
        return handle if handle != _PER_THREAD else (handle, threading.get_ident())

    def _handle(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    def capturing(self) -> bool:
        stream = self._handle()  # 0 and 1 are the legacy default stream, which cannot be captured
        return stream > 1 and bool(self._cupy.cuda.runtime.streamIsCapturing(stream))

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        stream = self._cupy.cuda.Stream(non_blocking=True)
        graph = _CupyGraph()
        with stream:
            stream.begin_capture()
            try:
                yield graph
            finally:
                graph.recorded = stream.end_capture()


@cache
def _fieldless(num_bytes: int) -> np.dtype[Any]:
    """A dtype of that size without fields: CuPy has NumPy describe a parameter's dtype at every launch, tens of us for a struct."""
    return np.dtype((np.void, num_bytes))


class _CupyGraph:
    recorded: Any = None

    def replay(self) -> None:
        self.recorded.launch()
