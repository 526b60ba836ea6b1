"""How the host side reaches a device: one small protocol, and CuPy's implementation of it.

The host side of the GPU path (planning, workspace, argument packing, dispatch) speaks to a `Launcher` and to nothing else. The
tests have a second implementation that runs the same CUDA sources on the CPU, over NumPy arrays, so this protocol is also the
list of everything the package asks of a device.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from .arrays import Array

Defines = Mapping[str, int | str]  # specialisation constants: -DkHeadDim=64, -DkQueryType=__half
Dim3 = tuple[int, int, int]


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

    info: DeviceInfo

    def get(self, kernel: str, source: str, defines: Defines, shared_bytes: int = 0) -> Any:
        """The function `kernel` of file `source` ("decode.cu"), specialised by `defines`; compiled on first use, then cached.

        `shared_bytes` is the most dynamic shared memory a launch of it will ask for. Raises `kernels.CompileError` with kernel,
        specialisation, options and the compiler's log.
        """

    def occupancy(self, function: Any, threads: int, shared_bytes: int) -> int:
        """How many blocks of `threads` threads one multiprocessor holds at once (at least 1)."""

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

    def stream(self) -> int:
        """A key of the current stream, for caches that must not be shared between streams."""

    def capture(self) -> AbstractContextManager[Graph]:
        """Record instead of run: `with launcher.capture() as graph: ...` then `graph.replay()`, any number of times.

        Nothing may be compiled, allocated or synchronised inside the block.
        """
