"""The study as one picture: use over time by kind of waste, waste against block size, requests at once against pool size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .measures import Figures
from .policies import BLOCK_SIZES, CONTIGUOUS, PAGED
from .replay import Outcome
from .traces import FloatArray

_KINDS = {  # kind -> (label, colour), from the bottom of a stack up
    "used": ("used: holds a token", "#1b6ca8"),
    "reservation": ("reservation: will be used later", "#8fc1e3"),
    "internal": ("internal: never used", "#d1495b"),
    "external": ("external: free, but in the wrong place", "#edae49"),
    "free": ("free", "#f1f1ee"),
}
_LINES = {"contiguous-max": "#d1495b", "buddy": "#d08a1d", "oracle": "#66716f", PAGED: "#1b6ca8"}


def draw(
    path: Path,
    title: str,
    outcomes: dict[str, Outcome],
    figures: dict[str, Figures],
    sweep: dict[str, dict[int, float]],
    until: float,
) -> None:
    """Write the picture to `path`. `sweep`: policy -> pool in slots -> requests at once; `until`: seconds of time axis."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 8.2), layout="constrained")
    figure.suptitle(title, fontsize=12)
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.15, 1))
    upper, lower = halves
    shown = [name for name in (*CONTIGUOUS, PAGED) if name in outcomes and figures[name].admitted]
    if shown:
        panels = upper.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for panel, name in zip(panels, shown, strict=True):
            _use_over_time(panel, name, outcomes[name], figures[name], until)
        panels[0].set_ylabel("share of the pool")
        handles, labels = panels[0].get_legend_handles_labels()
        upper.legend(handles, labels, loc="outside lower center", ncols=len(_KINDS), frameon=False, fontsize=9)
    left, right = lower.subplots(1, 2)
    _waste_by_block_size(left, figures)
    _requests_by_pool(right, sweep)
    figure.savefig(path, dpi=130)


def over_time(outcome: Outcome, until: float, bins: int = 240) -> tuple[FloatArray, dict[str, FloatArray]]:
    """Seconds `[bins]`, and the mean share of the pool of each kind in each bin; a bin in which no request is there is all free."""
    column = outcome.timeline.column
    start, steps = column("step"), column("steps")
    edges = np.linspace(0, max(until / outcome.interval, 1), bins + 1) + start[0]
    # A running sum over time, read off at the edges of the bins; before the first record and in the gaps between records it stands still.
    times = np.stack([start, start + steps], axis=1).reshape(-1)
    shares = {}
    for kind, slots in outcome.kinds().items():
        if kind != "free":
            total = np.cumsum(np.stack([np.zeros(len(steps)), slots * steps], axis=1).reshape(-1))
            shares[kind] = np.diff(np.interp(edges, times, total)) / np.diff(edges) / outcome.memory.capacity
    shares["free"] = 1 - np.sum(list(shares.values()), axis=0)
    return (edges[:-1] - edges[0]) * outcome.interval, shares


def _use_over_time(panel: Any, name: str, outcome: Outcome, figures: Figures, until: float) -> None:
    seconds, shares = over_time(outcome, until)
    scale, unit = (60, "minutes") if until > 600 else (1, "seconds")
    labels, colours = zip(*_KINDS.values(), strict=True)
    panel.stackplot(seconds / scale, *(shares[kind] for kind in _KINDS), labels=labels, colors=colours, linewidth=0)
    panel.set(
        title=f"{name}\n{figures.useful:.0%} of memory in use holds tokens",
        xlabel=unit,
        ylim=(0, 1),
        xlim=(0, seconds[-1] / scale),
    )
    panel.title.set_fontsize(10)
    panel.yaxis.set_major_formatter(lambda y, _: f"{y:.0%}")


def _waste_by_block_size(panel: Any, figures: dict[str, Figures]) -> None:
    sizes = [size for size in BLOCK_SIZES if f"paged-{size}" in figures]
    rows = [figures[f"paged-{size}"] for size in sizes]
    bottom = np.zeros(len(rows))
    for kind in ("reservation", "internal"):
        label, colour = _KINDS[kind]
        height = np.array([getattr(row, kind) / (1 - row.free) * 100 for row in rows])
        panel.bar(range(len(rows)), height, bottom=bottom, color=colour, label=label, width=0.65)
        bottom += height
    for x, total in enumerate(bottom):
        panel.annotate(f"{total:.2f}%", (x, total), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=9)
    panel.axhline(4, color="#66716f", linewidth=1, linestyle="--", zorder=0, label="the PagedAttention paper: under 4%")
    ticks = [f"{size}\n{row.metadata_bytes / 1024:,.0f} KiB" for size, row in zip(sizes, rows, strict=True)]
    panel.set_xticks(range(len(rows)), ticks)
    panel.set(
        title="Waste of paging against block size",
        xlabel="block size (token slots), and what the bookkeeping takes",
        ylabel="% of memory in use",
    )
    panel.set_ylim(0, max(5, float(bottom.max(initial=0)) * 1.35))
    panel.legend(frameon=False, fontsize=8, loc="upper left")
    panel.spines[["top", "right"]].set_visible(False)


def _requests_by_pool(panel: Any, sweep: dict[str, dict[int, float]]) -> None:
    sweep = {name: points for name, points in sweep.items() if points}
    for name, points in sweep.items():
        pools, requests = list(points), list(points.values())
        panel.plot(pools, requests, marker="o", color=_LINES[name], label=name)
        panel.annotate(
            f"{requests[-1]:.0f}",
            (pools[-1], requests[-1]),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=_LINES[name],
        )
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    pools = sorted({pool for points in sweep.values() for pool in points})
    panel.set_xticks(pools, [f"{pool:,}" for pool in pools])
    panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    panel.set(
        title="Requests running at once while others wait, all there from the start",
        xlabel="pool (token slots)",
        ylabel="requests (mean)",
    )
    panel.grid(alpha=0.3)
    if sweep:
        panel.legend(frameon=False, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
