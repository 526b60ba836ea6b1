"""Kernels that are launched: those of the package run on the executor, those of CuPy are known by name."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from simt.native import Launch
from simt.regions import Region, pointer_fields

from cupaged import cuda_structs

_STRUCTS = {
    "write_kv": cuda_structs.WRITE,
    "copy_blocks": cuda_structs.COPY,
    "merge": cuda_structs.MERGE,
    "classic_attention": cuda_structs.CLASSIC,
    "classic_reduce": cuda_structs.CLASSIC,
}


DEVICE = 2  # cudaMemoryTypeDevice


class Kernel:
    """A function of a module: one of this package's, or one of CuPy's."""

    def __init__(self, cuda: Any, name: str, device: int, source: str, constants: dict[str, str]) -> None:
        self.cuda, self.name, self.device, self.most_shared = cuda, name, device, 48 * 1024
        self._own = None
        if "kParamsBytes" in constants:
            self._own = cuda.simt._load(name, source, constants)
            self.fields = pointer_fields(_STRUCTS.get(name, cuda_structs.ATTENTION))
        else:
            found = re.search(rf"\b{name}\s*\(([^)]*)\)", source)
            self.parameters = re.findall(
                r"(CArray|CIndexer)<([^>]*)>|(\w[\w ]*?) \w+(?:,|$)", found[1] if found else ""
            )

    def bound(self, grid: Any, block: Any, shared: int, params: int) -> Callable[[], None]:
        """The launch with its arguments frozen by value."""
        pointers = ctypes.cast(params, ctypes.POINTER(ctypes.c_void_p))
        if self._own is None:
            return self._of_cupy(pointers)
        held = ctypes.string_at(pointers[0], self._own.params_bytes)
        self.cuda.launches.append((self.name, grid, block, shared, held))
        launch = Launch(self._own, grid, block, held, shared, 1, 0, -1, False)
        regions = []
        for offset, field in self.fields:
            pointer = int.from_bytes(held[offset : offset + 8], "little")
            if pointer:
                found = self.cuda.block_of(pointer)
                self.cuda.require(found is not None, f"{self.name}: {field} = {pointer:#x} is no device memory")
                away = found[2] == DEVICE and found[3] != self.device
                self.cuda.require(
                    not away, f"{self.name}: {field} lies on device {found[3]}, the launch on {self.device}"
                )
                regions.append(Region(found[0], found[0] + found[1].nbytes, pointer, offset))
        return lambda: self.cuda.simt._machine.run(launch, regions)

    def _of_cupy(self, pointers: Any) -> Callable[[], None]:
        arguments = [_argument(kind, of, scalar, pointers[i]) for i, (kind, of, scalar) in enumerate(self.parameters)]
        arrays = [x for x in arguments if isinstance(x, np.ndarray)]
        if self.name.startswith(("cupy_copy", "cupy_fill")):
            return lambda: np.copyto(arrays[-1], arguments[0], casting="unsafe")
        if self.name.startswith("cupy_arange"):
            first, step = arguments[:2]
            return lambda: np.copyto(arrays[-1], first + step * np.arange(arrays[-1].size), casting="unsafe")
        if self.name.startswith("cupy_take"):
            return lambda: _take(*arguments[:-1])
        if self.name in self.cuda.skipped:
            return lambda: None
        self.cuda.require(False, f"{self.name} is not among the kernels of CuPy that are known here")
        raise AssertionError


def _take(a: Any, indices: Any, ldim: int, cdim: int, rdim: int, index_range: int, out: Any) -> None:
    i = np.arange(out.size).reshape(out.shape)
    out[...] = a.reshape(-1)[(i // (cdim * rdim) * index_range + indices % index_range) * rdim + i % rdim]


_SCALARS = {
    "float": "f4", "double": "f8", "float16": "f2", "int": "i4", "long long": "i8", "unsigned int": "u4", "unsigned char": "u1",
    "unsigned long long": "u8", "signed char": "i1", "bool": "?", "unsigned short": "u2", "short": "i2", "bfloat16": "V2",
}  # fmt: skip


def _argument(kind: str, of: str, scalar: str, address: int) -> Any:
    """One argument of a kernel of CuPy, from where `cuLaunchKernel` would copy it."""
    if kind == "CIndexer":
        return None
    if kind == "CArray":
        name, ndim = (part.strip() for part in of.split(",")[:2])
        dtype, n = np.dtype(_SCALARS[name]), int(ndim)
        data, _, *rest = np.frombuffer(ctypes.string_at(address, 16 + 16 * n), np.int64).tolist()
        shape, strides = tuple(rest[:n]), tuple(rest[n:])
        extent = sum((k - 1) * s for k, s in zip(shape, strides, strict=True)) + dtype.itemsize
        if 0 in shape:
            return np.empty(shape, dtype)
        memory = np.frombuffer((ctypes.c_ubyte * extent).from_address(data), np.uint8)
        return np.ndarray(shape, dtype, memory, 0, strides)
    dtype = np.dtype(_SCALARS[scalar.removeprefix("const ")])
    return np.frombuffer(ctypes.string_at(address, dtype.itemsize), dtype)[0]
