"""Everything that needs a GPU, in under nine minutes: the gpu-marked tests, then the benchmarks of attention, then peers.

    make gpu-check PYTHON=python3 OUT=results        (or: OUT=results python -m bench.gpu_check)

Needs an environment with CuPy for CUDA 12 or 13, pytest and hypothesis, and pytest-xdist for the tests to end in their time; nothing
is installed. Writes to the folder OUT (default "gpu-check"), as far as it got: gpu-check.json (device, versions, tests, every figure),
gpu-check.txt (a short table), gpu-tests.txt (the tests' output), gpu-peers.txt (a line for each time of a peer; only with PyTorch).
Tests run first; benchmarks run whatever the tests say, as many as the time allows, and peers in what is left of it. Ends with status 0
when all tests passed and no benchmark failed, 1 otherwise, 2 without a GPU.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Tests compile some 300 kernels, 185 s of one core, and bring up CUDA in every process; a case takes about 2 s.
TOTAL_SECONDS, TEST_SECONDS = 530.0, 260.0
KEPT_SECONDS = 20.0  # for the last case and for writing


def main() -> int:
    start = time.monotonic()
    try:
        import cupy
    except ImportError:
        print("gpu-check: CuPy is not installed here: pip install 'cupaged[cuda12x]' (or [cuda13x])", file=sys.stderr)
        return 2
    if not cupy.cuda.is_available():
        print("gpu-check: CuPy finds no GPU (no CUDA device or no driver)", file=sys.stderr)
        return 2
    folder = Path(os.environ.get("OUT") or "gpu-check")
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": describe(cupy)}
    print(json.dumps(report["machine"]), flush=True)
    write(folder, report)

    report["tests"] = run_tests(folder / "gpu-tests.txt")
    print(f"tests: {report['tests']['summary']}", flush=True)
    write(folder, report)
    report["attention"] = []
    run_benchmarks(start + TOTAL_SECONDS - KEPT_SECONDS, report["attention"], lambda: write(folder, report))
    run_peers(folder / "gpu-peers.txt", start + TOTAL_SECONDS - KEPT_SECONDS, report["attention"])
    report["seconds"] = round(time.monotonic() - start, 1)
    print(write(folder, report))
    failed = report["tests"]["status"] != 0 or any("error" in r for r in report["attention"])
    return int(failed)


def describe(cupy: Any) -> dict[str, Any]:
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    free, memory = cupy.cuda.Device().mem_info
    return {
        "device": properties["name"].decode(),
        "compute_capability": cupy.cuda.Device().compute_capability,
        "multiprocessors": properties["multiProcessorCount"],
        "l2_bytes": properties["l2CacheSize"],
        "memory_bytes": memory,
        "free_bytes": free,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "nvrtc": nvrtc(cupy),
        "peers": {name: version(name) for name in ("torch", "flashinfer-python")},
        "python": sys.version.split()[0],
        "commit": commit(),
    }


def nvrtc(cupy: Any) -> str:
    """Version of the compiler, or why there is none: without it, and without CUDA's headers, nothing below runs."""
    try:
        return ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    try:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def run_tests(log: Path) -> dict[str, Any]:
    """The tests marked gpu, in processes of their own so that a broken context does not reach the benchmarks.

    Most of their time goes to compiling a few hundred kernels: side by side where pytest-xdist is installed.
    """
    options = [
        "-m",
        "gpu and not fuzz",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
    ]
    if find_spec("xdist"):
        options += ["-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    start = time.monotonic()
    status = run(command, log, TEST_SECONDS)
    lines = log.read_text(errors="replace").splitlines()
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|error|skipped|deselected)", line)]
    summary = (counts or lines or ["no output"])[-1].strip("= ")
    if status == 124:
        summary = f"stopped after {TEST_SECONDS:.0f} s: {summary}"
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "status": status, "summary": summary, "failures": failures, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def run(command: list[str], log: Path, seconds: float) -> int:
    """The status of a command, 124 where it was stopped after so many seconds; its output goes to `log`."""
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest says what it knows by then
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers too: a kernel that hangs would disturb what comes next
            process.wait()
            return 124


def run_benchmarks(deadline: float, results: list[dict[str, Any]], save: Callable[[], object]) -> None:
    """Append the result of every case that still fits, and save each; one that fails is reported and the next one runs."""
    import cupy

    from bench.gpu_attention import CASES, compile_kernels, fits, measure, memory_needed

    compile_kernels(CASES)
    for case in CASES:
        if time.monotonic() > deadline:
            results.append({"case": case.name, "skipped": "no time left"})
            continue
        if not fits(case):
            free = cupy.cuda.Device().mem_info[0]
            needed = f"needs {memory_needed(case) / 2**30:.1f} GiB, {free / 2**30:.1f} are free"
            results.append({"case": case.name, "skipped": needed})
            continue
        try:
            results.append(measure(case).as_dict())
        except Exception as error:
            results.append({"case": case.name, "error": f"{type(error).__name__}: {error}"[:2000]})
        print(results[-1], flush=True)
        save()
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()


def run_peers(log: Path, deadline: float, results: list[dict[str, Any]]) -> None:
    """Add what peers took to the results of the same cases, as far as the time goes."""
    seconds = deadline - time.monotonic()
    if find_spec("torch") is None or seconds < 10:
        return
    print(f"peers: {seconds:.0f} s", flush=True)
    run([sys.executable, "-m", "bench.gpu_peers", str(seconds - 5)], log, seconds)
    add_peers(log.read_text(errors="replace"), results)


def add_peers(text: str, results: list[dict[str, Any]]) -> None:
    """Put the times of the lines of `gpu_peers` into the results of their cases."""
    measured = {r["case"]: r for r in results if "peer_us" in r}
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):  # what libraries print
            found = json.loads(line)
            measured[found["case"]]["peer_us"][found["peer"]] = found["us"]


def write(folder: Path, report: dict[str, Any]) -> str:
    """Save what is known so far. Returns the table."""
    from bench.gpu_attention import table

    (folder / "gpu-check.json").write_text(json.dumps(report, indent=1) + "\n")
    machine = report["machine"]
    tests = report["tests"]["summary"] if "tests" in report else "did not end"
    measured = [r for r in report.get("attention", []) if "skipped" not in r]
    text = (
        f"{machine['device']} (sm_{machine['compute_capability']}), CuPy {machine['cupy']}, CUDA {machine['runtime']}\n"
        f"tests: {tests}\n\n{table(measured)}\n"
    )
    (folder / "gpu-check.txt").write_text(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
