"""Launches in a process of their own, for the sanitizers whose libraries Python was not started with."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import struct
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO

import numpy as np

from . import build
from .native import Function, Launch, SimtError
from .regions import Region

_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66:detect_stack_use_after_return=0",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_signal_unsafe=0",
}
_SECONDS = 240  # of the processor; a launch that takes more hangs, however busy the machine is
_NO_RANDOM_ADDRESSES = (
    0x0040000  # ADDR_NO_RANDOMIZE of personality(2); ThreadSanitizer's shadow needs known address ranges
)


class Worker:
    """One sanitized process; started at the first use, and again after a report ended it."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._handles: dict[tuple[Path, str], tuple[int, int, int]] = {}

    def load(self, path: Path, kernel: str) -> Function:
        _, params_bytes, max_threads = self._load(path, kernel)
        return Function(kernel, path, 0, params_bytes, max_threads)

    def _load(self, path: Path, kernel: str) -> tuple[int, int, int]:
        if (path, kernel) not in self._handles or self._process is None:
            self._send(struct.pack("I", 0) + _bytes(str(path).encode()) + _bytes(kernel.encode()))
            self._handles[path, kernel] = struct.unpack("IIi", self._receive(12))
        return self._handles[path, kernel]

    def run(self, launch: Launch, regions: list[Region]) -> None:
        """Run one launch and copy what it wrote back into its arrays. Raises SimtError with the sanitizer's report."""
        arrays = _merged(regions)
        parts = [struct.pack("II", 1, self._load(launch.function.path, launch.function.name)[0])]
        parts += [struct.pack("7I", *launch.grid, *launch.block, launch.shared_bytes)]
        parts += [struct.pack("=iQQ", launch.copies, launch.seed, launch.model), _bytes(launch.params)]
        parts += [struct.pack("I", len(arrays))]
        memory = [_memory(begin, end) for begin, end in arrays]
        for (begin, end), bytes_of in zip(arrays, memory, strict=True):
            parts += [struct.pack("=QI", end - begin, begin % 256), bytes_of.tobytes()]
        parts += [struct.pack("I", len(regions))]
        for region in regions:
            index = next(i for i, (begin, end) in enumerate(arrays) if begin <= region.begin and region.end <= end)
            parts += [struct.pack("=IIQ", region.offset, index, region.pointer - arrays[index][0])]
        self._send(b"".join(parts))
        failed, length = struct.unpack("iI", self._receive(8))
        message = self._receive(length).decode()
        for bytes_of in memory:
            bytes_of[:] = np.frombuffer(self._receive(bytes_of.size), np.uint8)
        if failed:  # the process ends itself
            assert self._process is not None
            self._process.wait()
            self._process = None
            raise SimtError(message)

    # ------------------------------------------------------------------------------------------------ the process

    def _start(self) -> subprocess.Popen[bytes]:
        self._handles.clear()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self._process = subprocess.Popen(
            [str(build.worker(self._kind))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **_OPTIONS},
            preexec_fn=lambda: ctypes.CDLL(None).personality(_NO_RANDOM_ADDRESSES),
        )
        weakref.finalize(self, _end, self._process)
        return self._process

    def _send(self, data: bytes) -> None:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(data)
            process.stdin.flush()
        except BrokenPipeError:
            self._died()

    def _receive(self, length: int) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        clock = ~self._process.pid << 3 | 2  # of the process: CPUCLOCK_SCHED of clock_getcpuclockid(3)
        limit = int(time.clock_gettime(clock)) + _SECONDS
        resource.prlimit(self._process.pid, resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        data = self._process.stdout.read(length)
        if len(data) < length:
            self._died()
        return data

    def _died(self) -> None:
        assert self._process is not None and self._log is not None
        code = self._process.wait()
        self._process = None
        self._log.seek(0)
        report = self._log.read().decode(errors="replace").strip()
        raise SimtError(f"{_headline(report)} (the {self._kind} process ended with {code})\n{report[:6000]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.wait()


def _headline(report: str) -> str:
    """The line of a sanitizer's report that says what it found, with the first kernel line of it."""
    what = re.search(r"(?:ERROR|WARNING): \w+Sanitizer: ([^(\n]*)", report)
    where = re.search(r"\b([\w.]+\.cuh?:\d+)", report)
    return f"{where[1] if where else '?'}: {what[1].strip() if what else 'no report'}"


def _bytes(data: bytes) -> bytes:
    return struct.pack("I", len(data)) + data


def _merged(regions: list[Region]) -> list[tuple[int, int]]:
    """The address ranges of a launch, overlapping ones (interleaved views of one pool) joined."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted({(region.begin, region.end) for region in regions}):
        if merged and begin < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _memory(begin: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin))
