"""Which tokens continue a prompt: sampling of n sequences in parallel, and beam search. Logits in, decisions out.

Both search by the same protocol, so that whoever runs the model need not know which it serves. `live` holds the tokens that each
running sequence has so far, one empty sequence at first. `advance(logits [len(live), vocab_size])` takes the logits after the last
token of each, and returns `parents`: sequence i of the new `live` continues sequence `parents[i]` of the old one, by one token.
No parents: the search has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


class Samples:
    """`n` continuations drawn independently; `outputs[i]` are the tokens of number i, without the eos token that ends it.

    Temperature 0 takes the most likely token. A sequence ends with an eos token or after `max_tokens`. `added` holds the
    `(sequence, token)` of the newest advance.
    """

    def __init__(
        self, n: int, max_tokens: int, eos_ids: Sequence[int], temperature: float = 0.0, seed: int | None = None
    ) -> None:
        self.width, self.max_tokens, self.eos_ids, self.temperature = n, max_tokens, eos_ids, temperature
        self.outputs: list[list[int]] = [[] for _ in range(n)]
        self.added: list[tuple[int, int]] = []
        self._rng = np.random.default_rng(seed)
        self._running = [0]
        self._begun = False

    @property
    def live(self) -> list[list[int]]:
        """Tokens of each running sequence."""
        return [self.outputs[i] for i in self._running]

    def advance(self, logits: Logits) -> list[int]:
        """Draw a token of every running sequence; see the head of this file."""
        rows = list(range(len(self._running)))
        if not self._begun:
            self._begun, self._running, rows = True, list(range(self.width)), [0] * self.width
        tokens = choose(logits[rows], self.temperature, self._rng).tolist()
        drawn = [x for x in zip(rows, self._running, tokens, strict=True) if x[2] not in self.eos_ids]
        self.added = [(i, token) for _, i, token in drawn]
        for i, token in self.added:
            self.outputs[i].append(token)
        going_on = [(row, i) for row, i, _ in drawn if len(self.outputs[i]) < self.max_tokens]
        self._running = [i for _, i in going_on]
        return [row for row, _ in going_on]


def choose(logits: Logits, temperature: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """One token of each row of `logits [n, vocab_size]`: the most likely one at temperature 0, else drawn by softmax(logits / t)."""
    if temperature == 0:
        return np.asarray(logits.argmax(axis=1))
    scaled = logits.astype(np.float64) / temperature
    mass = np.exp(scaled - scaled.max(axis=1, keepdims=True)).cumsum(axis=1)
    return np.asarray((mass > rng.random((len(mass), 1)) * mass[:, -1:]).argmax(axis=1))


@dataclass(frozen=True)
class Hypothesis:
    """A continuation found by beam search, with its eos token if it has one."""

    tokens: tuple[int, ...]
    log_probability: float  # sum over the tokens

    @property
    def score(self) -> float:
        """Mean log probability of a token: hypotheses of different lengths are ranked by it."""
        return self.log_probability / len(self.tokens)


class Beams:
    """Beam search for the best `width` continuations.

    Each advance extends every beam by every token and keeps the `width` best extensions by total log probability; extensions that
    end in an eos token leave the beams as finished hypotheses. The search ends with `width` of them, or after `max_tokens`.
    """

    def __init__(self, width: int, max_tokens: int, eos_ids: Sequence[int]) -> None:
        self.width, self.max_tokens, self.eos_ids = width, max_tokens, eos_ids
        self.live: list[tuple[int, ...]] = [()]
        self._beams = [Hypothesis((), 0.0)]
        self._finished: list[Hypothesis] = []

    def advance(self, logits: Logits) -> list[int]:
        """Extend the beams; see the head of this file."""
        parents: list[int] = []
        extended: list[Hypothesis] = []
        for parent, hypothesis in extensions(self._beams, logits, self.width * (1 + len(self.eos_ids))):
            if len(parents) == self.width:  # a finished one has to beat the beams that go on
                break
            if hypothesis.tokens[-1] in self.eos_ids:
                self._finished.append(hypothesis)
            else:
                parents.append(parent)
                extended.append(hypothesis)
        self._beams = extended
        if len(self._finished) >= self.width or not extended or len(extended[0].tokens) == self.max_tokens:
            parents = []
        self.live = [beam.tokens for beam in extended] if parents else []
        return parents

    @property
    def hypotheses(self) -> list[Hypothesis]:
        """The best `width` continuations once the search has ended, best first."""
        return sorted(self._finished + self._beams, key=lambda hypothesis: -hypothesis.score)[: self.width]


def extensions(beams: list[Hypothesis], logits: Logits, n: int) -> list[tuple[int, Hypothesis]]:
    """The n most likely `(beam, beam extended by one token)`, best first; `logits [len(beams), vocab_size]`."""
    scaled = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    totals = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
    totals += np.array([[beam.log_probability] for beam in beams])
    n = min(n, totals.size)
    best = np.argpartition(-totals, n - 1, axis=None)[:n]
    best = best[np.argsort(-totals.ravel()[best], kind="stable")]
    parents, tokens = np.divmod(best, logits.shape[1])
    return [
        (int(p), Hypothesis((*beams[p].tokens, int(t)), float(totals[p, t])))
        for p, t in zip(parents, tokens, strict=True)
    ]
