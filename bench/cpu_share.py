"""Attention's share of a decode step of the demo's model on the CPU, at contexts of 1024 and 4096 tokens. `python bench/cpu_share.py`

With keys and values in float16, as in the demo, and in float32. The prompt is any tokens: a step takes as long whatever they say.
Attention includes the write of the new keys and values. Needs what `make demo` installs.
"""

from __future__ import annotations

import sys
import time
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

from generation import Engine
from gguf_file import find_model
from llama import load

STEPS = 20


def main() -> None:
    model, _ = load(find_model(), np)
    for context, kv_dtype in product((1024, 4096), ("float16", "float32")):
        engine = Engine(model, context // 16 + 4, kv_dtype=kv_dtype)
        tokens = np.random.default_rng(0).integers(0, 1000, context - STEPS).tolist()
        engine.prefill("A", tokens)
        spent = [0.0]

        def timed(call, spent=spent):  # type: ignore[no-untyped-def]
            def run(*args, **how):  # type: ignore[no-untyped-def]
                start = time.perf_counter()
                result = call(*args, **how)
                spent[0] += time.perf_counter() - start
                return result

            return run

        engine.cache.attend = timed(engine.cache.attend)  # type: ignore[method-assign]
        shares = []
        for _ in range(STEPS):
            spent[0] = 0.0
            engine.decode(["A"], [0])
            shares.append((spent[0], engine.usage.decode_times[-1]))
        attention, step = (median(x) for x in zip(*shares, strict=True))
        print(
            f"context {context}, {kv_dtype}: attention {attention * 1e3:.2f} ms of {step * 1e3:.2f} ms, {attention / step:.1%}"
        )


if __name__ == "__main__":
    main()
