"""Request traces: when requests arrive, how long their prompts and outputs are, and which prompts begin alike.

Readers for two public formats, and built-in length distributions for a machine that has neither:

- Azure LLM inference trace (Patel et al., "Splitwise", ISCA 2024): CSV with columns TIMESTAMP, ContextTokens, GeneratedTokens.
- Mooncake trace (Qin et al., "Mooncake", FAST 2025): one JSON object a line with timestamp (ms), input_length, output_length and
  hash_ids, one id for every 512 prompt tokens; equal ids stand for equal text after an equal beginning.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

HASHED_TOKENS = 512  # prompt tokens behind one of a Mooncake trace's hash ids

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Quantiles = tuple[tuple[float, float], ...]  # (cumulative share, tokens) in ascending order, from share 0 to share 1


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    A request with `p` prompt and `g` generated tokens ends with `p + g - 1` tokens in the cache: its last token is never fed back.
    """

    name: str
    arrivals: FloatArray  # [n] seconds after the first one
    prompts: IntArray  # [n] tokens, at least 1
    outputs: IntArray  # [n] tokens, at least 1
    # [n] hash ids of each prompt, where the trace has them, numbered as they come
    prefixes: tuple[tuple[int, ...], ...] | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def finals(self) -> IntArray:
        """Tokens that each request has in the cache at its end, `[n]`."""
        return self.prompts + self.outputs - 1

    def repeated_share(self) -> float | None:
        """Share of prompt tokens that a prefix cache without end would find; None where the trace does not tell.

        Counted in whole hashes, at least one token of each prompt left to compute.
        """
        if self.prefixes is None:
            return None
        seen: set[int] = set()
        found = 0
        for prompt, hash_ids in zip(self.prompts.tolist(), self.prefixes, strict=True):
            for hash_id in hash_ids[: (prompt - 1) // HASHED_TOKENS]:
                if hash_id not in seen:
                    break
                found += HASHED_TOKENS
            seen.update(hash_ids[: prompt // HASHED_TOKENS])
        return found / int(self.prompts.sum())

    def first(self, n: int | None) -> Trace:
        """The first `n` requests (None: all)."""
        prefixes = self.prefixes[:n] if self.prefixes else None
        return Trace(self.name, self.arrivals[:n], self.prompts[:n], self.outputs[:n], prefixes)

    def at_once(self) -> Trace:
        """The same requests, all of them there from the start."""
        return Trace(self.name, np.zeros_like(self.arrivals), self.prompts, self.outputs, self.prefixes)


def read(path: Path) -> Trace:
    """Read an Azure CSV file or, by the ending .jsonl, a Mooncake file. Raises ValueError naming the line that is wrong."""
    try:
        rows = list(_mooncake(path) if path.suffix == ".jsonl" else _azure(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8 ({error})") from None
    arrivals, prompts, outputs = [], [], []
    prefixes: list[tuple[int, ...] | None] = []
    for line, (arrival, prompt, output, hash_ids) in rows:
        if prompt < 1 or output < 0:
            raise ValueError(
                f"{path}, line {line}: expected a prompt of at least 1 token, got {prompt} and {output} generated"
            )
        if not math.isfinite(arrival):
            raise ValueError(f"{path}, line {line}: expected a finite time, got {arrival}")
        if prefixes and (hash_ids is None) != (prefixes[0] is None):
            raise ValueError(f"{path}, line {line}: expected hash_ids in every line or in none")
        if hash_ids is not None and len(hash_ids) != -(-prompt // HASHED_TOKENS):
            raise ValueError(
                f"{path}, line {line}: expected one hash id for every {HASHED_TOKENS} prompt tokens, got {len(hash_ids)} for {prompt}"
            )
        arrivals.append(arrival)
        prompts.append(prompt)
        outputs.append(max(output, 1))  # the pass over the prompt always gives one token
        prefixes.append(hash_ids)
    if not arrivals:
        raise ValueError(f"{path}: no requests in it")
    times = np.array(arrivals) - min(arrivals)
    order = np.argsort(times, kind="stable")
    by_hash = tuple(prefixes[i] or () for i in order) if prefixes[0] is not None else None
    return Trace(path.stem, times[order], np.array(prompts)[order], np.array(outputs)[order], by_hash)


_Row = tuple[float, int, int, tuple[int, ...] | None]


def _azure(path: Path) -> Iterator[tuple[int, _Row]]:
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if not set(columns) <= set(reader.fieldnames or ()):
            raise ValueError(f"{path}: expected the columns {', '.join(columns)}, got {reader.fieldnames}")
        for row in reader:
            try:
                time, prompt, output = (row[name] for name in columns)
                parsed = datetime.fromisoformat(time).timestamp(), int(prompt), int(output), None
            except (ValueError, TypeError) as error:
                raise ValueError(f"{path}, line {reader.line_num}: {error}") from None
            yield reader.line_num, parsed


def _mooncake(path: Path) -> Iterator[tuple[int, _Row]]:
    numbers: dict[object, int] = {}  # of the hash ids, which may be of any size
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
                hash_ids = None
                if "hash_ids" in row:
                    hash_ids = tuple(numbers.setdefault(each, len(numbers)) for each in row["hash_ids"])
                parsed = row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), hash_ids
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise ValueError(f"{path}, line {line}: {type(error).__name__} {error}") from None
            yield line, parsed


@dataclass(frozen=True, slots=True)
class Distribution:
    """A made-up workload: prompt and output lengths drawn independently from quantile tables, arrivals from a Poisson process."""

    prompts: Quantiles
    outputs: Quantiles
    rate: float  # requests a second

    def draw(self, name: str, n: int, rate: float | None, rng: np.random.Generator) -> Trace:
        """`n` requests, arriving at `rate` a second (None: the distribution's own)."""
        arrivals = np.cumsum(rng.exponential(1 / (rate or self.rate), n))
        prompts, outputs = (_sample(table, n, rng) for table in (self.prompts, self.outputs))
        return Trace(name, arrivals - arrivals[0], prompts, outputs)


def mean(table: Quantiles) -> float:
    """Mean of the distribution that a quantile table describes, linear between its entries."""
    share, tokens = np.array(table).T
    return float(np.sum(np.diff(share) * (tokens[1:] + tokens[:-1]) / 2))


def _sample(table: Quantiles, n: int, rng: np.random.Generator) -> IntArray:
    share, tokens = np.array(table).T
    drawn: IntArray = np.rint(np.interp(rng.random(n), share, tokens)).astype(np.int64)
    return drawn


# The two workloads of the PagedAttention paper (Kwon et al., SOSP 2023, section 6.1). It gives the means (ShareGPT: 161.31 prompt and
# 337.99 output tokens, Alpaca: 19.31 and 58.45); the shapes around these means are ours. The rates keep the paper's pool busy.
BUILT_IN = {
    "sharegpt": Distribution(
        prompts=((0, 4), (0.1, 9), (0.25, 18), (0.5, 60), (0.75, 174), (0.9, 428), (0.99, 1000), (1, 1024)),
        outputs=((0, 4), (0.1, 30), (0.25, 110), (0.5, 283), (0.75, 480), (0.9, 745), (0.99, 1010), (1, 1024)),
        rate=2.0,
    ),
    "alpaca": Distribution(
        prompts=((0, 7), (0.1, 10), (0.25, 13), (0.5, 17), (0.75, 22), (0.9, 30), (0.99, 45), (1, 120)),
        outputs=((0, 1), (0.1, 6), (0.25, 15), (0.5, 39), (0.75, 77), (0.9, 120), (0.99, 262), (1, 400)),
        rate=30.0,
    ),
}
