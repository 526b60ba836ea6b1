"""Pages with the allocator's prefix cache: a prompt takes the blocks of its beginning over from requests before it.

A trace tells which prompts begin alike by hash ids, one for every 512 tokens. A hash id becomes 512 token ids of its own, so equal
ids after an equal beginning are equal text. What a request generates is known to nobody else: the prompts of later turns of a
conversation find it only where the trace gives them hash ids that an earlier prompt had.
"""

from __future__ import annotations

import numpy as np

from ..errors import OutOfBlocks
from .paged import Paged
from .traces import HASHED_TOKENS, IntArray, Trace


class PrefixCached(Paged):
    """Blocks shared by equal beginnings of prompts, also with requests that have left, for as long as nobody needs their blocks."""

    def __init__(self, capacity: int, block_size: int, trace: Trace) -> None:
        if trace.prefixes is None:
            raise ValueError(
                f"trace: a prefix cache needs a trace with hash ids, {trace.name} has none; leave out this policy"
            )
        super().__init__(capacity, block_size, prefix_caching=True)
        self._prompts, self._prefixes = trace.prompts, trace.prefixes

    @property
    def metadata_bytes(self) -> int:
        """What plain pages need, and for each block its token ids, 4 bytes each, and 32 bytes of numbers and hash."""
        return super().metadata_bytes + (4 * self.block_size + 32) * self.allocator.num_blocks

    @property
    def prefix_hits(self) -> float | None:
        return self.allocator.stats().hit_rate

    def admit(self, request: int, tokens: int, final: int) -> bool:
        token_ids = self._token_ids(request, tokens)
        try:
            step = self.allocator.add_request((request, 0), token_ids=token_ids)
        except OutOfBlocks:
            return False
        self.allocator.commit([(request, 0)], [token_ids[int(step.num_cached[0]) :]])
        self._enter(request, [(request, 0)])
        return True

    def _token_ids(self, request: int, tokens: int) -> IntArray:
        hash_ids = np.array(self._prefixes[request], np.int64)[:, None]
        prompt = (hash_ids * HASHED_TOKENS + np.arange(HASHED_TOKENS)).reshape(-1)[: self._prompts[request]]
        return np.concatenate([prompt, np.full(tokens - len(prompt), -1 - request)])  # generated ones equal no other's
