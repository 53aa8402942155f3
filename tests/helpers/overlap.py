"""Requests that run while each step is launched before the tokens of the step before it are known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from torch import Tensor

from retain.engine import drafters, sampler
from retain.engine.engine import Engine
from retain.engine.pending_step import PendingStep
from retain.engine.request import Request
from tests.helpers.engines import GREEDY, make_request

LENGTHS = (17, 7, 20, 9, 12, 6, 15)
STOPPED, CANCELLED, PREEMPTED, PENALIZED, DRAFTED = range(1, 6)  # indices of requests


def overlapped_requests(max_tokens: int, stop_token: int | None = None) -> list[Request]:
    """Return requests of every kind: full, stopped, cancelled, with a ring, with penalties, with drafts, evicting."""
    prompts = [list(range(11, 11 + n)) for n in LENGTHS]
    prompts[DRAFTED] = [5, 6, 7] * 4
    requests = [make_request(p, max_tokens) for p in prompts]
    requests[STOPPED] = make_request(
        prompts[STOPPED], max_tokens, stop_ids=frozenset() if stop_token is None else frozenset({stop_token})
    )
    requests[PREEMPTED] = make_request(prompts[PREEMPTED], max_tokens, "ring:window=10")
    penalties = replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.5)
    requests[PENALIZED] = make_request(prompts[PENALIZED], max_tokens, params=penalties)
    requests[DRAFTED] = make_request(prompts[DRAFTED], max_tokens, drafter_name="ngram")
    requests[6] = make_request(prompts[6], max_tokens, "h2o:budget=8,interval=2", replace(GREEDY, temperature=0.7))
    return requests


def run_overlapped(engine: Engine, requests: list[Request]) -> set[Request]:
    """Run requests with two pending steps; cancel one and preempt another on the way.

    Returns those of which a token was computed before the host knew it. No launch may wait for tokens.
    """
    engine.speculator.named["ngram"] = drafters.parse("ngram:k=3,min=1")
    engine.depth = 2
    engine.add(*requests)
    with watch_launches(engine) as overlapped:
        for step in range(1000):
            if not engine.has_unfinished_requests:
                break
            engine.step()
            if step == 2:
                engine.cancel(requests[CANCELLED])
            if step == 3 and requests[PREEMPTED] in engine.scheduler.running:
                assert requests[PREEMPTED].num_pending_tokens
                engine.scheduler.preempt(requests[PREEMPTED])
    engine.cache.check()
    assert engine.cache.free_pages == engine.cache.total_pages
    return overlapped


def assert_tokens_equal(requests: list[Request], expected: list[list[int]], stop_token: int) -> None:
    """Compare the answers with those of requests that were not cancelled and had no stop token."""
    expected = expected.copy()
    expected[STOPPED] = expected[STOPPED][: expected[STOPPED].index(stop_token) + 1]
    num_tokens = len(requests[CANCELLED].output_tokens)
    assert 0 < num_tokens < len(expected[CANCELLED])
    expected[CANCELLED] = expected[CANCELLED][:num_tokens]
    assert [r.output_tokens for r in requests] == expected


@contextmanager
def watch_launches(engine: Engine) -> Iterator[set[Request]]:
    """Collect the requests of which a launch computes pending tokens. Raises AssertionError if it waits for tokens."""
    overlapped = set[Request]()
    launch, tokens_to_host = engine.launch, sampler.tokens_to_host

    def watched_launch() -> PendingStep | None:
        pending = {r for r in (*engine.scheduler.running, *engine.scheduler.waiting) if r.num_pending_tokens}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampler, "tokens_to_host", refuse)
            step = launch()
        if step:
            overlapped.update(pending & {s.request for s in step.scheduled})
        return step

    def refuse(tokens: Tensor) -> list[int]:
        raise AssertionError("a launch waits for tokens")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "launch", watched_launch)
        yield overlapped
    assert sampler.tokens_to_host is tokens_to_host
