"""Replay a trace on a pool of token slots: requests wait, are admitted, grow by a token a step, finish; every step is accounted for.

The service model, the same for every way to manage memory:

- Time goes in decode steps of a fixed interval. A request is seen at the first step that begins after its arrival.
- Admission is first come, first served: while the request at the head of the queue does not fit, nobody passes it. It is tried again
  when a running request has finished.
- An admitted request writes its whole prompt in its first step and one token in each later one: `g` generated tokens keep it for
  `g` steps, the last of them with `p + g - 1` tokens.
- When a running request cannot grow, the one admitted last is preempted: it gives up its memory and returns to the head of the
  queue, where it needs memory for all tokens it had (recomputation, Kwon et al. section 4.5). Nobody is admitted before a running
  request has finished: what was just taken from one would only be given to it again.

Slots are accounted for in five kinds that always sum to the capacity: used (they hold a token), reservation (empty, given to a
request that will use them later), internal (given to a request that never uses them), external (free, but a request that needs no
more than all free slots waits, because they do not lie in a piece that it could get) and free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .traces import FloatArray, IntArray, Trace


class Holding(NamedTuple):
    """What the running requests have of the pool, in slots."""

    taken: int  # not available to others
    used: int  # hold a token
    reservation: int  # taken, and will be used later by the request that has them
    unshared: int = 0  # what would be taken if nothing were shared; 0 where nothing can be


class Memory(ABC):
    """A way to give memory to requests. Requests are named by their index in the trace."""

    capacity: int  # slots
    grows: bool  # requests take more memory while they run; if not, growth cannot fail

    @property
    @abstractmethod
    def metadata_bytes(self) -> int:
        """The most that its bookkeeping took so far."""

    @abstractmethod
    def can_hold(self, final: int) -> bool:
        """Whether a request of this final length would be admitted if it were alone."""

    @abstractmethod
    def admit(self, request: int, tokens: int, final: int) -> bool:
        """Give memory for the first `tokens` tokens of a request: its prompt, or what it had when it was preempted, and one more.

        Returns False, with nothing changed, where it does not fit.
        """

    @abstractmethod
    def release(self, request: int) -> None:
        """Take back the memory of a request."""

    @abstractmethod
    def holding(self, requests: IntArray, lengths: IntArray, finals: IntArray) -> Holding:
        """What the running requests `[n]` have now, given the tokens `[n]` that each has and will have."""

    @abstractmethod
    def stranded(self, final: int) -> bool:
        """Whether enough slots are free for a refused request of this final length, and only their places are wrong."""

    @property
    def prefix_hits(self) -> float | None:
        """Share of prompt tokens that were found in a prefix cache; None where there is none."""
        return None

    def begin_step(self, requests: IntArray) -> None:  # noqa: B027 (most have nothing to do)
        """The running requests chose their next tokens; called once a step before they grow."""

    def grow(self, requests: IntArray) -> bool:
        """One more token for each running request; False, with nothing changed, where memory runs out."""
        return True


class Timeline:
    """Records of consecutive steps between which only lengths change; `steps` steps from `step` on, `running` more tokens in each.

    All columns are int64 `[records]`. `used`, `reservation` are those of the first step, the other kinds hold for all steps.
    """

    COLUMNS = ("step", "steps", "running", "waiting", "taken", "used", "reservation", "stranded", "unshared")

    def __init__(self) -> None:
        self._records = array("q")

    def add(self, step: int, steps: int, running: int, waiting: int, stranded: bool, holding: Holding) -> None:
        taken, used, reservation, unshared = holding
        self._records.extend((step, steps, running, waiting, taken, used, reservation, stranded, unshared))

    def column(self, name: str) -> IntArray:
        """One column of all records."""
        table = np.frombuffer(self._records, np.int64).reshape(-1, len(self.COLUMNS))
        return table[:, self.COLUMNS.index(name)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay came to."""

    memory: Memory
    timeline: Timeline
    interval: float  # seconds of a step
    waits: FloatArray  # [admitted requests] seconds from arrival to first admission
    rejected: int  # larger than the pool, or than the model's longest length
    preempted: int  # times that a running request lost its memory
    recomputed: int  # tokens that those had

    def kinds(self) -> dict[str, FloatArray]:
        """Slots of each kind, `[records]`: the mean over the steps of each record. They sum to the capacity."""
        column = self.timeline.column
        growth = column("running") * (column("steps") - 1) / 2  # used and reservation are linear within a record
        used, reservation = column("used") + growth, column("reservation") - growth
        unused = self.memory.capacity - column("taken")
        external = np.where(column("stranded") == 1, unused, 0)
        return {
            "used": used,
            "reservation": reservation,
            "internal": column("taken") - used - reservation,
            "external": external,
            "free": unused - external,
        }


def replay(
    trace: Trace,
    memory: Memory,
    *,
    interval: float,
    max_length: int,
    until_queue_empty: bool = False,
    finished: Callable[[int], None] = lambda count: None,
) -> Outcome:
    """Replay `trace` on `memory` with a step every `interval` seconds.

    Requests whose final length is over `max_length` are rejected. `until_queue_empty` ends the replay when no request waits any
    more, while the pool is still as full as it gets. `finished` is told how many requests just left, for a progress bar.
    """
    due = np.ceil(np.round(trace.arrivals / interval, 6)).astype(np.int64)
    prompts, finals = trace.prompts, trace.finals
    resumes: dict[int, int] = {}  # tokens of preempted requests
    waiting: deque[int] = deque()
    # requests in order of admission, their tokens now and at their end
    running = lengths = ends = np.zeros(0, np.int64)
    timeline, waits = Timeline(), []
    rejected = preempted = recomputed = 0
    clock, arrived = int(due[0]), 0
    closed = False  # the head of the queue was refused, or a request preempted, and none has finished since

    while arrived < len(trace) or waiting or len(running):
        if not waiting and not len(running):
            clock = max(clock, int(due[arrived]))

        done = lengths == ends
        if done.any():
            for request in running[done].tolist():
                memory.release(request)
            running, lengths, ends = running[~done], lengths[~done], ends[~done]
            finished(int(done.sum()))
            closed = False

        memory.begin_step(running)
        while len(running) and not memory.grow(running):
            closed = True
            victim = int(running[-1])
            memory.release(victim)
            if len(running) == 1:  # alone, and still too large
                rejected += 1
                finished(1)
            else:
                preempted += 1
                recomputed += int(lengths[-1])
                resumes[victim] = int(lengths[-1]) + 1
                waiting.appendleft(victim)
            running, lengths, ends = running[:-1], lengths[:-1], ends[:-1]
        lengths = lengths + 1
        closed = closed and len(running) > 0

        while arrived < len(trace) and due[arrived] <= clock:
            waiting.append(arrived)
            arrived += 1
        admitted: list[int] = []
        while waiting and not closed:
            head = waiting[0]
            final = int(finals[head])
            if final > max_length or not memory.can_hold(final):
                rejected += 1
                finished(1)
            elif memory.admit(head, resumes.get(head, int(prompts[head])), final):
                admitted.append(head)
                if head not in resumes:
                    waits.append(clock * interval - float(trace.arrivals[head]))
            else:
                closed = True  # nobody gives memory back before that
                break
            waiting.popleft()
        if admitted:
            running = np.append(running, admitted)
            lengths = np.append(lengths, [resumes.get(head, int(prompts[head])) for head in admitted])
            ends = finals[running]

        steps = 1
        if len(running) and not memory.grows:
            # nothing but lengths changes until a request leaves, or one comes that may fit
            steps = int((ends - lengths).min()) + 1
            if not waiting and arrived < len(trace):
                steps = min(steps, int(due[arrived]) - clock)
        if not waiting and not len(running):
            continue
        stranded = bool(waiting) and memory.stranded(int(finals[waiting[0]]))
        timeline.add(clock, steps, len(running), len(waiting), stranded, memory.holding(running, lengths, ends))
        if until_queue_empty and arrived == len(trace) and not waiting:
            break
        clock += steps
        lengths = lengths + (steps - 1)
    return Outcome(memory, timeline, interval, np.array(waits), rejected, preempted, recomputed)
