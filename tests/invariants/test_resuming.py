"""Laws of resuming: a conversation that goes on from evicted states equals the same conversation without a pause.

The other side of the law is one row that stays open between two requests. It goes on in the pages that it has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.eviction.evicted_state import EvictedState
from retain.kv.eviction.resumption import plan_resumption
from retain.kv.row import AttachedPrefix, Row
from tests.helpers.engines import make_engine, make_request
from tests.helpers.marks import slow

ANSWER = 20  # tokens
TURNS = (70, 17, 30, 45)  # tokens that the user adds
Positions = list[list[list[int]]]

POLICIES = [
    "sinks:budget=40",
    "h2o:budget=25%",
    "h2o:budget=50%,share=layer",
    "h2o:budget=64,prefill=stream,chunk=32",
    "gate:budget=50%",
    "h2o:budget=25%,demote=int4:50%",
    *slow(
        "window:budget=100",  # the first turn fits into the budget
        "keyformer:budget=30%",
        "tova:budget=40,interval=5",
        "snapkv:budget=25%",
        "knorm:budget=30,interval=3",
        "keydiff:budget=30",
        "dilated:budget=40",
        "h2o:budget=30,heads=union",
        "h2o:budget=30,heads=union,prefill=stream,chunk=40",
        "h2o:budget=25%,share=all,demote=int4:30%",
        "h2o:budget=30%,scope=shared",
        "gate:budget=40,share=none,prefill=stream,chunk=24,demote=int4:30",
        "sinks:budget=20,demote=int4",
        "sinks:budget=50%,protect=system",
    ),
]
FAMILIES = ["llama", *slow("gemma3_text", "mpt")]


def record_positions(engine: Engine) -> list[Positions]:
    """Record which positions every row holds when it is closed."""
    found: list[Positions] = []
    close = engine.scheduler._close_row

    def close_row(request: Request) -> None:
        found.append(cast(Row, request.row).positions())
        close(request)

    engine.scheduler._close_row = close_row  # type: ignore[method-assign]
    return found


def talk(
    policy: str,
    answer: Callable[[list[int], str], Request],
    turns: Sequence[int] = TURNS,
    seed: int = 1,
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
    request = make_request(text, max_tokens, policy, num_system_tokens=5, **more)
    engine.add(request)
    while engine.has_unfinished_requests:
        engine.step()
        engine.cache.check()
    return request


class OneRow:
    """An engine whose row stays open between two requests of a conversation."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.positions: list[Positions] = []
        self.row: Row | None = None
        self.num_computed = 0
        engine.scheduler._release = self.keep_row  # type: ignore[method-assign]
        open_row = engine.cache.open
        engine.cache.open = lambda *args: self.continue_row(args[0]) or open_row(*args)  # type: ignore[method-assign]

    def keep_row(self, request: Request) -> None:
        """End a request without its row."""
        self.row = cast(Row, request.row)
        self.num_computed = request.num_computed_tokens
        self.positions.append(self.row.positions())
        self.engine.scheduler.running.remove(request)
        request.row = None

    def continue_row(self, policy: Any) -> Row | None:
        """Let the row go on under the policy of another request, in the pages that it has."""
        row = self.row
        p = self.num_computed
        if row is None:
            return None
        state = EvictedState(p, row.evictors[0].policy, tuple(e.capture_state(p) for e in row.evictors), None)
        plan = plan_resumption(state, policy)
        assert plan
        row.policy = policy
        row.evictors = []
        row._open_evictors(plan.policy)
        for evictor, part, slots in zip(row.evictors, state.evictors, plan.slots, strict=True):
            evictor.resume(part, plan, slots)
        row.attach_prefix = lambda *_: AttachedPrefix(p, 0)  # type: ignore[method-assign]
        return row

    def ask(self, text: list[int], policy: str) -> Request:
        """Run one request to its end."""
        return ask(self.engine, text, policy)


def talk_in_one_row(policy: str, **options: Any) -> tuple[list[Request], list[Positions]]:
    """Hold a conversation without a pause. A step has room for a page: so many tokens fit into shrunk rings."""
    one_row = OneRow(make_engine(max_batched_tokens=16, max_running_requests=4, **options))
    return talk(policy, one_row.ask), one_row.positions


def talk_through_tree(policy: str, engine: Engine) -> tuple[list[Request], list[Positions]]:
    """Hold a conversation that resumes, while others use what pages are free."""
    positions = record_positions(engine)
    own: list[Positions] = []

    def answer(text: list[int], policy: str) -> Request:
        request = ask(engine, text, policy)
        own.append(positions[-1])
        ask(engine, [3, *text[::-1]][:90], policy, salt="other")
        return request

    return talk(policy, answer), own


def options_of(family: str, policy: str, **more: Any) -> dict[str, Any]:
    """Return the options of engines for a policy."""
    columns = 2 if "heads=" in policy else 1
    return {"family": family, "backend": "cpu", "demotes": "demote" in policy, "score_columns": columns, **more}


def answers(requests: Sequence[Request]) -> list[list[int]]:
    """Return the answers of requests."""
    return [r.output_tokens for r in requests]


@pytest.mark.parametrize("max_batched_tokens", [128, *slow(7)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", POLICIES)
def test_resumed_conversation_equals_one_row(policy: str, family: str, max_batched_tokens: int) -> None:
    """The same tokens, and the same positions in every head of every layer; only new tokens are computed."""
    options = options_of(family, policy)
    expected, expected_positions = talk_in_one_row(policy, **options)
    engine = make_engine(prefix_cache="exact", max_batched_tokens=max_batched_tokens, max_running_requests=4, **options)
    found, positions = talk_through_tree(policy, engine)
    assert answers(found) == answers(expected)
    assert positions == expected_positions
    lengths = [len(r.tokens) for r in found]
    assert [r.stats.num_cached_tokens for r in found[1:]] == [n - 1 for n in lengths[:-1]]
