"""CuPy itself where there is no GPU: `python -m pytest -p pretend -m gpu` runs the GPU tests on it (with `tests` on PYTHONPATH).

CuPy's compiled modules find the functions of `cupy_backends.cuda.api.runtime` and `.driver` as capsules, when they are imported.
`install` replaces those capsules before the rest of CuPy is imported, so that CuPy's own code packs arguments, converts arrays, pools
memory and keeps current streams and devices, and the calls that it would make of CUDA end in `device.py`. Kernels of this package are
run by the executor (tests/simt) with the bytes that CuPy would hand to `cuLaunchKernel`. They are not compiled to machine code here.

What CUDA would refuse is kept in `refused`, since C code cannot be told, and fails the test.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .device import Pretend

_LEFT = ("get_build_version", "runtimeGetVersion", "_getCUDAMajorVersion", "check_status")  # need no driver
_C_TYPES = {
    "PyObject *": ctypes.py_object, "intptr_t": ctypes.c_ssize_t, "size_t": ctypes.c_size_t, "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint, "float": ctypes.c_float, "uintmax_t": ctypes.c_ulonglong, "CUdevice": ctypes.c_int,
    "cudaMemcpyKind": ctypes.c_int,
}  # fmt: skip
installed: list[Pretend] = []
_ended: list[int] = []


def pytest_configure() -> None:
    """As a plugin: two devices."""
    installed.append(install(num_devices=2))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    _ended.append(int(exitstatus))


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """CuPy frees what it holds when the interpreter ends, by calls that Python cannot take any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_ended[-1] if _ended else 1)


@pytest.fixture(autouse=True)
def nothing_refused() -> Iterator[None]:
    """No call was one that CUDA would refuse."""
    installed[0].refused.clear()
    yield
    assert not installed[0].refused


def install(arch: int = 90, num_devices: int = 1) -> Pretend:
    """Take the place of CUDA for the CuPy that this process imports from now on."""
    assert not any(name.split(".")[0] == "cupy" for name in sys.modules), "CuPy has found its CUDA already"
    from cupy_backends.cuda.api import driver, runtime

    pretend = Pretend(arch, num_devices)
    pretend.runtime = runtime
    for module in (runtime, driver):
        for name, capsule in list(module.__pyx_capi__.items()):
            signature = bytes(_name_of(capsule))
            if b"(" in signature and name not in _LEFT:
                call = getattr(pretend, name, None) or _missing(pretend, name)
                module.__pyx_capi__[name] = _capsule(call, signature, pretend)
                if hasattr(module, name):
                    setattr(module, name, call)
    import cupy.cuda.compiler as compiler

    compile_with_cache = compiler._compile_module_with_cache

    def remembered(source: str, options: tuple[str, ...] = (), **how: Any) -> Any:
        constants = dict(option[2:].split("=", 1) for option in options if option.startswith("-D") and "=" in option)
        pretend.compiling = (source, constants)
        return compile_with_cache(source, options, **how)

    class Nothing(compiler._KernelCacheBackend):  # type: ignore[misc]
        def load(self, name: str) -> None:
            return None

        def save(self, name: str, cubin: bytes, source: str) -> None:
            pass

    compiler._compile_module_with_cache = remembered
    compiler._compile_using_nvrtc_no_warning = lambda *source, **how: (b"\x7fELF", None)
    compiler._kernel_cache_backend = Nothing()
    return pretend


def _missing(pretend: Pretend, name: str) -> Callable[..., None]:
    def call(*arguments: Any) -> None:
        pretend.require(False, f"{name} is not known here")

    return call


_kept: list[Any] = []  # what C code points to
_new, _name_of = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetName
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_name_of.restype, _name_of.argtypes = ctypes.c_char_p, (ctypes.py_object,)


def _capsule(call: Callable[..., Any], signature: bytes, pretend: Pretend) -> Any:
    """A capsule of the signature's type, which is its name, that calls `call`."""
    found = re.fullmatch(r"(.*?)\s?\((.*)\)", signature.decode())
    assert found is not None
    result, *arguments = (_c_type(text.strip()) for text in (found[1], *found[2].split(",")) if text.strip() != "void")
    own = sum(
        "__pyx_skip" not in text and "__pyx_opt" not in text and text.strip() != "void" for text in found[2].split(",")
    )

    def entry(*given: Any) -> Any:
        try:
            return call(*given[:own])
        except Exception as error:  # C code cannot be told
            pretend.refused.append(f"{getattr(call, '__name__', '')}{given[:own]}: {error}")
            return None if result is ctypes.py_object else 0

    function = ctypes.CFUNCTYPE(result, *arguments)(entry)
    name = ctypes.create_string_buffer(signature)
    _kept.extend((function, name))
    return _new(ctypes.cast(function, ctypes.c_void_p), ctypes.cast(name, ctypes.c_char_p), None)


def _c_type(text: str) -> Any:
    if "__pyx_opt_args" in text:
        return ctypes.c_void_p
    if "struct __pyx_obj" in text:
        return ctypes.py_object
    if "__pyx_skip_dispatch" in text:
        return ctypes.c_int
    return _C_TYPES.get(text, ctypes.c_void_p)
