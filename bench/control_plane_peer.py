"""The peer of `control_plane.py`: vLLM's KV cache manager (`vllm.v1.core`), run by a Python that has it. One JSON object on stdout.

control_plane_peer.py WORK [WORK ...]     works as below, times in nanoseconds per sequence or block
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

SIZE = 16
init_none_hash(sha256_cbor)
hasher = get_request_block_hasher(SIZE, sha256_cbor)


def manager(num_blocks: int, caching: bool) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=8, head_size=128, dtype=torch.float16)
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, 1 << 20, SIZE, SIZE, enable_caching=caching)


def request(name: str, tokens: list[int], caching: bool) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=1 << 20), None, block_hasher=hasher if caching else None)


def decode(n: int, caching: bool) -> float:
    """ns per sequence of one step: one slot for each of n sequences of about 500 tokens, and the new token's identity."""
    peer = manager(n * 40 + 100, caching)
    requests = [request(str(i), list(range(i, i + 484 + i % 32)), caching) for i in range(n)]
    for r in requests:
        assert peer.allocate_slots(r, r.num_tokens) is not None
        r.num_computed_tokens = r.num_tokens
        r.append_output_token_ids(1)
    steps = 64 if n <= 256 else 16
    times = []
    for _ in range(steps):
        start = time.perf_counter_ns()
        for r in requests:
            peer.allocate_slots(r, 1)
        if caching:  # the identity of full blocks is computed when a token is known
            for r in requests:
                r.append_output_token_ids(7)
                r.num_computed_tokens += 1
        times.append(time.perf_counter_ns() - start)
        if not caching:
            for r in requests:
                r.append_output_token_ids(7)
                r.num_computed_tokens += 1
    return sum(times) / len(times) / n


def take_and_return() -> float:
    """ns per block of taking 16,384 blocks and giving them back."""
    pool = BlockPool(20_000, False, SIZE)

    def once() -> None:
        pool.free_blocks(pool.get_new_blocks(16_384))

    return best(once) / 16_384


def take_with_eviction() -> float:
    """The same when every block holds cached content that must go first: cache, free, take."""
    count = 16_384
    pool = BlockPool(count + 1, True, SIZE)
    times = []
    for repeat in range(5):
        tokens = [repeat * 1_000_000 + i for i in range(count * SIZE)]
        r = request(str(repeat), tokens, True)
        start = time.perf_counter_ns()
        blocks = pool.get_new_blocks(count)
        middle = time.perf_counter_ns()
        pool.cache_full_blocks(r, blocks, 0, count, SIZE, 0)
        again = time.perf_counter_ns()
        pool.free_blocks(blocks)
        times.append(time.perf_counter_ns() - again + middle - start)
    return min(times[1:]) / count


def match(num_tokens: int = 100_000) -> float:
    """ns of finding a cached prompt: its hashes and the lookup."""
    peer = manager(num_tokens // SIZE + 100, True)
    tokens = list(range(num_tokens))
    first = request("first", tokens, True)
    assert peer.allocate_slots(first, num_tokens) is not None
    peer.free(first)

    def once() -> None:
        _, count, *_ = peer.get_computed_blocks(request("again", tokens, True))
        assert count > num_tokens - 2 * SIZE

    return best(once, 3)


def replay(path: str, num_blocks: int) -> float:
    """Seconds for looking up, allocating, caching and freeing every prompt of a trace."""
    peer = manager(num_blocks, True)
    total = 0
    with open(path) as lines:
        for i, line in enumerate(lines):
            entry = json.loads(line)
            tokens = list(prompt(entry["hash_ids"], entry["input_length"]))
            start = time.perf_counter_ns()
            r = request(str(i), tokens, True)
            blocks, count, *_ = peer.get_computed_blocks(r)
            if peer.allocate_slots(r, len(tokens) - count, count, blocks) is None:
                raise SystemExit("the pool is too small for the trace")
            peer.free(r)
            total += time.perf_counter_ns() - start
    return total / 1e9


def prompt(ids: list[int], length: int) -> Iterator[int]:
    """512 tokens made from each id, cut to the length."""
    for at, i in enumerate(ids):
        yield from range(i * 512, i * 512 + min(512, length - at * 512))


def best(call: Callable[[], Any], repeats: int = 20) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return min(times)


def main() -> None:
    results = {}
    for work in sys.argv[1:]:
        name, *arguments = work.split(":")
        if name == "decode":
            results[work] = decode(int(arguments[0]), False)
        elif name == "decode+cache":
            results[work] = decode(int(arguments[0]), True)
        elif name == "replay":
            results[work] = replay(arguments[0], int(arguments[1]))
        else:
            results[work] = {"take": take_and_return, "evict": take_with_eviction, "match": match}[name]()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
