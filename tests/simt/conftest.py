"""Small kernels for the executor's own tests."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupaged.kernels import source_dir

from . import build
from .launcher import SimtLauncher

Run = Callable[..., SimtLauncher]


@pytest.fixture(autouse=True)
def _needs_the_executor() -> None:
    if reason := build.unavailable():
        pytest.skip(reason)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """`run(source, x=array, n=3, ...)`: compile the kernel `test` of `source`, launch it once, return the launcher.

    The struct `Params` is made of the keyword arguments in their order: arrays are pointers, ints are int, floats float.
    """
    for header in source_dir().glob("*.cuh"):
        shutil.copy(header, tmp_path)

    def run(
        source: str,
        /,
        *,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
        shared_bytes: int = 0,
        defines: dict[str, int | str] | None = None,
        **options_and_params: Any,
    ) -> SimtLauncher:
        options = {name: options_and_params.pop(name) for name in OPTIONS & options_and_params.keys()}
        (tmp_path / "test.cu").write_text(source, encoding="utf-8")
        launcher = SimtLauncher(folder=tmp_path, **options)
        text = '#include "ptx.cuh"\n#include "types.cuh"\nextern __shared__ __align__(128) unsigned char smem[];\n'
        text += f'struct Params {{ {_members(options_and_params)} }};\n#line 1 "test.cu"\n{source}'
        # The file name carries the content: flattened sources are cached by name.
        name = f"test{hashlib.sha256(text.encode()).hexdigest()[:16]}.cu"
        (tmp_path / name).write_text(text, encoding="utf-8")
        function = launcher.get("test", name, defines or {}, shared_bytes)
        launcher.launch(function, grid, block, _packed(launcher, options_and_params), shared_bytes)
        return launcher

    return run


OPTIONS = {"arch", "kind", "seed", "model", "copies", "traced"}
_C_NAMES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "int32": "int", "uint32": "unsigned"}
_C_NAMES |= {"uint8": "unsigned char", "uint16": "unsigned short", "int64": "long long", "uint64": "unsigned long long"}


def _members(params: dict[str, Any]) -> str:
    members = []
    for name, value in params.items():
        if isinstance(value, np.ndarray):
            members.append(f"{_C_NAMES[value.dtype.name]}* {name};")
        else:
            members.append(f"{'int' if isinstance(value, int) else 'float'} {name};")
    return " ".join(members)


def _packed(launcher: SimtLauncher, params: dict[str, Any]) -> np.ndarray[Any, Any]:
    kinds = [
        np.uint64 if isinstance(v, np.ndarray) else np.int32 if isinstance(v, int) else np.float32
        for v in params.values()
    ]
    packed = np.zeros(1, np.dtype(list(zip(params, kinds, strict=True)), align=True))
    for name, value in params.items():
        packed[name] = launcher.pointer(value) if isinstance(value, np.ndarray) else value
    return packed
