"""The hash index against a plain dictionary: nothing that is there is missed, whatever came and went before."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from cupaged import hash_index
from cupaged.hash_index import HashIndex


@pytest.mark.parametrize("few", [0, 8])  # at once, and one by one
@pytest.mark.parametrize("num_hashes", [1, 7, 10**9])
def test_entries_are_found_until_they_are_removed(num_hashes: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_index, "_FEW", few)
    random = Random(num_hashes + few)
    for num_blocks in (1, 2, 5, 40, 300):
        index, entries = HashIndex(np.zeros(num_blocks, np.uint64)), set[int]()
        for _ in range(25):
            fresh = sorted(set(range(num_blocks)) - entries)
            fresh = random.sample(fresh, random.randint(0, len(fresh)))
            blocks = np.array(fresh, np.int64)
            index.hashes[blocks] = [random.randrange(num_hashes) for _ in fresh]
            index.insert(blocks, index.homes(index.hashes[blocks]))
            entries |= set(fresh)
            assert sorted(index.entries().tolist()) == sorted(entries) and index.count == len(entries)

            asked = np.array([random.randrange(num_hashes) for _ in range(20)] + index.hashes.tolist(), np.uint64)
            there = {int(index.hashes[block]) for block in entries}
            found = index.find(index.homes(asked))
            for hash_, block in zip(asked.tolist(), found.tolist(), strict=True):
                assert block in entries if hash_ in there else block == -1
                assert hash_ not in there or int(index.hashes[block]) == hash_
            for hash_ in sorted(there)[:5]:
                same = [block for block in entries if int(index.hashes[block]) == hash_]
                assert sorted(index.find_all(np.uint64(hash_))) == sorted(same)

            gone = random.sample(sorted(entries), random.randint(0, len(entries)))
            index.remove(np.array(gone, np.int64))
            entries -= set(gone)
            if random.random() < 0.05:
                index.clear()
                entries.clear()


def test_entries_beyond_a_full_bucket_are_found(rng: np.random.Generator) -> None:
    index = HashIndex(np.zeros(60, np.uint64))
    drawn = rng.integers(0, 2**63, 20_000, np.uint64)
    buckets, tags = index.homes(drawn)
    home = drawn[buckets == 3]
    home = home[np.unique(tags[buckets == 3], return_index=True)[1]][
        :20
    ]  # all of one bucket, whose tags say which they are
    index.hashes[:20] = home
    blocks = np.arange(20)
    index.insert(blocks, index.homes(home))
    assert index.find(index.homes(home)).tolist() == blocks.tolist()
    for block in range(20):
        assert index.find_one(index.homes(home[block : block + 1])) == block
        assert index.find(index.homes(home[block : block + 1])).tolist() == [block]
