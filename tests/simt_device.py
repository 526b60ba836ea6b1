"""The CUDA backend on the CPU executor: what the package's host code and kernels do where no GPU is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
from behaviour import Case
from devices import Device
from simt.launcher import SimtLauncher

from cupaged import attention, classic, cuda, kernels, kv_cache


class DeviceArray(np.ndarray):
    """Marks memory that stands for a device's: the backend uploads plain NumPy arrays of metadata, and no others."""


class Launcher(SimtLauncher):
    def __init__(self, arch: int = 90, **options: Any) -> None:
        super().__init__(arch, **options)
        self.num_copies = self.num_launches = 0
        self.known: dict[Any, Any] = {}

    def get(self, kernel: str, source: str, defines: Any, shared_bytes: int = 0) -> Any:
        """While a graph is captured only what was compiled before; in debug mode with the device-side clamps."""
        defines = {"kDebug": int(kernels.debug()), **defines}
        key = (kernel, source, tuple(sorted(defines.items())), shared_bytes)
        if key not in self.known:
            self.known[key] = super().get(kernel, source, defines, shared_bytes)
        return self.known[key]

    def launch(self, *arguments: Any, **options: Any) -> None:
        self.num_launches += 1
        super().launch(*arguments, **options)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return super().empty(shape, dtype).view(DeviceArray)

    def copy_async(self, dst: np.ndarray, src: np.ndarray) -> None:
        self.num_copies += 1
        super().copy_async(dst, src)

    def put(self, x: np.ndarray) -> np.ndarray:
        """A copy of `x` on the device."""
        there = self.empty(x.shape, x.dtype)
        there[...] = x
        return there

    def fetch(self, x: np.ndarray) -> np.ndarray:
        """A copy of `x` on the host, after all work."""
        self.flush()
        return np.array(x)


@cache
def backend(arch: int = 90, **options: Any) -> cuda.Backend:
    """One backend for the whole test run, so that each specialisation is loaded once."""
    return cuda.Backend(Launcher(arch, **options))


@contextmanager
def in_place_of_a_gpu(backend: cuda.Backend) -> Iterator[cuda.Backend]:
    """Send every call inside to `backend`, those on NumPy arrays and those that ask for the current device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "backend_of", lambda x, classic=False: backend)
        patch.setattr(classic, "backend_of", lambda x, classic=False: backend)
        patch.setattr(kv_cache, "backend_of", lambda x, classic=False: backend)
        patch.setattr(cuda, "current_backend", lambda: backend)
        yield backend


def attend(case: Case, backend: cuda.Backend) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """`(out, lse)` of a case, and the names of the kernels that were launched."""
    with pytest.MonkeyPatch.context() as patch:
        launched: list[str] = []
        launch = backend.launcher.launch
        patch.setattr(backend.launcher, "launch", lambda f, *rest: (launched.append(f.name), launch(f, *rest)))
        out, lse = Device("simt", backend).paged_attention(*case.arguments(), **case.options)
    return out, lse, launched
