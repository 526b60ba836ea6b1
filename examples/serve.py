"""The command `python -m cupaged serve`: requests that come over time, served as one batch that changes at every step.

Questions with one system prompt come at random moments; most want one greedy answer, some several sampled ones, some a beam search.
The pool is small enough that blocks run out now and then. What the requests waited for and what the pool did is printed at the end.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
from decoding import Beams, Samples
from generate import add_kv_dtype, array_module, at_least_one, at_least_zero, not_negative
from generation import Engine, check_prompt, search
from gguf_file import InputError, find_model
from llama import load
from scheduler import Job, Scheduler
from tokenizer import TextStream, Tokenizer

SYSTEM = (
    "You are the assistant of a public library. People of every age ask you about the world, about words and numbers, and about "
    "what they could read. You answer in one or two short sentences, in plain words that a child understands. You never invent a "
    "fact: when you do not know, you say so, and name a kind of book in which the answer could be found. You do not repeat the "
    "question, you do not talk about yourself, and you stay friendly, also with people who are not."
)
QUESTIONS = (
    "What is the capital of France?", "Name three primary colours.", "Why is the sky blue?", "What do bees make?",
    "How many days are there in a leap year, and how often does such a year come?", "Write one sentence about the sea.",
    "What does a computer do?", "Translate 'good morning' into Spanish.", "Who wrote Romeo and Juliet?", "Why do leaves fall?",
    "Give me a short recipe for pancakes. I have flour, milk, eggs, butter and a little sugar at home.", "What is seven times six?",
)  # fmt: skip


@dataclass
class Client:
    """Someone who asks a question at a moment and reads the answer."""

    number: int
    arrival: float  # seconds after the start
    question: str
    prompt: list[int]
    decoder: Samples | Beams
    streams: list[TextStream]
    job: Job | None = None

    @property
    def answered(self) -> bool:
        """Whether the search has ended."""
        return not self.decoder.live

    def pieces(self) -> Iterator[tuple[int, str]]:
        """`(sequence, text)` of what the newest step added."""
        for i, token in self.decoder.added if isinstance(self.decoder, Samples) else ():
            yield i, self.streams[i].push(token)

    def answers(self) -> list[Sequence[int]]:
        """Tokens of each answer, the best first for a beam search."""
        if isinstance(self.decoder, Samples):
            return list(self.decoder.outputs)
        return [hypothesis.tokens for hypothesis in self.decoder.hypotheses]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    for name, default, kind, what in (
        ("requests", 80, at_least_one, "how many requests come"),
        ("rate", 3.0, not_negative, "requests a second, on average; 0: all at once"),
        ("max-tokens", 48, at_least_one, "most tokens of an answer"),
        ("block-size", 16, at_least_one, "token slots of a block"),
        ("num-blocks", 36, at_least_one, "blocks in the pool"),
        ("host-blocks", 16, int, "blocks of host memory for preempted requests; 0 always computes them again"),
        ("watermark", 0.02, float, "share of the pool that a new request leaves free"),
        ("token-budget", 64, at_least_one, "most tokens that one step computes"),
        ("max-sequences", 16, at_least_one, "most sequences that run at once"),
        ("seed", 0, at_least_zero, "seed of the arrivals and of the sampling"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=f"{what} (default {default})")
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt as a whole")
    parser.add_argument("--stream", action="store_true", help="print every piece of text as it comes")
    add_kv_dtype(parser)
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto", help="where to run (default auto)")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="a Llama in GGUF (default: the model package)")


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns 0, or 2 after one line on stderr."""
    try:
        run(args, sys.stdout)
    except (InputError, ValueError, MemoryError) as error:
        print(f"cupaged: {error}", file=sys.stderr)
        return 2
    return 0


def run(args: argparse.Namespace, out: TextIO) -> None:
    """Serve and print. Raises InputError, ValueError or MemoryError for options that cannot be used."""
    model, tokenizer = load(args.model or find_model(), array_module(args.device))
    from tqdm import tqdm  # comes with what loads models

    for _ in search(Engine(model, 3, kv_dtype=args.kv_dtype), [1] * 17, Samples(2, 2, ())):
        pass  # kernels are compiled, or read from the disk, before the clock runs
    clients = make_clients(tokenizer, model.config.context_length, args)
    engine = Engine(
        model,
        args.num_blocks,
        args.block_size,
        prefix_caching=not args.no_prefix_cache,
        watermark=args.watermark,
        host_blocks=args.host_blocks,
        kv_dtype=args.kv_dtype,
    )
    scheduler = Scheduler(engine, args.token_budget, args.max_sequences)
    start = time.perf_counter()
    with tqdm(total=len(clients), unit="request", leave=False, disable=True if args.stream else None) as bar:
        for client in serve(scheduler, clients, start):
            now = f"{time.perf_counter() - start:6.2f} s"
            for i, piece in client.pieces() if args.stream else ():
                print(f"{now} [{client.number}.{i}] {piece!r}", file=out)
            if client.answered:
                bar.write(f"{now} [{client.number}] {answer(client, tokenizer)}", file=out)
                bar.update()
    print_report(scheduler, clients, start, out)


def make_clients(tokenizer: Tokenizer, context_length: int, args: argparse.Namespace) -> list[Client]:
    """Questions in turn, at the moments of a Poisson process."""
    rng = np.random.default_rng(args.seed)
    arrivals = rng.exponential(1 / args.rate, args.requests).cumsum() if args.rate else np.zeros(args.requests)
    clients = []
    for i, arrival in enumerate(arrivals.tolist()):
        question = QUESTIONS[i % len(QUESTIONS)]
        prompt = tokenizer.encode_prompt(question, SYSTEM)
        most = check_prompt(prompt, args.max_tokens, context_length)
        decoder: Samples | Beams = Samples(1, most, tokenizer.eos_ids)
        if i % 6 == 3:
            decoder = Samples(3, most, tokenizer.eos_ids, 0.8, args.seed + i)
        elif i % 6 == 5:
            decoder = Beams(3, most, tokenizer.eos_ids)
        clients.append(
            Client(i, arrival, question, prompt, decoder, [tokenizer.stream() for _ in range(decoder.width)])
        )
    return clients


def serve(scheduler: Scheduler, clients: Sequence[Client], start: float) -> Iterator[Client]:
    """Submit each request at its moment and step until all are answered; gives each client whose answer grew or ended."""
    coming = deque(clients)
    asked: dict[Job, Client] = {}
    while coming or not scheduler.idle:
        now = time.perf_counter() - start
        while coming and coming[0].arrival <= now:
            client = coming.popleft()
            client.job = scheduler.submit(client.prompt, client.decoder)
            asked[client.job] = client
        if scheduler.idle:
            time.sleep(coming[0].arrival - now)
        else:
            yield from [asked[job] for job in scheduler.step()]


def answer(client: Client, tokenizer: Tokenizer) -> str:
    """One line: the question, its first or best answer, and how many more there are."""
    text = " ".join(tokenizer.decode(client.answers()[0]).split())
    more = f" (and {client.decoder.width - 1} more)" if client.decoder.width > 1 else ""
    return f"{shortened(client.question, 28)} | {shortened(text, 56)}{more}"


def shortened(text: str, size: int) -> str:
    """At most `size` characters of a text."""
    return text if len(text) <= size else f"{text[: size - 3]}..."


def print_report(scheduler: Scheduler, clients: Sequence[Client], start: float, out: TextIO) -> None:
    """What the requests waited for, and what the steps and the pool did."""
    rounds = [client.job.advanced for client in clients if client.job]
    seconds = max(times[-1] for times in rounds) - start
    tokens = sum(len(answer) for client in clients for answer in client.answers())
    usage, stats = scheduler.usage, scheduler.engine.alloc.stats()
    print(
        f"\n{len(clients)} requests in {seconds:.1f} s, {tokens} tokens of answers, {tokens / seconds:.1f} a second\n",
        file=out,
    )

    waits = {
        "time to the first token, s": [t[0] - start - c.arrival for t, c in zip(rounds, clients, strict=True)],
        "between tokens, s": np.concatenate([np.diff(times) for times in rounds]),
        "whole answer, s": [t[-1] - start - c.arrival for t, c in zip(rounds, clients, strict=True)],
    }
    print(f"{'':<28}" + "".join(f"{name:>9}" for name in ("median", "p90", "p99", "most")), file=out)
    for name, values in waits.items():
        print(f"{name:<28}" + "".join(f"{x:9.3f}" for x in np.percentile(values, (50, 90, 99, 100))), file=out)

    print(f"\n{'of ' + str(len(usage.tokens)) + ' steps':<28}{'mean':>9}{'most':>9}{'limit':>9}", file=out)
    for name, counts, limit in (
        ("sequences in the batch", usage.sequences, scheduler.max_sequences),
        ("tokens computed", usage.tokens, scheduler.token_budget),
        ("blocks in use", usage.blocks, scheduler.engine.num_blocks),
    ):
        print(f"{name:<28}{np.mean(counts):9.1f}{max(counts):9}{limit:9}", file=out)

    swapped, recomputed, found = usage.swapped, usage.recomputed, stats.hit_tokens
    print(f"\npreempted                   {swapped} swapped to the host, {recomputed} computed again", file=out)
    if stats.hit_rate is not None:
        of = f"{stats.queried_tokens} tokens of joining requests"
        print(f"found in the prefix cache   {found} of {of}, {stats.hit_rate:.0%}", file=out)
    print(f"copy-on-write copies        {stats.copies}", file=out)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="requests that come over time on a paged KV cache")
    add_arguments(options)
    sys.exit(main(options.parse_args()))
