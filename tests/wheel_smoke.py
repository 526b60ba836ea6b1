"""What an installed wheel must do, without this repository and without a GPU: `make wheel-check` runs it in an environment of its own.

Writes and attends on the CPU and compares with the oracle, runs the commands, and compiles every CUDA source of the wheel with NVRTC for
every architecture, element types taking turns. Not collected by pytest: nothing but the wheel and its extras may be needed.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import cupaged
from cupaged.cuda import Backend
from cupaged.cuda_structs import classic_defines
from cupaged.kernels import Specialisation, compile_cubin, source_dir
from cupaged.launcher import DeviceInfo

# bytes of shared memory per block and per multiprocessor: CUDA C++ Programming Guide, table of compute capabilities
SHARED = {75: (64, 64), 80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
TYPES = (("float16", None), ("bfloat16", None), ("float16", "fp8_e4m3"), ("bfloat16", "fp8_e5m2"))


class Compiler:
    """The part of a launcher that makes functions: machine code, kept by nobody."""

    def __init__(self, arch: int) -> None:
        per_block, per_sm = SHARED[arch]
        self.info = DeviceInfo(f"sm_{arch}", arch, 100, per_block << 10, per_sm << 10, 40 << 20)
        self.sources: set[str] = set()
        self.compiled = 0

    def get(self, kernel: str, source: str, defines: Any, shared_bytes: int = 0) -> None:
        cubin, _ = compile_cubin(Specialisation.of(kernel, source, defines), self.info.arch)
        assert cubin.startswith(b"\x7fELF"), f"{kernel} for sm_{self.info.arch}"
        self.sources.add(source)
        self.compiled += 1

    def pinned(self, num_bytes: int) -> np.ndarray:
        return np.empty(num_bytes, np.uint8)


def compile_everything() -> None:
    there = {path.name for path in source_dir().glob("*.cu")}
    for i, arch in enumerate(SHARED):
        compiler, start = Compiler(arch), time.monotonic()
        dtype, kv_dtype = TYPES[i % len(TYPES)]
        module = sys.modules[cupaged.warmup.__module__]
        with mock.patch.object(module, "current_backend", lambda: Backend(compiler)):  # noqa: B023
            shape = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
            cupaged.warmup(**shape, dtype=dtype, kv_dtype=kv_dtype, max_queries=8)
            cupaged.warmup(**shape, dtype="float32")
        for partition in (0, 512):
            compiler.get(
                "classic_attention", "classic.cu", classic_defines(dtype, kv_dtype or dtype, 128, 16, partition)
            )
        needed = there if arch >= 80 else there - {"decode_mma.cu", "prefill.cu"}
        assert compiler.sources == needed, needed ^ compiler.sources
        print(f"sm_{arch}: {compiler.compiled} kernels from {len(needed)} sources, {time.monotonic() - start:.1f} s")


def attend_and_compare() -> None:
    rng = np.random.default_rng(0)
    alloc = cupaged.BlockAllocator(num_blocks=16, block_size=16)
    cache = cupaged.KVCache(
        num_layers=1, num_blocks=16, block_size=16, num_kv_heads=2, head_dim=64, dtype="float32", device="cpu"
    )
    k, v = (rng.standard_normal((37, 2, 64), np.float32) for _ in range(2))
    q = rng.standard_normal((37, 4, 64), np.float32)
    step = alloc.add_request("A", 37)
    cache.begin(step)
    cache.write(0, k, v, step)
    out = cache.attend(0, q, step)
    expected, _ = cupaged.reference.dense_attention(q, k, v)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    print("attention on the CPU equals the oracle")


def run_commands(folder: Path) -> None:
    def run(*command: str) -> str:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout

    program = str(Path(sys.executable).with_name("cupaged"))
    report = json.loads(run(program, "info", "--json"))
    assert report["versions"]["cupaged"] == importlib.metadata.version("cupaged") == cupaged.__version__
    assert report["backends"]["cpu"]["available"]
    run(sys.executable, "-m", "cupaged", "simulate", "--help")
    run(sys.executable, "-m", "cupaged", "generate", "--help")
    code = "from cupaged.bench import summary; assert summary.cases('control-plane', short=True)"
    run(sys.executable, "-c", code)
    print("the commands answer")


def main() -> None:
    assert "site-packages" in cupaged.__file__, f"not the installed wheel: {cupaged.__file__}"
    installed = {d.name.lower() for d in importlib.metadata.distributions()}
    assert not installed & {"torch", "pytest"}, "the environment has more than the wheel and its extras"
    attend_and_compare()
    with tempfile.TemporaryDirectory() as folder:
        run_commands(Path(folder))
    compile_everything()


if __name__ == "__main__":
    main()
