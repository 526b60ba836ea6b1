"""A Llama small enough for quick tests, written as a real GGUF file, and the plain caches that paged ones are compared with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_file import InputError, find_model
from llama import Llama, load
from tokenizer import Tokenizer, _byte_chars

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, CONTEXT = 3, 64, 6, 2, 16, 96, 200
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(
    path: Path,
    seed: int,
    *,
    tied: bool = False,
    quantised: bool = False,
    rope_factors: bool = False,
    sentencepiece: bool = False,
    template: str | None = TEMPLATE,
    metadata: dict[str, Any] | None = None,
    architecture: str = "llama",
    drop: str = "",
    extra: dict[str, np.ndarray] | None = None,
    kv_heads: int = KV_HEADS,
) -> Path:
    """Write a model with random weights; `metadata` adds or replaces unsigned keys, `drop` leaves one tensor out."""
    rng = np.random.default_rng(seed)
    tokens, types, scores = _sentencepiece() if sentencepiece else _byte_level()
    writer = gguf.GGUFWriter(path, architecture)
    numbers: dict[str, Any] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": kv_heads,
        "attention.key_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
    } | (metadata or {})
    for key, value in numbers.items():
        if value is not None:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 1000.0)
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if sentencepiece:
        writer.add_token_scores(scores)
    else:
        writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    q_rows, kv_rows = HEADS * HEAD_DIM, kv_heads * HEAD_DIM
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(tokens), HIDDEN)
    for layer in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,), "attn_q": (q_rows, HIDDEN), "attn_k": (kv_rows, HIDDEN), "attn_v": (kv_rows, HIDDEN),
            "attn_output": (HIDDEN, q_rows), "ffn_norm": (HIDDEN,), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():  # fmt: skip
            shapes[f"blk.{layer}.{name}"] = shape
    for name, shape in shapes.items():
        if name == drop:
            continue
        values = rng.standard_normal(shape, dtype=np.float32) * np.float32(shape[-1] ** -0.5 if len(shape) == 2 else 1)
        if quantised and len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", rng.uniform(1, 8, HEAD_DIM // 2).astype(np.float32))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def real_model() -> tuple[Llama, Tokenizer]:
    """SmolLM2-135M, loaded once; the test is skipped where its package is not installed."""
    try:
        return _load_once(find_model())
    except InputError as error:
        pytest.skip(str(error))


_load_once = cache(load)


class DenseCache:
    """Contiguous keys and values of one sequence: the comparison for a paged cache. `attend` is what the model calls.

    Attention is computed in float64, so that a difference of logits is the paged side's rounding alone.
    """

    def __init__(self, config: Any) -> None:
        empty = np.zeros((0, config.num_kv_heads, config.head_dim), np.float32)
        self.k = [empty] * config.num_layers
        self.v = [empty] * config.num_layers

    @property
    def length(self) -> int:
        return len(self.k[-1])

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        k = self.k[layer] = np.concatenate([self.k[layer], k])
        v = self.v[layer] = np.concatenate([self.v[layer], v])
        rows, heads, head_dim = q.shape
        k, v = (np.repeat(x.astype(np.float64), heads // x.shape[1], axis=1) for x in (k, v))
        scores = np.einsum("ihd,jhd->hij", q.astype(np.float64), k, optimize=True) * head_dim**-0.5
        seen = np.arange(len(k)) <= np.arange(len(k) - rows, len(k))[:, None]
        p = np.exp(np.where(seen, scores, -np.inf) - scores.max(axis=2, keepdims=True))
        return np.einsum("hij,jhd->ihd", p / p.sum(axis=2, keepdims=True), v, optimize=True).astype(np.float32)


def dense_logits(model: Any, tokens: list[int]) -> np.ndarray:
    """Logits `[len(tokens), vocab_size]` of one sequence computed in one pass over a dense cache."""
    return model.forward(np.array(tokens), np.arange(len(tokens)), DenseCache(model.config).attend)


class RoundedCache(DenseCache):
    """The same with queries, keys, values and attention rounded to float16."""

    def attend(self, layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        q, k, v = (x.astype(np.float16).astype(np.float32) for x in (q, k, v))
        return super().attend(layer, q, k, v).astype(np.float16).astype(np.float32)


def _byte_level() -> tuple[list[str], list[int], list[float]]:
    chars = sorted(_byte_chars().values())
    merged = [merge.replace(" ", "") for merge in MERGES]
    return [*SPECIAL, *chars, *merged], [3] * len(SPECIAL) + [1] * (len(chars) + len(merged)), []


def _sentencepiece() -> tuple[list[str], list[int], list[float]]:
    special, byte_tokens = ["<unk>", "<s>", "</s>"], [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["he", "ll", "▁w", "llo", "or", "hello", "▁hello", "▁wor", "ld", "▁world", *"▁helowrd", "el"]
    tokens = special + byte_tokens + pieces
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(rank) for rank in range(len(pieces))]
    return tokens, [2, 3, 3] + [6] * 256 + [1] * len(pieces), scores
