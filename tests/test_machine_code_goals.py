"""What the machine code of the tensor-core kernels must keep: no spills, wide copies, bytes in flight, few instructions, no bank
conflicts, fences around what blocks leave for one another.

The figures are those of `bench/machine_code.py`, on machine code that NVRTC makes without a GPU; wavefronts are counted by the
executor from the addresses that ran.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from behaviour import make_case
from devices import Device
from simt import build
from simt.launcher import DEVICES

pytest.importorskip("cupy", reason="compiling needs CuPy and NVRTC: pip install 'cupaged[cuda12x]'")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

from machine_code import ARCHS, CHIPS, IN_FLIGHT_GOAL, Audit, audit, basic_blocks, device, disassemble, goal

from cupaged import kernels
from cupaged.cuda_structs import decode_defines
from cupaged.kernel_config import attention_kernels
from cupaged.kernels import Specialisation, compile_cubin

FORMATS = [
    ("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "fp8_e4m3"), ("bfloat16", "fp8_e4m3"), ("float16", "fp8_e5m2"),
]  # fmt: skip


def audited(arch: int, head_dim: int, dtype: str, kv_dtype: str, rows: int, block_size: int = 16) -> Audit:
    """The kernel that takes sequences of `rows` packed rows; 8 query heads share a KV head."""
    try:
        return audit(arch, attention_kernels(device(arch), head_dim, dtype, kv_dtype, 8, rows, rows)[-1], block_size)
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
def test_decode_of_eight_rows_of_128(arch: int, dtype: str, kv_dtype: str) -> None:
    a = audited(arch, 128, dtype, kv_dtype, 8)
    assert a.config.kernel == "decode_mma"
    assert a.spills == 0
    assert a.copy_widths == {16}
    assert a.in_flight >= IN_FLIGHT_GOAL[arch]
    assert a.blocks >= a.config.resident, "the host counts on so many blocks at once"
    # before sm_89 the conversion of e4m3 alone takes 20
    most = 7 if kv_dtype == dtype else 29 if kv_dtype == "fp8_e4m3" and arch < 89 else 19
    assert a.per_512 <= most < goal(dtype, kv_dtype)


@pytest.mark.parametrize("arch", [80, 86, 90, 100])
@pytest.mark.parametrize(("head_dim", "dtype", "kv_dtype", "most"), [
    (64, "float16", "float16", 11), (128, "bfloat16", "bfloat16", 8.5), (128, "float16", "fp8_e4m3", 32),
    (128, "bfloat16", "fp8_e4m3", 32), (128, "float16", "fp8_e5m2", 21),
])  # fmt: skip
def test_decode_of_sixteen_rows(arch: int, head_dim: int, dtype: str, kv_dtype: str, most: int) -> None:
    a = audited(arch, head_dim, dtype, kv_dtype, 16)
    assert a.config.rows == 16
    assert a.spills == 0
    assert a.blocks >= a.config.resident
    assert a.per_512 <= most <= goal(dtype, kv_dtype)


# of 512 bytes the conversion alone takes 20; head_dim 64 has four tokens in them, each with exponentials for 8 or 16 rows
@pytest.mark.parametrize("arch", [80, 86])
@pytest.mark.parametrize(("head_dim", "rows", "block_size", "most"), [
    (64, 8, 16, 31.5), (64, 8, 64, 31.5), (64, 8, 1, 32), (64, 8, 2, 32), (64, 8, 256, 32), (96, 8, 16, 30),
    (128, 16, 1, 31.6), (128, 16, 256, 31.8), (64, 16, 16, 36.8),
])  # fmt: skip
def test_decode_of_e4m3_pages_before_the_hardware_converts_them(
    arch: int, head_dim: int, rows: int, block_size: int, most: float
) -> None:
    a = audited(arch, head_dim, "float16", "fp8_e4m3", rows, block_size)
    assert a.spills == 0
    assert a.copy_widths == {16}
    assert a.blocks >= a.config.resident
    assert a.in_flight >= IN_FLIGHT_GOAL[arch]
    assert a.per_512 <= most


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_of_float32_on_cuda_cores(arch: int, head_dim: int) -> None:
    a = audited(arch, head_dim, "float32", "float32", 8)
    assert a.spills == 0
    assert a.copy_widths == {16}
    assert a.in_flight >= IN_FLIGHT_GOAL[arch]
    assert a.blocks >= a.config.resident
    assert a.per_512 <= 50, "32 of them are the multiply-adds"


@pytest.mark.parametrize(
    ("head_dim", "rows"), [(64, 8), (64, 16), (128, 16), (256, 8), (256, 16), (80, 8), (40, 8), (72, 8)]
)
@pytest.mark.parametrize(("dtype", "kv_dtype", "arch"), [(*FORMATS[0], 90), (*FORMATS[2], 80), (*FORMATS[3], 100)])
def test_decode_of_other_shapes_stays_under_the_issue_budget(
    head_dim: int, rows: int, dtype: str, kv_dtype: str, arch: int
) -> None:
    a = audited(arch, head_dim, dtype, kv_dtype, rows)
    assert a.spills == 0
    assert a.copy_widths == {8 if head_dim * (1 if kv_dtype != dtype else 2) % 16 else 16}
    assert a.in_flight >= IN_FLIGHT_GOAL[arch]
    assert a.blocks >= a.config.resident
    assert all(a.issue(chip) < (0.7 if head_dim >= 64 else 0.85) for chip in CHIPS[arch])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("most", [32, 64, 256])
@pytest.mark.parametrize(("dtype", "kv_dtype", "arch"), [(*FORMATS[0], 80), (*FORMATS[0], 86), (*FORMATS[3], 90)])
def test_prefill_keeps_everything_in_registers(head_dim: int, most: int, dtype: str, kv_dtype: str, arch: int) -> None:
    a = audited(arch, head_dim, dtype, kv_dtype, most)
    assert a.config.kernel == "prefill"
    assert a.spills == 0
    assert a.copy_widths == {16}
    assert a.blocks >= a.config.resident
    products = sum(i.opcode.startswith("HMMA") for i in a.path)
    # 16 rows x tile x head_dim twice, in m16n8k16
    assert products == 2 * 16 * a.config.tile * head_dim // (16 * 8 * 16)


@pytest.mark.parametrize(("kernel", "arch"), [("decode", 75), ("decode_mma", 80), ("prefill", 90)])
def test_blocks_see_one_anothers_partial_results(kernel: str, arch: int) -> None:
    """Fences around the ticket, and no float32 read through the read-only path, which may be stale: the executor sees neither."""
    info = DEVICES[arch]
    config = attention_kernels(info, 64, "float16", "float16", 4, 4, 64 if kernel == "prefill" else 4)[-1]
    assert config.kernel == kernel
    what = Specialisation.of(
        kernel, f"{kernel}.cu", decode_defines(config, 16, planned=True, softcap=False, alibi=False)
    )
    read_only = set(re.findall(r"ld\.global\.nc\.([\w.]+)", ptx_of(what, arch)))
    assert read_only == {"u32"} | ({"v4.u32"} if arch < 80 else set()), (
        "page ids, and pages where copies are not asynchronous"
    )
    try:
        blocks = basic_blocks(disassemble(compile_cubin(what, arch)[0]), kernel)
    except ModuleNotFoundError as missing:
        pytest.skip(str(missing))
    (opcodes,) = [[i.opcode for i in b.instructions] for b in blocks if any("ATOM" in i.opcode for i in b.instructions)]
    (ticket,) = [i for i, opcode in enumerate(opcodes) if "ATOM" in opcode]
    fence, forget = opcodes.index("MEMBAR.ALL.GPU"), opcodes.index("CCTL.IVALL")
    assert fence < ticket < forget
    assert not any(opcode.startswith(("ST", "RED")) and "STS" not in opcode for opcode in opcodes[fence:ticket])
    assert not any(opcode.startswith("LD") and "LDS" not in opcode for opcode in opcodes[ticket:forget])


def ptx_of(what: Specialisation, arch: int) -> str:
    """What NVRTC makes of a source before it becomes machine code."""
    nvrtc = pytest.importorskip("cupy.cuda").nvrtc
    program = nvrtc.createProgram(kernels.flatten(what.source), what.source, (), ())
    try:
        nvrtc.compileProgram(program, (*what.options, f"-arch=compute_{arch}", *kernels._cuda_includes()))
        text = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    return text.decode() if isinstance(text, bytes) else str(text)


@pytest.mark.skipif(build.unavailable() is not None, reason=str(build.unavailable()))
@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS[1:3])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 96, 128])
def test_shared_memory_is_read_and_written_without_bank_conflicts(
    head_dim: int, dtype: str, kv_dtype: str, rng: np.random.Generator
) -> None:
    import simt_device

    backend = simt_device.backend(90, kind="checked", traced=True)
    backend.launcher.traffic.clear()
    case = make_case(
        rng, seq_lens=[256, 128], query_lens=[16, 1], num_kv_heads=1, group=4, head_dim=head_dim, block_size=16, dtype=dtype,
        kv_dtype=None if kv_dtype == dtype else kv_dtype,
    )  # fmt: skip
    put = backend.launcher.put  # aligned as device memory is
    case = replace(case, k_cache=put(case.k_cache), v_cache=put(case.v_cache))
    Device("simt", backend).paged_attention(*case.arguments(), **case.options)
    reads = [t for t in backend.launcher.traffic if t.space == "shared" and t.lane_bytes == 16 and not t.write]
    copies = [t for t in backend.launcher.traffic if t.space == "shared" and t.lane_bytes == 16 and t.write]
    pages = [t for t in backend.launcher.traffic if t.space == "global" and t.lane_bytes == 16]
    assert reads and (copies or head_dim == 40)
    for traffic in (*reads, *copies):
        assert traffic.units == traffic.ideal, traffic
    for traffic in pages:
        assert traffic.units == traffic.ideal, f"whole sectors of pages: {traffic}"
