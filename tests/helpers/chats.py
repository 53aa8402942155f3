"""Conversations under a budget: in one row that never pauses, or turn by turn as answers are asked for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.stats.request import RequestMemory
from tests.helpers.engines import make_engine, make_request, row_of
from tests.helpers.one_row import STEP_TOKENS, OneRow, Positions

ANSWER = 20  # tokens
TURNS = (70, 17, 30, 45)  # tokens that the user adds


def record_positions(engine: Engine) -> list[Positions]:
    """Record which positions every row holds when it is closed."""
    found: list[Positions] = []
    close = engine.scheduler._close_row

    def close_row(request: Request) -> RequestMemory:
        found.append(row_of(engine, request).positions())
        return close(request)

    engine.scheduler._close_row = close_row  # type: ignore[method-assign]
    return found


def talk(
    policy: str, answer: Callable[[list[int], str], Request], turns: Sequence[int] = TURNS, seed: int = 1
) -> list[Request]:
    """Hold a conversation: each turn sends all earlier ones and some random tokens."""
    rng = random.Random(seed)
    text: list[int] = []
    requests = []
    for n in turns:
        text = text + [rng.randrange(128) for _ in range(n)]
        requests.append(answer(text, policy))
        text = text + requests[-1].output_tokens
    return requests


def ask(engine: Engine, text: Sequence[int], policy: str, max_tokens: int = ANSWER, **more: Any) -> Request:
    """Run one request to its end."""
    request = make_request(text, max_tokens, policy, **{"num_system_tokens": 5, **more})
    run_together(engine, [request])
    return request


def run_together(engine: Engine, requests: Sequence[Request]) -> None:
    """Run requests, each added alone. The accountant must balance after every step."""
    for request in requests:
        engine.add(request)
    while engine.has_unfinished_requests:
        engine.step()
        engine.cache.check()


def options_of(family: str, policy: str, **more: Any) -> dict[str, Any]:
    """Return the options of engines for a policy."""
    columns = 2 if "heads=" in policy else 1
    return {"family": family, "backend": "cpu", "demotes": "demote" in policy, "score_columns": columns, **more}


def answers(requests: Sequence[Request]) -> list[list[int]]:
    """Return the answers of requests."""
    return [r.output_tokens for r in requests]


def open_one_row(**options: Any) -> OneRow:
    """Return an engine whose row stays open between two turns."""
    return OneRow(make_engine(**{"max_batched_tokens": STEP_TOKENS, "max_running_requests": 4, **options}))


@cache
def talk_in_one_row(policy: str, family: str) -> tuple[list[list[int]], list[Positions]]:
    """Return the answers of a conversation without a pause, and the positions at the end of each turn."""
    one_row = open_one_row(**options_of(family, policy))
    return answers(talk(policy, partial(ask, one_row.engine))), one_row.positions
