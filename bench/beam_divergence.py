"""Which beam continues which, from a real model: the record that the memory study plays back.

    python bench/beam_divergence.py

runs beam search of widths 2, 4 and 6 on ten prompts (SmolLM2-135M-Instruct, up to 96 tokens, about six minutes on one core), writes
`cupaged/study/beam_parents.json` and prints how much of the generated tokens the beams hold in common.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from generation import Engine, beam_search, blocks_to_be_safe  # noqa: E402
from gguf_file import find_model  # noqa: E402
from llama import load  # noqa: E402

PROMPTS = (
    "Why is the sky blue? Answer in two sentences.",
    "Give three tips for staying healthy.",
    "Describe a time when you had to make a difficult decision.",
    "What are the main parts of a plant, and what does each of them do?",
    "Write a short story about a lost dog.",
    "Explain what a database index is.",
    "List five cities in Italy and say one thing about each.",
    "Translate into French: the train leaves at noon.",
    "How do I remove a coffee stain from a shirt?",
    "Summarise the plot of Romeo and Juliet.",
)
WIDTHS = (2, 4, 6)
MAX_TOKENS = 96


def main() -> None:
    """Run the searches, write the record, print what it says."""
    model, tokenizer = load(find_model(), np)
    record: dict[str, list[str]] = {str(width): [] for width in WIDTHS}
    for text in PROMPTS:
        prompt = tokenizer.encode_prompt(text)
        for width in WIDTHS:
            engine = Engine(model, blocks_to_be_safe(len(prompt), MAX_TOKENS, width, 16), 16)
            steps = watch_reorders(engine)
            beam_search(engine, prompt, width=width, max_tokens=MAX_TOKENS, eos_ids=tokenizer.eos_ids)
            # at the first step all beams are the same prompt
            record[str(width)].append(" ".join("".join(map(str, step)) for step in steps[1:]))
    told = {"model": "SmolLM2-135M-Instruct", "made_by": "bench/beam_divergence.py", "parents": record}
    (ROOT / "cupaged" / "study" / "beam_parents.json").write_text(json.dumps(told, indent=1) + "\n")
    for width, runs in record.items():
        shares = [distinct_share(run.split()) for run in runs]
        print(
            f"width {width}: {np.mean(shares):.1%} of the beams' generated tokens are distinct ({1 / int(width):.1%} if all were shared)"
        )


def watch_reorders(engine: Engine) -> list[list[int]]:
    """The parents that `engine` will be asked to reorder by, a list that fills as it runs."""
    steps: list[list[int]] = []
    reorder = engine.alloc.reorder

    def noting(requests: list[object], parents: list[int]) -> None:
        steps.append(parents)
        reorder(requests, parents)

    engine.alloc.reorder = noting  # type: ignore[method-assign, assignment]
    return steps


def distinct_share(steps: list[str]) -> float:
    """Distinct generated tokens over those that beams without sharing would hold, averaged over the steps."""
    pasts: list[list[tuple[int, int]]] = [[] for _ in steps[0]]
    shares = []
    for at, parents in enumerate(steps):
        pasts = [[*pasts[int(parent)], (at, beam)] for beam, parent in enumerate(parents)]
        shares.append(len({token for past in pasts for token in past}) / (len(pasts) * (at + 1)))
    return float(np.mean(shares))


if __name__ == "__main__":
    main()
