"""Launches inside the test's own process, and what the executor counts there."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from . import build
from .regions import Region


class SimtError(RuntimeError):
    """A launch broke a rule of the device: the message says which, where, and the seed that shows it again."""


@dataclass(frozen=True, eq=False)
class Function:
    """One compiled kernel."""

    name: str
    path: Path
    entry: int
    params_bytes: int
    max_threads: int  # of __launch_bounds__


@dataclass(frozen=True)
class Launch:
    """One launch with its arguments frozen by value."""

    function: Function
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: bytes
    shared_bytes: int
    seed: int
    model: int
    copies: int
    traced: bool


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one instruction cost over a launch, all blocks and warps together."""

    where: str  # "decode.cu:135", with the lines it was inlined from
    space: str  # "global" | "shared"
    write: bool
    lane_bytes: int  # width of one lane's access
    requests: int  # by warps
    accesses: int  # by lanes
    units: int  # global: 32-byte sectors; shared: wavefronts
    ideal: int  # the units that the same bytes would need at best


class _Launch(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("copies", ctypes.c_int),
        ("seed", ctypes.c_ulonglong),
        ("model", ctypes.c_ulonglong),
        ("regions", ctypes.c_void_p),
        ("num_regions", ctypes.c_ulonglong),
        ("traced", ctypes.c_int),
    )


class _Total(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("key", ctypes.c_void_p),
        ("line", ctypes.c_int),
        ("space", ctypes.c_int),
        ("write", ctypes.c_int),
        ("bytes", ctypes.c_uint),
        ("requests", ctypes.c_ulonglong),
        ("accesses", ctypes.c_ulonglong),
        ("units", ctypes.c_ulonglong),
        ("ideal", ctypes.c_ulonglong),
    )


class Native:
    """The plain and the checked executor."""

    def __init__(self, kind: str) -> None:
        self._runtime = ctypes.CDLL(str(build.runtime(kind)), mode=ctypes.RTLD_LOCAL)

    def load(self, path: Path, kernel: str) -> Function:
        library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        entry = ctypes.cast(getattr(library, f"simt_entry_{kernel}"), ctypes.c_void_p).value
        assert entry is not None
        params_bytes = ctypes.c_uint.in_dll(library, f"simt_size_{kernel}").value
        max_threads = ctypes.c_int.in_dll(library, f"simt_bounds_{kernel}").value
        return Function(kernel, path, entry, params_bytes, max_threads)

    def run(self, launch: Launch, regions: list[Region]) -> None:
        """Run one launch. Raises SimtError."""
        held = ctypes.create_string_buffer(launch.params, len(launch.params) + 64)
        extents = sorted({(region.begin, region.end) for region in regions})
        table = (ctypes.c_ulonglong * (2 * len(extents) + 1))(*(value for extent in extents for value in extent))
        record = _Launch(
            launch.function.entry,
            ctypes.addressof(held),
            launch.grid,
            launch.block,
            launch.shared_bytes,
            launch.copies,
            launch.seed,
            launch.model,
            ctypes.addressof(table),
            len(extents),
            launch.traced,
        )
        error = ctypes.create_string_buffer(2048)
        if self._runtime.simt_launch(ctypes.byref(record), error, len(error)):
            raise SimtError(_symbolised(error.value.decode()))

    def traffic(self, function: Function) -> list[Traffic]:
        """What the last launch, a traced one of `function`, cost, by instruction."""
        totals = ctypes.POINTER(_Total)()
        count = self._runtime.simt_trace(ctypes.byref(totals))
        base = _base_address(function.path)
        result = []
        for total in totals[:count]:
            where = (
                f"{total.file.decode()}:{total.line}" if total.file else _line_of(function.path, total.key - 1 - base)
            )
            space = ("global", "shared")[total.space]
            counts = (total.requests, total.accesses, total.units, total.ideal)
            result.append(Traffic(where, space, bool(total.write), total.bytes, *counts))
        return sorted(result, key=lambda traffic: -traffic.units)


def _base_address(path: Path) -> int:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return min(int(line.split("-", 1)[0], 16) for line in maps if line.endswith(str(path)))


@lru_cache(maxsize=4096)
def _line_of(path: Path | str, offset: int) -> str:
    """File and line of a machine instruction, innermost function first, through the functions it was inlined into."""
    command = ["addr2line", "-i", "-e", str(path), hex(offset)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    places = [re.sub(r" \(discriminator \d+\)", "", line).rsplit("/", 1)[-1] for line in lines if line]
    own = [place for place in places if not place.startswith(("simt", "??", "entries"))]
    return " < ".join(dict.fromkeys(own)) or "?"


def _symbolised(message: str) -> str:
    return re.sub(r"\{(.+?)\+(0x[0-9a-f]+)\}", lambda match: _line_of(match[1], int(match[2], 16)), message)
