"""Rows that evict in the same step are evicted together, and each keeps what it keeps alone, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain import kernels
from retain.factory import build_cache
from retain.kernels.api import KV
from retain.kernels.slots.eviction_order import LAST_POSITION, eviction_key, protect
from retain.kernels.slots.kv_cache_spec import FullAttentionSpec, KVCacheSpec, uniform_layers
from retain.kernels.slots.pool_dtypes import slots_in_page
from retain.kv.capacity import CacheConfig
from retain.kv.eviction import evictor, policies
from retain.kv.eviction.demotion import DEMOTED_DTYPE
from retain.kv.eviction.evictor import Compact, compact_rows, punch_rows
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.manager import KVCacheManager
from retain.kv.row import Row
from retain.types import Ints
from tests.helpers.gates import random_gate
from tests.helpers.marks import slow
from tests.helpers.policy_specs import goes_with, spec_of

KV_HEADS = 2
HEAD_DIM = 16
WINDOWS = (None, 9, None)
SPEC = KVCacheSpec(uniform_layers(KV_HEADS, HEAD_DIM, WINDOWS))
UNLIKE = KVCacheSpec((*SPEC.caches, FullAttentionSpec(1, 32, 48), *SPEC.caches))  # layers of two groups evict
COLUMNS = 2
OPTIONS = {  # beside a budget, an interval and a chunk, which are drawn
    "h2o": ["", "share=layer", "share=all", "value=norm", "heads=query", "heads=union", "scope=shared", "sinks=2"],
    "keyformer": ["heads=kv-max"],
    "reread": ["", "first=5"],
    "random": ["keep=prompt"],
    "gate": ["", "share=none"],
    "gate_replay": ["refit=0"],  # there are no queries here
    "replay": ["refit=0"],
    "knorm": ["demote=int4:40%"],
    "tova": ["demote=int4"],
}
SPECS = [
    spec_of(name, options)
    for name in policies.names()
    for options in OPTIONS.get(name, [""])
    if name not in ("full", "look", "ring")
]


def with_options(spec: str, *options: str) -> str:
    """Return a spec with more options."""
    name, _, more = spec.partition(":")
    return f"{name}:{','.join([*options, more]).rstrip(',')}"


def make_cache(layers: KVCacheSpec = SPEC) -> KVCacheManager:
    S, rows = 16, 8
    demoted = slots_in_page(S, HEAD_DIM, torch.float32, DEMOTED_DTYPE)
    config = CacheConfig(S, rows, 300, 64, COLUMNS, demoted)
    config = config if layers is SPEC else replace(config, demoted_page_size=0)
    gate = random_gate(SPEC)
    return build_cache(layers, config, kernels.load("reference"), torch.float32, 2**23, load_gate=lambda file: gate)


def plan(cache: KVCacheManager, spec: str, prompt_len: int) -> EvictionPolicy:
    """Return the policy of a prompt."""
    return cache.planner.effective_policy(policies.parse(spec).resolve(prompt_len))


def fill(cache: KVCacheManager, row: Row, begin: int, end: int, seed: int) -> None:
    """Write tokens of random K and V, and give all slots random masses that depend on the row's seed only."""
    assert row.reserve(end)
    positions = np.arange(begin, end, dtype=np.int32)
    rng = torch.Generator().manual_seed(1000 * seed + begin)
    mapping = cache.slot_mapping(np.full(end - begin, row.index, np.int32), positions)
    for t, group_slots in zip(row.groups, mapping, strict=True):
        for slots in group_slots:
            k, v = (torch.randn(end - begin, len(slots), d, generator=rng) for d in (t.kv.k_dim, t.kv.v_dim))
            cache.backend.write(t.kv, slots, k, v, torch.from_numpy(positions))
        for layer, head in np.ndindex(t.counts.shape[1:]):
            pages = t.kv.to_index(t.pages[row.index, layer, head, : t.counts[row.index, layer, head]])
            t.kv.mass[pages] = torch.rand(len(pages), *t.kv.mass.shape[1:], generator=rng)


def contents(kv: KV, pages: Ints) -> list[torch.Tensor]:
    """Return positions, and what live slots hold: codes of K and V, and masses."""
    i = kv.to_index(pages)
    live = kv.pos[i] >= 0
    mass = kv.mass[i].transpose(1, 2)[live]
    k, v = (kv.k[i][live], kv.v[i][live]) if kv.k.shape[1] == kv.page_size else (kv.k[i], kv.v[i])
    return [kv.pos[i], k.clone(), v.clone(), mass]


def snapshot(row: Row) -> list[torch.Tensor]:
    """Return all that eviction may change of a row, whatever the numbers of its pages are."""
    found = [torch.tensor([[e.next_eviction, e.num_evicted] for e in row.evictors])]
    for t in row.groups:
        for layer, head in np.ndindex(t.counts.shape[1:]):
            found += contents(t.kv, t.pages[row.index, layer, head, : t.counts[row.index, layer, head]])
            if d := t.demoted:
                pages = d.pages[row.index, layer, head, : d.counts[row.index, layer, head]]
                found.append(d.store.kv.pos[d.store.kv.to_index(pages)])
    return found


def run(
    spec: str, prompt_lens: Sequence[int], num_tokens: int, together: bool, layers: KVCacheSpec = SPEC
) -> list[list[torch.Tensor]]:
    """Compute rows up to the same token of their answers, evicting all of them in a step or one after the other."""
    cache = make_cache(layers)
    rows = []
    for n in prompt_lens:
        policy = plan(cache, spec, n)
        rows.append(cache.open(policy, n))
        for row_evictor in rows[-1].evictors:
            row_evictor.query_blocks.begin(n)  # masses are random here, and no model has queries
    computed = [0] * len(rows)
    found = []
    while any(c < n + num_tokens for c, n in zip(computed, prompt_lens, strict=True)):
        for i, row in enumerate(rows):
            end = prompt_lens[i] + num_tokens if computed[i] >= prompt_lens[i] else prompt_lens[i]
            end = min(end, row.next_stop(computed[i]), computed[i] + 64)
            if end > computed[i]:
                fill(cache, row, computed[i], end, seed=i)
                computed[i] = end
                row.advance(end, 0 if end >= prompt_lens[i] else 1)
            if not together:
                cache.evict()
        cache.evict()
        cache.check()
        found += [snapshot(row) for row in rows]
    return found


@pytest.mark.parametrize("spec", [*SPECS[::4], *slow(*(s for i, s in enumerate(SPECS) if i % 4))])
@settings(max_examples=3)
@given(data=st.data())
def test_rows_that_evict_together_keep_what_they_keep_alone(spec: str, data: st.DataObject) -> None:
    budget = data.draw(st.sampled_from(["30%", "50%", "20"]))
    options = [f"budget={budget}", f"interval={data.draw(st.integers(1, 20))}"]
    if goes_with(spec, "prefill=stream") and data.draw(st.booleans()):
        options += ["prefill=stream", f"chunk={data.draw(st.integers(16, 60))}"]
    full = with_options(spec, *options)
    prompt_lens = data.draw(st.lists(st.integers(30, 120), min_size=2, max_size=4))
    one, all_ = (run(full, prompt_lens, 40, together) for together in (False, True))
    for alone, beside in zip(one, all_, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


RANKED_BY_BACKEND = [
    spec for spec in SPECS if "demote" not in spec and policies.parse(with_options(spec, "budget=9")).ranked_by
]


@pytest.mark.parametrize("spec", RANKED_BY_BACKEND)
@settings(max_examples=3)
@given(data=st.data())
def test_rows_keep_what_their_policy_ranks_highest_where_the_backend_ranks(spec: str, data: st.DataObject) -> None:
    """Of `priority` and of what `ranked_by` says, one and the same slots are evicted, in one order."""
    options = [f"budget={data.draw(st.sampled_from(['30%', '20']))}", f"interval={data.draw(st.integers(1, 20))}"]
    if goes_with(spec, "prefill=stream") and data.draw(st.booleans()):
        options += ["prefill=stream", f"chunk={data.draw(st.integers(16, 60))}"]
    full = with_options(spec, *options)
    prompt_lens = data.draw(st.lists(st.integers(30, 120), min_size=1, max_size=3))
    by_backend = run(full, prompt_lens, 40, together=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evictor, "operation_of", lambda due: compact_rows if isinstance(due, Compact) else punch_rows)
        by_policy = run(full, prompt_lens, 40, together=True)
    for found, expected in zip(by_backend, by_policy, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("spec", ["h2o:budget=30%,interval=5", *slow("knorm:budget=20,prefill=stream,chunk=16")])
def test_each_group_of_layers_keeps_what_it_keeps_alone(spec: str) -> None:
    one, all_ = (run(spec, [40, 75, 58], 30, together, UNLIKE) for together in (False, True))
    for alone, beside in zip(one, all_, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


@given(
    slots=st.lists(
        st.tuples(st.integers(-1, 20), st.floats(width=32)), min_size=1, max_size=20, unique_by=lambda s: s[0]
    ),
    bounds=st.tuples(st.integers(0, 20), st.integers(-1, 20)),
)
def test_lists_with_ranges_of_their_own_are_ordered_as_one_range_orders_them(
    slots: list[tuple[int, float]], bounds: tuple[int, int]
) -> None:
    pos = torch.tensor([p for p, _ in slots], dtype=torch.int32)
    priority = torch.tensor([x for _, x in slots]).nan_to_num(3)
    first, last = torch.tensor(bounds)[:, None]
    found = eviction_key(protect(priority, pos, first, last), pos, 0, LAST_POSITION).argsort()
    assert found.tolist() == eviction_key(priority, pos, *bounds).argsort().tolist()


def test_a_union_of_query_heads_leaves_room_for_the_answer_of_a_streamed_prompt() -> None:
    """Nearly all of its slots are kept by one query head or another: the next tokens need holes behind them."""
    run("h2o:budget=30%,interval=19,prefill=stream,chunk=16,heads=union", [30, 30, 30, 30], 40, together=True)


def test_one_call_evicts_all_rows_that_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different prompts, budgets and policies: one call for those that the backend ranks, one for the rest."""
    cache = make_cache()
    selected: list[int] = []
    punched: list[int] = []
    backend = cache.backend
    select_victims, punch = backend.select_victims, backend.punch
    monkeypatch.setattr(
        backend,
        "select_victims",
        lambda priority, *args: selected.append(len(priority)) or select_victims(priority, *args),
    )
    monkeypatch.setattr(
        backend, "punch", lambda kv, lists, *args: punched.append(lists.slots_used.numel()) or punch(kv, lists, *args)
    )
    specs = [("h2o:budget=30%", 60), ("sinks:budget=25", 90), ("knorm:budget=50%", 45), ("keydiff:budget=20", 30)]
    rows = [(cache.open(plan(cache, spec, n), n), n) for spec, n in specs]
    for end in (0, 16):
        for i, (row, n) in enumerate(rows):
            fill(cache, row, (n if end else 0), n + end, seed=i)
            row.advance(n + end, 0)
            assert row.evictors[0].next_eviction <= n + end
        cache.evict()
    full_layers = WINDOWS.count(None)
    assert selected == punched == [2 * full_layers * KV_HEADS]


def test_a_row_that_is_closed_before_the_eviction_is_not_evicted() -> None:
    cache = make_cache()
    policy = plan(cache, "h2o:budget=30%", 60)
    a, b = cache.open(policy, 60), cache.open(policy, 60)
    for row in (a, b):
        fill(cache, row, 0, 60, seed=1)
        row.advance(60, 0)
    a.close()
    cache.evict()
    assert b.evictors[0].has_holes and not cache.rows.get(a.index)
    b.close()
    cache.check()
    assert cache.free_pages == cache.total_pages
