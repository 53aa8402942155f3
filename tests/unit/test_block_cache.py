"""Rows that are kept in memory: the same bytes, never more than allowed, and who is worth most."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from retain.kv.offload.selective.block_cache import BlockCache, CachedReader
from tests.unit.test_disk_tier import content, key, opened, span_of

ROW = 1536


@pytest.mark.parametrize("by", ["lru", "lfu", "worth"])
def test_through_memory_or_not_the_bytes_are_the_same(by: str, tmp_path: Path) -> None:
    """Any stretch of rows, hot in any pattern."""
    rng, store, hot = random.Random(0), opened(tmp_path), BlockCache(20 * 4096, by)
    spans = []
    for first in (0, 20):
        store.put(*span_of(list(range(first, first + 9))))
        store.sync()
        spans.append(store.find(key(first))[0])
    for _ in range(300):
        n = rng.randrange(2)
        with closing(CachedReader(store.open(spans[n]), hot, spans[n], spans[n].file_number)) as reader:
            reader.attention_shares = np.random.default_rng(n).random((3, 9), np.float32)
            layer, begin = rng.randrange(3), rng.randrange(9)
            end = rng.randint(begin + 1, 9)
            rows = reader.read_blocks(layer, begin, end)
            assert (rows == content([20 * n + i for i in range(begin, end)], layer)).all()
        assert hot.span_index.used_bytes <= 20 * 4096
    assert hot.counts["found"] > 50 and hot.counts["missed"] > 50
    store.close()


def test_what_was_found_is_not_read(tmp_path: Path) -> None:
    store, hot = opened(tmp_path), BlockCache(10**6, "worth")
    store.put(*span_of(list(range(4))))
    store.sync()
    span = store.find(key(0))[0]
    for again in range(2):
        with closing(CachedReader(store.open(span), hot, span, span.file_number)) as reader:
            before = store.counts["read"]
            reader.read_blocks(1, 0, 3)
            assert (store.counts["read"] == before) == bool(again)
    store.close()


def test_worth_is_how_often_times_how_much() -> None:
    hot = BlockCache(3 * 4096, "worth")
    row = np.zeros(4096, np.uint8)
    for name, hits, share in ((b"a", 5, 1.0), (b"b", 1, 4.0), (b"c", 2, 1.0)):
        hot.put(name, row, hits, share)
    hot.put(b"d", row, 1, 1.0)  # worth less than all of them
    assert [n for n in (b"a", b"b", b"c", b"d") if hot.span_index.find(n)] == [b"a", b"b", b"c"]
    hot.put(b"e", row, 3, 1.0)
    assert [n for n in (b"a", b"b", b"c", b"e") if hot.span_index.find(n)] == [b"a", b"b", b"e"]
    hot.get(b"b", 9, 4.0)
    hot.put(b"f", row, 4, 1.0)
    assert [n for n in (b"a", b"b", b"e", b"f") if hot.span_index.find(n)] == [b"a", b"b", b"f"]
