"""What became slower: the short benchmarks of the CPU against a saved run, in units of a calibration loop. `make bench-compare`

    python -m bench.compare [--save] [--only GROUP ...]

A figure is the median of seven runs. Machines and their moods differ, so not times are compared but ratios: of the control plane to a
loop of small NumPy calls and Python, run before each of the seven; of CPU attention to reading as many bytes with all threads, where
decode is bound by memory, and to a product of matrices in prefill. More than 30% above the saved ratio, in a second measurement too, is a
regression, and the exit status is then 1. Compare on the machine that saved.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable

import numpy as np

from .results import Row, latest, load, machine, save
from .summary import cases, why_not

GROUPS = ("control-plane", "cpu-attention")
RUNS, ALLOWED = 7, 1.3
NAME = "compare"


def regressions(saved: Iterable[Row], now: Iterable[Row], allowed: float = ALLOWED) -> list[str]:
    """A line for each work of `now` that takes more than `allowed` times what it took; works that only one side has are no regression."""
    before = {(row.group, row.work): row for row in saved}
    lines = []
    for row in now:
        old = before.get((row.group, row.work))
        if old is not None and row.ours > allowed * old.ours:
            lines.append(
                f"{row.group}: {row.work}: {row.ours / old.ours:.2f} times the saved run ({old.ours:.4g} -> {row.ours:.4g})"
            )
    return lines


def confirmed(saved: list[Row], now: list[Row], again: Callable[[Row], Row]) -> list[str]:
    """The regressions that a second measurement of the same works shows as well."""
    return regressions(saved, [again(row) for row in now if regressions(saved, [row])])


def relative(measure: Callable[[], Row], calibrate: Callable[[], float], runs: int = RUNS) -> Row:
    """The median over `runs` of a figure in units of the yardstick: its own limit of the same moment, or else `calibrate()`."""
    ratios = []
    for _ in range(runs):
        unit = calibrate()
        row = measure()
        bound = row.group == "cpu-attention" and row.limit
        ratios.append(row.ours / (bound or unit))
    return Row(row.group, row.work, float(np.median(ratios)), "calibration", more={"runs": sorted(ratios)})


def small_calls() -> float:
    """Nanoseconds of a loop like a step's: small array operations and the interpreter between them."""
    x, y = np.arange(1024), np.zeros(1024, np.int64)
    times = []
    for _ in range(200):
        start = time.perf_counter_ns()
        for _ in range(10):
            np.take(x, x, out=y)
            np.cumsum(x, out=y)
            y += 1
            (y > 5).any()
        times.append(time.perf_counter_ns() - start)
    return float(np.median(times))


def product() -> float:
    """Microseconds of a float32 product of matrices."""
    a = np.ones((1024, 1024), np.float32)
    times = []
    for _ in range(5):
        start = time.perf_counter_ns()
        a @ a
        times.append(time.perf_counter_ns() - start)
    return float(np.median(times)) / 1e3


CALIBRATE = {"control-plane": small_calls, "cpu-attention": product}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="this run becomes the one to compare with")
    parser.add_argument("--only", nargs="*", choices=GROUPS, default=GROUPS)
    options = parser.parse_args()
    rows, again = [], {}
    for group in options.only:
        if reason := why_not(group):
            print(f"{group}: not run: {reason}")
            continue
        for case in cases(group, short=True):
            rows.append(relative(case.run, CALIBRATE[group]))
            again[rows[-1].group, rows[-1].work] = case.run
            print(f"{group:14} {case.work:60} {rows[-1].ours:10.4g}", flush=True)
    if options.save:
        print(f"saved {save(NAME, rows, 'python -m bench.compare --save')}")
        return 0
    path = latest(NAME)
    content, saved = load(path)
    if content["machine"] != machine():
        print(f"{path.name} is of another machine ({content['machine']['processor']}): save a run of this one first")
    found = confirmed(saved, rows, lambda row: relative(again[row.group, row.work], CALIBRATE[row.group]))
    print("\n".join(found) or f"nothing is more than {ALLOWED - 1:.0%} slower than in {path.name}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
