"""The engine: `step` is its whole life. What is not known here: text and files."""

from __future__ import annotations

from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor

from retain.engine.batch import Batch, build_batch
from retain.engine.drafters import Drafter
from retain.engine.request import FinishReason, Request
from retain.engine.runner import Runner
from retain.engine.sampler import sample, select_rows
from retain.engine.scheduler import ScheduledRequest, Scheduler
from retain.engine.spec_decode.rejection_sampler import to_device_like
from retain.engine.spec_decode.speculator import Speculator
from retain.kv.memory.cache import Cache


class Engine:
    """Requests go in by `add`; every `step` gives the requests that got a token."""

    def __init__(self, runner: Runner, cache: Cache, max_batched_tokens: int, drafter: Drafter | None = None):
        self.runner, self.cache, self.speculator = runner, cache, Speculator(drafter)
        self.scheduler = Scheduler(cache, max_batched_tokens)

    def add(self, *requests: Request) -> None:
        """Queue them; equal prompts among them are computed once, as far as policies allow.

        Raises ValueError when one could never fit; then none is queued.
        """
        for request in requests:
            request.policy = self.cache.effective_policy(request.policy)
            request.max_model_len = min(request.max_model_len, self.cache.max_model_len)
        leaders: dict[tuple[str, *tuple[int, ...]], list[Request]] = {}  # of a tenant's prompt
        for request in sorted(requests, key=lambda r: not r.score_key):  # who sees nothing may follow anybody
            alike = leaders.setdefault((request.salt, *request.prompt), [])
            leader = next((r for r in alike if request.can_share_prompt(r)), None)
            if leader:
                leader.prompt_sharers.append(request)
                leader.require_full_prefill()
                request.require_full_prefill()
            else:
                alike.append(request)
        for request in requests:
            self.scheduler.check_fits(request)
        for request in (r for alike in leaders.values() for r in alike):
            self.scheduler.enqueue(request)

    def step(self) -> list[Request]:
        """Pay debts, draw tokens, settle. The requests that got a token; those with a `why` have ended."""
        began, drafting = perf_counter(), self._propose_drafts()
        shares = self.scheduler.schedule()
        if not shares:
            return []
        batch = build_batch(shares, self.cache)
        logits = self.runner.forward(batch)  # [N, V]
        self._requeue_failed_loads(shares)
        ready: list[Request] = []
        rows: list[int] = []
        for share, end in zip(shares, accumulate(batch.num_logits), strict=True):
            for request in share.request.with_prompt_sharers(share.num_tokens) if share.request.row is not None else []:
                if (
                    share.request.will_sample(share.num_tokens)
                    if request is share.request
                    else not request.forced_tokens
                ):
                    ready.append(request)
                    rows += range(end - 1 - len(request.drafts), end)
        drawn = sample(select_rows(logits, rows), ready)
        took = perf_counter() - began - drafting
        waited = bool(ready) or logits.device.type == "cpu"  # else the device may still compute
        if self.cache.prefix_cache and waited and not batch.before_attention:
            self.cache.prefix_cache.record_compute(len(batch.input_ids), took)
        self.speculator.update(shares, dict(zip(ready, drawn, strict=True)), took, drafting)
        wrong = {r: r.accept_drafts(len(tokens)) for r, tokens in zip(ready, drawn, strict=True)}
        self._reject_drafts(batch, shares, wrong)
        self._commit(shares, torch.split(logits, batch.num_logits), wrong)
        for request, tokens in zip(ready, drawn, strict=True):
            request.append_tokens(tokens)
            if request.finish_reason:
                self._finish(request)
        return ready

    def cancel(self, request: Request) -> None:
        """End a request now; its pages are free when this returns. Nothing happens to one that has ended."""
        if request.finish_reason is None:
            request.finish_reason = FinishReason.CANCELLED
            self._finish(request)

    @property
    def has_unfinished_requests(self) -> bool:
        """Somebody waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def _propose_drafts(self) -> float:
        """A step has room for one token of everybody first."""
        running = self.scheduler.running
        most = (
            min(self.scheduler.max_batched_tokens // max(len(running), 1), self.cache.page_size) - 1
        )  # rings spare a page
        return self.speculator.propose(running, most)

    def _requeue_failed_loads(self, scheduled: list[ScheduledRequest]) -> None:
        """For whom something did not come that it was to begin with."""
        reuse = self.cache.prefix_cache
        for request in [s.request for s in scheduled if reuse and not reuse.finish_load(s.request.row)]:
            self.scheduler.requeue(request)

    def _reject_drafts(self, batch: Batch, scheduled: list[ScheduledRequest], num_rejected: dict[Request, int]) -> None:
        """Drafts that were not accepted are holes."""
        ends = batch.query_start_loc[1:].tolist()
        gone = [
            t for s, end in zip(scheduled, ends, strict=True) for t in range(end - num_rejected.get(s.request, 0), end)
        ]
        if gone:
            self.cache.reject(batch.slot_mapping.index_select(-1, to_device_like(batch.slot_mapping, gone)))

    def _commit(
        self, scheduled: list[ScheduledRequest], logits: tuple[Tensor, ...], num_rejected: dict[Request, int]
    ) -> None:
        """Book what was paid, but for `wrong` drafts, and show logits to who reads them."""
        for share, rows in zip(scheduled, logits, strict=True):
            request, again = share.request, share.request.reread_chunk
            if request.row is None:
                continue  # what it began with did not come
            for twin in request.with_prompt_sharers(share.num_tokens):
                if twin.logits_callback and len(rows):
                    twin.logits_callback(rows)
                    twin.num_logits_read += len(rows)
                if twin is not request:
                    twin.num_computed_tokens = len(twin.prompt)
            before = request.num_computed_tokens
            request.advance(share.num_tokens - num_rejected.get(request, 0))
            if self.cache.prefix_cache and (
                before < len(request.prompt) <= request.num_computed_tokens
                or request.num_computed_tokens == request.branch_point
            ):
                self.cache.prefix_cache.insert(request.row, *request.prefix_entry, still_running=True)
            if again and (request.num_reread_tokens % again == 0 or not request.reread_chunk):
                self.cache.rollback(request.row, request.num_computed_tokens)
            if not request.reread_chunk:
                if request.num_computed_tokens >= len(request.prompt):
                    self._start_prompt_sharers(request)
                if request.attention_trace:
                    request.attention_trace.record_if_due(self.cache, request.row, request.num_computed_tokens)
                self.cache.commit(request.row, request.num_computed_tokens, max(request.num_uncomputed_tokens, 0))

    def _start_prompt_sharers(self, request: Request) -> None:
        """Its followers begin, each with a copy of the prompt's slots; or, where there is no room, later and alone."""
        assert request.row is not None
        followers, request.prompt_sharers = request.prompt_sharers, []
        for follower in followers:
            if follower.finish_reason is None:
                follower.row = self.cache.fork(request.row, follower.policy, follower.num_computed_tokens)
                if follower.row is None:
                    self.scheduler.enqueue(follower)
                    continue
                follower.num_reread_tokens = request.num_reread_tokens
                self.scheduler.running.append(follower)
                if not follower.reread_chunk:
                    self.cache.commit(follower.row, follower.num_computed_tokens, follower.num_uncomputed_tokens)

    def _finish(self, request: Request) -> None:
        if request.row is not None:
            if request.attention_trace:
                request.attention_trace.record(self.cache, request.row, request.num_computed_tokens)
            request.final_slots, request.num_final_pages = (
                self.cache.slots_per_layer(request.row),
                self.cache.num_pages(request.row),
            )
        self.scheduler.remove(request)
        self.speculator.remove_request(request)
        request.finish_time = perf_counter()
        for follower in request.prompt_sharers:  # it ended before they could begin
            if follower.finish_reason is None:
                self.scheduler.enqueue(follower)
        request.prompt_sharers = []
