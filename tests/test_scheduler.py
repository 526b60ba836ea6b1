"""Continuous batching: under any schedule of arrivals, budgets and preemptions a request finds what it finds alone.

Logits of a batch and of a sequence alone differ by rounding, about 1e-6 here, which decides between tokens only in a near tie. So the
requests are drawn until there are enough whose result stays the same when a thousand times as much noise is added to the logits, and
the opposite noise: one of the two turns a near tie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf", reason="the model tests need: pip install 'cupaged[models]'")
pytest.importorskip("tokenizers", reason="the model tests need: pip install 'cupaged[models]'")

import tiny_llama
from decoding import Beams, Samples
from generation import Engine, blocks_to_be_safe, search
from gguf_file import GGUFFile, InputError
from hypothesis import event, given, settings
from hypothesis import strategies as st
from llama import Llama
from scheduler import Job, Scheduler

NOISE = 1e-3
EOS_IDS = (7, 70, 130, 200)


@dataclass(frozen=True)
class Request:
    """A prompt and how it is continued."""

    prompt: tuple[int, ...]
    width: int
    max_tokens: int
    beam: bool
    temperature: float
    seed: int
    found: Any = None  # what it finds alone

    def decoder(self) -> Samples | Beams:
        if self.beam:
            return Beams(self.width, self.max_tokens, EOS_IDS)
        return Samples(self.width, self.max_tokens, EOS_IDS, self.temperature, self.seed)

    def alone(self, model: Any) -> Any:
        decoder = self.decoder()
        engine = Engine(model, blocks_to_be_safe(len(self.prompt), self.max_tokens, self.width, 16))
        for _ in search(engine, self.prompt, decoder):
            pass
        return result(decoder)


def result(decoder: Samples | Beams) -> Any:
    return decoder.outputs if isinstance(decoder, Samples) else [h.tokens for h in decoder.hypotheses]


class Shaken:
    """A model whose logits tremble."""

    def __init__(self, model: Llama, seed: int, noise: float) -> None:
        self.model, self.config, self.xp = model, model.config, model.xp
        self.rng, self.noise = np.random.default_rng(seed), noise

    def forward(self, *args: Any) -> np.ndarray:
        logits = self.model.forward(*args)
        return logits + (self.noise * self.rng.uniform(-1, 1, logits.shape)).astype(np.float32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    seed = int(np.random.default_rng().integers(1 << 32))
    return Llama(GGUFFile(tiny_llama.write(tmp_path_factory.mktemp("tiny") / f"tiny-{seed}.gguf", seed)))


@pytest.fixture(scope="module")
def requests(tiny: Llama) -> list[Request]:
    """Nine requests with a common beginning of some length: greedy, sampled, and beam search, of one to four sequences."""
    rng = np.random.default_rng()
    system = rng.integers(3, tiny.config.vocab_size, 37).tolist()
    steady: list[Request] = []
    while len(steady) < 9:
        kind = len(steady) % 3
        own = rng.integers(3, tiny.config.vocab_size, rng.integers(1, 30)).tolist()
        prompt = (*system[: rng.integers(0, 38)], *own)
        width = 1 if kind == 0 else int(rng.integers(1, 5))
        request = Request(
            prompt, width, int(rng.integers(8, 25)), kind == 2, 2.0 * (kind == 1), int(rng.integers(1 << 32))
        )
        found = request.alone(tiny)
        if all(request.alone(Shaken(tiny, seed, noise)) == found for seed in range(2) for noise in (NOISE, -NOISE)):
            steady.append(Request(*list(vars(request).values())[:-1], found))
    return steady


def pool_for(requests: Sequence[Request], block_size: int, watermark: float, more: int) -> int:
    """The smallest pool that takes each of the requests alone, and `more` blocks."""
    num = needed = max(blocks_to_be_safe(len(r.prompt), r.max_tokens, r.width, block_size) for r in requests)
    while num - math.ceil(watermark * num) < needed:
        num += 1
    return num + more


def serve(scheduler: Scheduler, arrivals: Sequence[tuple[int, Request]]) -> list[Job]:
    """Submit each request at its step, run until all have ended, and check every step on the way."""
    engine, jobs, steps = scheduler.engine, [], 0
    alloc = engine.alloc
    engine.cache.pool[...] = np.nan
    while len(jobs) < len(arrivals) or not scheduler.idle:
        jobs += [scheduler.submit(r.prompt, r.decoder()) for at, r in arrivals[len(jobs) :] if at <= steps]
        scheduler.step()
        steps += 1
        alloc.check()
        if not engine.prefix_caching:
            engine.cache.pool[alloc.free] = np.nan
        if engine.host_blocks:
            engine.cache.host_pool[alloc.host_pool.free()] = np.nan
        assert steps < 5000, "the schedule does not end"
    assert max(scheduler.usage.tokens) <= scheduler.token_budget
    assert max(scheduler.usage.sequences) <= scheduler.max_sequences
    assert alloc.num_free == alloc.num_blocks and not alloc.lengths
    return jobs


def assert_found(jobs: Sequence[Job], requests: Sequence[Request]) -> None:
    for job, request in zip(jobs, requests, strict=True):
        assert result(job.decoder) == request.found, f"prompt of {len(request.prompt)} tokens, {request}"


def any_schedule(tiny: Llama, requests: list[Request], data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(requests), min_size=2, max_size=7), "requests")
    gaps = data.draw(st.lists(st.integers(0, 4), min_size=len(chosen), max_size=len(chosen)), "steps between arrivals")
    block_size = data.draw(st.sampled_from([1, 3, 4, 16]), "block size")
    watermark = data.draw(st.sampled_from([0.0, 0.02, 0.3]), "watermark")
    more = data.draw(st.integers(0, 8), "blocks beyond the largest request") * 4 // block_size
    prefix_caching = data.draw(st.booleans(), "prefix caching")
    max_sequences = data.draw(st.integers(4, 12), "sequences at once")
    token_budget = max_sequences + data.draw(st.integers(0, 60), "token budget beyond them")
    host_blocks = data.draw(st.sampled_from([0, 5, 150]), "host blocks")
    num_blocks = pool_for(chosen, block_size, watermark, more)
    engine = Engine(
        tiny, num_blocks, block_size, prefix_caching=prefix_caching, watermark=watermark, host_blocks=host_blocks
    )
    scheduler = Scheduler(engine, token_budget, max_sequences)
    jobs = serve(scheduler, list(zip(np.cumsum(gaps).tolist(), chosen, strict=True)))
    event(f"recomputed {scheduler.usage.recomputed > 0}, swapped {scheduler.usage.swapped > 0}")
    assert_found(jobs, chosen)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_schedule_finds_what_each_request_finds_alone(
    tiny: Llama, requests: list[Request], data: st.DataObject
) -> None:
    any_schedule(tiny, requests, data)


@pytest.mark.fuzz
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_any_of_many_schedules_finds_what_each_request_finds_alone(
    tiny: Llama, requests: list[Request], data: st.DataObject
) -> None:
    any_schedule(tiny, requests, data)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("host_blocks", [0, 20, 150], ids=["recompute", "either", "swap"])
def test_preempted_jobs_find_the_same(
    tiny: Llama, requests: list[Request], host_blocks: int, prefix_caching: bool
) -> None:
    swapped = recomputed = 0
    for number, more in enumerate((2, 8, 0, 1, 3, 4, 5, 6)):
        if number > 1 and (
            swapped if host_blocks else recomputed
        ):  # by chance they may have had room beside each other
            break
        num_blocks = pool_for(requests, 4, 0.0, more)
        scheduler = Scheduler(Engine(tiny, num_blocks, 4, prefix_caching=prefix_caching, host_blocks=host_blocks))
        jobs = serve(scheduler, [(0, r) for r in requests])
        swapped += scheduler.usage.swapped
        recomputed += scheduler.usage.recomputed
        assert_found(jobs, requests)
    assert (swapped > 0) == (host_blocks > 0)
    assert recomputed > 0 if host_blocks == 0 else recomputed == 0 or host_blocks < 150


def test_prompts_in_pieces_keep_within_the_budget_and_beside_the_sequences_that_generate(tiny: Llama) -> None:
    scheduler = Scheduler(Engine(tiny, 60, 4), token_budget=10, max_sequences=3)
    first = scheduler.submit(range(3, 8), Samples(1, 30, ()))
    scheduler.step()
    second = scheduler.submit(range(3, 40), Samples(1, 3, ()))
    while not second.advanced:
        scheduler.step()
    assert scheduler.usage.tokens == [5, 10, 10, 10, 10, 2]  # 1 of the first job beside 9, 9, 9, 9, 1 of the prompt
    assert len(first.decoder.live[0]) == 6


def test_requests_with_a_common_prompt_compute_it_once(tiny: Llama) -> None:
    prompt = list(range(3, 43))
    scheduler = Scheduler(Engine(tiny, 60, 4, prefix_caching=True))
    for last in range(3):
        scheduler.submit([*prompt, 50 + last], Samples(1, 3, ()))
        scheduler.step()
    while not scheduler.idle:
        scheduler.step()
    stats = scheduler.engine.alloc.stats()
    assert (stats.queried_tokens, stats.hit_tokens) == (3 * 41, 2 * 40)


def test_jobs_join_while_others_run_and_never_the_younger_before_the_older(tiny: Llama) -> None:
    scheduler = Scheduler(Engine(tiny, 30, 4), token_budget=64, max_sequences=4)
    jobs = [scheduler.submit(range(3, 3 + n), Samples(w, 6, (), 1.0)) for n, w in ((9, 2), (5, 3), (4, 1))]
    scheduler.step()
    assert scheduler.running == jobs[:1]  # the second has no place beside it, and the third waits behind the second
    while jobs[0] in scheduler.running:
        scheduler.step()
    scheduler.step()
    assert scheduler.running == jobs[1:]


def test_the_youngest_is_preempted_so_that_the_order_of_arrival_lasts(tiny: Llama) -> None:
    scheduler = Scheduler(Engine(tiny, 20, 4, host_blocks=6))
    jobs = [scheduler.submit(range(3, 9), Samples(1, n, ())) for n in (60, 20, 40, 30)]
    while not scheduler.idle:
        scheduler.step()
        assert [*scheduler.running, *scheduler.waiting] == [job for job in jobs if job.decoder.live]
    assert scheduler.usage.swapped and scheduler.usage.recomputed


def test_sequences_that_differ_begin_again_as_forks_of_each_other(tiny: Llama) -> None:
    prompt, alone = list(range(3, 13)), Samples(3, 20, (), 2.0, 1)
    for _ in search(Engine(tiny, 60, 4), prompt, alone):
        pass
    scheduler = Scheduler(Engine(tiny, 21, 4), token_budget=9, max_sequences=4)
    scheduler.submit(range(3, 9), Samples(1, 60, ()))
    job = scheduler.submit(prompt, Samples(3, 20, (), 2.0, 1))
    while not scheduler.idle:
        scheduler.step()
    assert scheduler.usage.recomputed
    assert job.decoder.outputs == alone.outputs


def test_watermark_keeps_blocks_for_the_growth_of_those_that_run(tiny: Llama) -> None:
    recomputed = []
    for watermark in (0.0, 0.4):
        scheduler = Scheduler(Engine(tiny, 20, 4, watermark=watermark))
        for _ in range(5):
            scheduler.submit(range(3, 15), Samples(1, 30, ()))
        while not scheduler.idle:
            scheduler.step()
        recomputed.append(scheduler.usage.recomputed)
    assert recomputed[0] > recomputed[1]


def test_request_that_could_never_run_is_refused_with_the_reason(tiny: Llama) -> None:
    scheduler = Scheduler(Engine(tiny, 10, 4, watermark=0.1), max_sequences=4)
    scheduler.submit(range(3, 15), Samples(1, 24, ()))
    with pytest.raises(InputError, match="may need 10 blocks of 4 tokens, but the pool has 10 and keeps 1"):
        scheduler.submit(range(3, 15), Samples(1, 28, ()))
    with pytest.raises(InputError, match="5 sequences, but at most 4"):
        scheduler.submit([3], Samples(5, 1, ()))
    with pytest.raises(InputError, match="empty"):
        scheduler.submit([], Samples(1, 1, ()))
    with pytest.raises(ValueError, match="max_sequences: expected 1 to token_budget"):
        Scheduler(scheduler.engine, token_budget=3, max_sequences=4)


def test_real_model_serves_what_it_answers_alone() -> None:
    model, tokenizer = tiny_llama.real_model()
    questions = ("What is the capital of France?", "What do bees make?", "Name a colour.")
    requests = [
        Request(tuple(tokenizer.encode_prompt(q)), width, 6, beam, 0.0, 0)
        for q, width, beam in zip(questions, (1, 1, 2), (False, False, True), strict=True)
    ]
    engine = Engine(model, 12, 16, prefix_caching=True)
    scheduler = Scheduler(engine, token_budget=32, max_sequences=8)
    jobs = [scheduler.submit(r.prompt, r.decoder()) for r in requests]
    while not scheduler.idle:
        scheduler.step()
    for job, request in zip(jobs, requests, strict=True):
        assert result(job.decoder) == request.alone(model)
