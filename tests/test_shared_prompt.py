"""A real model with the prefix cache: what is shared is not computed again, and the logits are the same."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the model tests need: pip install 'cupaged[models]'")
pytest.importorskip("tokenizers", reason="the model tests need: pip install 'cupaged[models]'")

import tiny_llama
from shared_prompt import SHARED, SharedPool, prompts


def test_second_prompt_computes_only_what_it_does_not_share_and_has_the_same_logits() -> None:
    model, tokenizer = tiny_llama.real_model()
    first, second = prompts(tokenizer)
    assert first[:SHARED] == second[:SHARED] and SHARED == 500
    common = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)

    shared = SharedPool(model, 80, prefix_caching=True)
    shared.cache.pool[...] = np.nan  # what is not written is never read
    assert shared.start("first", first).computed == len(first)
    start = shared.start("second", second)
    assert start.computed == len(second) - common <= 40  # a partly equal block is copied, not computed
    alone = SharedPool(model, 40, prefix_caching=False).start("second", second)
    assert alone.computed == len(second)
    np.testing.assert_allclose(start.logits, alone.logits, rtol=0, atol=1e-4)
    shared.alloc.check()
