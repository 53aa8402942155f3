"""The cache's closed form against its definition: what a query sees is exactly its window, in every layer and head."""

import dataclasses
import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.factory import build_cache
from retain.kernels import load
from retain.kernels.api import NO_WINDOW
from retain.kv.capacity import CacheConfig, KVCacheSpec
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.view import CacheView
from retain.plugins import Amount

FULL = policies.parse("full")


def make(windows, page_size=16, max_running_requests=2, context=400, max_batched_tokens=64, pages=4000):
    spec = KVCacheSpec(kv_heads=2, head_dim=8, windows=tuple(windows))
    config = CacheConfig(page_size, max_running_requests, context, max_batched_tokens)
    return build_cache(spec, config, load("reference"), torch.float32, pages * page_size * (2 * 8 * 4 + 8))


def pay(cache, row, computed, n):
    """One payment: own pages, write positions into slots. Returns the slots [L, G, n]."""
    assert cache.reserve(row, computed + n)
    pos = np.arange(computed, computed + n, dtype=np.int32)
    slots = cache.slot_mapping(np.full(n, row, np.int32), pos).numpy()
    kv = torch.zeros(n, 2, 8)
    for layer in slots:
        load("reference").write(cache.kv, torch.from_numpy(layer), kv, kv, torch.from_numpy(pos))
    cache.check()
    return slots


def held(cache, row, layer, g):
    """The positions in the slots that a head owns, holes left out."""
    pages = cache.tables.pages[row, layer, g, : cache.tables.counts[row, layer, g]]
    pos = cache.kv.pos[torch.from_numpy(pages).long()].flatten().tolist()
    return [p for p in pos if p >= 0]


@settings(max_examples=150, deadline=None)
@given(
    windows=st.lists(st.one_of(st.none(), st.integers(1, 90)), min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, 64), min_size=1, max_size=6),
    decode=st.integers(0, 16),
    page_size=st.sampled_from([16, 32]),
)
def test_every_query_finds_its_window_and_rings_stay_small(windows, chunks, decode, page_size):
    cache = make(windows, page_size)
    row, computed, owed = cache.open_row(FULL, sum(chunks)), 0, sum(chunks)
    for n in chunks + [1] * decode:
        if computed == owed:
            cache.commit(row, computed, 0)
            cache.check()
        pay(cache, row, computed, n)
        for layer, w in enumerate(windows):
            for g in range(2):
                seen = held(cache, row, layer, g)
                assert len(seen) == len(set(seen))
                for p in range(computed, computed + n):  # no key that a query of this chunk needs is gone
                    need = range(max(0, p + 1 - (w or NO_WINDOW)), p + 1)
                    assert set(need) <= set(seen)
                fresh = max(1 if computed >= owed else min(owed, 64), page_size)
                bound = (w or NO_WINDOW) + fresh - 1
                assert cache.tables.counts[row, layer, g] * page_size < bound + page_size
        computed += n
    cache.close_row(row)
    cache.check()
    assert cache.free_pages == cache.total_pages and cache.free_rows == 2


def test_a_prompt_longer_than_the_window_keeps_its_last_tokens_and_gives_the_rest_back():
    cache = make([None, 32], page_size=16)
    row = cache.open_row(FULL, 200)
    for start in range(0, 192, 64):
        pay(cache, row, start, 64)
    pay(cache, row, 192, 8)
    before = cache.free_pages
    assert cache.tables.counts[row, 1, 0] == 6  # 32 + 64 - 1 slots in whole pages of 16
    cache.commit(row, 200, 0)
    assert cache.tables.counts[row, 1, 0] == 3 and cache.free_pages == before + 3 * 2
    assert set(range(168, 200)) <= set(held(cache, row, 1, 0))
    slots = [pay(cache, row, p, 1)[1, 0, 0] for p in range(200, 296)]
    assert cache.tables.counts[row, 1].tolist() == [3, 3]  # 32 + 16 - 1: for ever
    assert slots[:48] == slots[48:]  # slot = pos mod capacity
    assert cache.tables.counts[row, 0].tolist() == [19, 19]


def test_cost_is_what_a_request_comes_to_own():
    for length, owed in [(1, 1), (40, 40), (200, 200), (200, 7), (64, 64)]:
        cache = make([None, 20, 50])
        row, computed = cache.open_row(FULL, owed), 0
        while computed < length:
            n = min(64, owed - computed) if computed < owed else 1
            if computed == owed:
                cache.commit(row, computed, 0)
            pay(cache, row, computed, n)
            computed += n
        peaks = cache.tables.peaks[row].sum()
        assert peaks <= cache.pages_needed(FULL, length, owed)
        if length == owed:
            assert peaks == cache.pages_needed(FULL, length, owed)
        assert cache.close_row(row) == [int(p) * 16 for p in cache.tables.peaks[row, :, 0]]


def test_growing_takes_all_or_nothing():
    cache = make([None], pages=7)  # the trash page and six more
    a, b = cache.open_row(FULL, 1), cache.open_row(FULL, 1)
    assert cache.reserve(a, 32) and not cache.reserve(b, 32)
    assert cache.free_pages == 2 and cache.tables.counts[b].sum() == 0
    cache.check()
    assert cache.reserve(b, 16) and cache.free_pages == 0


def test_a_page_comes_without_its_former_owner_positions():
    cache = make([None])
    a = cache.open_row(FULL, 30)
    pay(cache, a, 0, 30)
    cache.close_row(a)
    b = cache.open_row(FULL, 3)
    pay(cache, b, 0, 3)
    assert held(cache, b, 0, 1) == [0, 1, 2]


def test_a_policy_bounds_layers_that_see_everything_and_the_model_window_stays():
    cache = make([None, 20, 300])
    assert cache.planner.windows(policies.parse("ring:window=100")).tolist() == [100, 20, 100]
    assert cache.planner.windows(FULL).tolist() == [NO_WINDOW, 20, 300]


def seen(pos):
    """A view of slots with these positions [L, G, S] and random masses, keys and values."""
    mass = torch.rand(*pos.shape[:2], 1, pos.shape[2])
    return CacheView(pos, mass, 100, lambda: (torch.randn(*pos.shape, 8), torch.randn(*pos.shape, 8)))


def test_priority_is_the_definition_of_the_ring():
    """Punching the lowest priority when a head holds more than its budget keeps what slot = pos mod capacity keeps."""
    policy = policies.parse("ring:window=24")
    cache = make([None], page_size=16)
    row = cache.open_row(policy, 1)
    kept: list[int] = []
    for p in range(150):
        pay(cache, row, p, 1)
        kept.append(p)
        if len(kept) > policy.ring_window:
            kept.pop(int(policy.priority(seen(torch.tensor([[kept]]))).argmin()))
        alive = [q for q in held(cache, row, 0, 0) if p - q < cache.tables.window[row, 0]]
        assert sorted(alive) == kept


@pytest.mark.parametrize("name", policies.names())
def test_the_cache_carries_out_every_policy_there_is(name):
    """By looking, where it is a Budget; else it must forget the oldest first, as slot = pos mod capacity does."""
    cls = importlib.import_module(f"retain.kv.eviction.policies.{name}").Policy
    view = seen(torch.randperm(100).int().view(2, 2, 25))
    if issubclass(cls, BudgetPolicy):
        policy = cls(budget=Amount(fraction=0.5)).resolve(100)
        assert policy.priority(view).shape == view.pos.shape and policy.budget_tokens == 50
        return
    policy = cls(**{f.name: 24 for f in dataclasses.fields(cls)})
    if policy.ring_window is not None:
        assert torch.equal(policy.priority(view).argsort(-1), view.pos.argsort(-1))


@pytest.mark.parametrize(
    "text",
    [
        "full",
        "ring:window=9",
        "h2o:budget=25%",
        "keyformer:budget=1024,recent=40,sinks=3,interval=1,noise=gaussian,tau=1..3",
        "random:budget=1%,keep=prompt",
        "h2o:budget=50%,shrink=20%",
    ],
)
def test_a_policy_is_its_text(text):
    policy = policies.parse(text)
    assert policies.parse(policies.to_spec(policy)) == policy and policies.to_spec(policy).count(",") == text.count(",")


@pytest.mark.parametrize("name", policies.names())
def test_a_policy_is_short_and_found_by_its_name(name):
    module = importlib.import_module(f"retain.kv.eviction.policies.{name}")
    assert len(Path(module.__file__).read_text().splitlines()) <= 60
    assert module.__doc__.startswith(f"{name}: ")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lru",
        "ring",
        "ring:window=0",
        "ring:window=x",
        "ring:size=3",
        "h2o",
        "h2o:budget=0",
        "h2o:budget=150%",
        "h2o:budget=x",
        "h2o:budget=10,prompt=5",
        "h2o:budget=10,interval=0",
        "h2o:budget=10,chunk=0",
        "h2o:budget=10,shrink=0",
        "h2o:budget=10,shrink=x",
        "keyformer:budget=10,noise=white",
        "keyformer:budget=10,tau=0",
        "keyformer:budget=10,tau=a..b",
        "keyformer:budget=10,tau=nan",
        "h2o:budget=10,damping=2",
        "h2o:budget=10,heads=all",
        "h2o:budget=10,scope=head",
        "h2o:budget=10,value=key",
        "h2o:budget=10,share=heads",
        "h2o:budget=10,share=layer,prefill=stream",
        "h2o:budget=10,share=layer,heads=union",
        "h2o:budget=10,share=all,scope=shared",
        "window:budget=10,value=norm",
        "h2o:budget=10,protect=prompt",
        "h2o:budget=10,damping=0",
        "snapkv:budget=10,queries=0",
        "random:budget=10,keep=me",
        "dilated:budget=10,stride=0",
        "reread:budget=10,mix=tova",
        "reread:budget=10,rereads=0",
        "reread:budget=10,prefill=stream",
        "ring:window",
        "ring:window=2,window=3",
        "full:x=1",
    ],
)
def test_bad_policies_are_refused_in_one_line(text):
    with pytest.raises(ValueError) as error:
        policies.parse(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("alias", "name"), policies.ALIASES.items())
def test_an_alias_names_the_same_policy(alias, name):
    """`streaming_llm` and `kvzip` are what the papers call `sinks` and `reread`."""
    assert policies.parse(f"{alias}:budget=8") == policies.parse(f"{name}:budget=8")
    assert policies.to_spec(policies.parse(f"{alias}:budget=8")) == f"{name}:budget=8"
