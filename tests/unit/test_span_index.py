"""The index of a tier: spans by key, a bounded number of bytes, eviction by priority."""

from __future__ import annotations

import random

import numpy as np
import pytest

from retain.kv.stores.index import SpanIndex
from retain.kv.stores.selective.block_cache import BlockCache
from retain.kv.stores.span import Span

PAGE = 4096  # bytes; spans are padded to whole blocks of this size


def make_span(key: bytes, num_pages: int = 1, hits: int = 1, start_page: int = 0, used_at: float = 1.0) -> Span:
    return Span((key,), (num_pages,), PAGE, start_page, hits=hits, last_used_at=used_at)


def index_of(*spans: Span, capacity: int = 3 * PAGE, replacement: str = "importance") -> SpanIndex:
    index = SpanIndex(capacity, replacement)
    for span in spans:
        index.add(span)
    return index


def test_a_span_that_is_refused_evicts_nothing() -> None:
    """The cheapest span alone does not free enough, and the next one is more important than the new span."""
    kept = [make_span(b"a", hits=5), make_span(b"b", hits=1), make_span(b"c", hits=5)]
    index = index_of(*kept)
    new = make_span(b"d", num_pages=2, hits=3)
    assert index.make_room(new.size, index.priority(new)) is None
    assert list(index.spans) == kept and index.used_bytes == 3 * PAGE
    assert all(index.find(key) for key in (b"a", b"b", b"c"))
    # The index still works: the same victims are found once the new span is more important than both.
    better = make_span(b"d", num_pages=2, hits=6)
    assert index.make_room(better.size, index.priority(better)) == [kept[1], kept[0]]
    assert list(index.spans) == [kept[2]] and index.used_bytes == PAGE


def test_spans_that_share_keys_are_found_until_the_last_of_them_is_removed() -> None:
    """By each key the newest span that has it, whatever was removed before."""
    rng = random.Random(0)
    index, spans = SpanIndex(10**9, "lru"), list[Span]()
    for i in range(300):
        if rng.random() < 0.6:
            keys = rng.sample([b"a", b"b", b"c", b"d", b"e"], rng.randint(1, 3))
            spans.append(Span(tuple(keys), (1,), PAGE, last_used_at=float(i + 1)))
            index.add(spans[-1])
        elif spans:
            index.remove(spans.pop(rng.randrange(len(spans))))
        for key in (b"a", b"b", b"c", b"d", b"e"):
            newest = next((s for s in reversed(spans) if key in s.keys), None)
            assert index.find(key) == (newest and (newest, newest.keys.index(key)))
        assert set(index.older) <= set(index.by_key)


def test_a_block_that_is_refused_evicts_nothing_and_counts_nothing() -> None:
    cache = BlockCache(3 * PAGE, "importance")
    block = np.zeros(PAGE, np.uint8)
    for key, hits in ((b"a", 5), (b"b", 1), (b"c", 5)):
        cache.put(key, block, hits, 1.0)
    cache.put(b"d", np.zeros(2 * PAGE, np.uint8), 3, 1.0)
    assert [bool(cache.span_index.find(key)) for key in (b"a", b"b", b"c", b"d")] == [True, True, True, False]
    assert cache.counts["evicted"] == 0


def test_a_span_larger_than_the_capacity_evicts_nothing() -> None:
    index = index_of(make_span(b"a"), make_span(b"b"))
    assert index.make_room(4 * PAGE) is None and len(index.spans) == 2


@pytest.mark.parametrize("replacement", ["lru", "lfu", "importance"])
def test_victims_are_the_spans_of_lowest_priority(replacement: str) -> None:
    """Against a sort, with priorities that grow while spans are in the index."""
    rng = random.Random(0)
    index, added, evicted = SpanIndex(20 * PAGE, replacement), 0, 0
    for i in range(500):
        new = make_span(str(i).encode(), rng.randint(1, 4), rng.randint(1, 3), rng.randrange(9), rng.uniform(1, 9))
        for span in rng.sample(list(index.spans), len(index.spans) // 2):
            span.hits, span.last_used_at = span.hits + rng.randint(0, 2), span.last_used_at + rng.uniform(0, 9)
        if index.spans and not i % 7:
            index.remove(rng.choice(list(index.spans)))
        expected, free = [], index.capacity - index.used_bytes
        for span in sorted(index.spans, key=index.priority):
            if free >= new.size:
                break
            if replacement == "importance" and index.priority(span)[0] > index.priority(new)[0]:
                expected = None
                break
            expected.append(span)
            free += span.size
        victims = index.make_room(new.size, index.priority(new))
        assert victims == expected
        if victims is not None:
            index.add(new)
            added, evicted = added + 1, evicted + len(victims)
        assert index.used_bytes == sum(span.size for span in index.spans) <= index.capacity
    assert added > 100 and evicted > 40
