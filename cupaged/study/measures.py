"""From a replay to figures: means over time, peaks, and what they are compared with."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from .replay import Outcome
from .traces import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Figures:
    """One policy on one trace. Shares are of the pool's slots, averaged over the time in which any request is there."""

    pool_slots: int
    used: float  # mean utilisation: slots that hold a token
    used_peak: float
    reservation: float
    internal: float
    external: float
    free: float
    useful: float  # used / (used + reservation + internal + external): what the PagedAttention paper's figure 2 calls token states
    running_mean: float  # requests at once
    running_peak: int
    running_pressed: float | None  # mean while other requests wait; None if none ever did
    pressed: float  # share of the time in which requests wait
    wait_mean: float | None  # seconds from arrival to admission; None if none was admitted
    wait_p99: float | None
    duration: float  # seconds from the first arrival to the last departure
    admitted: int
    rejected: int
    preempted: int
    recomputed: int  # tokens of preempted requests
    shared: float | None  # 1 - blocks / blocks without sharing; None where nothing can be shared
    prefix_hits: float | None  # share of prompt tokens found in the prefix cache
    metadata_bytes: int


def measure(outcome: Outcome) -> Figures:
    """Sum up a replay."""
    column = outcome.timeline.column
    steps, running, waiting = column("steps"), column("running"), column("waiting")
    total = max(int(steps.sum()), 1)
    capacity = outcome.memory.capacity

    def mean(values: IntArray | FloatArray) -> float:
        return float((values * steps).sum() / total)

    kinds = outcome.kinds()
    shares = {kind: mean(slots) / capacity for kind, slots in kinds.items()}
    busy = max(1 - shares["free"], 1e-12)
    pressed = (waiting > 0) * steps
    taken, unshared = mean(column("taken")), mean(column("unshared"))
    return Figures(
        pool_slots=capacity,
        **shares,
        used_peak=float((column("used") + running * (steps - 1)).max(initial=0)) / capacity,
        useful=shares["used"] / busy,
        running_mean=mean(running),
        running_peak=int(running.max(initial=0)),
        running_pressed=float((running * pressed).sum() / pressed.sum()) if pressed.any() else None,
        pressed=float(pressed.sum() / total),
        wait_mean=float(outcome.waits.mean()) if len(outcome.waits) else None,
        wait_p99=float(np.percentile(outcome.waits, 99)) if len(outcome.waits) else None,
        duration=float(column("step")[-1] + steps[-1] - column("step")[0]) * outcome.interval if len(steps) else 0.0,
        admitted=len(outcome.waits),
        rejected=outcome.rejected,
        preempted=outcome.preempted,
        recomputed=outcome.recomputed,
        shared=1 - taken / unshared if unshared else None,
        prefix_hits=outcome.memory.prefix_hits,
        metadata_bytes=outcome.memory.metadata_bytes,
    )


def as_json(figures: Figures) -> dict[str, float | int | None]:
    """Plain values with six digits."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(figures).items()}
