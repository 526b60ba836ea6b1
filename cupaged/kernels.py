"""CUDA sources: find them, flatten their includes into one string, specialise and compile.

The only file that knows NVRTC and `RawModule`. A kernel is an `extern "C"` function of one `.cu` file with one by-value
parameter struct; everything known at compile time comes as `-D` constants. The source is handed over as one string because
CuPy's disk cache looks at the string and not at files behind `-I`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

# How the sources spell an element type (types.cuh has the two fp8 formats as one-byte structs).
CUDA_TYPES = {
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}

MIN_ARCH = 75
# Contraction of a * b + c is off so that a row's bits do not depend on which specialisation computes it; the sources say fmaf.
_OPTIONS = ("-std=c++17", "-fmad=false")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')


@lru_cache(maxsize=1)
def source_dir() -> Path:
    """The folder of the CUDA sources: inside an installed wheel, else beside the package in the repository."""
    here = Path(__file__).resolve().parent
    for folder in (here / "cuda_src", here.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no CUDA sources in {here / 'cuda_src'} or {here.parent / 'cuda_src'}; reinstall cupaged")


@cache
def flatten(source: str, folder: Path | None = None) -> str:
    """`source` and every file it includes with quotes, each once, as one string; `<...>` includes stay.

    `#line` keeps file names and line numbers of compiler messages right. `folder` replaces the package's own sources.
    """
    root = source_dir() if folder is None else folder
    seen: set[str] = set()

    def lines(name: str) -> list[str]:
        seen.add(name)
        result = [f'#line 1 "{name}"']
        for number, line in enumerate((root / name).read_text(encoding="utf-8").splitlines(), 1):
            include = _INCLUDE.match(line)
            if include is None:
                result.append("" if line.strip() == "#pragma once" else line)
            elif include[1] in seen:
                result.append("")
            else:
                result += lines(include[1])
                result.append(f'#line {number + 1} "{name}"')
        return result

    return "\n".join(lines(source)) + "\n"


class CompileError(RuntimeError):
    """A CUDA source did not compile; the message has kernel, specialisation, options and the compiler's log."""


@dataclass(frozen=True, slots=True)
class Specialisation:
    """One kernel with its compile-time constants."""

    kernel: str
    source: str  # "decode.cu"
    defines: tuple[tuple[str, int | str], ...]

    @classmethod
    def of(cls, kernel: str, source: str, defines: Mapping[str, int | str]) -> Specialisation:
        return cls(kernel, source, tuple(sorted({"kDebug": int(debug()), **defines}.items())))

    @property
    def options(self) -> tuple[str, ...]:
        return (*_OPTIONS, *(f"-D{name}={value}" for name, value in self.defines))

    def __str__(self) -> str:
        return f"{self.kernel} of {self.source} with " + ", ".join(f"{name}={value}" for name, value in self.defines)


def debug() -> bool:
    """CUPAGED_DEBUG=1: kernels clamp what they read from device memory, and each compilation is reported on stderr."""
    return os.environ.get("CUPAGED_DEBUG", "0") not in ("", "0")


def compile_function(what: Specialisation, arch: int, shared_bytes: int) -> Any:
    """The function on CuPy's current device, and on no other. Raises CompileError."""
    import cupy

    module = cupy.RawModule(code=flatten(what.source), options=what.options)
    with _explained(what, arch):
        function = module.get_function(what.kernel)
    if shared_bytes > 48 * 1024:
        function.max_dynamic_shared_size_bytes = shared_bytes
    if debug():
        print(
            f"cupaged: {what} for sm_{arch}: {function.num_regs} registers, {shared_bytes} bytes of shared memory, "
            f"{function.local_size_bytes} bytes of local memory",
            file=sys.stderr,
        )
    return function.kernel  # of this device: a RawKernel asks at each launch which one is current


def compile_cubin(what: Specialisation, arch: int) -> tuple[bytes, str]:
    """Machine code for `sm_<arch>` and the log of `ptxas -v`, on a machine that needs no GPU and no driver."""
    from cupy.cuda import nvrtc

    # CuPy itself always adds -ftz=true
    flags = (*what.options, "-ftz=true", f"-arch=sm_{arch}", "--ptxas-options=-v", *_cuda_includes())
    program = nvrtc.createProgram(flatten(what.source), what.source, (), ())
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            message = f"{what} does not compile for sm_{arch}\noptions: {' '.join(flags)}\n{log}"
            raise CompileError(message + _advice(message)) from error
        # getCUBIN drops the last byte of the image
        return bytes(nvrtc.getCUBIN(program)) + b"\0", str(nvrtc.getProgramLog(program))
    finally:
        nvrtc.destroyProgram(program)


@contextmanager
def _explained(what: Specialisation, arch: int) -> Iterator[None]:
    """What CuPy raises where it compiles, loads or keeps a kernel, as a CompileError that says what helps."""
    from cupy.cuda.compiler import CompileException
    from cupy_backends.cuda.api.driver import CUDADriverError

    try:
        yield
    except (CompileException, CUDADriverError, OSError) as error:
        failed = "does not compile" if isinstance(error, CompileException) else "cannot be loaded"
        message = f"{what} {failed} for sm_{arch}\noptions: {' '.join(what.options)}\n{type(error).__name__}: {error}"
        raise CompileError(message + _advice(str(error), isinstance(error, OSError))) from error


def _advice(text: str, of_system: bool = False) -> str:
    """What helps against an error with this text; `of_system`: it came from the operating system."""
    if of_system:
        return "\nif CuPy's cache of compiled kernels cannot be written, set CUPY_CACHE_DIR to a folder that can, or CUPY_CACHE_IN_MEMORY=1"
    if "--gpu-architecture" in text or "NO_BINARY_FOR_GPU" in text or "UNSUPPORTED_PTX" in text:
        from cupy.cuda import nvrtc

        version = ".".join(map(str, nvrtc.getVersion()))
        return (
            f"\nthis compiler, NVRTC {version}, and this device or its driver do not go together: pip install -U nvidia-cuda-nvrtc-cu12 "
            "(nvidia-cuda-nvrtc for CUDA 13), or a newer driver"
        )
    if "open source file" in text:
        return "\nCUDA's headers are missing: pip install nvidia-cuda-runtime-cu12 (nvidia-cuda-runtime for CUDA 13)"
    return ""


@lru_cache(maxsize=1)
def _cuda_includes() -> tuple[str, ...]:
    """Where CuPy finds the CUDA headers: the wheels' folder or the toolkit's."""
    from cupy._core import core

    return tuple(core.assemble_cupy_compiler_options(()))
