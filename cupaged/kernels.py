"""CUDA sources: find them, flatten their includes into one string, specialise and compile.

The only file that knows NVRTC and `RawModule`. A kernel is an `extern "C"` function of one `.cu` file with one by-value
parameter struct; everything known at compile time comes as `-D` constants. The source is handed over as one string because
CuPy's disk cache looks at the string and not at files behind `-I`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

# How the sources spell an element type (types.cuh has the two fp8 formats as one-byte structs).
CUDA_TYPES = {
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')


@lru_cache(maxsize=1)
def source_dir() -> Path:
    """The folder of the CUDA sources: inside an installed wheel, else beside the package in the repository."""
    here = Path(__file__).resolve().parent
    for folder in (here / "cuda_src", here.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"no CUDA sources in {here / 'cuda_src'} or {here.parent / 'cuda_src'}; reinstall cupaged")


@lru_cache(maxsize=None)
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
                if line.strip() != "#pragma once":
                    result.append(line)
            elif include[1] not in seen:
                result += lines(include[1])
                result.append(f'#line {number + 1} "{name}"')
        return result

    return "\n".join(lines(source)) + "\n"
