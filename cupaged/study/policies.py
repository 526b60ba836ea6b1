"""The ways to manage memory that the study compares, by name."""

from __future__ import annotations

from .contiguous import reserve_maximum, reserve_oracle, reserve_power_of_two
from .paged import Paged
from .prefix import PrefixCached
from .replay import Memory
from .sharing import WIDTHS, SharedSequences, beam_parents
from .traces import Trace

CONTIGUOUS = ("contiguous-max", "buddy", "oracle")
BLOCK_SIZES = (1, 8, 16, 32, 128)
BLOCK_SIZE = 16  # of the policies that share blocks, and of the comparison over pool sizes
PAGED = f"paged-{BLOCK_SIZE}"
PREFIX = "prefix-cache"
NAMES = (
    *CONTIGUOUS,
    *(f"paged-{size}" for size in BLOCK_SIZES),
    PREFIX,
    *(f"{kind}-{width}" for kind in ("parallel", "beam") for width in WIDTHS),
)


def default(trace: Trace) -> list[str]:
    """The policies that are compared when none are named: all that the trace can show, sharing by four sequences."""
    others = {f"{kind}-{width}" for kind in ("parallel", "beam") for width in WIDTHS if width != 4}
    return [name for name in NAMES if name not in others and (name != PREFIX or trace.prefixes is not None)]


def make(name: str, pool: int, max_length: int, trace: Trace, seed: int = 0) -> Memory:
    """Memory managed as `name` (one of NAMES) says, for a pool of `pool` slots and a model with sequences of up to `max_length`.

    Raises ValueError for a prefix cache and a trace that does not tell which prompts begin alike.
    """
    if name == "contiguous-max":
        return reserve_maximum(pool, max_length)
    if name == "buddy":
        return reserve_power_of_two(pool)
    if name == "oracle":
        return reserve_oracle(pool)
    if name == PREFIX:
        return PrefixCached(pool, BLOCK_SIZE, trace)
    kind, number = name.split("-")
    if kind == "paged":
        return Paged(pool, int(number))
    width = int(number)
    return SharedSequences(pool, BLOCK_SIZE, width, beam_parents(width) if kind == "beam" else None, seed)
