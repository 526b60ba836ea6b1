"""Compile CUDA sources with g++ for the executor, once per content.

A build is one shared object of one flattened source, one set of `-D` constants, one architecture and one kind:

    plain     runs fast
    checked   every memory access is seen by the executor (bounds, uninitialised shared memory), integer and alignment checks
    asan      AddressSanitizer, runs in a process of its own (`worker.py`)
    tsan      ThreadSanitizer, the same

Everything lands in a folder named by `CUPAGED_SIMT_CACHE` (default `.cache/simt` in the repository), under a hash of all that
went in: source, constants, executor, headers, compiler.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNTIME_SOURCES = ("runtime.cpp", "memory.cpp", "warp.cpp", "trace.cpp", "hooks.cpp")
RUNTIME_HEADERS = ("simt.h", "simt_ptx.h", "runtime.h")
KINDS = ("plain", "checked", "asan", "tsan")
_KEPT_SECONDS = 3 * 24 * 3600  # builds that no test has used for so long are removed

_COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-pthread", "-g1", "-gdwarf-4", "-w"]
# Vector instructions and merged or split accesses would hide what the source does from the checked build.
_AS_WRITTEN = ["-fno-tree-vectorize", "-fno-store-merging", "-fno-tree-sra"]
_SEEN = ["-fsanitize=thread,alignment,signed-integer-overflow,shift", "-DSIMT_CHECKED"]
_KERNEL = {
    "plain": ["-O1"],
    "checked": ["-O1", *_AS_WRITTEN, *_SEEN],
    "asan": ["-O1", "-fno-omit-frame-pointer", "-fsanitize=address", "-DSIMT_ASAN"],
    "tsan": ["-O1", "-fsanitize=thread", "-DSIMT_TSAN"],
}
_RUNTIME = {
    "plain": ["-O2"],
    "checked": ["-O2", "-DSIMT_CHECKED"],
    "asan": ["-O1", "-fno-omit-frame-pointer", "-fsanitize=address", "-DSIMT_ASAN"],
    "tsan": ["-O2", "-DSIMT_TSAN"],
}
_LINK = {"plain": [], "checked": [], "asan": ["-fsanitize=address"], "tsan": ["-Wl,--no-as-needed", "-ltsan"]}

_ENTRY = re.compile(
    r'extern\s+"C"\s+__global__((?:\s|void\b|__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\))+)(\w+)\s*\(([^)]*)\)'
)
_BOUNDS = re.compile(r"__launch_bounds__\s*\(((?:[^()]|\([^()]*\))*)\)")
_STATIC_SHARED = re.compile(r"(?:(?<!extern) |[;{}])__shared__ [^;]*;")


class BuildError(RuntimeError):
    """g++ or the executor refused a source; the message holds kernel, constants and the compiler's log."""


@lru_cache(maxsize=1)
def include_dirs() -> tuple[Path, ...]:
    """Folders of the CUDA headers, found through the packages that bring them. Raises FileNotFoundError with the reason."""
    folders: list[Path] = []
    wanted = (
        ("nvidia-cuda-runtime-cu12", "cuda_fp16.h"),
        ("nvidia-cuda-nvcc-cu12", "crt/host_defines.h"),
        ("cupy-cuda12x", "nv/target"),
    )
    for package, header in wanted:
        try:
            files = metadata.files(package) or []
        except metadata.PackageNotFoundError:
            raise FileNotFoundError(f"the executor needs {header} of {package}: pip install {package}") from None
        found = [Path(str(file.locate())) for file in files if file.as_posix().endswith("/" + header)]
        if not found:
            raise FileNotFoundError(f"{package} {metadata.version(package)} holds no {header}")
        folders.append(found[0].parents[header.count("/")])
    return tuple(folders)


def unavailable() -> str | None:
    """Why the executor cannot run here, or None."""
    if os.uname().machine != "x86_64":
        return f"the executor switches fibers in x86-64 assembly; this machine is {os.uname().machine}"
    if shutil.which("g++") is None:
        return "g++ is not on the PATH"
    try:
        include_dirs()
    except FileNotFoundError as error:
        return str(error)
    return None


@lru_cache(maxsize=1)
def _cache_dir() -> Path:
    folder = Path(os.environ.get("CUPAGED_SIMT_CACHE", HERE.parent.parent / ".cache" / "simt"))
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        with suppress(OSError):  # another process finished its build, or is clearing it away
            if time.time() - entry.stat().st_mtime > _KEPT_SECONDS:
                gone = entry.rename(entry.with_name(f"{entry.name}.{os.getpid()}.gone"))  # whole, not file by file
                shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    return folder


def _known(entry: Path) -> bool:
    """Whether the cache has it; marks it as used."""
    with suppress(FileNotFoundError):
        os.utime(entry)
        return True
    return False


@lru_cache(maxsize=1)
def _machine_flags() -> list[str]:
    """AVX2 and FMA where the processor has them: then products and sums contract as they do on the device."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("flags", 1)[-1].split("\n", 1)[0].split()
    return ["-march=x86-64-v3"] if {"avx2", "fma", "bmi2", "f16c", "movbe"} <= set(flags) else ["-march=x86-64-v2"]


@lru_cache(maxsize=1)
def _environment() -> str:
    """What every build depends on besides its own source."""
    parts = [subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout]
    parts += [(HERE / name).read_text(encoding="utf-8") for name in RUNTIME_SOURCES + RUNTIME_HEADERS + ("worker.cpp",)]
    parts += [str(folder) for folder in include_dirs()]
    parts += [metadata.version(name) for name in ("nvidia-cuda-runtime-cu12", "nvidia-cuda-nvcc-cu12", "cupy-cuda12x")]
    parts += [repr((_COMMON, _KERNEL, _RUNTIME, _LINK, _machine_flags()))]
    return "\0".join(parts)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{what}\n{' '.join(command)}\n{done.stderr}")


def _includes() -> list[str]:
    return [flag for folder in include_dirs() for flag in ("-isystem", str(folder))]


def _publish(made: Path, target: Path) -> None:
    os.replace(made, target)  # atomic: another process may have built the same


@cache
def runtime(kind: str) -> Path:
    """The executor itself, as a shared object."""
    target = _cache_dir() / f"runtime-{kind}-{_hash(_environment(), kind)}.so"
    if not _known(target):
        made = target.with_suffix(f".{os.getpid()}.tmp")
        command = ["g++", *_COMMON, *_machine_flags(), *_RUNTIME[kind], "-shared", "-o", str(made)]
        command += [
            f"-Wl,-soname,{target.name}",
            *_includes(),
            *(str(HERE / name) for name in RUNTIME_SOURCES),
            *_LINK[kind],
        ]
        _run(command, f"building the executor ({kind})")
        _publish(made, target)
    return target


@cache
def worker(kind: str) -> Path:
    """The program that runs launches under a sanitizer."""
    target = _cache_dir() / f"worker-{kind}-{_hash(_environment(), kind)}"
    if not _known(target):
        made = target.with_suffix(f".{os.getpid()}.tmp")
        command = ["g++", *_COMMON, *_machine_flags(), *_RUNTIME[kind], *_includes(), "-o", str(made)]
        command += [str(HERE / "worker.cpp"), str(runtime(kind)), "-Wl,-rpath,$ORIGIN", *_LINK[kind]]
        _run(command, f"building the worker ({kind})")
        _publish(made, target)
    return target


@cache
def _prelude(kind: str) -> Path:
    """`simt.h`, precompiled."""
    folder = _cache_dir() / f"prelude-{kind}-{_hash(_environment(), kind)}"
    header, compiled = folder / "simt.h", folder / "simt.h.gch"
    if not (_known(folder) and _known(compiled)):
        folder.mkdir(exist_ok=True)
        made = folder / f"{os.getpid()}.tmp"
        made.write_text(f'#include "{HERE / "simt.h"}"\n', encoding="utf-8")
        _publish(made, header)  # another process may be compiling it
        flags = [*_COMMON, *_machine_flags(), *_KERNEL[kind], *_includes()]
        _run(["g++", *flags, "-x", "c++-header", str(header), "-o", str(made)], "precompiling simt.h")
        _publish(made, compiled)
    return header


def _entry_points(entries: list[tuple[str, str]]) -> list[str]:
    """For each kernel: a function that takes its parameters by address, the size of their struct, the bound on threads."""
    lines = [
        '#line 1 "entries"',
        "template <class P> constexpr unsigned simt_size(void (*)(P)) { return sizeof(P); }",
        "template <class P> __attribute__((no_sanitize_thread)) void simt_call(void (*f)(P), const void* p) {",
        "  f(*static_cast<const P*>(p));",
        "}",
        "#pragma GCC visibility push(default)",
        'extern "C" {',
    ]
    for name, bounds in entries:
        lines.append(f"void simt_entry_{name}(const void* p) {{ simt_call({name}, p); }}")
        lines.append(f"extern const unsigned simt_size_{name} = simt_size({name});")
        lines.append(f"extern const int simt_bounds_{name}[] = {{{bounds}}};")
    return [*lines, "}", "#pragma GCC visibility pop", ""]


def kernel(text: str, defines: Mapping[str, int | str], arch: int, kind: str = "plain") -> Path:
    """The shared object of the flattened source `text`. Raises BuildError."""
    if bad := _STATIC_SHARED.search(re.sub(r"\s+", " ", re.sub(r"//[^\n]*", "", text))):
        raise BuildError(f"only `extern __shared__` memory is supported: {bad[0].strip(' ;{}')}")
    entries = []
    for match in _ENTRY.finditer(text):
        bounds = _BOUNDS.search(match[1])
        entries.append((match[2], bounds[1] if bounds else "1024"))
    if not entries:
        raise BuildError('no `extern "C" __global__ void name(const Params p)` in the source')
    source = "\n".join(
        [
            f"#define __CUDA_ARCH__ {arch * 10}",
            "#define CUPAGED_SIMT 1",
            *(f"#define {name} {value}" for name, value in defines.items()),
            text,
            *_entry_points(entries),
        ]
    )
    target = _cache_dir() / f"{entries[0][0]}-{kind}-{_hash(_environment(), kind, source)}.so"
    if not _known(target):
        made = target.with_suffix(f".{os.getpid()}")
        written = made.with_suffix(f".{os.getpid()}.cpp")
        written.write_text(source, encoding="utf-8")
        flags = [*_COMMON, *_machine_flags(), *_KERNEL[kind], "-include", str(_prelude(kind)), *_includes()]
        what = f"compiling {[name for name, _ in entries]} for the executor ({kind}, sm_{arch}) with {dict(defines)}"
        try:
            _run(["g++", *flags, "-c", str(written), "-o", str(made) + ".o"], what)
            link = ["g++", "-shared", "-o", str(made), str(made) + ".o", str(runtime(kind)), "-Wl,-rpath,$ORIGIN"]
            _run([*link, *_LINK[kind]], what)
            _publish(made, target)
        finally:
            for left in (written, Path(str(made) + ".o")):
                left.unlink(missing_ok=True)
    return target
