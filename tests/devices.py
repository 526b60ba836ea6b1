"""The backends under test behind one face: NumPy arrays go in and come out, the public functions run in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cupaged
from cupaged import attention, backends, classic


@dataclass(frozen=True)
class Device:
    """Where the public functions run, and how wide a search it can afford there."""

    name: str
    backend: Any = None  # None: what the arrays themselves choose
    xp: Any = np
    examples: int = 60
    head_dims: tuple[int, ...] = (8, 16, 24, 64, 80, 128)
    block_sizes: tuple[int, ...] = (1, 3, 4, 8, 16, 24)
    groups: tuple[int, ...] = (1, 2, 3, 5, 7, 8, 16, 17)
    longest: tuple[int, ...] = (3, 20, 150)  # sequences of a case

    @property
    def tensor_cores(self) -> bool:
        """Whether 16-bit queries are multiplied on tensor cores."""
        return self.name in ("simt", "cuda")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Send the calls inside to this backend."""
        with pytest.MonkeyPatch.context() as patch:
            if self.backend is not None:
                patch.setattr(attention, "backend_of", lambda x, classic=False: self.backend)
                patch.setattr(classic, "backend_of", lambda x, classic=False: self.backend)
            yield

    def paged_attention(self, *arguments: np.ndarray, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """`(out, lse)`, into arrays that held NaN before."""
        q, k_cache, v_cache, tables, lens = arguments
        out = self.put(np.full(q.shape, np.nan, q.dtype))
        lse = self.put(np.full(q.shape[:2], np.nan, np.float32))
        with self.active():
            cupaged.paged_attention(
                self.put(q),
                self.put(k_cache),
                self.put(v_cache),
                tables,
                lens,
                out=out,
                lse=lse,
                return_lse=True,
                **options,
            )
        return self.get(out), self.get(lse)

    def write_kv(
        self, k: np.ndarray, v: np.ndarray, k_cache: np.ndarray, v_cache: np.ndarray, slots: np.ndarray, **options: Any
    ) -> None:
        """Changes the caches given, wherever the work was done."""
        k_there, v_there = self.put(k_cache), self.put(v_cache)
        with self.active():
            cupaged.write_kv(self.put(k), self.put(v), k_there, v_there, slots, **options)
        if self.xp is not np:
            k_cache[...], v_cache[...] = self.get(k_there), self.get(v_there)

    def merge_states(
        self, outs: np.ndarray, lses: np.ndarray, sinks: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        with self.active():
            out, lse = cupaged.merge_states(self.put(outs), self.put(lses), sinks)
        return self.get(out), self.get(lse)

    def put(self, x: np.ndarray) -> Any:
        """A copy on the device with the strides that `x` has, since strides are part of what is tested."""
        if self.xp is np:
            return x
        low, high = np.lib.array_utils.byte_bounds(x)
        flat = np.lib.stride_tricks.as_strided(x.view(np.uint8) if x.ndim == 0 else x, x.shape, x.strides)
        there = self.xp.ndarray(x.shape, x.dtype, self.xp.empty(high - low, np.uint8).data, strides=x.strides)
        there[...] = self.xp.asarray(np.ascontiguousarray(flat))
        return there

    def get(self, x: Any) -> np.ndarray:
        return x if self.xp is np else self.xp.asnumpy(x)


def reference() -> Device:
    return Device("reference", backends.Reference)


def cpu() -> Device:
    pytest.importorskip("numba", reason="the CPU backend needs numba: pip install 'cupaged[cpu]'")
    from cupaged import cpu as backend

    return Device("cpu", backend, longest=(3, 20, 150, 600))  # from 256 tokens on, keys are worked on in chunks


def simt(name: str = "simt", arch: int = 90) -> Device:
    """The CUDA backend on the CPU executor; few shapes, since each is compiled once."""
    from simt import build

    if reason := build.unavailable():
        pytest.skip(reason)
    import simt_device

    few = {"head_dims": (8, 64, 80), "block_sizes": (1, 3, 16), "groups": (1, 3, 5, 17)}
    return Device(name, simt_device.backend(arch), examples=40, **few)


def simt_sm75() -> Device:
    """The same as a device on which no dtype goes to tensor cores."""
    return simt("simt_sm75", 75)


def cuda() -> Device:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'cupaged[cuda12x]' or [cuda13x]")
    if not cupy.cuda.is_available():
        pytest.skip("no CUDA device found")
    return Device("cuda", None, cupy)


@dataclass(frozen=True)
class Machine:
    """Where the CUDA path runs: the executor, or a GPU."""

    backend: Any  # a `cuda.Backend`
    put: Any  # host array -> device array
    get: Any  # device array -> host array
    tensor_cores: bool  # whether 16-bit queries go there


@contextmanager
def machine(name: str) -> Iterator[Machine]:
    """The machine of that name: "simt", "simt_sm75" or "cuda"."""
    if name == "cuda":
        from cupaged.cuda import current_backend

        xp = cuda().xp
        backend = current_backend()
        yield Machine(backend, xp.asarray, xp.asnumpy, backend.launcher.info.arch >= 80)
        return
    backend = simt(name, 75 if name == "simt_sm75" else 90).backend
    import simt_device

    with simt_device.in_place_of_a_gpu(backend):
        yield Machine(backend, backend.launcher.put, backend.launcher.fetch, name == "simt")
