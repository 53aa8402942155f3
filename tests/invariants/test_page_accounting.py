"""Law 6: the accountant balances after every step of a random schedule.

Every request ends, and no request writes into a page of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from retain import kernels
from retain.engine import drafters
from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import DrafterNeeds, TargetModel
from retain.engine.engine import Engine
from retain.engine.request import FinishReason, Request, RequestInput
from retain.factory import build_cache
from retain.kernels.api import Batch
from retain.kernels.slots.kv_cache_spec import KVCacheSpec, uniform_layers
from retain.kernels.slots.pool_dtypes import slots_in_page
from retain.kv.capacity import CacheConfig
from retain.kv.eviction import policies
from retain.kv.manager import KVCacheManager
from retain.kv.prefix.config import PrefixConfig
from retain.sampling_params import SamplingParams
from tests.helpers.cached_pages import check_cached_pages
from tests.helpers.engines import PlanningEngine

POLICIES = [
    "full",
    "ring:window=5",
    "ring:window=40",
    "h2o:budget=20,interval=3",
    "sinks:budget=30%",
    "h2o:budget=12,prefill=stream,chunk=9",
    "h2o:budget=30%,share=all",
    "tova:budget=5,interval=2",
    "h2o:budget=50%,shrink=10,share=all",
    "tova:budget=40,shrink=20%",
    "reread:budget=30%,share=layer,rereads=20",
    "sinks:budget=10,interval=3,demote=int4",
    "h2o:budget=12,prefill=stream,chunk=9,demote=int4:40",
    "h2o:budget=30%,share=all,demote=int4:30%",
]


class NullRunner:
    """A runner without a model: checks where a batch would write, and returns noise."""

    hidden_states = None
    state_size = 0

    def __init__(self, cache: KVCacheManager):
        self.cache = cache

    def forward(self, batch: Batch) -> Tensor:
        S, tables = self.cache.page_size, self.cache.tables
        rows = np.repeat(batch.rows.numpy(), np.diff(batch.query_start_loc.numpy()))
        for layer in range(len(batch.caches)):
            slots = batch.cache(layer).slot_mapping.numpy()
            assert len(np.unique(slots)) == slots.size  # heads and tokens never share a slot
            assert (self.cache.pool.ref_counts[slots // S] == 1).all()  # a shared page is never written
            for head, t in np.ndindex(slots.shape):
                row = rows[t]
                assert slots[head, t] // S in tables.pages[row, layer, head, : tables.counts[row, layer, head]]
            self.cache.kv.pos.view(-1)[batch.cache(layer).slot_mapping.long()] = batch.positions
        return torch.randn(len(batch.logits_indices), 16)


class RandomDrafter:
    """Draft a number of tokens that depends on the request, without regard to its text."""

    k, max_draft_tokens = "9", 9
    needs: ClassVar[DrafterNeeds] = DrafterNeeds()

    def attach(self, target: TargetModel) -> None:
        pass

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        for request, limit in draft_limits:
            request.set_drafts([3] * min(limit, request.id % 7))

    def remove_request(self, request: Request) -> None:
        pass


def num_done(requests: Sequence[Request]) -> dict[int, tuple[int, int]]:
    """Return how far each request is computed: tokens of its text, tokens of its scoring passes."""
    return {r.id: (r.num_computed_tokens, sum(p.num_done for p in r.scoring_passes)) for r in requests}


class Schedule(RuleBasedStateMachine):
    """Add, step and cancel in a random order."""

    engine: Engine | None = None

    @initialize(
        num_pages=st.integers(40, 120),
        max_batched_tokens=st.integers(5, 40) | st.integers(80, 150),
        windows=st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=1, max_size=3),
        prefix=st.sampled_from([None, PrefixConfig(), PrefixConfig(keep="prompt")]),
        drafter=st.sampled_from([RandomDrafter(), "self:k=5,dtype=int4"]),
    )
    def start(self, num_pages, max_batched_tokens, windows, prefix, drafter):
        self.cache = build_cache(
            KVCacheSpec(uniform_layers(2, 8, windows)),
            CacheConfig(
                page_size=16,
                max_running_requests=4,
                max_model_len=200,
                max_batched_tokens=max_batched_tokens,
                demoted_page_size=slots_in_page(16, 8, torch.float32, torch.int4),
            ),
            kernels.load("reference"),
            torch.float32,
            (num_pages + 1) * 16 * (2 * 8 * 4 + 4 + 4),
            prefix_config=prefix,
        )
        runner = NullRunner(self.cache)
        drafter = drafters.parse(drafter) if isinstance(drafter, str) else drafter
        loaders = (lambda *_: (runner, self.cache), lambda _: runner, lambda *_: runner)
        drafter.attach(TargetModel(runner, self.cache, *loaders))
        self.engine = PlanningEngine(runner, self.cache, drafter)
        self.requests: list[Request] = []
        self.specs: dict[int, str] = {}  # policies, by request

    @rule(
        prompt_len=st.integers(1, 120),
        max_tokens=st.integers(1, 60),
        policy=st.sampled_from(POLICIES),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def add(self, prompt_len, max_tokens, policy, temperature):
        self.add_request([1] * prompt_len, max_tokens, policy, temperature)

    @rule(i=st.integers(0, 10**6), num_more=st.integers(1, 40), max_tokens=st.integers(1, 40))
    def follow(self, i, num_more, max_tokens):
        """Send prompt and answer of an earlier request and some more tokens, under its policy."""
        earlier = [r for r in self.requests if r.finish_reason and len(r.tokens) + num_more + max_tokens <= 200]
        if earlier:
            request = earlier[i % len(earlier)]
            self.add_request([*request.tokens, *[1] * num_more], max_tokens, self.specs[request.id], 1.0)

    def add_request(self, prompt, max_tokens, policy, temperature):
        params = SamplingParams(temperature=temperature, ignore_eos=True)
        request = Request(RequestInput(prompt, params, policies.parse(policy).resolve(len(prompt)), max_tokens))
        self.specs[request.id] = policy
        try:
            self.engine.add(request)
            self.requests.append(request)
        except ValueError:
            length = len(prompt) + max_tokens - 1
            assert self.cache.pages_needed(request.policy, length, length) > self.cache.total_pages

    @rule(i=st.integers(0, 10**6), max_tokens=st.integers(1, 40), policy=st.sampled_from([None, *POLICIES]))
    def repeat(self, i, max_tokens, policy):
        """Send the prompt of an earlier request again, under its policy or another."""
        earlier = [r for r in self.requests if r.finish_reason and len(r.prompt) + max_tokens <= 200]
        if earlier:
            request = earlier[i % len(earlier)]
            self.add_request(request.prompt, max_tokens, policy or self.specs[request.id], 1.0)

    @rule(num_steps=st.integers(1, 12))
    def step(self, num_steps):
        scheduler = self.engine.scheduler
        for _ in range(num_steps):
            before = {r.id: r.num_computed_tokens for r in scheduler.running}
            self.engine.step()
            self.cache.check()
            check_cached_pages(self.cache)
            num_new = sum(max(r.num_computed_tokens - before.get(r.id, 0), 0) for r in scheduler.running)
            assert num_new <= scheduler.max_batched_tokens or self.cache.prefix_cache.enabled

    @rule(i=st.integers(0, 10**6))
    def cancel(self, i):
        if self.requests:
            request = self.requests.pop(i % len(self.requests))
            num_free = self.cache.free_pages
            row = self.engine.scheduler.running.get(request)
            num_pages = row.num_pages if row else 0  # 0 too, where a prompt waits for a whole step
            self.engine.cancel(request)
            assert request.finish_reason and request not in self.engine.scheduler.running
            assert self.cache.free_pages > num_free or not num_pages or self.cache.prefix_cache.enabled

    @invariant()
    def accounts_balance(self):
        if self.engine:
            self.cache.check()
            waiting, running = self.engine.scheduler.waiting, self.engine.scheduler.running
            assert {r.id for r in (*waiting, *running)} == {r.id for r in self.requests if not r.finish_reason}
            assert all(r not in running and r.num_computed_tokens == 0 for r in waiting)
            assert {row.index: row for row in running.values()} == self.cache.rows

    def teardown(self):
        """Step to the end: every step computes something, every request ends, and all pages are free."""
        if not self.engine:
            return
        for _ in range(20_000):
            if not self.engine.has_unfinished_requests:
                break
            before = num_done(self.engine.scheduler.running)
            output = self.engine.step()
            assert output.token_ids or num_done(self.engine.scheduler.running) != before
        assert not self.engine.has_unfinished_requests
        for request in self.requests:
            assert request.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
            if request.finish_reason is FinishReason.LENGTH:
                assert len(request.output_tokens) == request.input.max_tokens
        self.cache.check()
        assert self.cache.free_pages == self.cache.total_pages and not self.cache.copies.num_pages


class TestRandomSchedules(Schedule.TestCase):
    settings = settings(max_examples=5, stateful_step_count=25)


@pytest.mark.slow
class TestManyRandomSchedules(Schedule.TestCase):
    settings = settings(max_examples=30, stateful_step_count=25)
