"""Every kernel compiles to machine code for every architecture, without spills; no GPU and no driver are needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Any

import pairwise
import pytest

from cupaged.cuda_structs import classic_defines, copy_defines, decode_defines, merge_defines, write_defines
from cupaged.kernel_config import decode_config, decode_mma_config, most_rows, on_tensor_cores, prefill_config, rows_for
from cupaged.kernels import Specialisation, compile_cubin
from cupaged.launcher import DeviceInfo

pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC: pip install 'cupaged[cuda12x]'")

# bytes of shared memory per block and per multiprocessor: CUDA C++ Programming Guide, table of compute capabilities
SHARED = {75: (64, 64), 80: (163, 164), 86: (99, 100), 89: (99, 100), 90: (227, 228), 100: (227, 228), 120: (99, 100)}
ARCHS = tuple(SHARED)
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
ELEMENTS = {"dtype": ("float32", "float16", "bfloat16"), "kv_dtype": ("as q", "fp8_e4m3", "fp8_e5m2")}
DECODE = {
    "head_dim": HEAD_DIMS, "arch": ARCHS, "group": (1, 3, 4, 7, 8), "queries": (1, 40), **ELEMENTS, "vec": (16, 2),
    "planned": (True, False), "softcap": (False, True), "alibi": (False, True),
}  # fmt: skip
# everything that is compiled in and takes registers; windows, chunks, sinks and lse are decided at run time
TENSOR_CORES = {
    "head_dim": (64, 128, 256), "arch": ARCHS[1:], "rows": (8, 16, 64), "dtype": ("float16", "bfloat16"),
    "kv_dtype": ELEMENTS["kv_dtype"], "vec": (16, 2), "planned": (True, False), "block_size": (16, 64, 256, 3),
}  # fmt: skip
CLASSIC = {"head_dim": HEAD_DIMS, "block_size": (8, 16, 32, 64, 128), "arch": ARCHS, **ELEMENTS, "partition": (0, 512)}
WRITE = {
    "head_dim": (32, 46, 80, 256), "arch": ARCHS, **ELEMENTS, "vec": (8, 2, 1), "classic": (False, True), "slots": ("<i8", "<i4"),
}  # fmt: skip


def device(arch: int) -> DeviceInfo:
    per_block, per_sm = SHARED[arch]
    return DeviceInfo(f"sm_{arch}", arch, 100, per_block << 10, per_sm << 10, 40 << 20)


def compiled(what: Specialisation, arch: int) -> str:
    """The assembler's log."""
    cubin, log = compile_cubin(what, arch)
    assert cubin.startswith(b"\x7fELF")
    return log


def assert_all_in_registers(log: str) -> None:
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert frames, log
    assert all(number == "0" for frame in frames for number in frame), log


def kv(row: pairwise.Row) -> str:
    return row["dtype"] if row["kv_dtype"] == "as q" else row["kv_dtype"]


def check_decode(row: pairwise.Row) -> None:
    rows = rows_for(row["head_dim"], row["group"], row["queries"])
    config = decode_config(device(row["arch"]), row["head_dim"], row["dtype"], kv(row), rows)
    assert config.shared_bytes <= device(row["arch"]).shared_per_block
    defines = decode_defines(config, row["vec"], row["planned"], row["softcap"], row["alibi"])
    assert_all_in_registers(compiled(Specialisation.of("decode", "decode.cu", defines), row["arch"]))


def check_tensor_cores(row: pairwise.Row) -> None:
    """With soft cap and ALiBi. The rows of a unit choose the kernel: up to 16 decode_mma.cu, more prefill.cu."""
    info, head_dim, rows = device(row["arch"]), row["head_dim"], row["rows"]
    config = (decode_mma_config if rows <= 16 else prefill_config)(
        info, head_dim, row["dtype"], kv(row), rows, (0, rows)
    )
    assert config.shared_bytes <= info.shared_per_block
    defines = decode_defines(config, row["vec"], row["planned"], softcap=True, alibi=True, block_size=row["block_size"])
    what = Specialisation.of(config.kernel, f"{config.kernel}.cu", defines)
    assert_all_in_registers(compiled(what, row["arch"]))


def check_classic(row: pairwise.Row) -> None:
    defines = classic_defines(row["dtype"], kv(row), row["head_dim"], row["block_size"], row["partition"])
    assert_all_in_registers(compiled(Specialisation.of("classic_attention", "classic.cu", defines), row["arch"]))


def as_id(row: pairwise.Row) -> str:
    return "-".join(f"{name}={value}" for name, value in row.items())


@pytest.mark.parametrize("row", pairwise.cover(DECODE), ids=as_id)
def test_decode_keeps_everything_in_registers(row: pairwise.Row) -> None:
    check_decode(row)


@pytest.mark.parametrize("row", pairwise.cover(TENSOR_CORES), ids=as_id)
def test_tensor_cores_keep_everything_in_registers(row: pairwise.Row) -> None:
    check_tensor_cores(row)


@pytest.mark.parametrize("row", pairwise.cover(CLASSIC), ids=as_id)
def test_classic_keeps_everything_in_registers(row: pairwise.Row) -> None:
    check_classic(row)


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize(
    ("head_dim", "kv_dtype", "block_size"), [(192, "fp8_e4m3", 64), (192, "fp8_e5m2", 32), (256, "fp8_e4m3", 128)]
)
@pytest.mark.parametrize("partition", [0, 512])
def test_classic_has_registers_for_wide_rows_of_fp8(
    arch: int, head_dim: int, kv_dtype: str, block_size: int, partition: int
) -> None:
    check_classic(
        {
            "arch": arch, "head_dim": head_dim, "dtype": "float16", "kv_dtype": kv_dtype, "block_size": block_size,
            "partition": partition,
        }
    )  # fmt: skip


@pytest.mark.parametrize("row", pairwise.cover(WRITE), ids=as_id)
def test_write_compiles_everywhere(row: pairwise.Row) -> None:
    cache = kv(row)
    x = 16 // {"float32": 4, "float16": 2, "bfloat16": 2}.get(cache, 1)
    vec = row["vec"] if row["head_dim"] % row["vec"] == 0 else 2
    if row["classic"]:
        if row["head_dim"] % x:
            pytest.skip(f"the classic layout needs head_dim % {x} == 0")
        vec = min(vec, x)
    defines = write_defines(row["dtype"], cache, row["head_dim"], vec, row["classic"], row["slots"])
    compiled(Specialisation.of("write_kv", "write_kv.cu", defines), row["arch"])


@pytest.mark.parametrize("arch", ARCHS)
def test_copies_and_merges_compile_everywhere(arch: int) -> None:
    for vec in (1, 2, 4, 8, 16):
        assert_all_in_registers(compiled(Specialisation.of("copy_blocks", "copy_blocks.cu", copy_defines(vec)), arch))
    for dtype in ELEMENTS["dtype"]:
        assert_all_in_registers(compiled(Specialisation.of("merge", "merge.cu", merge_defines(dtype)), arch))


def test_the_covers_hold_every_pair() -> None:
    for factors in (DECODE, TENSOR_CORES, CLASSIC, WRITE):
        assert not pairwise.uncovered(pairwise.cover(factors), factors)


def every(factors: dict[str, Any], **fewer: Any) -> Iterator[pairwise.Row]:
    factors = {**factors, **fewer}
    for values in product(*factors.values()):
        yield dict(zip(factors, values, strict=True))


def of_decode(row: pairwise.Row) -> bool:
    """Whether decode.cu is ever compiled so: 16-bit queries are tensor cores' from sm_80 on, and wide rows are few."""
    return not on_tensor_cores(device(row["arch"]), row["dtype"]) and row["group"] <= most_rows(row["head_dim"])


@pytest.mark.fuzz
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("options", [False, True], ids=["plain", "softcap and alibi"])
def test_decode_keeps_everything_in_registers_in_every_combination(arch: int, options: bool) -> None:
    fewer = {
        "group": (1, 2, 4, 8, 16),
        "queries": (1,),
        "vec": (16,),
        "planned": (True,),
        "softcap": (options,),
        "alibi": (options,),
    }
    for row in filter(of_decode, every(DECODE, arch=(arch,), **fewer)):
        check_decode(row)


@pytest.mark.fuzz
@pytest.mark.parametrize("arch", ARCHS[1:])
@pytest.mark.parametrize("rows", TENSOR_CORES["rows"])
def test_tensor_cores_keep_everything_in_registers_in_every_combination(arch: int, rows: int) -> None:
    for row in every(TENSOR_CORES, arch=(arch,), rows=(rows,), vec=(16,), planned=(True,), block_size=(16, 64)):
        check_tensor_cores(row)


@pytest.mark.fuzz
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block_size", CLASSIC["block_size"])
def test_classic_keeps_everything_in_registers_in_every_combination(arch: int, block_size: int) -> None:
    for row in every(CLASSIC, arch=(arch,), block_size=(block_size,)):
        check_classic(row)
