"""Engines of the benches: several over one model and cache, stepped by the bench."""

from __future__ import annotations

from collections.abc import Sequence

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.llm import LLM


def make_engine(llm: LLM, requests: Sequence[Request]) -> Engine:
    """Return another engine over the same model and cache."""
    engine = Engine(llm.engine.runner, llm.cache)
    engine.add(*requests)
    return engine


def run_until_first_tokens(engine: Engine) -> None:
    """Step until every request has its first token, and its scoring passes are over."""
    scheduler = engine.scheduler
    while scheduler.waiting or any(r.scoring or not r.stats.first_token_time for r in scheduler.running):
        engine.step()


def cancel_all(engine: Engine) -> None:
    """Cancel all requests of an engine."""
    for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
        engine.cancel(request)
