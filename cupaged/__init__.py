"""cupaged: a paged KV cache and its attention kernels for NumPy and CuPy, without PyTorch."""

from . import reference
from .attention import merge_states, paged_attention, write_kv

__version__ = "0.1.0"
