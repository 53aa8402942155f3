"""The engine: `step` is its whole life. What is not known here: text and files."""

from __future__ import annotations

from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor

from retain.engine.batch import Batch, collect
from retain.engine.drafters import Drafter
from retain.engine.drafting import Drafting
from retain.engine.request import Request, Why
from retain.engine.runner import Runner
from retain.engine.sampler import pick, sample
from retain.engine.scheduler import Scheduler, Share
from retain.engine.speculate import beside
from retain.kv.cache import Cache


class Engine:
    """Requests go in by `add`; every `step` gives the requests that got a token."""

    def __init__(self, runner: Runner, cache: Cache, step_tokens: int, drafter: Drafter | None = None):
        self.runner, self.cache, self.drafting = runner, cache, Drafting(drafter)
        self.scheduler = Scheduler(cache, step_tokens)

    def add(self, *requests: Request) -> None:
        """Queue them; equal prompts among them are computed once, as far as policies allow.

        Raises ValueError when one could never fit; then none is queued.
        """
        for request in requests:
            request.policy = self.cache.heeded(request.policy)
            request.context = min(request.context, self.cache.context)
        leaders: dict[tuple[str, *tuple[int, ...]], list[Request]] = {}  # of a tenant's prompt
        for request in sorted(requests, key=lambda r: not r.sees):  # who sees nothing may follow anybody
            alike = leaders.setdefault((request.salt, *request.prompt), [])
            leader = next((r for r in alike if request.may_follow(r)), None)
            if leader:
                leader.followers.append(request)
                leader.whole()
                request.whole()
            else:
                alike.append(request)
        for request in requests:
            self.scheduler.check(request)
        for request in (r for alike in leaders.values() for r in alike):
            self.scheduler.wait(request)

    def step(self) -> list[Request]:
        """Pay debts, draw tokens, settle. The requests that got a token; those with a `why` have ended."""
        began, drafting = perf_counter(), self._draft()
        shares = self.scheduler.plan()
        if not shares:
            return []
        batch = collect(shares, self.cache)
        logits = self.runner.forward(batch)  # [N, V]
        self._again(shares)
        ready: list[Request] = []
        rows: list[int] = []
        for share, end in zip(shares, accumulate(batch.split), strict=True):
            for request in share.request.twins(share.n) if share.request.row is not None else []:
                if share.request.draws(share.n) if request is share.request else not request.given:
                    ready.append(request)
                    rows += range(end - 1 - len(request.drafts), end)
        drawn = sample(pick(logits, rows), ready)
        took = perf_counter() - began - drafting
        waited = bool(ready) or logits.device.type == "cpu"  # else the device may still compute
        if self.cache.reuse and waited and not batch.before:
            self.cache.reuse.computed(len(batch.ids), took)
        self.drafting.learn(shares, dict(zip(ready, drawn, strict=True)), took, drafting)
        wrong = {r: r.verified(len(tokens)) for r, tokens in zip(ready, drawn, strict=True)}
        self._reject(batch, shares, wrong)
        self._settle(shares, torch.split(logits, batch.split), wrong)
        for request, tokens in zip(ready, drawn, strict=True):
            request.push(tokens)
            if request.why:
                self._end(request)
        return ready

    def cancel(self, request: Request) -> None:
        """End a request now; its pages are free when this returns. Nothing happens to one that has ended."""
        if request.why is None:
            request.why = Why.CANCELLED
            self._end(request)

    @property
    def busy(self) -> bool:
        """Somebody waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def _draft(self) -> float:
        """A step has room for one token of everybody first."""
        running = self.scheduler.running
        most = min(self.scheduler.step_tokens // max(len(running), 1), self.cache.page_size) - 1  # rings spare a page
        return self.drafting.propose(running, most)

    def _again(self, shares: list[Share]) -> None:
        """For whom something did not come that it was to begin with."""
        reuse = self.cache.reuse
        for request in [s.request for s in shares if reuse and not reuse.arrived(s.request.row)]:
            self.scheduler.again(request)

    def _reject(self, batch: Batch, shares: list[Share], wrong: dict[Request, int]) -> None:
        """Drafts that were not accepted are holes."""
        ends = batch.starts[1:].tolist()
        gone = [t for s, end in zip(shares, ends, strict=True) for t in range(end - wrong.get(s.request, 0), end)]
        if gone:
            self.cache.reject(batch.slots.index_select(-1, beside(batch.slots, gone)))

    def _settle(self, shares: list[Share], logits: tuple[Tensor, ...], wrong: dict[Request, int]) -> None:
        """Book what was paid, but for `wrong` drafts, and show logits to who reads them."""
        for share, rows in zip(shares, logits, strict=True):
            request, again = share.request, share.request.rereads
            if request.row is None:
                continue  # what it began with did not come
            for twin in request.twins(share.n):
                if twin.reader and len(rows):
                    twin.reader(rows)
                    twin.read += len(rows)
                if twin is not request:
                    twin.computed = len(twin.prompt)
            before = request.computed
            request.pay(share.n - wrong.get(request, 0))
            if self.cache.reuse and (
                before < len(request.prompt) <= request.computed or request.computed == request.mark
            ):
                self.cache.reuse.leave(request.row, *request.ending, goes_on=True)
            if again and (request.reread % again == 0 or not request.rereads):
                self.cache.rewind(request.row, request.computed)
            if not request.rereads:
                if request.computed >= len(request.prompt):
                    self._fork(request)
                if request.witness:
                    request.witness.told(self.cache, request.row, request.computed)
                self.cache.settle(request.row, request.computed, max(request.owed, 0))

    def _fork(self, request: Request) -> None:
        """Its followers begin, each with a copy of the prompt's slots; or, where there is no room, later and alone."""
        assert request.row is not None
        followers, request.followers = request.followers, []
        for follower in followers:
            if follower.why is None:
                follower.row = self.cache.fork(request.row, follower.policy, follower.computed)
                if follower.row is None:
                    self.scheduler.wait(follower)
                    continue
                follower.reread = request.reread
                self.scheduler.running.append(follower)
                if not follower.rereads:
                    self.cache.settle(follower.row, follower.computed, follower.owed)

    def _end(self, request: Request) -> None:
        if request.row is not None:
            if request.witness:
                request.witness.look(self.cache, request.row, request.computed)
            request.owned, request.held = self.cache.owned(request.row), self.cache.held(request.row)
        self.scheduler.drop(request)
        self.drafting.drop(request)
        request.ended = perf_counter()
        for follower in request.followers:  # it ended before they could begin
            if follower.why is None:
                self.scheduler.wait(follower)
        request.followers = []
