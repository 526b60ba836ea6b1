"""The tables of README.md and docs/benchmarks.md, from the result files: `python -m bench.readme_tables` (or `make docs`).

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; what is between them is replaced. Figures come from
the newest file of each benchmark in `bench/results/` and from nowhere else; `tests/test_docs.py` asserts that both are current.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

from cupaged.study.report import PAPER_SHARED, PAPER_USEFUL

from .results import FOLDER, Row, conditions, latest, load, of_each_machine

PAGES = tuple(FOLDER.parents[1] / name for name in ("README.md", "docs/benchmarks.md"))
_PLACE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def markdown(head: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown, its columns in line; all but the first are to the right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return (
            "| "
            + " | ".join(
                c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            )
            + " |"
        )

    rule = "|" + "|".join("-" * (w + 2) if i == 0 else "-" * (w + 1) + ":" for i, w in enumerate(widths)) + "|"
    return "\n".join([line(head), rule, *map(line, rows)])


def figure(x: float | None, unit: str = "") -> str:
    """Three digits, thousands apart."""
    if x is None:
        return ""
    digits = f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}"
    return f"{digits} {unit}".strip()


def _times(row: Row, of: float | None) -> str:
    return "" if of is None else f"{of / row.ours:.1f}" if of / row.ours < 10 else f"{of / row.ours:.0f}"


def control_plane() -> str:
    content, rows = load(latest("control-plane"))
    lines = [
        [row.work, figure(row.ours, row.unit), figure(row.limit), figure(row.peer), _times(row, row.peer)]
        for row in rows
    ]
    return _with_conditions(content, markdown(["work", "cupaged", "goal", "vLLM", "vLLM / cupaged"], lines))


SHOWN = re.compile(r"decode 8 x 2048, .*, dim 128,|prefill 1 x 512, heads 32/8, dim 128,")


def cpu_attention() -> str:
    """The newest run of all."""
    return _cpu_attention(of_each_machine("cpu-attention")[0])


def cpu_attention_elsewhere() -> str:
    """The newest run of each other machine."""
    return "\n\n".join(map(_cpu_attention, of_each_machine("cpu-attention")[1:]))


def planning() -> str:
    """Host time of planning and of a planned call."""
    content, rows = load(latest("planning"))
    lines = [[row.work, figure(row.ours, row.unit), figure(row.limit, row.unit if row.limit else "")] for row in rows]
    return _with_conditions(content, markdown(["work", "time", "goal"], lines))


def _cpu_attention(path: Path) -> str:
    """Some rows of the file, and the ratios over all of them."""
    content, rows = load(path)
    few = [row for row in rows if SHOWN.match(row.work) and "blocks of 32" not in row.work]
    others = sorted({name for row in rows for name in row.more.get("peers", {})})
    head = ["call", "time", "GB/s", "of reading", "vLLM / cupaged", *(f"{name} / cupaged" for name in others)]
    lines = []
    for row in few:
        of_limit = "" if row.of_limit is None else f"{row.of_limit:.2f}"
        rest = [_times(row, row.more.get("peers", {}).get(name)) for name in others]
        decode = row.work.startswith("decode")  # a prefill is not bound by reading
        work = row.work.removesuffix(", blocks of 16").replace(", dim 128", "")
        lines.append(
            [
                work,
                figure(row.ours, row.unit),
                figure(row.more.get("gb_s")) if decode else "",
                of_limit,
                _times(row, row.peer),
                *rest,
            ]
        )
    return _with_conditions(content, f"{markdown(head, lines)}\n\n{_over_all(rows)}")


def _over_all(rows: list[Row]) -> str:
    """Geometric mean and least of what peers take, for decode and prefill."""
    words = []
    for kind in ("decode", "prefill"):
        mine = [row for row in rows if row.work.startswith(kind)]
        for name in ("vLLM", "gather", "sdpa"):
            theirs = [(row, row.peer if name == "vLLM" else row.more.get("peers", {}).get(name)) for row in mine]
            ratios = [peer / row.ours for row, peer in theirs if peer is not None]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                words.append(f"{kind}, {name} {mean:.2f} ({min(ratios):.2f} at least, {len(ratios)} rows)")
    return "Times as long as cupaged over all rows of the file, geometric mean: " + "; ".join(words) + "."


def machine_code() -> str:
    """What the decode kernels issue and keep in flight, counted in their machine code."""
    content, rows = load(latest("kernel-compile"))
    lines = []
    for row in rows:
        if row.limit is None:
            continue
        m = row.more
        issue = ", ".join(f"{chip} {part:.0%}" for chip, part in m["part_of_issue"].items())
        lines.append(
            [row.work.removesuffix(", issued"), f"{row.ours:.1f}", figure(row.limit), issue, f"{m['in_flight'] / 1024:.0f} KiB",
             f"{m['in_flight_goal'] / 1024:.0f}", str(m["registers"]), str(m["spills"])]
        )  # fmt: skip
    head = [
        "kernel",
        "instructions for 512 bytes",
        "goal",
        "of the issue slots",
        "in flight",
        "goal",
        "registers",
        "spills",
    ]
    return _with_conditions(content, markdown(head, lines))


def memory(name: str = "sharegpt") -> str:
    """The memory study: a policy a line."""
    study = json.loads((FOLDER / f"{name}.json").read_text())
    shown = {
        "contiguous-max": f"contiguous, {study['max_length']:,} slots each", "buddy": "contiguous, next power of two",
        "oracle": "contiguous, exact length known", "paged-1": "paged, blocks of 1", "paged-16": "paged, blocks of 16",
        "paged-128": "paged, blocks of 128", "parallel-4": "4 samples each, blocks of 16", "beam-4": "4 beams each, blocks of 16",
    }  # fmt: skip
    lines = []
    for policy, words in shown.items():
        p = study["policies"][policy]
        kind = policy.split("-")[0]
        theirs = f"{PAPER_USEFUL[policy]:.1%}" if policy in PAPER_USEFUL else "over 96%" if policy == "paged-16" else ""
        saved = [f"{x:.1%}" for x in PAPER_SHARED[kind]["ShareGPT"]] if kind in PAPER_SHARED else []
        shared = f"{p['shared']:.0%}" if p["shared"] else ""
        lines.append(
            [
                words,
                f"{p['useful']:.1%}",
                theirs,
                f"{p['running_mean']:.1f}",
                figure(p["wait_mean"], "s"),
                shared,
                " to ".join(saved),
            ]
        )
    head = [
        "policy",
        "memory that holds tokens",
        "paper",
        "requests at once",
        "mean wait",
        "saved by sharing",
        "paper",
    ]
    return markdown(head, lines)


def verbatim(name: str) -> Callable[[], str]:
    """What a command printed, its first line the command, long lines cut."""

    def text() -> str:
        found = sorted(FOLDER.glob(f"{name}-[0-9][0-9][0-9][0-9]-*.txt"))
        lines = found[-1].read_text().rstrip().splitlines()
        short = [line if len(line) <= 128 else line[:125] + "..." for line in lines]
        return "\n".join(["```", *short, "```"])

    return text


def serving() -> str:
    """The report at the end of `make serve`, without the answers before it."""
    lines = verbatim("serve")().splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(r"\d+ requests in ", line))
    return "\n".join(lines[:3] + [""] + lines[start:])


def _with_conditions(content: dict, table: str) -> str:
    return f"{table}\n\n`{content['command']}`: {conditions(content)}."


TABLES = {
    "control-plane": control_plane,
    "cpu-attention": cpu_attention,
    "cpu-attention-elsewhere": cpu_attention_elsewhere,
    "planning": planning,
    "machine-code": machine_code,
    "memory": memory,
    "demo": verbatim("demo"),
    "test": verbatim("test"),
    "serve": serving,
}


def rendered(text: str) -> str:
    """`text` with every table made anew. Raises KeyError for a name that no table has."""
    return _PLACE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}\n{found[3]}", text)


def main() -> None:
    for page in PAGES:
        text = page.read_text()
        new = rendered(text)
        page.write_text(new)
        print(f"{page.name}: {'is current' if new == text else 'tables written'}")


if __name__ == "__main__":
    main()
