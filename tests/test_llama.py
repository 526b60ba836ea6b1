"""The example model: what a GGUF file says, tokens, and the forward pass against an independent one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the model tests need: pip install 'cupaged[models]'")
pytest.importorskip("tokenizers", reason="the model tests need: pip install 'cupaged[models]'")

import tiny_llama
from gguf_file import GGUFFile, InputError
from hypothesis import given, settings
from hypothesis import strategies as st
from llama import Llama
from tokenizer import Tokenizer


def independent_logits(file: GGUFFile, tokens: list[int]) -> np.ndarray:
    """The same mathematics in float64, one matrix at a time, rotary embedding by cosine and sine."""
    c = file.config

    def tensor(name: str) -> np.ndarray:
        return file.tensor(f"{name}.weight").astype(np.float64)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + c.rms_eps) * tensor(name)

    factors = tensor("rope_freqs") if "rope_freqs.weight" in file else np.ones(c.rope_dim // 2)

    def rope(x: np.ndarray) -> np.ndarray:  # [n, heads, head_dim]
        out = x.copy()
        for position in range(len(x)):
            for i in range(c.rope_dim // 2):
                angle = position / c.rope_scale / factors[i] * c.rope_base ** (-2 * i / c.rope_dim)
                a, b = x[position, :, 2 * i], x[position, :, 2 * i + 1]
                out[position, :, 2 * i] = a * np.cos(angle) - b * np.sin(angle)
                out[position, :, 2 * i + 1] = a * np.sin(angle) + b * np.cos(angle)
        return out

    n = len(tokens)
    x = tensor("token_embd")[tokens]
    for layer in range(c.num_layers):
        blk = f"blk.{layer}"
        h = norm(x, f"{blk}.attn_norm")
        q = rope((h @ tensor(f"{blk}.attn_q").T).reshape(n, c.num_heads, c.head_dim))
        k = rope((h @ tensor(f"{blk}.attn_k").T).reshape(n, c.num_kv_heads, c.head_dim))
        v = (h @ tensor(f"{blk}.attn_v").T).reshape(n, c.num_kv_heads, c.head_dim)
        heads = []
        for head in range(c.num_heads):
            kv = head * c.num_kv_heads // c.num_heads
            scores = np.where(np.tri(n, dtype=bool), q[:, head] @ k[:, kv].T / np.sqrt(c.head_dim), -np.inf)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(p / p.sum(axis=1, keepdims=True) @ v[:, kv])
        x = x + np.concatenate(heads, axis=1) @ tensor(f"{blk}.attn_output").T
        h = norm(x, f"{blk}.ffn_norm")
        gate = h @ tensor(f"{blk}.ffn_gate").T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ tensor(f"{blk}.ffn_up").T)) @ tensor(f"{blk}.ffn_down").T
    return norm(x, "output_norm") @ tensor("output" if "output.weight" in file else "token_embd").T


@pytest.mark.parametrize(
    "kind",
    [
        {"tied": True},
        {"tied": False},
        {"quantised": True},
        {"kv_heads": 6},
        {"kv_heads": 1},
        {"rope_factors": True},
        {"metadata": {"rope.dimension_count": 8}},
        {"metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 4}},
    ],
    ids=str,
)
def test_forward_pass_agrees_with_an_independent_one(tmp_path: Path, kind: dict) -> None:
    seed = int(np.random.default_rng().integers(1 << 32))
    file = GGUFFile(tiny_llama.write(tmp_path / "tiny.gguf", seed, **kind))
    tokens = np.random.default_rng(seed).integers(0, file.config.vocab_size, 20).tolist()
    expected = independent_logits(file, tokens)
    logits = tiny_llama.dense_logits(Llama(file), tokens)
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max(), err_msg=f"seed {seed}")


def test_only_the_asked_rows_get_logits(tmp_path: Path) -> None:
    model = Llama(GGUFFile(tiny_llama.write(tmp_path / "tiny.gguf", 1)))
    tokens = [5, 9, 70, 12, 33]
    every = tiny_llama.dense_logits(model, tokens)
    attend = tiny_llama.DenseCache(model.config).attend
    some = model.forward(np.array(tokens), np.arange(5), attend, np.array([3, 1]))
    np.testing.assert_allclose(some, every[[3, 1]], atol=1e-5)
    assert (
        model.forward(np.array(tokens), np.arange(5), tiny_llama.DenseCache(model.config).attend, slice(0)).shape[0]
        == 0
    )


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_survives_byte_level_tokens_and_streaming(tiny: Tokenizer, text: str) -> None:
    text = text.replace("<|", "")  # control tokens have no text
    ids = tiny.encode(text)
    stream = tiny.stream()
    assert tiny.decode(ids) == text
    assert "".join(stream.push(token) for token in ids) + stream.end() == text


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(GGUFFile(tiny_llama.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", 0)))


def test_streaming_holds_back_a_broken_character(tiny: Tokenizer) -> None:
    first, second, third = tiny.encode("€")
    stream = tiny.stream()
    assert [stream.push(first), stream.push(second), stream.push(third)] == ["", "", "€"]
    assert (stream.push(first), stream.end()) == ("", "�")


def test_merges_and_control_tokens_are_found_in_text(tiny: Tokenizer) -> None:
    assert [tiny.tokens[i] for i in tiny.encode("hello world<|im_end|>hell")] == [
        "hello",
        "Ġworld",
        "<|im_end|>",
        "hell",
    ]
    assert tiny.decode(tiny.encode("hello<|im_end|> world")) == "hello world"


def test_every_digit_is_a_token_of_its_own(tiny: Tokenizer) -> None:
    assert "12" in tiny.tokens
    assert [tiny.tokens[i] for i in tiny.encode("12")] == ["1", "2"]


def test_prompt_goes_through_the_chat_template(tiny: Tokenizer) -> None:
    assert tiny.encode_prompt("hello") == tiny.encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


def test_prompt_without_a_template_is_plain_text(tmp_path: Path) -> None:
    path = tiny_llama.write(tmp_path / "plain.gguf", 0, template=None)
    tokenizer = Tokenizer(GGUFFile(path))
    assert tokenizer.encode_prompt("hello") == tokenizer.encode("hello")


def test_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes(tmp_path: Path) -> None:
    path = tiny_llama.write(tmp_path / "pieces.gguf", 0, sentencepiece=True, template=None)
    tokenizer = Tokenizer(GGUFFile(path))
    assert [tokenizer.tokens[i] for i in tokenizer.encode("hello world")] == ["▁hello", "▁world"]
    assert [tokenizer.tokens[i] for i in tokenizer.encode("é")] == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode_prompt("hello") == [1, *tokenizer.encode("hello")]
    assert tokenizer.decode(tokenizer.encode("hello wé")) == " hello wé"


def test_template_that_refuses_is_a_model_error(tmp_path: Path) -> None:
    path = tiny_llama.write(tmp_path / "refuses.gguf", 0, template="{{ raise_exception('no user here') }}")
    with pytest.raises(InputError, match="chat template: no user here"):
        Tokenizer(GGUFFile(path)).encode_prompt("hello")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"architecture": "qwen2"}, "expected a model of the architecture 'llama', got 'qwen2'"),
        ({"drop": "blk.1.ffn_up"}, "the tensor 'blk.1.ffn_up.weight' is missing"),
        ({"extra": {"blk.0.attn_q.bias": np.zeros(96, np.float32)}}, "'blk.0.attn_q.bias' is no part of the Llama"),
        ({"metadata": {"embedding_length": 32}}, "expected 'token_embd.weight' of shape"),
        ({"metadata": {"attention.head_count": None}}, "the key 'llama.attention.head_count' is missing"),
        ({"metadata": {"attention.head_count": 0}}, "'llama.attention.head_count' is not a size, it is 0"),
        ({"metadata": {"attention.head_count_kv": 4}}, "6 heads, 4 KV heads"),
        ({"metadata": {"rope.dimension_count": 18}}, "18 rotated elements of 16"),
        ({"metadata": {"expert_count": 8}}, "a mixture of experts"),
        ({"metadata": {"rope.scaling.type": "yarn"}}, "rope scaling 'yarn'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_model_that_cannot_run_is_refused_by_name(tmp_path: Path, how: dict, message: str) -> None:
    path = tiny_llama.write(tmp_path / "bad.gguf", 0, **how)
    with pytest.raises(InputError) as error:
        GGUFFile(path)
    assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("cut", [0, 3, 20, 500, 5000, -1000])
def test_damaged_file_is_a_model_error(tmp_path: Path, cut: int) -> None:
    path = tiny_llama.write(tmp_path / "whole.gguf", 0)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match="not a readable GGUF file") as error:
        GGUFFile(path)
    assert "\n" not in str(error.value)


def test_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        GGUFFile(tmp_path / "nowhere.gguf")


def test_real_model_answers_as_llama_cpp_does() -> None:
    """llama.cpp on the same weights in float32 gives these tokens."""
    model, tokenizer = tiny_llama.real_model()
    prompt = tokenizer.encode_prompt("What is the capital of France?")
    cache = tiny_llama.DenseCache(model.config)
    tokens, answer = prompt, []
    while len(answer) < 10 and (not answer or answer[-1] not in tokenizer.eos_ids):
        at = np.arange(cache.length, cache.length + len(tokens))
        tokens = [int(model.forward(np.array(tokens), at, cache.attend, slice(-1, None)).argmax())]
        answer += tokens
    assert answer == [504, 3575, 282, 4649, 314, 7042, 30, 2]
    assert tokenizer.decode(answer) == "The capital of France is Paris."
