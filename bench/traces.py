"""Public request traces replayed on pools of several sizes, with `check()` on samples. `python -m bench.traces [FILE ...]`

- A Mooncake trace names the beginnings that prompts share: one prompt after the other is looked up, allocated, committed and freed, and
  the table says how many of the full blocks were found in the prefix cache. Blocks have 512 tokens, as many as an id stands for.
- An Azure trace has lengths only. Nothing in it can be found in a cache, so the table says what lengths can tell: how many requests
  run at once, how much of the pool holds tokens, how often one is preempted, and how long they wait.

Without files it reads those of `../shared/traces`, beside the repository.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cupaged import BlockAllocator
from cupaged.prefix_match import match
from cupaged.study.measures import Figures, measure
from cupaged.study.paged import Paged
from cupaged.study.replay import replay
from cupaged.study.traces import HASHED_TOKENS, Trace, read

FOLDER = Path(__file__).parents[2] / "shared" / "traces"
CHECKS = 8  # in each replay
PREFIX_POOLS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)  # blocks of 512 tokens; the last one is never full
LENGTH_POOLS = (16_384, 32_768, 65_536, 131_072)  # slots
STEP_SECONDS = 0.05


@dataclass(frozen=True)
class Hits:
    """What a prefix cache of one size found."""

    blocks: int  # full blocks of prompts that were there
    references: int  # full blocks of prompts


def prompts(trace: Trace) -> Iterator[npt.NDArray[np.int32]]:
    """Token ids of each prompt: 512 of its own for each hash id."""
    assert trace.prefixes is not None
    for ids, length in zip(trace.prefixes, trace.prompts.tolist(), strict=True):
        tokens = np.array(ids, np.int64)[:, None] * HASHED_TOKENS + np.arange(HASHED_TOKENS)
        yield tokens.reshape(-1)[:length].astype(np.int32)


def prefix_hits(trace: Trace, num_blocks: int, block_size: int = HASHED_TOKENS) -> Hits:
    """Each prompt alone in a pool that keeps what was there before, as long as there is room. A prompt larger than the pool is left out."""
    alloc = BlockAllocator(num_blocks, block_size, prefix_caching=True)
    found = references = 0
    for i, prompt in enumerate(prompts(trace)):
        if -(-len(prompt) // block_size) > num_blocks:
            continue
        assert alloc._cache is not None
        root = alloc._cache.root(None, np.zeros(0, np.int64))
        # one token of a prompt is always computed: what was there is seen before that rule
        found += len(match(alloc._cache, root, prompt, len(prompt))[0])
        references += len(prompt) // block_size
        cached = int(alloc.add_request("prompt", token_ids=prompt).num_cached[0])
        alloc.commit(["prompt"], prompt[cached:])
        alloc.free_request("prompt")
        if (i + 1) % max(len(trace) // CHECKS, 1) == 0:
            alloc.check()
    alloc.check()
    return Hits(found, references)


def lengths_only(trace: Trace, slots: int, block_size: int = 16) -> Figures:
    """Requests come as the trace says, get a token each 50 ms; first come, first served; the newest is preempted without blocks."""
    memory, left, due = Paged(slots, block_size), 0, 0

    def finished(count: int) -> None:
        nonlocal left, due
        left += count
        if left >= due:
            memory.allocator.check()
            due += max(len(trace) // CHECKS, 1)

    longest = int(trace.finals.max())
    figures = measure(replay(trace, memory, interval=STEP_SECONDS, max_length=longest, finished=finished))
    memory.allocator.check()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="Azure CSV or Mooncake JSON lines")
    parser.add_argument("--limit", type=int, help="the first requests only")
    options = parser.parse_args()
    files = options.files or (
        sorted(path for path in FOLDER.iterdir() if path.suffix in (".csv", ".jsonl")) if FOLDER.is_dir() else []
    )
    if not files:
        print(f"no traces: expected files as arguments or in {FOLDER}")
    for path in files:
        trace = read(path).first(options.limit)
        print(f"\n{trace.name}: {len(trace):,} requests, {trace.prompts.mean():,.0f} prompt tokens on average")
        if trace.prefixes is None:
            print(
                f"{'pool, slots':>14} {'running':>9} {'tokens in':>10} {'preempted':>10} {'wait, mean':>11}   no token ids: no hits"
            )
            for slots in (size for size in LENGTH_POOLS if size >= 1.02 * trace.finals.max() + 16):
                f = lengths_only(trace, slots)
                print(
                    f"{slots:14,} {f.running_mean:9.1f} {f.used:10.1%} {f.preempted:10,} {f.wait_mean or 0.0:9.1f} s",
                    flush=True,
                )
        else:
            print(f"{'pool, blocks':>14} {'tokens':>13} {'found':>9} {'of':>9} {'hit rate':>9}")
            for num_blocks in PREFIX_POOLS:
                hits = prefix_hits(trace, num_blocks)
                print(
                    f"{num_blocks:14,} {num_blocks * HASHED_TOKENS:13,} {hits.blocks:9,} {hits.references:9,} "
                    f"{hits.blocks / max(hits.references, 1):9.2%}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
