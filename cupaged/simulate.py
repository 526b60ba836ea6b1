"""The memory study: `python -m cupaged simulate TRACE` replays requests on a pool of token slots, under several ways to manage it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import __version__
from .study import policies, report, traces
from .study.measures import as_json, measure
from .study.replay import Outcome, replay

BUILT_IN_REQUESTS = 2000
BUILT_IN_POOL = 15_700  # slots that the PagedAttention paper has for OPT-13B on a 40 GB GPU (table 1)
BUILT_IN_LENGTH = 2048  # of OPT
SMALLEST_POOL = max(policies.BLOCK_SIZES)
SWEEP_REQUESTS = 1000
SWEEP_POOLS = (0.25, 0.5, 1, 2, 4)  # of the pool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "trace",
        nargs="?",
        default="sharegpt",
        help=f"Azure CSV, Mooncake JSONL, or a built-in workload: {', '.join(traces.BUILT_IN)} (default: sharegpt)",
    )
    parser.add_argument(
        "--limit", type=_positive, metavar="N", help=f"first N requests only (built-in: {BUILT_IN_REQUESTS})"
    )
    parser.add_argument(
        "--pool",
        type=_positive,
        metavar="SLOTS",
        help=f"pool in token slots (default: 4 sequences of the longest length; built-in: {BUILT_IN_POOL:,})",
    )
    parser.add_argument(
        "--max-length",
        type=_positive,
        metavar="TOKENS",
        help="longest sequence of the model; longer requests are rejected (default: power of two above the trace's longest; "
        f"built-in: {BUILT_IN_LENGTH:,})",
    )
    parser.add_argument(
        "--interval", type=_above_zero, default=0.05, metavar="SECONDS", help="time of a decode step (default: 0.05)"
    )
    parser.add_argument("--rate", type=_above_zero, metavar="R", help="requests a second of a built-in workload")
    parser.add_argument("--seed", type=_not_negative, default=0, help="of built-in workloads and of beams (default: 0)")
    parser.add_argument(
        "--policies",
        nargs="+",
        choices=policies.NAMES,
        metavar="NAME",
        help=f"of {', '.join(policies.NAMES)}",
    )
    parser.add_argument(
        "--geometry",
        type=_geometry,
        default=(32, 8, 128, 2),
        metavar="LAYERS,KV_HEADS,HEAD_DIM,BYTES",
        help="turns slots into bytes (default: 32,8,128,2, an 8B Llama 3 in 16 bits)",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("memory-study"), metavar="PATH", help="writes PATH.json and PATH.png"
    )


def run(args: argparse.Namespace) -> int:
    """Run the study. Returns 0, or 2 after one line on stderr for input that cannot be used."""
    start = time.perf_counter()
    try:
        trace = _load(args)
        built_in = args.trace in traces.BUILT_IN
        max_length = args.max_length or (BUILT_IN_LENGTH if built_in else 1 << int(trace.finals.max() - 1).bit_length())
        pool = args.pool or (BUILT_IN_POOL if built_in else max(4 * max_length, SMALLEST_POOL))
        if pool < SMALLEST_POOL:
            raise ValueError(f"--pool: expected at least {SMALLEST_POOL} slots, one of the largest blocks, got {pool}")
        names = args.policies or policies.default(trace)
        if not args.out.name:
            raise ValueError(f"--out: expected the name of a file without its ending, got {str(args.out)!r}")
        args.out.parent.mkdir(parents=True, exist_ok=True)  # found out now, not after minutes
        memories = {name: policies.make(name, pool, max_length, trace, args.seed) for name in names}
    except (OSError, ValueError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    bytes_per_slot = 2 * int(np.prod(args.geometry))
    heading = (
        f"{trace.name}: {len(trace):,} requests, {trace.prompts.mean():,.0f} prompt and {trace.outputs.mean():,.0f} generated tokens on "
        f"average; pool of {pool:,} slots ({pool * bytes_per_slot / 2**30:.1f} GiB), sequences of up to {max_length:,}"
    )
    print(heading + "\n")

    outcomes: dict[str, Outcome] = {}
    for name, memory in memories.items():
        with _Progress(name, len(trace)) as finished:
            outcomes[name] = replay(trace, memory, interval=args.interval, max_length=max_length, finished=finished)
    figures = {name: measure(outcome) for name, outcome in outcomes.items()}
    sweep = requests_at_once(trace, pool, max_length, args.interval)
    print(report.table(figures) + "\n")
    for line in report.comparison(trace, max_length, figures):
        print(line)

    results = {
        "cupaged": __version__,
        "trace": trace.name,
        "requests": len(trace),
        "prompt_tokens_mean": round(float(trace.prompts.mean()), 2),
        "generated_tokens_mean": round(float(trace.outputs.mean()), 2),
        "pool_slots": pool,
        "max_length": max_length,
        "bytes_per_slot": bytes_per_slot,
        "interval_seconds": args.interval,
        "seed": args.seed,
        "policies": {name: as_json(row) for name, row in figures.items()},
        "running_by_pool": {name: {str(size): round(n, 3) for size, n in row.items()} for name, row in sweep.items()},
    }
    written, picture = (args.out.with_name(args.out.name + ending) for ending in (".json", ".png"))
    written.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\n{time.perf_counter() - start:.0f} s. Written: {written}", end="")
    try:
        from .study.plots import draw

        draw(picture, heading.replace("; ", "\n"), outcomes, figures, sweep, until=float(trace.arrivals[-1]))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        print("\nno picture: matplotlib is not installed: pip install 'cupaged[plot]'")
    else:
        print(f", {picture}")
    return 0


def requests_at_once(trace: traces.Trace, pool: int, max_length: int, interval: float) -> dict[str, dict[int, float]]:
    """Mean number of requests running while others wait, by policy and pool in slots, when the first requests all arrive at once.

    A pool that holds none of them, or all of them at once, has no entry.
    """
    queue = trace.first(SWEEP_REQUESTS).at_once()
    names = (*policies.CONTIGUOUS, policies.PAGED)
    sizes = [int(pool * share) for share in SWEEP_POOLS]
    result: dict[str, dict[int, float]] = {name: {} for name in names}
    with _Progress("pool sizes", len(names) * len(sizes)) as finished:
        for name in names:
            for size in sizes:
                memory = policies.make(name, size, max_length, queue)
                outcome = replay(queue, memory, interval=interval, max_length=max_length, until_queue_empty=True)
                running = measure(outcome).running_pressed
                if running is not None:  # with all of them in the pool at once, the pool is not what limits them
                    result[name][size] = running
                finished(1)
    return result


def _load(args: argparse.Namespace) -> traces.Trace:
    built_in = traces.BUILT_IN.get(args.trace)
    if built_in is None:
        path = Path(args.trace)
        if not path.exists():
            raise ValueError(f"trace: expected a file or one of {', '.join(traces.BUILT_IN)}, got {args.trace}")
        return traces.read(path).first(args.limit)
    return built_in.draw(args.trace, args.limit or BUILT_IN_REQUESTS, args.rate, np.random.default_rng(args.seed))


class _Progress:
    """A progress bar on stderr where tqdm is installed, nothing where it is not."""

    def __init__(self, name: str, total: int) -> None:
        try:
            from tqdm import tqdm
        except ModuleNotFoundError:
            self._bar = None
        else:
            self._bar = tqdm(desc=f"{name:<15}", total=total, leave=False, disable=None, mininterval=0.5)

    def __enter__(self) -> Callable[[int], None]:
        return self._bar.update if self._bar is not None else lambda count: None

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected an integer of at least 0, got {text}")
    return int(text)


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def _geometry(text: str) -> tuple[int, ...]:
    sizes = tuple(_positive(part) for part in text.split(","))
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"expected LAYERS,KV_HEADS,HEAD_DIM,BYTES, four numbers, got {text}")
    return sizes
