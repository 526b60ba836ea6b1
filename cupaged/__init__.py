"""cupaged: a paged KV cache and its attention kernels for NumPy and CuPy, without PyTorch."""

from . import classic, reference
from .allocator import BlockAllocator
from .attention import merge_states, paged_attention, write_kv
from .block_pool import BlockPool
from .cuda import warmup
from .errors import OutOfBlocks
from .groups import Group
from .kv_cache import KVCache, blocks_for
from .mirror import TableMirror
from .plan import plan
from .steps import Step

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
