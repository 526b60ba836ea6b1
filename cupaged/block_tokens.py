"""Which tokens each block holds, as far as they are known: steps give slots, and only `commit` says what is in them."""

from __future__ import annotations

import numpy as np

from .array_types import Blocks, Ints, Tokens
from .block_pool import BlockPool

_ONE = np.array(1)


class BlockTokens:
    """Token ids of a pool's blocks.

    Attributes:
        ids: `[num_blocks, block_size] int32`.
        filled: `[num_blocks] int32`, how many of them are known, from the front.
        size: the block size as an array: a Python int would be converted at every use.
        cut: whether a block may ever have known more tokens than a request that ends in it has, see `truncated`. Otherwise
            a request grows from the end of what its last block knows, and a write has nothing to forget.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self.block_size = pool, block_size
        self.size = np.array(block_size)
        self.ids = np.zeros((pool.num_blocks, block_size), np.int32)
        element = np.dtype((np.void, 4 * block_size))
        self._words = self.ids.reshape(-1).view(element)  # [num_blocks], a block's tokens as one element
        self.filled = np.zeros(pool.num_blocks, np.int32)
        self.cut = False

    def truncated(self, blocks: Blocks, offsets: Ints) -> None:
        """Requests now end at `offsets` in `blocks [n]`: what is behind may be known, or become known through another owner."""
        if not self.cut:
            self.cut = bool(((self.filled.take(blocks) > offsets) | (self._pool.ref_count.take(blocks) > 1)).any())

    def keep(self, blocks: Ints, offsets: Ints) -> None:
        """Of `blocks [n]` only the tokens before `offsets` are known from now on."""
        self.filled[blocks] = np.minimum(self.filled.take(blocks), offsets)

    def copy(self, sources: Ints | Blocks, targets: Ints | Blocks) -> None:
        """A step will copy these blocks: their tokens go along."""
        self.ids[targets] = self.ids.take(sources, 0)
        self.filled[targets] = self.filled.take(sources)

    def learn(self, blocks: Ints, offsets: Ints, tokens: Tokens) -> Ints:
        """The tokens `[n]` at `(blocks[i], offsets[i])` are computed. Returns the elements, if any, that contradict what is known of a
        shared block, with nothing changed that can be seen."""
        slots = blocks * self.block_size + offsets
        flat = self.ids.reshape(-1)
        wrong: Ints = ((offsets < self.filled.take(blocks)) & (flat.take(slots) != tokens)).nonzero()[0]
        if not len(wrong):
            flat[slots] = tokens
            if self._pool.sharing:
                wrong = (flat.take(slots) != tokens).nonzero()[0]  # two requests, one slot
        if not len(wrong):
            np.maximum.at(self.filled, blocks, (offsets + 1).astype(np.int32))
        return wrong

    def learn_run(self, blocks: Ints, offset: int, tokens: Tokens) -> bool:
        """`learn` for a piece of one sequence: `tokens [n]`, n > 0, from `offset` in the first of its `blocks` on, whole blocks at once.
        False, with nothing done, when some of them are known already."""
        size, filled = self.block_size, self.filled.take(blocks)
        if filled[0] > offset or np.count_nonzero(filled[1:]):
            return False
        begin = 0
        if offset:
            begin = min(size - offset, len(tokens))
            self.ids[blocks[0], offset : offset + begin] = tokens[:begin]
            self.filled[blocks[0]] = offset + begin
            blocks = blocks[1:]
        whole = (len(tokens) - begin) // size
        if whole:
            words = tokens[begin : begin + whole * size].view(self._words.dtype)
            self._words[blocks[:whole]] = words
            self.filled[blocks[:whole]] = size
        rest = tokens[begin + whole * size :]
        if len(rest):
            self.ids[blocks[whole], : len(rest)] = rest
            self.filled[blocks[whole]] = len(rest)
        return True

    def learn_one_each(self, blocks: Ints, offsets: Ints, tokens: Tokens) -> bool:
        """`learn` for the next token `[n]` of private blocks. False, with nothing done, when some of them are known already."""
        if self._pool.sharing or np.count_nonzero(self.filled.take(blocks) == offsets) < len(blocks):
            return False
        slots = blocks * self.size
        slots += offsets
        self.ids.reshape(-1)[slots] = tokens
        self.filled[blocks] = (offsets + _ONE).astype(np.int32)
        return True
