"""How host arrays get to a device without a wait: through page-locked buffers that are used in turn."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from .arrays import Array
from .launcher import Launcher

_BUFFERS = 4


class PinnedRing:
    """Page-locked buffers that are refilled in turn, each only after the copy out of it has run.

    Attributes:
        lock: held from `stage` to `send`: until then another thread would be given the same buffer.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.lock = threading.RLock()
        self._launcher = launcher
        self._buffers: list[Array | None] = [None] * _BUFFERS
        self._events: list[Any] = [None] * _BUFFERS
        self._next = 0

    def stage(self, num_bytes: int) -> Array:
        """A uint8 buffer of at least `num_bytes`, free to be filled. Raises RuntimeError while a graph is captured."""
        if self._launcher.capturing():
            raise RuntimeError(
                "metadata on the host were about to be copied while a CUDA graph is captured; each replay would copy what the buffer "
                "holds by then: make a plan (cupaged.plan with device='cuda', max_seqs, max_tokens, max_blocks), update it outside"
            )
        if self._events[self._next] is not None:
            self._launcher.synchronize(self._events[self._next])
            self._events[self._next] = None
        buffer = self._buffers[self._next]
        if buffer is None or len(buffer) < num_bytes:
            buffer = self._buffers[self._next] = self._launcher.pinned(max(2 * num_bytes, 4096))
        return buffer

    def send(self, to: Array, num_bytes: int) -> Any:
        """Copy the staged bytes to the start of the device buffer `to`, on the current stream. Returns the event after it."""
        buffer = self._buffers[self._next]
        assert buffer is not None
        self._launcher.copy_async(to[:num_bytes], buffer[:num_bytes])
        event = self._events[self._next] = self._launcher.record()
        self._next = (self._next + 1) % len(self._buffers)
        return event


class DeviceSide:
    """What all operations on one device need: its launcher, and a way there for host arrays.

    Threads may call at the same time, on one stream or on several: whoever stages host arrays, or launches more than once over
    memory of the stream, holds the ring's lock. Plans and caches belong to one thread at a time.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._ring = PinnedRing(launcher)

    def _upload(self, x: Array) -> Array:
        """A host array on the device; a device array as it is."""
        if type(x) is not np.ndarray:
            return x
        there = self.launcher.empty(x.shape, x.dtype)
        with self._ring.lock:
            self._ring.stage(x.nbytes)[: x.nbytes].view(x.dtype)[:] = x.reshape(-1)
            self._ring.send(there.reshape(-1).view(np.uint8), x.nbytes)
        return there
