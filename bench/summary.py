"""Every benchmark that this machine can run, in one table: ours, a peer's figure, the limit and how much of it was reached.

    python -m bench.summary [--only GROUP ...] [--save]      all of them, some minutes; `make bench` runs the same under pytest
    python -m cupaged bench                                  a few of each group, under a minute

The work is that of `control_plane.py`, `cpu_attention.py`, `gpu_attention.py` and `machine_code.py`; this file chooses. What cannot run is
named with the reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from .results import Row, save, table

GROUPS = ("control-plane", "cpu-attention", "gpu-attention", "kernel-compile")


@dataclass(frozen=True)
class Case:
    """One row that is yet to be measured."""

    group: str
    work: str
    run: Callable[[], Row]


def why_not(group: str) -> str:
    """What the group needs and is not here; empty when it can run."""
    from cupaged.info import cuda_devices

    if group == "cpu-attention" and find_spec("numba") is None:
        return "Numba is not installed: pip install 'cupaged[cpu]'"
    if group == "gpu-attention":
        return cuda_devices()[1]
    if group == "kernel-compile" and find_spec("cupy") is None:
        return "CuPy is not installed: pip install 'cupaged[cuda12x]' (or [cuda13x])"
    return ""


def cases(group: str, short: bool = False) -> list[Case]:
    """What there is to measure in a group that can run."""
    return list(
        {"control-plane": _control_plane, "cpu-attention": _cpu, "gpu-attention": _gpu, "kernel-compile": _compile}[
            group
        ](short)
    )


# ------------------------------------------------------------------------------------------------------------- groups


def _control_plane(short: bool) -> Iterator[Case]:
    from .control_plane import run_peer, works

    chosen = [work for work in works("") if work.peer or not short]

    @cache
    def peer() -> dict[str, float]:
        return run_peer(sorted({work.peer for work in chosen if work.peer}))

    for work in chosen:

        def run(work: Any = work) -> Row:
            other = peer().get(work.peer)
            more = {"faster": work.faster} if work.faster else {}
            return Row(
                "control-plane", work.name, work.measure(), work.unit, other and other * work.per, work.goal, more
            )

        yield Case("control-plane", work.name, run)


def _cpu(short: bool) -> Iterator[Case]:
    from .cpu_attention import Peers, configurations, figure, measure

    def wanted(c: dict[str, Any]) -> bool:
        decode = c["batch"] == 8 and c["context"] == 2048 and c["rows"] == 1
        prefill = c["batch"] == 1 and c["context"] == c["rows"] == 512
        if c["head_dim"] != 128 or c["block_size"] != 16 or not (decode or prefill):
            return False
        if short and c["dtype"] == "float32":
            return False
        return (c["num_heads"], c["num_kv_heads"]) == (32, 8) or (decode and not short)

    peers = cache(Peers)
    for c in filter(wanted, configurations("all")):

        def run(c: dict[str, Any] = c) -> Row:
            seconds = measure(c, peers(), 1 if short else 3, 0.05, False)
            return Row(**figure({"config": c, "seconds": seconds}))

        kind = "decode" if c["rows"] == 1 else "prefill"
        heads = f"{c['num_heads']}/{c['num_kv_heads']}"
        yield Case("cpu-attention", f"{kind} {c['batch']} x {c['context']}, heads {heads}, {c['dtype']}", run)


def _gpu(short: bool) -> Iterator[Case]:
    from .gpu_attention import CASES, fits, measure

    for case in filter(fits, CASES[1:3] if short else CASES):

        def run(case: Any = case) -> Row:
            r = measure(case)
            more = {**r.as_dict(), "peers": r.classic_us}
            return Row("gpu-attention", case.name, r.graph_us, "us", None, r.kv_bytes / r.read_gb_s / 1e3, more)

        yield Case("gpu-attention", case.name, run)


def _compile(short: bool) -> Iterator[Case]:
    from cupaged.cuda_structs import decode_defines
    from cupaged.kernel_config import attention_kernels
    from cupaged.kernels import Specialisation, compile_cubin

    from .machine_code import CHIPS, IN_FLIGHT_GOAL, audit, device, goal

    types = [("float16", "float16"), ("float16", "fp8_e4m3"), ("float32", "float32")]
    for arch in (90,) if short else (80, 90, 100):
        for dtype, kv_dtype in types[:1] if short else types:
            # the decode of 32 query heads on 8 KV heads, and a prefill where there are tensor cores for it
            few, many = (attention_kernels(device(arch), 128, dtype, kv_dtype, 4, 4, rows)[-1] for rows in (4, 256))
            for config in (few, many) if dtype != "float32" else (few,):
                name = f"{config.kernel}, {dtype} on {kv_dtype} pages, dim 128, sm_{arch}"

                def compiled(config: Any = config, arch: int = arch, name: str = name) -> Row:
                    start = time.perf_counter()
                    defines = decode_defines(config, 16, planned=True, softcap=False, alibi=False)
                    compile_cubin(Specialisation.of(config.kernel, config.kernel + ".cu", defines), arch)
                    return Row("kernel-compile", name, (time.perf_counter() - start) * 1e3, "ms")

                yield Case("kernel-compile", name, compiled)
                if config.kernel == "prefill" or not _disassembler():
                    continue

                def issued(
                    config: Any = config, arch: int = arch, name: str = name, most: int = goal(dtype, kv_dtype)
                ) -> Row:
                    a = audit(arch, config)
                    more = {
                        "registers": a.registers, "spills": a.spills, "warps": a.warps, "in_flight": a.in_flight,
                        "in_flight_goal": IN_FLIGHT_GOAL[arch], "part_of_issue": {c.name: a.issue(c) for c in CHIPS[arch]},
                    }  # fmt: skip
                    return Row("kernel-compile", f"{name}, issued", a.per_512, "instructions/512 B", None, most, more)

                yield Case("kernel-compile", f"{name}, issued", issued)


def _disassembler() -> bool:
    try:
        metadata.distribution("nvidia-cuda-nvdisasm")
    except metadata.PackageNotFoundError:
        return False
    return True


# ---------------------------------------------------------------------------------------------------------------- run


def report(rows: list[Row], reasons: dict[str, str]) -> str:
    """The table, and a line for each group and peer that is missing."""
    lines = [table(rows)] if rows else []
    lines += [f"{group}: not run: {reason}" for group, reason in reasons.items() if reason]
    if not os.environ.get("CUPAGED_VLLM_PYTHON"):
        lines.append("peer: not run: CUPAGED_VLLM_PYTHON names no Python that has vLLM")
    lines.append("Less is better. Of the limit: over 100% is within a budget; reading the same bytes cannot be beaten.")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=GROUPS, help="these groups")
    parser.add_argument("--save", action="store_true", help="write bench/results/GROUP-DATE.json and .txt")
    options = parser.parse_args(argv)
    return run(tuple(options.only), short=False, keep=options.save)


def run(only: tuple[str, ...] = GROUPS, short: bool = False, keep: bool = False) -> int:
    """Measure, print and with `keep` save the groups in `only`."""
    reasons = {group: why_not(group) for group in only}
    rows: list[Row] = []
    for group in (group for group in only if not reasons[group]):
        for case in cases(group, short):
            rows.append(case.run())
            if sys.stderr.isatty():
                print(f"\r{len(rows)} measured, {case.work:80.80}", end="", file=sys.stderr, flush=True)
        if keep:
            save(group, [row for row in rows if row.group == group], f"python -m bench.summary --only {group} --save")
    if sys.stderr.isatty():
        print("\r" + " " * 100, end="\r", file=sys.stderr)
    print(report(rows, reasons))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
