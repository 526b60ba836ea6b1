"""What the study says in words: a table of policies, and how it compares with the PagedAttention paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .measures import Figures
from .policies import CONTIGUOUS, PAGED, PREFIX
from .traces import Trace

# Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", SOSP 2023: figure 2 (ShareGPT), and
# section 6.3 with figure 15 (blocks saved by sharing, for 2, 4 and 6 sequences: the lowest and the highest of the three).
PAPER_USEFUL = {"contiguous-max": 0.204, "buddy": 0.268, "oracle": 0.382}
PAPER_PAGED_WASTE = 0.04
PAPER_SHARED = {  # kind -> workload -> range
    "parallel": {"Alpaca": (0.061, 0.098), "ShareGPT": (0.162, 0.305)},
    "beam": {"Alpaca": (0.376, 0.552), "ShareGPT": (0.443, 0.663)},
}
PAPER_PROMPTS = 0.32  # share of prompts in the tokens of its ShareGPT workload; Alpaca: 0.25

_COLUMNS: tuple[tuple[str, int, Callable[[Figures], str]], ...] = (  # heading, width, how a row shows it
    ("useful", 7, lambda f: f"{f.useful:.1%}"),
    ("used", 6, lambda f: f"{f.used:.1%}"),
    ("peak", 6, lambda f: f"{f.used_peak:.1%}"),
    ("reserv.", 7, lambda f: f"{f.reservation:.1%}"),
    ("internal", 8, lambda f: f"{f.internal:.1%}"),
    ("external", 8, lambda f: f"{f.external:.1%}"),
    ("free", 6, lambda f: f"{f.free:.1%}"),
    ("running", 8, lambda f: f"{f.running_mean:.1f}"),
    ("peak", 5, lambda f: f"{f.running_peak}"),
    ("wait s", 8, lambda f: "-" if f.wait_mean is None else f"{f.wait_mean:,.1f}"),
    ("rejected", 8, lambda f: f"{f.rejected}"),
    ("preempted", 9, lambda f: f"{f.preempted:,}"),
    ("shared", 6, lambda f: "-" if f.shared is None else f"{f.shared:.1%}"),
    ("hits", 6, lambda f: "-" if f.prefix_hits is None else f"{f.prefix_hits:.1%}"),
    ("bookkeeping", 11, lambda f: f"{f.metadata_bytes / 1024:,.1f} KiB"),
)


def table(figures: dict[str, Figures]) -> str:
    """All policies, one a line. Shares are of the pool, but for `useful` (of the memory in use),
    `shared` (of the blocks that there would be without sharing) and `hits` (of prompt tokens).
    """
    lines = [f"{'':<15}" + "".join(f" {heading:>{width}}" for heading, width, _ in _COLUMNS)]
    lines += [
        f"{name:<15}" + "".join(f" {show(f):>{width}}" for _, width, show in _COLUMNS) for name, f in figures.items()
    ]
    return "\n".join(lines)


def comparison(trace: Trace, max_length: int, figures: dict[str, Figures]) -> Iterator[str]:
    """Lines that hold the paper's figures against these, and say what lies behind a difference."""
    figures = {name: row for name, row in figures.items() if row.admitted}
    prompts = trace.prompts.sum() / trace.finals.sum()
    at_once = f"prompts, written at once, are {prompts:.0%} of all tokens here: less is reserved for later"
    for name in CONTIGUOUS:
        if name not in figures:
            continue
        ours, paper = figures[name].useful, PAPER_USEFUL[name]
        yield f"{name}: {ours:.1%} of the memory in use holds tokens, in the paper {paper:.1%}"
        if name == "contiguous-max":
            ends = trace.finals[trace.finals <= max_length].mean()
            yield f"    a request ends with {ends:,.0f} tokens on average, {ends / max_length:.0%} of the {max_length:,} that it reserves"
        elif ours > paper and name == "buddy":
            yield "    here the whole length is rounded up once; there the output is, and then the sum again by the buddy allocator"
        elif ours > paper:
            yield "    here pieces have any size, by first fit; there a buddy allocator rounds them up"
        if ours > paper and prompts > PAPER_PROMPTS + 0.1:
            yield "    " + at_once
    if PAGED in figures:
        row = figures[PAGED]
        busy = 1 - row.free
        yield (
            f"{PAGED}: {1 - row.useful:.2%} of the memory in use holds none, in the paper under {PAPER_PAGED_WASTE:.0%}; "
            f"{row.internal / busy:.2%} never will, the rest fills as requests grow"
        )
        if 1 - row.useful > PAPER_PAGED_WASTE:
            held = row.used * row.pool_slots / row.running_mean
            yield f"    the last block of a sequence is half empty on average, and a sequence has only {held:,.0f} tokens"
    hits, most = figures[PREFIX].prefix_hits if PREFIX in figures else None, trace.repeated_share()
    if hits is not None and most is not None:
        yield f"{PREFIX}: {hits:.1%} of prompt tokens were found in the pool; {most:.1%} would be in one without end"
    for name, row in figures.items():
        kind = name.split("-")[0]
        if kind in PAPER_SHARED and row.shared is not None:
            ranges = " and ".join(
                f"{low:.1%} to {high:.1%} ({workload})" for workload, (low, high) in PAPER_SHARED[kind].items()
            )
            yield f"{name}: sharing saves {row.shared:.1%} of all blocks, in the paper {ranges} for widths of 2 to 6"
            if row.shared > PAPER_SHARED[kind]["ShareGPT"][1]:
                if prompts > PAPER_PROMPTS + 0.1:
                    yield f"    the prompt is shared, and is {prompts:.0%} of a sequence here; in the paper 25% and {PAPER_PROMPTS:.0%}"
                elif kind == "beam":
                    yield "    the beams played back are those of a 135M model; the paper's model may part from a common past earlier"
