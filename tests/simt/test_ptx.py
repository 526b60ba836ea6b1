"""The text of every inline instruction, which the executor bypasses: compiled to PTX by NVRTC, no driver needed.

Each wrapper of ptx.cuh is called with words of `x` and gives words of `y`; which word reaches which operand is followed through
the PTX. Instruction texts are those of the PTX ISA manual.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import pytest

from cupaged.kernels import flatten, source_dir

from . import build


@dataclass(frozen=True)
class Wrapper:
    call: (
        str  # statement; u(i) and f(i) are word i of x, U(i, value) and F(i, value) store word i of y, out has y's type
    )
    text: str  # expected instruction, operands as {}
    operands: tuple[str, ...]  # in order of the text: "x3" read from word 3 of x, "y2" goes to word 2 of y, "d0" both
    volatile: bool = True
    memory: bool = False
    arch: int = 80


D = ("d0", "d1", "d2", "d3")
_D_IN = "float d[4] = {f(0), f(1), f(2), f(3)}; "
_D_OUT = "; for (int i = 0; i < 4; ++i) F(i, d[i]);"
_A4 = "unsigned a[4] = {u(4), u(5), u(6), u(7)}; "


def _braces(count: int) -> str:
    return ", ".join(["{}"] * count)


def _mma16(kind: str) -> Wrapper:
    return Wrapper(
        f"{_D_IN}{_A4}mma_m16n8k16_{kind}(d, a, u(8), u(9)){_D_OUT}",
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {_braces(14)};",
        (*D, "x4", "x5", "x6", "x7", "x8", "x9", *D),
    )


def _mma8(kind: str) -> Wrapper:
    return Wrapper(
        f"{_D_IN}mma_m16n8k8_{kind}(d, u(4), u(5), u(6)){_D_OUT}",
        f"mma.sync.aligned.m16n8k8.row.col.f32.{kind}.{kind}.f32 {_braces(11)};",
        (*D, "x4", "x5", "x6", *D),
    )


def _ldmatrix(count: int, trans: str) -> Wrapper:
    return Wrapper(
        f"unsigned r[{count}]; ldmatrix_x{count}{trans.replace('.', '_')}(r, smem + u(9)); "
        f"for (int i = 0; i < {count}; ++i) U(i, r[i]);",
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {_braces(count)}, [{{}}];",
        (*(f"y{i}" for i in range(count)), "x9"),
        memory=True,
        arch=75,
    )


def _cp_async(bytes_: int, cache: str) -> Wrapper:
    return Wrapper(
        f"cp_async_{bytes_}(smem + u(0), reinterpret_cast<const char*>(x) + u(1), u(2) != 0);",
        f"cp.async.{cache}.shared.global [{{}}], [{{}}], {bytes_}, {{}};",
        ("x0", "x1", "x2"),
        memory=True,
    )


WRAPPERS = {
    "cp_async_16": _cp_async(16, "cg"),
    "cp_async_8": _cp_async(8, "ca"),
    "cp_async_4": _cp_async(4, "ca"),
    "cp_async_commit": Wrapper("cp_async_commit();", "cp.async.commit_group;", (), memory=True),
    "cp_async_wait": Wrapper("cp_async_wait<3>();", "cp.async.wait_group 3;", (), memory=True),
    "mma_m16n8k16_f16": _mma16("f16"),
    "mma_m16n8k16_bf16": _mma16("bf16"),
    "mma_m16n8k8_f16": _mma8("f16"),
    "mma_m16n8k8_bf16": _mma8("bf16"),
    "ldmatrix_x1": _ldmatrix(1, ""),
    "ldmatrix_x2": _ldmatrix(2, ""),
    "ldmatrix_x4": _ldmatrix(4, ""),
    "ldmatrix_x1_trans": _ldmatrix(1, ".trans"),
    "ldmatrix_x2_trans": _ldmatrix(2, ".trans"),
    "ldmatrix_x4_trans": _ldmatrix(4, ".trans"),
    "exp2_approx": Wrapper("F(0, exp2_approx(f(1)));", "ex2.approx.ftz.f32 {}, {};", ("y0", "x1"), volatile=False),
    "rcp_approx": Wrapper("F(0, rcp_approx(f(1)));", "rcp.approx.ftz.f32 {}, {};", ("y0", "x1"), volatile=False),
    "e4m3x2_to_half2": Wrapper(
        "U(0, e4m3x2_to_half2((unsigned short)u(1)));", "cvt.rn.f16x2.e4m3x2 {}, {};", ("y0", "x1"), volatile=False, arch=89
    ),
    "split_halves": Wrapper(
        "unsigned short low, high; split_halves(u(1), low, high); U(0, low); U(1, high);",
        "mov.b32 {}, {}, {};",
        ("y0", "y1", "x1"),
        volatile=False,
    ),
    "wide_product": Wrapper(
        "U(0, unsigned(wide_product(u(1), u(2))));", "mul.wide.u32 {}, {}, {};", ("y0", "x1", "x2"), volatile=False
    ),
    "formed_here": Wrapper("U(0, unsigned(formed_here(u(1))));", "mov.b64 {}, {};", ("y0", "x1")),
    "bitwise_choice": Wrapper(
        "U(0, bitwise_choice(u(1), u(2), u(3)));", "lop3.b32 {}, {}, {}, {}, 0xca;", ("y0", "x1", "x2", "x3"), volatile=False
    ),
    "movmatrix_trans": Wrapper(
        "U(0, movmatrix_trans(u(1)));", "movmatrix.sync.aligned.m8n8.trans.b16 {}, {};", ("y0", "x1"), arch=75
    ),
    "load_global_16": Wrapper(
        "uint4 v = load_global_16(x + u(9)); U(0, v.x); U(1, v.y); U(2, v.z); U(3, v.w);",
        "ld.global.nc.v4.u32 {}, {}, {}, {}, [{}];",
        ("y0", "y1", "y2", "y3", "x9"),
    ),
    "load_global_8": Wrapper(
        "uint2 v = load_global_8(x + u(9)); U(0, v.x); U(1, v.y);", "ld.global.nc.v2.u32 {}, {}, [{}];", ("y0", "y1", "x9")
    ),
    "load_global_4": Wrapper("U(0, load_global_4(x + u(9)));", "ld.global.nc.u32 {}, [{}];", ("y0", "x9")),
    "load_global_2": Wrapper("U(0, load_global_2(x + u(9)));", "ld.global.nc.u16 {}, [{}];", ("y0", "x9")),
    "load_global_1": Wrapper("U(0, load_global_1(x + u(9)));", "ld.global.nc.u8 {}, [{}];", ("y0", "x9")),
    "atomic_add_acq_rel": Wrapper(
        "U(0, atomic_add_acq_rel(y + u(9), u(1)));",
        "atom.acq_rel.gpu.global.add.u32 {}, [{}], {};",
        ("y0", "x9", "x1"),
        memory=True,
    ),
}  # fmt: skip

_PRELUDE = """
extern __shared__ __align__(128) unsigned char smem[];
#define u(i) x[i]
#define f(i) __uint_as_float(x[i])
#define U(i, value) y[i] = (value)
#define F(i, value) y[i] = __float_as_uint(value)
"""


def ptx(body: str, arch: int) -> str:
    nvrtc = pytest.importorskip("cupy.cuda", reason="CuPy, which brings the binding of NVRTC, is not installed").nvrtc
    entry = 'extern "C" __global__ void test(const unsigned* __restrict__ x, unsigned* __restrict__ y)'
    source = f"{flatten('ptx.cuh')}{_PRELUDE}{entry} {{ {body} }}"
    program = nvrtc.createProgram(source, "test.cu", (), ())
    try:
        nvrtc.compileProgram(program, (f"-arch=compute_{arch}", "-std=c++17"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    text = nvrtc.getPTX(program)
    return text.decode() if isinstance(text, bytes) else text


def inline(text: str) -> list[str]:
    """The inline instructions of a PTX text."""
    blocks = re.findall(r"// begin inline asm\s*(.*?)\s*// end inline asm", text, re.S)
    return [" ".join(re.sub(r"[{}]", "", block).split()) for block in blocks]  # braces group operands, they are none


def operands(text: str) -> list[tuple[str, set[str], set[str]]]:
    """Of the one inline instruction: every register with the words of x that reach it and the words of y it reaches."""
    base: dict[str, str] = {}  # pointer register -> "x" or "y"
    source: dict[str, set[str]] = defaultdict(set)
    target: dict[str, set[str]] = defaultdict(set)
    registers: list[str] = []
    reached: list[set[str]] = []
    before, _, rest = text.partition("// begin inline asm")
    instruction, _, after = rest.partition("// end inline asm")
    for line in before.splitlines():
        if match := re.match(r"\s*ld\.param\.u64\s+(%\w+), \[test_param_([01])\]", line):
            base[match[1]] = "xy"[int(match[2])]
        elif match := re.match(r"\s*ld\.global\.(?:nc\.)?\w+\s+(%\w+), \[(%\w+)(?:\+(\d+))?\]", line):
            source[match[1]] = {f"{base[match[2]]}{int(match[3] or 0) // 4}"}
        elif match := re.match(r"\s*[\w.]+\s+(%\w+), (.*);", line):
            names = re.findall(r"%\w+", match[2])
            source[match[1]] = set().union(*(source[name] for name in names))
            for name in names:
                if name in base:
                    base[match[1]] = base[name]
    registers = re.findall(r"%\w+", instruction)
    reached = [set(source[name]) for name in registers]
    same: dict[str, set[str]] = defaultdict(set)  # register after the instruction -> registers of it
    for name in registers:
        same[name].add(name)
    for line in after.splitlines():
        if match := re.match(r"\s*st\.global\.\w+\s+\[(%\w+)(?:\+(\d+))?\], (%\w+)", line):
            for name in same[match[3]]:
                target[name].add(f"y{int(match[2] or 0) // 4}")
        elif match := re.match(r"\s*[\w.]+\s+(%\w+), (.*);", line):
            same[match[1]] = set().union(*(same[name] for name in re.findall(r"%\w+", match[2])))
    return [(name, words, target[name]) for name, words in zip(registers, reached, strict=True)]


def with_asm() -> dict[str, str]:
    """Name and text of every function of ptx.cuh that holds inline PTX."""
    text = (source_dir() / "ptx.cuh").read_text(encoding="utf-8")
    functions = [part for part in text.split("__device__ __forceinline__ ")[1:] if re.search(r"\basm\b", part)]
    return {re.search(r"(\w+)\(", part)[1]: part for part in functions}  # type: ignore[index]


def test_every_wrapper_with_inline_ptx_has_a_case_and_no_other_file_has_any() -> None:
    assert with_asm().keys() == WRAPPERS.keys()
    for other in (*source_dir().glob("*.cu"), *source_dir().glob("*.cuh")):
        assert other.name == "ptx.cuh" or not re.search(r"\basm\b", other.read_text(encoding="utf-8")), other.name


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_instruction_is_the_manuals(name: str) -> None:
    wrapper = WRAPPERS[name]
    (instruction,) = inline(ptx(wrapper.call, wrapper.arch))
    assert re.sub(r"%\w+", "{}", instruction) == wrapper.text


@pytest.mark.parametrize("name", WRAPPERS)
def test_arguments_reach_their_operands_and_results_come_from_theirs(name: str) -> None:
    wrapper = WRAPPERS[name]
    got = operands(ptx(wrapper.call, wrapper.arch))
    assert len(got) == len(wrapper.operands)
    for expected, (register, words, reached) in zip(wrapper.operands, got, strict=True):
        if expected[0] in "xd":
            assert words == {f"x{expected[1:]}"}, (register, expected)
        if expected[0] in "yd":
            assert reached == {f"y{expected[1:]}"}, (register, expected)


@pytest.mark.parametrize("name", WRAPPERS)
def test_volatile_instructions_stay_though_their_results_are_not_used(name: str) -> None:
    wrapper = WRAPPERS[name]
    unused = re.sub(r"\b[UF]\(\w+, (.*?)\);", r"(void)(\1);", wrapper.call)
    assert unused.count("y[") == 0
    assert len(inline(ptx(f"{{ {unused} }} {{ {unused} }}", wrapper.arch))) == (2 if wrapper.volatile else 0)


@pytest.mark.parametrize("name", WRAPPERS)
def test_instructions_that_touch_memory_say_so(name: str) -> None:
    wrapper = WRAPPERS[name]
    assert ('"memory"' in with_asm()[name]) == wrapper.memory
    assert ("asm volatile(" in with_asm()[name]) == wrapper.volatile
    if wrapper.memory:  # a store before is not dead though another follows
        store = "reinterpret_cast<unsigned*>(smem)[31] = {};"
        text = ptx(f"{store.format(1)} {{ {wrapper.call} }} {store.format(2)}", wrapper.arch)
        assert text.count("st.shared.u32") == 2


@pytest.mark.parametrize("bytes_", [4, 8, 16])
def test_without_asynchronous_copies_an_old_device_copies_at_once(bytes_: int) -> None:
    text = ptx(f"cp_async_{bytes_}(smem, x, u(0) != 0); cp_async_commit(); cp_async_wait<0>();", 75)
    assert not inline(text) and "st.shared" in text


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_matrix_products_need_an_architecture_that_has_them(kind: str) -> None:
    with pytest.raises(pytest.fail.Exception, match="is undefined"):
        ptx(_mma16(kind).call, 75)


def test_the_executor_knows_every_wrapper_by_the_same_name() -> None:
    functions = re.compile(r"(?:__forceinline__|SIMT_INLINE) [\w ]+?\b(\w+)\(")
    own = set(functions.findall((source_dir() / "ptx.cuh").read_text(encoding="utf-8")))
    executors = set(functions.findall((build.HERE / "simt_ptx.h").read_text(encoding="utf-8")))
    assert own <= executors
    assert {name for name in executors if not name.startswith("simt_")} <= own
