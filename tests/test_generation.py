"""Generation on the paged cache against the same model on contiguous caches, and what it leaves in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the model tests need: pip install 'cupaged[models]'")
pytest.importorskip("tokenizers", reason="the model tests need: pip install 'cupaged[models]'")

import tiny_llama
from decoding import Hypothesis, choose
from generation import Engine, beam_search, blocks_to_be_safe, check_prompt, sample
from gguf_file import GGUFFile, InputError
from hypothesis import given, settings
from hypothesis import strategies as st
from llama import Llama

import cupaged


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    seed = int(np.random.default_rng().integers(1 << 32))
    return Llama(GGUFFile(tiny_llama.write(tmp_path_factory.mktemp("tiny") / f"tiny-{seed}.gguf", seed)))


def poisoned(model: Any, num_blocks: int, block_size: int, prefill_chunk: int = 256) -> Engine:
    engine = Engine(model, num_blocks, block_size, prefill_chunk)
    engine.cache.pool[...] = np.nan
    return engine


def paged_and_dense_logits(
    model: Any, prompts: list[list[int]], steps: int, engine: Engine
) -> tuple[np.ndarray, np.ndarray]:
    """Logits `[1 + steps, len(prompts), vocab_size]` of greedy decoding: one paged batch, and one dense cache a sequence."""
    caches = [tiny_llama.DenseCache(model.config) for _ in prompts]

    def dense(i: int, tokens: list[int]) -> np.ndarray:
        at = np.arange(caches[i].length, caches[i].length + len(tokens))
        return model.forward(np.array(tokens), at, caches[i].attend, slice(-1, None))[0]

    requests = list(range(len(prompts)))
    paged_rows = [np.stack([engine.prefill(i, prompts[i]) for i in requests])]
    dense_rows = [np.stack([dense(i, prompts[i]) for i in requests])]
    for _ in range(steps):
        tokens = dense_rows[-1].argmax(axis=1).tolist()
        paged_rows.append(engine.decode(requests, tokens))
        dense_rows.append(np.stack([dense(i, [token]) for i, token in enumerate(tokens)]))
    return np.stack(paged_rows), np.stack(dense_rows)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_paged_batch_equals_dense_sequences(tiny: Llama, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5), "lengths")
    block_size = data.draw(st.sampled_from([1, 3, 16, 64]), "block size")
    chunk = data.draw(st.sampled_from([1, 7, 16, 256]), "prefill chunk")
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32), "seed"))
    prompts = [rng.integers(3, tiny.config.vocab_size, n).tolist() for n in lengths]
    num_blocks = sum(-(-(n + 9) // block_size) for n in lengths)
    paged, dense = paged_and_dense_logits(tiny, prompts, 8, poisoned(tiny, num_blocks, block_size, chunk))
    np.testing.assert_allclose(paged, dense, rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [256, 9], ids=["whole prompt", "prompt in pieces"])
def test_real_model_paged_equals_dense(chunk: int) -> None:
    model, tokenizer = tiny_llama.real_model()
    prompt = tokenizer.encode_prompt("Why is the sky blue?")
    paged, dense = paged_and_dense_logits(model, [prompt], 32, poisoned(model, 8, 16, chunk))
    np.testing.assert_allclose(paged, dense, rtol=0, atol=1e-4)


def test_real_model_batch_of_different_lengths_equals_dense() -> None:
    model, tokenizer = tiny_llama.real_model()
    prompts = [tokenizer.encode_prompt("Count to ten" + ", slowly" * n) for n in (0, 5, 14)]
    paged, dense = paged_and_dense_logits(model, prompts, 8, poisoned(model, 16, 16))
    np.testing.assert_allclose(paged, dense, rtol=0, atol=1e-4)


def test_float16_keys_and_values_cost_what_rounding_them_costs() -> None:
    model, tokenizer = tiny_llama.real_model()
    prompt = tokenizer.encode_prompt("Why is the sky blue?")
    tokens = np.array(prompt + prompt)
    at = np.arange(len(tokens))
    exact, rounded = (
        model.forward(tokens, at, cache(model.config).attend)
        for cache in (tiny_llama.DenseCache, tiny_llama.RoundedCache)
    )
    engine = Engine(model, 8, 16, kv_dtype="float16")
    step = engine.alloc.add_request("A", len(tokens))
    logits = engine.run(step, tokens.tolist())
    assert engine.cache.pool.dtype == np.float16
    error = np.abs(rounded[-1] - exact[-1]).max()
    assert 0 < np.abs(logits[0] - exact[-1]).max() <= 3 * error


def test_real_model_answers_as_llama_cpp_does_on_the_paged_cache() -> None:
    """llama.cpp on the same weights in float32 gives these tokens, and then eos."""
    model, tokenizer = tiny_llama.real_model()
    prompt = tokenizer.encode_prompt("What is the capital of France?")
    steps = sample(poisoned(model, 8, 16), prompt, max_tokens=20, eos_ids=tokenizer.eos_ids)
    assert [token for added in steps for _, token in added] == [504, 3575, 282, 4649, 314, 7042, 30]


def beam_search_from_scratch(
    model: Any, prompt: list[int], width: int, max_tokens: int, eos_ids: Sequence[int]
) -> tuple[list[tuple[float, tuple[int, ...]]], float]:
    """Beam search as its definition says it: every beam is recomputed from its tokens at every step.

    Beside the hypotheses: by how much totals would have to differ for one of the choices to be another.
    """

    @cache
    def log_probabilities(tokens: tuple[int, ...]) -> np.ndarray:
        logits = tiny_llama.dense_logits(model, [*prompt, *tokens])[-1].astype(np.float64)
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())

    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    margin = np.inf
    for _ in range(max_tokens):
        every = [
            (total + log_probability, (*tokens, token))
            for total, tokens in beams
            for token, log_probability in enumerate(log_probabilities(tokens))
        ]
        beams = []
        ended = np.inf
        for total, tokens in sorted(every, key=lambda x: -x[0]):
            if len(beams) == width:  # the last of them could change places with this one, or with the last that ended
                margin = min(margin, beams[-1][0] - total, ended - beams[-1][0])
                break
            if tokens[-1] in eos_ids:
                finished.append((total, tokens))
                ended = total
            else:
                beams.append((total, tokens))
        if len(finished) >= width:
            break
    found = sorted(((total / len(tokens), tokens) for total, tokens in finished + beams), key=lambda x: -x[0])
    if len(found) > width:
        margin = min(margin, found[width - 1][0] - found[width][0])
    return found[:width], margin


def assert_same_hypotheses(found: list[Hypothesis], expected: list[tuple[float, tuple[int, ...]]]) -> None:
    np.testing.assert_allclose([h.score for h in found], [score for score, _ in expected], atol=1e-3)
    assert {h.tokens for h in found} == {tokens for _, tokens in expected}


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize(
    "eos_ids", [(), (7, 70, 130, 200), tuple(range(3, 260, 2))], ids=["no eos", "four eos", "half eos"]
)
def test_beam_search_equals_one_that_recomputes_every_beam(tiny: Llama, width: int, eos_ids: tuple[int, ...]) -> None:
    rng, margin = np.random.default_rng(), 0.0
    while margin < 3e-4:  # what rounding decides would be a matter of chance; it moves a total by a tenth of that
        prompt = rng.integers(3, tiny.config.vocab_size, 13).tolist()
        expected, margin = beam_search_from_scratch(tiny, prompt, width, 12, eos_ids)
    num_blocks = blocks_to_be_safe(len(prompt), 12, width, 4)
    found = beam_search(poisoned(tiny, num_blocks, 4), prompt, width=width, max_tokens=12, eos_ids=eos_ids)
    assert_same_hypotheses(found, expected)


def test_real_model_beam_search_equals_one_that_recomputes_every_beam() -> None:
    model, tokenizer = tiny_llama.real_model()
    prompt = tokenizer.encode_prompt("Name a colour.")
    found = beam_search(poisoned(model, 16, 16), prompt, width=4, max_tokens=10, eos_ids=tokenizer.eos_ids)
    assert_same_hypotheses(found, beam_search_from_scratch(model, prompt, 4, 10, tokenizer.eos_ids)[0])


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 20),
    max_tokens=st.integers(1, 12),
    sequences=st.integers(1, 4),
    block_size=st.integers(1, 6),
    beams=st.booleans(),
)
def test_safe_number_of_blocks_is_enough_and_all_come_back(
    tiny: Llama, length: int, max_tokens: int, sequences: int, block_size: int, beams: bool
) -> None:
    num_blocks = blocks_to_be_safe(length, max_tokens, sequences, block_size)
    engine = poisoned(tiny, num_blocks, block_size)
    prompt = list(range(3, 3 + length))
    if beams:
        found = beam_search(engine, prompt, width=sequences, max_tokens=max_tokens, eos_ids=(9,))
        assert len(found) == sequences and np.isfinite([h.score for h in found]).all()
    else:
        steps = list(sample(engine, prompt, n=sequences, max_tokens=max_tokens, eos_ids=(), temperature=5.0))
        assert len(steps) == max_tokens and all(len(added) == sequences for added in steps)
    engine.alloc.check()
    assert engine.alloc.num_free == num_blocks


def test_usage_counts_blocks_sharing_and_copies(tiny: Llama) -> None:
    engine = poisoned(tiny, 40, 4)
    list(sample(engine, list(range(3, 13)), n=3, max_tokens=4, eos_ids=(), temperature=1.0))
    # 10 tokens: 2 full blocks shared by 3, and a third one that two of them copy; 3 more tokens need a fourth block each.
    assert (engine.usage.peak_blocks, engine.usage.peak_unshared_blocks, engine.usage.copies) == (2 + 3 * 2, 3 * 4, 2)
    assert engine.usage.decode_tokens == 3 * 3 and len(engine.usage.decode_times) == 3


def test_sequences_leave_the_batch_at_their_eos_and_return_their_blocks(tiny: Llama) -> None:
    engine = poisoned(tiny, 200, 4)
    eos_ids = range(3, tiny.config.vocab_size, 4)
    lasted, free = np.zeros(20, int), []  # all as long by chance: below 4 ** -19
    for added in sample(engine, [5, 6, 7], n=20, max_tokens=30, eos_ids=eos_ids, temperature=100.0):
        assert not any(token in eos_ids for _, token in added)
        for i, _ in added:
            lasted[i] += 1
        free.append(engine.alloc.num_free)
    assert len(set(lasted.tolist())) > 1 and engine.alloc.num_free == 200


def test_leaving_generation_early_frees_every_block(tiny: Llama) -> None:
    engine = poisoned(tiny, 40, 4)
    steps = sample(engine, [5, 6, 7], n=3, max_tokens=30, eos_ids=())
    next(steps)
    assert engine.alloc.num_free < 40
    steps.close()
    assert engine.alloc.num_free == 40


@pytest.mark.parametrize("num_blocks", [1, 3], ids=["in the prompt", "while decoding"])
def test_out_of_blocks_frees_every_block(tiny: Llama, num_blocks: int) -> None:
    engine = poisoned(tiny, num_blocks, 4, prefill_chunk=3)
    with pytest.raises(cupaged.OutOfBlocks):
        list(sample(engine, [5, 6, 7, 8, 9, 10], n=2, max_tokens=30, eos_ids=(), temperature=1.0))
    with pytest.raises(cupaged.OutOfBlocks):
        beam_search(engine, [5, 6, 7, 8, 9, 10], width=2, max_tokens=30, eos_ids=())
    assert engine.alloc.num_free == num_blocks


def test_same_seed_gives_the_same_samples(tiny: Llama) -> None:
    def run(seed: int) -> list[list[tuple[int, int]]]:
        steps = sample(poisoned(tiny, 40, 4), [5, 6, 7], n=3, max_tokens=8, eos_ids=(), temperature=3.0, seed=seed)
        return list(steps)

    assert run(1) == run(1) != run(2)


def test_tokens_are_drawn_by_the_softmax_of_the_tempered_logits() -> None:
    logits, draws = np.array([0.0, 1.0, -np.inf, 2.0, -1.0], np.float32), 20000
    tokens = choose(np.repeat(logits[None], draws, axis=0), 2.0, np.random.default_rng())
    expected = np.exp(logits / 2) / np.exp(logits / 2).sum()
    counts = np.bincount(tokens, minlength=5)
    assert counts[2] == 0
    np.testing.assert_array_less(np.abs(counts - draws * expected), 6 * np.sqrt(draws * expected) + 1)
    assert choose(logits[None], 0.0, np.random.default_rng()).tolist() == [3]


def test_prompt_must_leave_room_in_the_context() -> None:
    assert check_prompt([1] * 10, 5, 100) == 5
    assert check_prompt([1] * 97, 5, 100) == 3
    with pytest.raises(InputError, match="has 100 tokens, but the model's context ends at 100"):
        check_prompt([1] * 100, 5, 100)
    with pytest.raises(InputError, match="empty"):
        check_prompt([], 5, 100)
