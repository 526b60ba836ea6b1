"""The CUDA runtime and driver as CuPy calls them: devices, memory, streams, events, graphs, modules.

Memory is the host's, poisoned when it is allocated. Work of a stream waits until somebody waits for it, in the order of that stream
alone (and of the default stream, with streams that are not non-blocking), so that a missing wait shows as wrong data.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from simt.launcher import DEVICES, SimtLauncher

from .kernels import DEVICE, Kernel

_UNKNOWN, _HOST = 0, 1  # cudaMemoryType
_NON_BLOCKING = 1  # cudaStreamNonBlocking
_MAJOR, _MINOR = 75, 76  # cudaDevAttrComputeCapability...
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_NOT_READY = 600  # cudaErrorNotReady


class Stream:
    """Work in order; `done` pieces of it have run."""

    def __init__(self, device: int, blocking: bool) -> None:
        self.device, self.blocking = device, blocking
        self.work: deque[Callable[[], None]] = deque()
        self.done = 0
        self.recorded: list[Callable[[], None]] | None = None  # while it is captured

    @property
    def end(self) -> int:
        return self.done + len(self.work)

    def run(self, until: int) -> None:
        while self.done < until and self.work:
            item = self.work.popleft()
            self.done += 1
            item()


class Pretend:
    """The calls, by the names that CuPy has for them; what is missing here is refused."""

    def __init__(self, arch: int, num_devices: int) -> None:
        self.arch, self.num_devices = arch, num_devices
        self.info = DEVICES[arch]
        self.current = 0
        self.refused: list[str] = []
        self.skipped: set[str] = set()  # kernels without whose work a test can do
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...], int, bytes]] = []
        self.memory: dict[int, tuple[np.ndarray, int, int]] = {}  # address -> memory, kind, device
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, tuple[Stream, int] | None] = {}
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.modules: dict[int, tuple[int, str, dict[str, str]]] = {}  # device, source, constants
        self.functions: dict[int, Kernel] = {}
        self.compiling: tuple[str, dict[str, str]] = ("", {})
        self._names = iter(range(0x1000, 1 << 40, 16))
        self.simt = SimtLauncher(arch)

    # --------------------------------------------------------------------------------------------------- devices

    def getDevice(self) -> int:
        return self.current

    def setDevice(self, device: int) -> None:
        self.require(0 <= device < self.num_devices, f"setDevice({device})")
        self.current = device

    def getDeviceCount(self) -> int:
        return self.num_devices

    def driverGetVersion(self) -> int:
        return 12080

    def _ensure_context(self) -> None:
        """The context is always there."""

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        info = self.info
        if attribute in (_MAJOR, _MINOR):
            return divmod(self.arch, 10)[attribute - _MAJOR]
        known = {
            "MultiProcessorCount": info.num_sms, "MaxSharedMemoryPerBlockOptin": info.shared_per_block,
            "MaxSharedMemoryPerMultiprocessor": info.shared_per_sm, "L2CacheSize": info.l2_bytes,
        }  # fmt: skip
        return {getattr(self.runtime, "cudaDevAttr" + name): value for name, value in known.items()}.get(attribute, 0)

    def getDeviceProperties(self, device: int) -> dict[str, Any]:
        return {
            "name": b"pretended sm_%d" % self.arch, "multiProcessorCount": self.info.num_sms, "l2CacheSize": self.info.l2_bytes,
            "major": self.arch // 10, "minor": self.arch % 10, "totalGlobalMem": 64 << 30,
        }  # fmt: skip

    def deviceSynchronize(self) -> None:
        self.require(not any(s.recorded is not None for s in self.streams.values()), "deviceSynchronize in a capture")
        for stream in reversed(
            list(self.streams.values())
        ):  # the default stream last, which others may not have waited for
            if stream.device == self.current:
                stream.run(stream.end)

    def deviceCanAccessPeer(self, device: int, peer: int) -> int:
        return 0

    # ---------------------------------------------------------------------------------------------------- memory

    def memGetInfo(self) -> tuple[int, int]:
        return 60 << 30, 64 << 30

    def malloc(self, size: int) -> int:
        return self._allocate(size, DEVICE)

    def hostAlloc(self, size: int, flags: int) -> int:
        return self._allocate(size, _HOST)

    def free(self, address: int) -> None:
        self._release(address, DEVICE)

    def freeHost(self, address: int) -> None:
        self._release(address, _HOST)

    def _allocate(self, size: int, kind: int) -> int:
        raw = np.full(size + 4096, 0xFF, np.uint8) if size < 1 << 30 else np.empty(size + 4096, np.uint8)
        address = -(-raw.ctypes.data // 4096) * 4096
        self.memory[address] = raw[address - raw.ctypes.data :][:size], kind, self.current
        return address

    def _release(self, address: int, kind: int) -> None:
        for stream in list(self.streams.values()):
            if stream.recorded is None:
                stream.run(stream.end)
        found = self.memory.pop(address, None)
        self.require(found is not None and found[1] == kind, f"free of {address:#x}")

    def block_of(self, address: int) -> tuple[int, np.ndarray, int, int] | None:
        for start, (memory, kind, device) in self.memory.items():
            if start <= address < start + memory.nbytes:
                return start, memory, kind, device
        return None

    def pointerGetMemoryType(self, address: int) -> int:
        found = self.block_of(address)
        return _UNKNOWN if found is None else found[2]

    def pointerGetAttributes(self, address: int) -> Any:
        found = self.block_of(address)
        if found is None:
            return self.runtime.PointerAttributes(-2, 0, address, _UNKNOWN)
        return self.runtime.PointerAttributes(found[3], address, address, found[2])

    def memcpy(self, dst: int, src: int, size: int, kind: int) -> None:
        self._copy(dst, src, size, 0, waits=True)

    def memcpyAsync(self, dst: int, src: int, size: int, kind: int, stream: int) -> None:
        self._copy(dst, src, size, stream, waits=False)

    def _copy(self, dst: int, src: int, size: int, stream: int, waits: bool) -> None:
        if size == 0:
            return
        to, source = self.block_of(dst), self.block_of(src)
        for address, found in ((dst, to), (src, source)):
            inside = found is None or address + size <= found[0] + found[1].nbytes
            self.require(inside, f"a copy of {size} bytes that ends past its memory at {address:#x}")
        if source is None:  # pageable memory is read before the call returns
            held = ctypes.string_at(src, size)
            self.enqueue(stream, lambda: ctypes.memmove(dst, held, size) and None)
        else:
            self.enqueue(stream, lambda: ctypes.memmove(dst, src, size) and None)
        if waits or to is None:  # pageable memory is written before the call returns
            self.streamSynchronize(stream)

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        self.require(self.block_of(address) is not None, f"memset at {address:#x}")
        self.enqueue(stream, lambda: ctypes.memset(address, value, size) and None)

    # ---------------------------------------------------------------------------------- streams, events, capture

    def stream(self, handle: int) -> Stream:
        if handle <= 2:  # each device has its legacy default stream (0, 1) and one of this thread (2)
            handle = -self.current - 1 if handle < 2 else -(threading.get_ident() * 64 + self.current)
            if handle not in self.streams:
                self.streams[handle] = Stream(self.current, True)
        return self.streams[handle]

    def enqueue(self, handle: int, item: Callable[[], None]) -> None:
        stream = self.stream(handle)
        self.require(
            stream.device == self.current, f"work on a stream of device {stream.device}, current is {self.current}"
        )
        if stream.recorded is not None:
            stream.recorded.append(item)
            return
        if stream.blocking:  # the default stream and those that follow it
            default = self.stream(0)
            others = [s for s in self.streams.values() if s.blocking and s.device == stream.device and s is not stream]
            for other in others if stream is default else [default]:
                if other is not stream and other.work:
                    stream.work.append(lambda other=other, end=other.end: other.run(end))
        stream.work.append(item)

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        handle = next(self._names)
        self.streams[handle] = Stream(self.current, not flags & _NON_BLOCKING)
        return handle

    def streamDestroy(self, handle: int) -> None:
        stream = self.streams.pop(handle)
        stream.run(stream.end)

    def streamSynchronize(self, handle: int) -> None:
        stream = self.stream(handle)
        self.require(stream.recorded is None, "waiting for a stream that is captured")
        if stream.blocking:
            self.enqueue(handle, lambda: None)
        stream.run(stream.end)

    def streamQuery(self, handle: int) -> int:
        return _NOT_READY if self.stream(handle).work else 0

    def streamWaitEvent(self, handle: int, event: int) -> None:
        where = self.events[event]
        if where is not None:
            self.enqueue(handle, lambda: where[0].run(where[1]))

    def streamIsCapturing(self, handle: int) -> int:
        return int(self.stream(handle).recorded is not None)

    def streamBeginCapture(self, handle: int, mode: int = 0) -> None:
        self.require(handle != 0, "capture of the default stream")
        self.stream(handle).recorded = []

    def streamEndCapture(self, handle: int) -> int:
        stream = self.stream(handle)
        self.require(stream.recorded is not None, "end of a capture that did not begin")
        graph = next(self._names)
        self.graphs[graph], stream.recorded = stream.recorded or [], None
        return graph

    def graphInstantiate(self, graph: int) -> int:
        made = next(self._names)
        self.graphs[made] = self.graphs[graph]
        return made

    def graphLaunch(self, graph: int, stream: int) -> None:
        for item in self.graphs[graph]:
            self.enqueue(stream, item)

    def graphDestroy(self, graph: int) -> None:
        del self.graphs[graph]

    graphExecDestroy = graphDestroy

    def eventCreate(self) -> int:
        return self.eventCreateWithFlags(0)

    def eventCreateWithFlags(self, flags: int) -> int:
        handle = next(self._names)
        self.events[handle] = None
        return handle

    def eventDestroy(self, event: int) -> None:
        del self.events[event]

    def eventRecord(self, event: int, handle: int) -> None:
        stream = self.stream(handle)
        self.enqueue(handle, lambda: None)
        self.events[event] = (stream, -1 if stream.recorded is not None else stream.end)

    def eventQuery(self, event: int) -> int:
        where = self.events[event]
        self.require(where is None or where[1] >= 0, "query of an event that was captured")
        return _NOT_READY if where is not None and where[0].done < where[1] else 0

    def eventSynchronize(self, event: int) -> None:
        where = self.events[event]
        self.require(where is None or where[1] >= 0, "waiting for an event that was captured")
        if where is not None:
            where[0].run(where[1])

    def eventElapsedTime(self, start: int, end: int) -> float:
        return 1.0

    # ------------------------------------------------------------------------------------- modules and launches

    def moduleLoadData(self, image: bytes) -> int:
        self.require(image.startswith(b"\x7fELF"), "an image that is no machine code")
        handle = next(self._names)
        self.modules[handle] = (self.current, *self.compiling)
        return handle

    def moduleUnload(self, module: int) -> None:
        del self.modules[module]

    def moduleGetFunction(self, module: int, name: str) -> int:
        handle = next(self._names)
        self.functions[handle] = Kernel(self, name, *self.modules[module])
        return handle

    def funcGetAttribute(self, attribute: int, function: int) -> int:
        return {_MOST_SHARED: self.functions[function].most_shared}.get(attribute, 32)

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:
        self.require(value <= self.info.shared_per_block, f"{value} bytes of shared memory")
        if attribute == _MOST_SHARED:
            self.functions[function].most_shared = value

    def launchKernel(
        self, function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int, params: int, extra: int
    ) -> None:  # fmt: skip
        kernel = self.functions[function]
        self.require(kernel.device == self.current, f"{kernel.name} of device {kernel.device} on device {self.current}")
        self.require(shared <= kernel.most_shared, f"{kernel.name} with {shared} bytes of shared memory")
        self.require(
            gx < 2**31 and gy < 65536 and gz < 65536 and bx * by * bz <= 1024, f"grid {gx, gy, gz} of {bx, by, bz}"
        )
        self.enqueue(stream, kernel.bound((gx, gy, gz), (bx, by, bz), shared, params))

    def require(self, right: bool, what: str) -> None:
        if not right:
            self.refused.append(what)
            raise RuntimeError(f"CUDA would refuse: {what}")
