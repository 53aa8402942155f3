"""The cache for blocks of spans on a disk: the same bytes, never more than the capacity, the most valuable stay."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from retain.kv.stores.selective.block_cache import BlockCache, CachedReader
from tests.helpers.stored_spans import expected_blocks, key_of, make_span, open_disk_store

PAGE = 4096  # bytes; a cached block takes whole ones


@pytest.mark.parametrize("evict", ["lru", "lfu", "importance"])
def test_reads_through_the_cache_give_the_same_bytes(evict: str, tmp_path: Path) -> None:
    """Any run of blocks, with any pattern of cached ones."""
    rng, store, cache = random.Random(0), open_disk_store(tmp_path), BlockCache(20 * PAGE, evict)
    spans = []
    for first in (0, 20):
        store.put(*make_span(range(first, first + 9)))
        store.sync()
        spans.append(store.find(key_of(first))[0])
    for _ in range(300):
        n = rng.randrange(2)
        with closing(CachedReader(store.open(spans[n]), cache)) as reader:
            reader.attention_shares = np.random.default_rng(n).random((3, 9), np.float32)
            layer, begin = rng.randrange(3), rng.randrange(9)
            end = rng.randint(begin + 1, 9)
            blocks = reader.read_blocks(layer, begin, end)
            assert (blocks == expected_blocks([20 * n + i for i in range(begin, end)], layer)).all()
        assert cache.span_index.used_bytes <= 20 * PAGE
    assert cache.counts["found"] > 50 and cache.counts["missed"] > 50
    store.close()


def test_cached_blocks_are_not_read_again(tmp_path: Path) -> None:
    store, cache = open_disk_store(tmp_path), BlockCache(10**6, "importance")
    store.put(*make_span(range(4)))
    store.sync()
    span = store.find(key_of(0))[0]
    for is_cached in (False, True):
        with closing(CachedReader(store.open(span), cache)) as reader:
            before = store.counts["read"]
            reader.read_blocks(1, 0, 3)
            assert (store.counts["read"] == before) == is_cached
    store.close()


def test_importance_is_uses_times_share_of_attention() -> None:
    cache = BlockCache(3 * PAGE, "importance")
    block = np.zeros(PAGE, np.uint8)

    def cached(*keys: bytes) -> list[bytes]:
        return [key for key in keys if cache.span_index.find(key)]

    for key, hits, share in ((b"a", 5, 1.0), (b"b", 1, 4.0), (b"c", 2, 1.0)):
        cache.put(key, block, hits, share)
    cache.put(b"d", block, 1, 1.0)  # less important than all of them
    assert cached(b"a", b"b", b"c", b"d") == [b"a", b"b", b"c"]
    cache.put(b"e", block, 3, 1.0)
    assert cached(b"a", b"b", b"c", b"e") == [b"a", b"b", b"e"]
    cache.get(b"b", 9, 4.0)
    cache.put(b"f", block, 4, 1.0)
    assert cached(b"a", b"b", b"e", b"f") == [b"a", b"b", b"f"]
