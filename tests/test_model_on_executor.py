"""The real model with the executor in the GPU's place: host code and kernels of the CUDA path, end to end."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the model tests need: pip install 'cupaged[models]'")
pytest.importorskip("tokenizers", reason="the model tests need: pip install 'cupaged[models]'")

import simt_device
import tiny_llama
from generation import Engine, beam_search, sample
from simt import build

PROMPT = "The capital of France is"


@pytest.fixture(autouse=True)
def _needs_the_executor() -> None:
    if reason := build.unavailable():
        pytest.skip(reason)


def poisoned(model: object) -> Engine:
    engine = Engine(model, num_blocks=24, block_size=4)
    engine.cache.pool[...] = np.nan
    return engine


def test_eight_tokens_are_those_of_the_cpu() -> None:
    model, tokenizer = tiny_llama.real_model()
    prompt = tokenizer.encode(PROMPT)

    def tokens() -> list[list[tuple[int, int]]]:
        return list(sample(poisoned(model), prompt, n=2, max_tokens=8, eos_ids=[]))

    on_cpu = tokens()
    with simt_device.in_place_of_a_gpu(simt_device.backend()) as backend:
        before = backend.launcher.num_launches
        on_executor = tokens()
    assert backend.launcher.num_launches - before >= 8 * 30 * 2, "a write and an attention a layer and pass"
    assert on_executor == on_cpu
    assert len(on_cpu) == 8 and "Paris" in tokenizer.decode([token for ((_, token), _) in on_cpu])


def test_beams_fork_and_copy_as_on_the_cpu() -> None:
    model, tokenizer = tiny_llama.real_model()
    prompt = tokenizer.encode(PROMPT)

    def beams() -> list[tuple[int, ...]]:
        engine = poisoned(model)
        found = [beam.tokens for beam in beam_search(engine, prompt, width=3, max_tokens=4, eos_ids=[])]
        assert engine.usage.copies, "beams of one prompt write into a shared block"
        return found

    on_cpu = beams()
    with simt_device.in_place_of_a_gpu(simt_device.backend()):
        assert beams() == on_cpu
