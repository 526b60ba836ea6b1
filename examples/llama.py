"""A Llama's forward pass on arrays, the same code for NumPy and CuPy. Keys and values live wherever `attend` puts them.

Everything is float32. One pass takes rows of any number of sequences (a whole prompt, a piece of one, or one token of each
sequence of a batch) and never looks at the cache itself:

    attend(layer, q, k, v) -> out      q, out [rows, num_heads, head_dim]      k, v [rows, num_kv_heads, head_dim]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf_file import GGUFFile
from ops import linear, rms_norm, swiglu
from tokenizer import Tokenizer

Array = Any  # a NumPy or a CuPy array
Attend = Callable[[int, Array, Array, Array], Array]


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, matrices as `[out, in]`."""

    attn_norm: Array  # [hidden_size]
    qkv: Array  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attn_output: Array  # [hidden_size, num_heads * head_dim]
    ffn_norm: Array  # [hidden_size]
    gate_up: Array  # [2 * intermediate_size, hidden_size]
    down: Array  # [hidden_size, intermediate_size]


class Llama:
    """A model with its weights on the device of `xp` (numpy or cupy)."""

    def __init__(self, file: GGUFFile, xp: Any = np) -> None:
        self.config = c = file.config
        self.xp = xp
        names: list[tuple[str, ...]] = [("token_embd",), ("output_norm",)]
        if "output.weight" in file:
            names.append(("output",))
        for i in range(c.num_layers):
            for fused in (
                ("attn_norm",), ("attn_q", "attn_k", "attn_v"), ("attn_output",),
                ("ffn_norm",), ("ffn_gate", "ffn_up"), ("ffn_down",),
            ):  # fmt: skip
                names.append(tuple(f"blk.{i}.{name}" for name in fused))
        self.weights, weights = _read_weights(file, names, xp)
        self.embedding, self.output_norm = weights[:2]  # [vocab_size, hidden_size], [hidden_size]
        self.output = weights[2] if "output.weight" in file else self.embedding  # [vocab_size, hidden_size]
        first = len(weights) - 6 * c.num_layers
        self.layers = [Layer(*weights[i : i + 6]) for i in range(first, len(weights), 6)]
        frequencies = c.rope_base ** (-np.arange(0, c.rope_dim, 2) / c.rope_dim) / c.rope_scale  # float64
        if "rope_freqs.weight" in file:
            frequencies = frequencies / file.tensor("rope_freqs.weight")
        self._frequencies = xp.asarray(frequencies)

    def forward(self, token_ids: Array, positions: Array, attend: Attend, rows: Array | slice = slice(None)) -> Array:
        """Logits of the chosen rows, `[rows, vocab_size]` float32; every row's keys and values go to `attend`.

        Args:
            token_ids, positions: `[n]` integers; the position of a token in its own sequence.
            attend: stores this pass's keys and values of a layer and returns the attention of its queries.
            rows: which of the n rows need logits (the output matrix is the largest one).
        """
        c, xp = self.config, self.xp
        n = len(token_ids)
        q_end = c.num_heads
        k_end = q_end + c.num_kv_heads
        turn = self._rotation(positions)
        x = self.embedding[xp.asarray(token_ids)]  # [n, hidden_size]
        for i, w in enumerate(self.layers):
            qkv = linear(rms_norm(x, w.attn_norm, c.rms_eps), w.qkv).reshape(n, -1, c.head_dim)
            pairs = qkv[:, :k_end, : c.rope_dim].view(np.complex64)  # neighbours are real and imaginary part
            pairs *= turn
            attended = attend(i, qkv[:, :q_end], qkv[:, q_end:k_end], qkv[:, k_end:])
            x += linear(attended.reshape(n, -1), w.attn_output)
            x += linear(swiglu(linear(rms_norm(x, w.ffn_norm, c.rms_eps), w.gate_up)), w.down)
        return linear(rms_norm(x[rows], self.output_norm, c.rms_eps), self.output)

    def _rotation(self, positions: Array) -> Array:
        """`[n, 1, rope_dim / 2]` complex64: the turn of each pair at each position (Su et al., RoFormer, 2021)."""
        angles = (
            self.xp.asarray(positions)[:, None] * self._frequencies
        )  # float64: positions are large, float32 is not enough
        return self.xp.exp(1j * angles).astype(np.complex64)[:, None]


def load(path: str | Path, xp: Any = np) -> tuple[Llama, Tokenizer]:
    """A model and its tokenizer from a GGUF file. Raises InputError."""
    file = GGUFFile(path)
    return Llama(file, xp), Tokenizer(file)


def _read_weights(file: GGUFFile, names: Sequence[tuple[str, ...]], xp: Any) -> tuple[Array, list[Array]]:
    """One array per tuple of tensors, fused along their rows: views of one piece of memory, which reads faster than many."""
    shapes = [[file.shape(f"{name}.weight") for name in fused] for fused in names]
    flat = np.empty(sum(int(np.prod(shape)) for fused in shapes for shape in fused), np.float32)
    at = 0
    for fused in names:
        for name in fused:
            values = file.tensor(f"{name}.weight").ravel()
            flat[at : at + values.size] = values
            at += values.size
    flat = xp.asarray(flat)
    weights, at = [], 0
    for parts in shapes:
        shape = (sum(part[0] for part in parts), *parts[0][1:])
        size = int(np.prod(shape))
        weights.append(flat[at : at + size].reshape(shape))
        at += size
    return flat, weights
