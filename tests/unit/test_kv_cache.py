"""The slot algebra against its definition: a query finds exactly the tokens of its window, in every layer and head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.factory import build_cache
from retain.kernels import load
from retain.kernels.api import NO_WINDOW
from retain.kernels.slots.kv_cache_spec import KVCacheSpec, uniform_layers
from retain.kv.capacity import CacheConfig
from retain.kv.eviction import policies
from retain.kv.manager import KVCacheManager
from retain.kv.row import Row
from retain.types import Ints

FULL = policies.parse("full")
MAX_BATCHED_TOKENS = 64


def make_cache(windows: Sequence[int | None], page_size: int = 16, num_pages: int = 4000) -> KVCacheManager:
    """Build a cache of 2 rows and 2 kv heads."""
    spec = KVCacheSpec(uniform_layers(2, 8, windows))
    config = CacheConfig(page_size, max_running_requests=2, max_model_len=400, max_batched_tokens=MAX_BATCHED_TOKENS)
    return build_cache(spec, config, load("reference"), torch.float32, num_pages * page_size * (2 * 8 * 4 + 8))


def compute(cache: KVCacheManager, row: Row, num_computed: int, n: int) -> Ints:
    """Reserve pages for the next n tokens and write their positions. Returns their slots [L, G, n]."""
    assert row.reserve(num_computed + n)
    pos = np.arange(num_computed, num_computed + n, dtype=np.int32)
    slots: Ints = cache.slot_mapping(np.full(n, row.index, np.int32), pos)[0].numpy()
    kv = torch.zeros(n, 2, 8)
    for layer in slots:
        load("reference").write(cache.kv, torch.from_numpy(layer), kv, kv, torch.from_numpy(pos))
    cache.check()
    return slots


def cached_positions(cache: KVCacheManager, row: Row, layer: int, g: int) -> list[int]:
    """Return the positions in the slots of a head, without holes."""
    pages = cache.tables.pages[row.index, layer, g, : cache.tables.counts[row.index, layer, g]]
    pos: list[int] = cache.kv.pos[torch.from_numpy(pages).long()].flatten().tolist()
    return [p for p in pos if p >= 0]


SCHEDULES = given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 90)), min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, MAX_BATCHED_TOKENS), min_size=1, max_size=6),
    num_decoded=st.integers(0, 16),
    page_size=st.sampled_from([16, 32]),
)


def check_windows(windows: list[int | None], chunks: list[int], num_decoded: int, page_size: int) -> None:
    """Compute a prompt in chunks, and an answer. Every query finds its window, and no ring has a page too many."""
    cache = make_cache(windows, page_size)
    prompt_len, num_computed = sum(chunks), 0
    row = cache.open(FULL, prompt_len)
    for n in chunks + [1] * num_decoded:
        if num_computed == prompt_len:
            row.advance(num_computed, 0)
            cache.evict()
            cache.check()
        compute(cache, row, num_computed, n)
        for layer, window in enumerate(windows):
            for g in range(2):
                positions = cached_positions(cache, row, layer, g)
                assert len(positions) == len(set(positions))
                for p in range(num_computed, num_computed + n):
                    visible = range(max(0, p + 1 - (window or NO_WINDOW)), p + 1)
                    assert set(visible) <= set(positions)
                chunk = 1 if num_computed >= prompt_len else min(prompt_len, MAX_BATCHED_TOKENS)
                bound = (window or NO_WINDOW) + max(chunk, page_size) - 1
                assert cache.tables.counts[row.index, layer, g] * page_size < bound + page_size
        num_computed += n
    row.close()
    cache.check()
    assert cache.free_pages == cache.total_pages and cache.free_rows == 2


@settings(max_examples=25)
@SCHEDULES
def test_every_query_finds_its_window_and_rings_stay_small(
    windows: list[int | None], chunks: list[int], num_decoded: int, page_size: int
) -> None:
    check_windows(windows, chunks, num_decoded, page_size)


@pytest.mark.slow
@settings(max_examples=150)
@SCHEDULES
def test_every_query_finds_its_window_in_many_schedules(
    windows: list[int | None], chunks: list[int], num_decoded: int, page_size: int
) -> None:
    check_windows(windows, chunks, num_decoded, page_size)


def test_a_ring_shrinks_to_its_window_after_the_prompt() -> None:
    cache = make_cache([None, 32], page_size=16)
    row = cache.open(FULL, 200)
    for start in range(0, 192, 64):
        compute(cache, row, start, 64)
    compute(cache, row, 192, 8)
    num_free = cache.free_pages
    assert cache.tables.counts[row.index, 1, 0] == 6  # 32 + 64 - 1 slots in whole pages of 16
    row.advance(200, 0)
    cache.evict()
    assert cache.tables.counts[row.index, 1, 0] == 3 and cache.free_pages == num_free + 3 * 2
    assert set(range(168, 200)) <= set(cached_positions(cache, row, 1, 0))
    slots = [compute(cache, row, p, 1)[1, 0, 0] for p in range(200, 296)]
    assert cache.tables.counts[row.index, 1].tolist() == [3, 3]  # 32 + 16 - 1 slots, however long the text is
    assert slots[:48] == slots[48:]  # slot = pos mod capacity
    assert cache.tables.counts[row.index, 0].tolist() == [19, 19]


@pytest.mark.parametrize(("length", "prompt_len"), [(1, 1), (40, 40), (200, 200), (200, 7), (64, 64)])
def test_a_request_owns_no_more_pages_than_planned(length: int, prompt_len: int) -> None:
    cache = make_cache([None, 20, 50])
    row, num_computed = cache.open(FULL, prompt_len), 0
    while num_computed < length:
        n = min(MAX_BATCHED_TOKENS, prompt_len - num_computed) if num_computed < prompt_len else 1
        if num_computed == prompt_len:
            row.advance(num_computed, 0)
            cache.evict()
        compute(cache, row, num_computed, n)
        num_computed += n
    peaks = cache.tables.peaks[row.index].sum()
    assert peaks <= cache.pages_needed(FULL, length, prompt_len)
    if length == prompt_len:
        assert peaks == cache.pages_needed(FULL, length, prompt_len)
    assert row.close().peak_slots == [int(p) * 16 for p in cache.tables.peaks[row.index, :, 0]]


def test_a_row_gets_all_pages_that_it_needs_or_none() -> None:
    cache = make_cache([None], num_pages=7)  # the trash page and six more
    a, b = cache.open(FULL, 1), cache.open(FULL, 1)
    assert a.reserve(32) and not b.reserve(32)
    assert cache.free_pages == 2 and cache.tables.counts[b.index].sum() == 0
    cache.check()
    assert b.reserve(16) and cache.free_pages == 0


def test_a_page_comes_without_the_positions_of_its_former_owner() -> None:
    cache = make_cache([None])
    a = cache.open(FULL, 30)
    compute(cache, a, 0, 30)
    a.close()
    b = cache.open(FULL, 3)
    compute(cache, b, 0, 3)
    assert cached_positions(cache, b, 0, 1) == [0, 1, 2]


def test_a_ring_policy_bounds_every_layer_that_sees_farther() -> None:
    cache = make_cache([None, 20, 300])
    assert cache.planner.windows(policies.parse("ring:window=100")).tolist() == [100, 20, 100]
    assert cache.planner.windows(FULL).tolist() == [NO_WINDOW, 20, 300]
