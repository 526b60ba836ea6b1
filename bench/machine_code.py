"""Audit of the attention kernels' machine code, on a machine that needs no GPU and no driver.

Specialisations are compiled by NVRTC for every architecture, for blocks of 16 tokens or of --block-size, and disassembled by nvdisasm;
the inner loop tells which instructions a warp issues for one clean tile. From that and the tile sizes follow the figures that bound
decode, to be held against a real measurement:

    registers, spills, shared memory, resident blocks and warps of a multiprocessor
    bytes of keys and values in flight on a multiprocessor, and the goal that hides the latency of its memory
    width of the copies from global memory
    warp instructions per 512 bytes of keys and values, their goal, and their part of what the multiprocessor can issue while its
    share of the memory's bandwidth delivers those bytes

    python -m bench.machine_code [--arch 90 ...] [--head-dim 128 ...] [--block-size 16] [--loop]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

from cupaged.cuda_structs import decode_defines
from cupaged.kernel_config import KernelConfig, attention_kernels
from cupaged.kernels import Specialisation, compile_cubin
from cupaged.launcher import DeviceInfo


@dataclass(frozen=True)
class Chip:
    """One product with its memory; bandwidth and boost clock from its data sheet."""

    name: str
    arch: int
    num_sms: int
    ghz: float
    gb_per_s: float

    @property
    def budget(self) -> float:
        """Warp instructions that a multiprocessor, at 4 a cycle, issues while 512 bytes arrive for it."""
        return 4 * 512 * self.ghz * self.num_sms / self.gb_per_s

    @property
    def bytes_per_us(self) -> float:
        """Of one multiprocessor's share of the bandwidth."""
        return 1000 * self.gb_per_s / self.num_sms


CHIPS = {
    80: (Chip("A100", 80, 108, 1.41, 2039),),
    86: (Chip("RTX 3090", 86, 82, 1.695, 936),),
    89: (Chip("RTX 4090", 89, 128, 2.52, 1008),),
    90: (Chip("H100", 90, 132, 1.755, 3350), Chip("H200", 90, 132, 1.755, 4800)),
    100: (Chip("B200", 100, 148, 1.85, 8000),),
    120: (Chip("RTX 5090", 120, 170, 2.41, 1792),),
}
ARCHS = tuple(CHIPS)
LATENCY_US = 0.8  # of global memory under load: what bytes in flight must cover
IN_FLIGHT_GOAL = {80: 24 << 10, 86: 12 << 10, 89: 12 << 10, 90: 48 << 10, 100: 64 << 10, 120: 12 << 10}  # bytes
SHARED_KIB = {
    80: (163, 164),
    86: (99, 100),
    89: (99, 100),
    90: (227, 228),
    100: (227, 228),
    120: (99, 100),
}  # block, SM
REGISTERS_PER_SM = 65536
WARPS_PER_SM = {80: 64, 86: 48, 89: 48, 90: 64, 100: 64, 120: 48}

_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_SECTION = re.compile(r"^\s*\.section\s+([^,]+),")
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str | None
    opcode: str
    operands: str

    @property
    def target(self) -> str | None:
        found = _TARGET.search(self.operands)
        return found[1] if found else None


@dataclass
class Block:
    """Instructions with one entry and one exit."""

    instructions: list[Instruction] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)  # indices of blocks


def disassemble(cubin: bytes) -> str:
    """SASS text. Raises ModuleNotFoundError when the package nvidia-cuda-nvdisasm is not installed."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(_nvdisasm()), "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout


@cache
def _nvdisasm() -> Path:
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        raise ModuleNotFoundError("the audit needs nvdisasm: pip install 'cupaged[bench]'") from None
    return next(Path(str(file.locate())) for file in files if file.name in ("nvdisasm", "nvdisasm.exe"))


def basic_blocks(sass: str, kernel: str) -> list[Block]:
    """The control flow of one kernel's section, in address order."""
    blocks, labels = [Block()], {}
    inside = False
    for line in sass.splitlines():
        if section := _SECTION.match(line):
            inside = section[1] == f".text.{kernel}"
        if not inside:
            continue
        if label := _LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
        elif found := _INSTRUCTION.match(line):
            blocks[-1].instructions.append(Instruction(int(found[1], 16), found[2], found[3], found[4]))
            if found[3].split(".")[0] in ("BRA", "CALL", "EXIT", "RET", "JMP"):
                blocks.append(Block())
    for i, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        opcode = last.opcode.split(".")[0] if last else ""
        # CALL.REL.NOINC to a label is a far jump, back from which may come another
        if last and opcode in ("BRA", "CALL") and last.target in labels and "DIV" not in last.opcode:
            block.successors.append(labels[last.target])
        ends = last is not None and opcode in ("BRA", "EXIT", "RET", "JMP") and last.predicate is None
        if ends and opcode == "BRA":  # BRA.U and `BRA UP0, ...` are conditional on a uniform predicate
            ends = not (re.match(r"!?U?P\d", last.operands) or "DIV" in last.opcode)
        if not ends and i + 1 < len(blocks):
            block.successors.append(i + 1)
    return blocks


def loops(blocks: list[Block]) -> Iterator[tuple[int, set[int]]]:
    """Header and members of every natural loop: an edge back to a block on the path from the entry, and all that reaches it."""
    predecessors: list[list[int]] = [[] for _ in blocks]
    for i, block in enumerate(blocks):
        for j in block.successors:
            predecessors[j].append(i)
    seen, path, on_path = {0}, [(0, iter(blocks[0].successors))], {0}
    while path:
        end, successors = path[-1]
        header = next(successors, None)
        if header is None:
            path.pop()
            on_path.discard(end)
        elif header in on_path:
            members, open_ends = {header, end}, [end] if end != header else []
            while open_ends:
                for before in predecessors[open_ends.pop()]:
                    if before not in members:
                        members.add(before)
                        open_ends.append(before)
            yield header, members
        elif header not in seen:
            seen.add(header)
            on_path.add(header)
            path.append((header, iter(blocks[header].successors)))


def count(block: Block, *opcodes: str) -> int:
    return sum(i.opcode.split(".")[0] in opcodes for i in block.instructions)


COPY, MATH = "LDGSTS", ("HMMA", "FFMA")


def clean_path(blocks: list[Block]) -> list[tuple[Instruction, bool]]:
    """What a warp issues in one round of the loop that copies and multiplies, and whether it stands in a loop inside that one.

    Of the paths with the most copies and the most products the shortest: the one of a tile that every row sees whole and that
    brings no new maximum. Loops inside are passed once.
    """
    all_loops = list(loops(blocks))
    # on tensor cores where there are any: then a multiply-add is part of the softmax, of one that brings a new maximum perhaps
    math = next((kind for kind in MATH if any(count(block, kind) for block in blocks)), MATH[-1])
    candidates = [
        (sum(len(blocks[i].instructions) for i in members), header, members)
        for header, members in all_loops
        if any(count(blocks[i], COPY) for i in members) and any(count(blocks[i], math) for i in members)
    ]
    if not candidates:
        raise ValueError("no loop copies and multiplies")
    _, header, members = min(candidates, key=lambda c: c[0])
    inner = set().union(*(m for h, m in all_loops if h != header and h in members and m < members))
    best: dict[int, tuple[tuple[int, int, int], list[int]] | None] = {}
    on_path: set[int] = set()

    def walk(i: int) -> tuple[tuple[int, int, int], list[int]] | None:
        if i in best:
            return best[i]
        on_path.add(i)
        block = blocks[i]
        found: tuple[tuple[int, int, int], list[int]] | None = None
        for j in block.successors:
            if j == header:
                rest: tuple[tuple[int, int, int], list[int]] | None = ((0, 0, 0), [])
            elif j in on_path or j not in members:
                continue
            else:
                rest = walk(j)
            if rest is not None and (found is None or rest[0] > found[0]):
                found = rest
        on_path.discard(i)
        if found is not None:
            (copies, products, length), rest_of_path = found
            copies, products = copies + count(block, COPY), products + count(block, math)
            found = ((copies, products, length - len(block.instructions)), [i, *rest_of_path])
        best[i] = found
        return found

    path = walk(header)
    assert path is not None
    return [(instruction, i in inner) for i in path[1] for instruction in blocks[i].instructions]


# --------------------------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Audit:
    """What one specialisation costs on one architecture."""

    config: KernelConfig
    arch: int
    tile_bytes: int  # keys and values that a warp's round of the loop is for
    registers: int
    spills: int  # bytes
    path: tuple[Instruction, ...]  # of one clean tile
    issued: float  # instructions of it, those of loops inside as often as they run

    @property
    def copy_widths(self) -> set[int]:
        """Bytes that one lane copies at once from global to shared memory."""
        widths = {"128": 16, "64": 8}
        return {widths.get(i.opcode.split(".")[-1], 4) for i in self.path if i.opcode.startswith(COPY)}

    @property
    def blocks(self) -> int:
        """Resident on a multiprocessor."""
        per_thread = -(-self.registers // 8) * 8
        by_shared = (SHARED_KIB[self.arch][1] << 10) // (self.config.shared_bytes + 1024)
        by_warps = WARPS_PER_SM[self.arch] // self.config.warps
        return min(REGISTERS_PER_SM // (per_thread * self.config.threads), by_shared, by_warps, 32)

    @property
    def warps(self) -> int:
        return self.blocks * self.config.warps

    @property
    def in_flight(self) -> int:
        """Bytes of keys and values on their way to a multiprocessor while its warps compute."""
        stages = dict(self.config.defines).get("kStages")
        rings = self.blocks if self.config.kernel == "prefill" else self.warps
        if stages is None:  # decode.cu: K or V of the next tile
            return rings * self.tile_bytes // 2
        return rings * (int(stages) - 1) * self.tile_bytes

    @property
    def per_512(self) -> float:
        """Warp instructions for 512 bytes of keys and values; of a prefill, by each of its warps."""
        return self.issued * 512 / self.tile_bytes

    def issue(self, chip: Chip) -> float:
        """Part of the multiprocessor's issue slots while memory delivers."""
        return self.per_512 / chip.budget

    def bandwidth(self, chip: Chip) -> float:
        """Predicted part of the chip's bandwidth: what bytes in flight and issue slots allow."""
        return min(1.0, self.in_flight / (LATENCY_US * chip.bytes_per_us), 1 / self.issue(chip))


def goal(dtype: str, kv_dtype: str) -> int:
    """Warp instructions per 512 bytes that decode shall not exceed."""
    if dtype == "float32":
        return 60
    return 16 if kv_dtype == dtype else 32 if dtype == "float16" else 40


def device(arch: int) -> DeviceInfo:
    per_block, per_sm = SHARED_KIB[arch]
    return DeviceInfo(f"sm_{arch}", arch, CHIPS[arch][0].num_sms, per_block << 10, per_sm << 10, 40 << 20)


@cache
def audit(arch: int, config: KernelConfig, block_size: int = 16) -> Audit:
    """Compile, disassemble, read. Raises CompileError, or ModuleNotFoundError without CuPy or nvdisasm."""
    d = dict(config.defines)
    item = {"float": 4, "__half": 2, "__nv_bfloat16": 2}.get(str(d["kCacheType"]), 1)
    row = int(d["kHeadDim"]) * item
    vec = min(16, row & -row)
    defines = decode_defines(config, vec, planned=True, softcap=False, alibi=False, block_size=block_size)
    cubin, log = compile_cubin(Specialisation.of(config.kernel, config.kernel + ".cu", defines), arch)
    used = re.search(r"Used (\d+) registers", log)
    spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    assert used is not None and spilled, log
    path = clean_path(basic_blocks(disassemble(cubin), config.kernel))
    head_dim = int(d["kHeadDim"])
    issued = float(len(path))
    if config.kernel == "decode":  # its products are in loops: they run as often as there are products to do
        products = [inner for i, inner in path if i.opcode.startswith("FFMA")]
        runs = (
            (2 * config.rows * config.tile * head_dim / 32 - products.count(False)) / products.count(True)
            if any(products)
            else 1
        )
        issued += (runs - 1) * sum(inner for _, inner in path)
    spills = sum(int(number) for numbers in spilled for number in numbers)
    tile_bytes = 2 * config.tile * head_dim * item
    return Audit(config, arch, tile_bytes, int(used[1]), spills, tuple(i for i, _ in path), issued)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="*", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--loop", action="store_true", help="print the instructions of each loop too")
    arguments = parser.parse_args()
    kinds = [
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float16", "fp8_e4m3"),
        ("bfloat16", "fp8_e4m3"),
        ("float16", "fp8_e5m2"),
    ]
    kinds.append(("float32", "float32"))
    print(
        "sm   kernel      dtype     pages     dim rows  regs spill shared blocks warps  in flight (goal)  width", end=""
    )
    print("  per 512 B (goal)    chip, part of issue slots, predicted part of bandwidth")
    for arch in arguments.arch:
        for head_dim in arguments.head_dim:
            for dtype, kv_dtype in kinds:
                for most in (8, 16, 64) if dtype != "float32" else (8,):
                    config = attention_kernels(device(arch), head_dim, dtype, kv_dtype, 8, most, most)[-1]
                    a = audit(arch, config, arguments.block_size)
                    decode = config.kernel != "prefill"
                    chips = (
                        ", ".join(f"{c.name} {a.issue(c):.0%} {a.bandwidth(c):.0%}" for c in CHIPS[arch])
                        if decode
                        else ""
                    )
                    goals = (f"({goal(dtype, kv_dtype)})", f"({IN_FLIGHT_GOAL[arch]})") if decode else ("", "")
                    print(
                        f"{arch:<4} {config.kernel:<11} {dtype:<9} {kv_dtype:<9} {head_dim:>3} {config.rows:>4}  {a.registers:>4} "
                        f"{a.spills:>5} {config.shared_bytes:>6} {a.blocks:>6} {a.warps:>5}  {a.in_flight:>8} {goals[1]:>7}  "
                        f"{'/'.join(map(str, sorted(a.copy_widths))):>5}  {a.per_512:>8.1f} {goals[0]:>5}    {chips}",
                        flush=True,
                    )
                    if arguments.loop:
                        for i in a.path:
                            print(f"        {i.address:05x} {i.predicate or '':>5} {i.opcode} {i.operands}")


if __name__ == "__main__":
    main()
