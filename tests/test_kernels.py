"""Sources and specialisations: what is compiled is what was asked for, and every pair of shapes gives right values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import behaviour
import devices
import numpy as np
import pairwise
import pytest
from behaviour import assert_close, make_case
from devices import Device

from cupaged import kernels, reference
from cupaged.arrays import numpy_dtype
from cupaged.cuda_structs import merge_defines
from cupaged.kernels import CompileError, Specialisation, compile_cubin, compile_function, flatten, source_dir

FACTORS = {
    "head_dim": (32, 64, 80, 96, 128, 192, 256),
    "block_size": (1, 8, 16, 24, 32, 128),
    "group": (1, 3, 4, 7, 8),
    "dtype": ("float32", "float16", "bfloat16"),
    "kv_dtype": (None, "fp8_e4m3", "fp8_e5m2"),
    "layout": ("HND", "NHD"),
    "queries": ("decode", "verify"),
    "arch": (75, 90),  # CUDA cores and tensor cores
}
ROWS = pairwise.cover(FACTORS)


def executor(arch: int = 90) -> Device:
    return devices.simt_sm75() if arch < 80 else devices.simt()


def gpu(arch: int = 0) -> Device:
    """The device there is, whatever `arch`."""
    return devices.cuda()


@pytest.fixture(params=[executor, pytest.param(gpu, marks=pytest.mark.gpu)], ids=["simt", "cuda"])
def device_of(request: pytest.FixtureRequest) -> Callable[..., Device]:
    return request.param


def test_the_cover_holds_every_pair() -> None:
    assert not pairwise.uncovered(ROWS, FACTORS)
    assert pairwise.uncovered(ROWS[1:], FACTORS), "a row less would miss one"


def as_id(row: pairwise.Row) -> str:
    return "-".join(str(value) for value in row.values())


@pytest.mark.parametrize("row", ROWS, ids=as_id)
def test_every_pair_of_shapes_writes_and_attends_right(
    device_of: Callable[..., Device], row: pairwise.Row, rng: np.random.Generator
) -> None:
    row = dict(row)
    device = device_of(row.pop("arch"))
    bs, verify = row["block_size"], row.pop("queries") == "verify"
    lens = [0, 1, 2 * bs + 1, int(rng.integers(40, 200))]
    case = make_case(rng, seq_lens=lens, query_lens=[1, 1, 3, 5] if verify else None, num_splits=None, **row)
    write_again(device, case, rng)
    assert_close(case, *device.paged_attention(*case.arguments(), **case.options), tensor_cores=device.tensor_cores)


def write_again(device: Device, case: behaviour.Case, rng: np.random.Generator) -> None:
    """Replace every visible key and value of the case by new ones through the device, and check every bit of the pool."""
    o = case.options
    bs = case.k_cache.shape[2 if o["layout"] == "HND" else 1]
    heads = case.k_cache.shape[1 if o["layout"] == "HND" else 2]
    slots = np.concatenate(
        [
            t[np.arange(n) // bs].astype(np.int64) * bs + np.arange(n) % bs
            for t, n in zip(case.block_tables, case.seq_lens, strict=True)
        ]
    )
    k, v = (rng.standard_normal((len(slots) + 2, heads, case.q.shape[2])).astype(case.q.dtype) for _ in range(2))
    expected = case.k_cache.copy(), case.v_cache.copy()
    how = {name: o[name] for name in ("layout", "kv_dtype")}
    reference.write_kv(k, v, *expected, slots, **how)
    device.write_kv(k, v, case.k_cache, case.v_cache, slots, **how)
    for got, wanted in zip((case.k_cache, case.v_cache), expected, strict=True):
        np.testing.assert_array_equal(np.ascontiguousarray(got).view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("arch", [75, 90])
@pytest.mark.parametrize("misalign", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_narrow_accesses_where_addresses_allow_no_wider(
    rng: np.random.Generator, misalign: int, dtype: str, arch: int
) -> None:
    """Pages that begin at an odd multiple of 2, 4 or 8 bytes: a wider access would be a misaligned one."""
    item = numpy_dtype(dtype).itemsize
    if misalign < item:
        pytest.skip("an element is wider than that")
    case = make_case(rng, seq_lens=[37, 5], head_dim=24, block_size=3, dtype=dtype, group=3)

    def moved(x: np.ndarray) -> np.ndarray:
        raw = np.zeros(x.nbytes + 64, np.uint8)
        start = -raw.ctypes.data % 16 + misalign
        there = raw[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
        there[...] = x
        return there

    case = behaviour.replace(case, k_cache=moved(case.k_cache), v_cache=moved(case.v_cache))
    device = executor(arch)  # a copy to a GPU would align the pages again
    write_again(device, case, rng)
    assert_close(case, *device.paged_attention(*case.arguments(), **case.options), tensor_cores=device.tensor_cores)


# ----------------------------------------------------------------------------------------------------------- sources


def test_flatten_takes_every_file_once_and_keeps_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n#include "c.cuh"\nint a;\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "c.cuh"\n#include <cuda_fp16.h>\nint b;\n')
    (tmp_path / "c.cuh").write_text("#pragma once\nint c;\n")
    text = flatten("a.cu", tmp_path)
    assert [line for line in text.splitlines() if line.startswith("int")] == ["int c;", "int b;", "int a;"]
    assert "#include <cuda_fp16.h>" in text and '#include "' not in text and "pragma" not in text
    lines = text.splitlines()
    at = lines.index("int a;")
    marker = max(i for i in range(at) if lines[i].startswith("#line") and lines[i].endswith('"a.cu"'))
    assert int(lines[marker].split()[1]) + (at - marker - 1) == 3


def test_sources_lie_in_the_wheel_or_in_the_repository() -> None:
    names = {path.name for path in source_dir().iterdir()}
    assert {"write_kv.cu", "copy_blocks.cu", "classic.cu", "decode.cu", "merge.cu", "ptx.cuh"} <= names


def test_only_one_file_has_inline_ptx_and_none_needs_a_missing_header() -> None:
    for path in source_dir().iterdir():
        text = path.read_text()
        assert path.name == "ptx.cuh" or "asm" not in text, f"{path.name}: instructions belong into ptx.cuh"
        for header in ("stdint.h", "type_traits", "mma.h", "cooperative_groups"):
            assert header not in text, f"{path.name}: NVRTC or its wheels lack {header}"


def test_constants_are_part_of_a_specialisation_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Specialisation.of("merge", "merge.cu", {"kA": 1, "kB": 2})
    assert (
        one
        == Specialisation.of("merge", "merge.cu", {"kB": 2, "kA": 1})
        != Specialisation.of("merge", "merge.cu", {"kA": 2, "kB": 1})
    )
    assert "-DkA=1" in one.options and "-DkDebug=0" in one.options
    monkeypatch.setenv("CUPAGED_DEBUG", "1")
    assert "-DkDebug=1" in Specialisation.of("merge", "merge.cu", {}).options


# ------------------------------------------------------------------------------------------------------- compilation


def test_a_source_that_does_not_compile_is_reported_with_everything_that_led_to_it() -> None:
    pytest.importorskip("cupy", reason="compiling needs CuPy")
    broken = Specialisation.of("merge", "merge.cu", {**merge_defines("float16"), "kParamsBytes": 8})
    with pytest.raises(CompileError) as failure:
        compile_cubin(broken, 80)
    message = str(failure.value)
    for part in (
        "merge of merge.cu",
        "kQueryType=__half",
        "-DkParamsBytes=8",
        "sm_80",
        "merge.cu(",
        "the host packs another struct",
    ):
        assert part in message


def test_the_cupy_path_reports_a_compile_error_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = pytest.importorskip("cupy", reason="the error is CuPy's")
    from cupy.cuda.compiler import CompileException

    def fail(self: Any, name: str) -> Any:
        raise CompileException("merge.cu(1): error: nonsense", "", name, ())

    monkeypatch.setattr(
        cupy, "RawModule", lambda code, options: SimpleNamespace(get_function=lambda name: fail(None, name))
    )
    with pytest.raises(
        CompileError, match=r"(?s)merge of merge.cu with .*kQueryType=__half.*options: .*-DkQueryType=__half.*nonsense"
    ):
        compile_function(Specialisation.of("merge", "merge.cu", merge_defines("float16")), 80, 0)


@pytest.mark.parametrize(
    ("kind", "said", "advice"),
    [
        ("compile", "nvrtc: error: invalid value for --gpu-architecture (-arch)", r"NVRTC \d+\.\d+, and this device .* pip install -U"),
        ("driver", "CUDA_ERROR_NO_BINARY_FOR_GPU: no kernel image is available", r"NVRTC \d+\.\d+, and this device .* pip install -U"),
        ("compile", 'catastrophic error: cannot open source file "cuda_fp16.h"', "headers are missing: pip install nvidia-cuda-runtime"),
        ("system", "[Errno 30] Read-only file system: 'kernel_cache/tmp1'", "set CUPY_CACHE_DIR to a folder"),
        ("compile", "merge.cu(1): error: nonsense", "nonsense$"),
    ],
)  # fmt: skip
def test_what_keeps_a_first_kernel_from_running_says_what_helps(
    monkeypatch: pytest.MonkeyPatch, kind: str, said: str, advice: str
) -> None:
    cupy = pytest.importorskip("cupy", reason="the errors are CuPy's")
    from cupy.cuda.compiler import CompileException
    from cupy_backends.cuda.api.driver import CUDADriverError

    class DriverError(CUDADriverError):  # CuPy's own asks the driver for the text of a number
        def __init__(self, text: str) -> None:
            RuntimeError.__init__(self, text)

    error = {"compile": CompileException(said, "", "x", ()), "driver": DriverError(said), "system": OSError(said)}[kind]

    def fail(name: str) -> Any:
        raise error

    monkeypatch.setattr(cupy, "RawModule", lambda code, options: SimpleNamespace(get_function=fail))
    with pytest.raises(CompileError, match=r"(?s)merge of merge.cu .* for sm_103.*" + advice) as found:
        compile_function(Specialisation.of("merge", "merge.cu", merge_defines("float16")), 103, 0)
    assert said in str(found.value)


def test_debug_mode_reports_what_was_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cupy = pytest.importorskip("cupy", reason="compiling needs CuPy")
    monkeypatch.setenv("CUPAGED_DEBUG", "1")
    function = SimpleNamespace(num_regs=42, local_size_bytes=0, max_dynamic_shared_size_bytes=0, kernel=object())
    monkeypatch.setattr(cupy, "RawModule", lambda code, options: SimpleNamespace(get_function=lambda name: function))
    compiled = compile_function(Specialisation.of("merge", "merge.cu", merge_defines("float16")), 80, 60 * 1024)
    assert compiled is function.kernel
    assert function.max_dynamic_shared_size_bytes == 60 * 1024
    said = capsys.readouterr().err
    assert (
        "merge of merge.cu" in said
        and "42 registers" in said
        and "61440 bytes of shared memory" in said
        and "sm_80" in said
    )


def test_debug_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPAGED_DEBUG", raising=False)
    assert not kernels.debug()
    for value, on in (("0", False), ("", False), ("1", True)):
        monkeypatch.setenv("CUPAGED_DEBUG", value)
        assert kernels.debug() is on
