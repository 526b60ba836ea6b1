"""cupaged: a paged KV cache and its attention kernels for NumPy and CuPy, without PyTorch."""

from typing import TYPE_CHECKING, Any

from . import classic, reference
from .allocator import BlockAllocator
from .attention import merge_states, paged_attention, write_kv
from .block_pool import BlockPool
from .errors import OutOfBlocks
from .groups import Group
from .kv_cache import KVCache, blocks_for
from .mirror import TableMirror
from .plan import plan
from .steps import Step

if TYPE_CHECKING:
    from .cuda import warmup

__version__ = "0.1.0"

__all__ = [
    "BlockAllocator",
    "BlockPool",
    "Group",
    "KVCache",
    "OutOfBlocks",
    "Step",
    "TableMirror",
    "blocks_for",
    "classic",
    "merge_states",
    "paged_attention",
    "plan",
    "reference",
    "warmup",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    """`warmup`, which brings the GPU's host code along: a third of the time of this import, and only a GPU needs it."""
    if name == "warmup":
        from .cuda import warmup

        return warmup
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
