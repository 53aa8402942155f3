"""Law 6: the accountant balances after every step of a random schedule.

Nobody starves, and nobody writes into another's page.
"""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from retain import kernels
from retain.engine.engine import Engine
from retain.engine.request import FinishReason, Request, RequestInput
from retain.factory import build_cache
from retain.kv.capacity import CacheConfig, KVCacheSpec
from retain.kv.eviction import policies
from retain.kv.prefix.config import PrefixConfig
from retain.sampling_params import SamplingParams


class Blind:
    """A runner without a model: checks where a batch would write, and gives noise."""

    def __init__(self, cache):
        self.cache = cache

    def forward(self, batch):
        S = self.cache.page_size
        rows = np.repeat(batch.rows.numpy(), np.diff(batch.query_start_loc.numpy()))
        for layer, slots in enumerate(batch.slot_mapping.numpy()):
            assert len(np.unique(slots)) == slots.size  # heads and tokens never share a slot
            assert (self.cache.pool.ref_counts[slots // S] == 1).all()  # nor is a page written that somebody else holds
            for head, t in np.ndindex(slots.shape):
                owned = self.cache.tables.pages[rows[t], layer, head, : self.cache.tables.counts[rows[t], layer, head]]
                assert slots[head, t] // S in owned
            self.cache.kv.pos.view(-1)[batch.slot_mapping[layer].long()] = batch.positions
            if batch.after_attention:
                batch.after_attention(layer)
        return torch.randn(len(batch.logits_indices), 16)


class Wild:
    """Drafts anything, now and then."""

    k, max_draft_tokens = "9", 9

    def attach(self, target):
        pass

    def propose(self, draft_limits):
        for request, n in draft_limits:
            request.set_drafts([3] * min(n, request.id % 7))

    def remove_request(self, request):
        pass


class Schedule(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(40, 120),
        max_batched_tokens=st.integers(5, 40) | st.integers(80, 150),
        windows=st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=1, max_size=3),
        prefix=st.sampled_from([None, PrefixConfig(), PrefixConfig(keep="prompt")]),
    )
    def start(self, pages, max_batched_tokens, windows, prefix):
        self.cache = build_cache(
            KVCacheSpec(kv_heads=2, head_dim=8, windows=tuple(windows)),
            CacheConfig(page_size=16, max_running_requests=4, max_model_len=200, max_batched_tokens=max_batched_tokens),
            kernels.load("reference"),
            torch.float32,
            (pages + 1) * kernels.api.page_bytes(16, 8, torch.float32),
            prefix_config=prefix,
        )
        self.engine = Engine(Blind(self.cache), self.cache, Wild())
        self.requests = []

    @rule(
        prompt=st.integers(1, 120),
        new=st.integers(1, 60),
        policy=st.sampled_from(
            [
                "full",
                "ring:window=5",
                "ring:window=40",
                "h2o:budget=20,interval=3",
                "sinks:budget=30%",
                "h2o:budget=12,prefill=stream,chunk=9",
                "h2o:budget=30%,share=all",
                "tova:budget=5,interval=2",  # layer by layer, where steps are long enough
                "h2o:budget=20,interval=3,positions=new",
                "h2o:budget=50%,shrink=10,share=all",
                "tova:budget=40,shrink=20%",
                "reread:budget=30%,share=layer,rereads=20",
            ]
        ),
        temperature=st.sampled_from([0.0, 1.0]),
    )
    def add(self, prompt, new, policy, temperature):
        params = SamplingParams(temperature=temperature, ignore_eos=True)
        request = Request(RequestInput([1] * prompt, params, policies.parse(policy), new))
        try:
            self.engine.add(request)
            self.requests.append(request)
        except ValueError as error:
            if "positions=new" in str(error):
                return  # not where some layers slide
            length = prompt + new - 1
            assert self.cache.pages_needed(request.policy, length, length) > self.cache.total_pages

    @rule(steps=st.integers(1, 12))
    def step(self, steps):
        for _ in range(steps):
            paid = {r.id: r.num_computed_tokens for r in self.engine.scheduler.running}
            self.engine.step()
            self.cache.check()
            running = self.engine.scheduler.running
            new = sum(max(r.num_computed_tokens - paid.get(r.id, 0), 0) for r in running)
            assert new <= self.engine.scheduler.max_batched_tokens or self.cache.prefix_cache.enabled

    @rule(i=st.integers(0, 10**6))
    def cancel(self, i):
        if self.requests:
            request = self.requests.pop(i % len(self.requests))
            free, row = self.cache.free_pages, request.row
            self.engine.cancel(request)
            assert request.finish_reason and request.row is None
            assert self.cache.free_pages > free or row is None or self.cache.prefix_cache.enabled

    @invariant()
    def balanced(self):
        if hasattr(self, "cache"):
            self.cache.check()
            waiting, running = self.engine.scheduler.waiting, self.engine.scheduler.running
            assert {r.id for r in waiting + running} == {r.id for r in self.requests if not r.finish_reason}
            assert all(r.row is None and r.num_computed_tokens == 0 for r in waiting)
            assert len({r.row for r in running}) == len(running)

    def teardown(self):
        """However it was left: everybody gets to the end, and every page comes back."""
        if not hasattr(self, "engine"):
            return
        for _ in range(20_000):
            if not self.engine.has_unfinished_requests:
                break
            before = {
                r.id: (r.num_computed_tokens, sum(p.num_done for p in r.scoring_passes))
                for r in self.engine.scheduler.running
            }
            ready = self.engine.step()
            after = {
                r.id: (r.num_computed_tokens, sum(p.num_done for p in r.scoring_passes))
                for r in self.engine.scheduler.running
            }
            assert ready or after != before  # something was paid
        assert not self.engine.has_unfinished_requests
        assert all(
            len(r.output_tokens) == r.input.max_tokens for r in self.requests if r.finish_reason is FinishReason.LENGTH
        )
        assert all(r.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED) for r in self.requests)
        self.cache.check()
        assert self.cache.free_pages == self.cache.total_pages


TestSchedule = Schedule.TestCase
TestSchedule.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
