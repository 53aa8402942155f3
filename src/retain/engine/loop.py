"""The engine: `step` is its whole life. What is not known here: text and files."""

from __future__ import annotations

from itertools import accumulate
from time import perf_counter

import torch
from torch import Tensor

from retain.engine.batch import collect
from retain.engine.request import Request, Why
from retain.engine.runner import Runner
from retain.engine.sampler import sample
from retain.engine.scheduler import Scheduler, Share
from retain.kv.cache import Cache


class Engine:
    """Requests go in by `add`; every `step` gives the requests that got a token."""

    def __init__(self, runner: Runner, cache: Cache, step_tokens: int):
        self.runner, self.cache = runner, cache
        self.scheduler = Scheduler(cache, step_tokens)

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError when it could never fit."""
        request.policy = self.cache.heeded(request.policy)
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """Pay debts, draw tokens, settle. The requests that got a token; those with a `why` have ended."""
        shares = self.scheduler.plan()
        if not shares:
            return []
        batch = collect(shares, self.cache)
        logits = self.runner.forward(batch)  # [N, V]
        ready = [s.request for s in shares if s.request.draws(s.n)]
        last = [end - 1 for s, end in zip(shares, accumulate(batch.split), strict=True) if s.request.draws(s.n)]
        self._settle(shares, torch.split(logits, batch.split))
        logits = logits if len(last) == len(logits) else logits[last]
        for request, (token, logprob) in zip(ready, sample(logits, ready), strict=True):
            request.push(token, logprob)
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

    def _settle(self, shares: list[Share], logits: tuple[Tensor, ...]) -> None:
        """Book what was paid, and show logits to who reads them."""
        for share, rows in zip(shares, logits, strict=True):
            request = share.request
            if request.reader and len(rows):
                request.reader(rows)
            before = request.rereads
            request.pay(share.n)
            assert request.row is not None
            if before and (request.reread % before == 0 or not request.rereads):
                self.cache.rewind(request.row, request.computed)
            if not request.rereads:
                self.cache.settle(request.row, request.computed, request.owed)

    def _end(self, request: Request) -> None:
        if request.row is not None:
            request.owned = self.cache.owned(request.row)
        self.scheduler.drop(request)
        request.ended = perf_counter()
