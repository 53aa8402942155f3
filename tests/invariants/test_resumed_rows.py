"""Resumed rows beside an independent implementation, at rungs, on the reference backend, and as leaders of a prompt.

The law of resuming itself is in tests/invariants/test_resuming.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.stats.request import RequestMemory
from retain.sampling_params import SamplingParams
from tests.helpers.engines import make_engine, make_request, row_of
from tests.helpers.list_model import ListModel, ListPolicy
from tests.helpers.marks import slow
from tests.helpers.one_row import STEP_TOKENS, OneRow, Positions

ANSWER = 12  # tokens
WITH_LOGPROBS = SamplingParams(temperature=0, ignore_eos=True, logprobs=2, seed=0)
MESSAGES = (70, 17, 30)  # tokens that the user adds


def run(engine: Engine, requests: Sequence[Request]) -> list[Positions]:
    """Run requests that are added together. Returns the positions that each row holds when it has answered."""
    found: dict[Request, Positions] = {}
    close = engine.scheduler._close_row

    def close_row(request: Request) -> RequestMemory:
        found[request] = row_of(engine, request).positions()
        return close(request)

    engine.scheduler._close_row = close_row  # type: ignore[method-assign]
    engine.add(*requests)
    while engine.has_unfinished_requests:
        engine.step()
        engine.cache.check()
    engine.scheduler._close_row = close  # type: ignore[method-assign]
    return [found[r] for r in requests]


def messages(seed: int = 1) -> list[list[int]]:
    """Return what the user of a chat says."""
    rng = random.Random(seed)
    return [[rng.randrange(128) for _ in range(n)] for n in MESSAGES]


def talk(engine: Engine, policy: str, num_together: int = 1) -> list[list[Request]]:
    """Hold a chat; each turn is sent so many times at once. Returns the requests of each turn."""
    text: list[int] = []
    turns = []
    for message in messages():
        text = [*text, *message]
        turns.append([make_request(text, ANSWER, policy) for _ in range(num_together)])
        run(engine, turns[-1])
        text = turns[-1][0].tokens
    return turns


def talk_in_one_row(policy: str, **options: Any) -> list[list[int]]:
    """Return the answers of the same chat in a row that stays open."""
    one_row = OneRow(make_engine("llama", max_batched_tokens=STEP_TOKENS, max_running_requests=4, **options))
    text: list[int] = []
    answers = []
    for message in messages():
        text = [*text, *message]
        request = make_request(text, ANSWER, policy)
        one_row.run(request, len(text) + ANSWER - 1)
        answers.append(request.output_tokens)
        text = request.tokens
    return answers


LISTS = {
    "sinks:budget=40,recent=36,interval=1": ListPolicy("sinks", recent=36, sinks=4),
    "h2o:budget=40,recent=12,interval=1": ListPolicy("h2o"),
}
LISTS_SLOW = {
    "tova:budget=40,recent=12,interval=1": ListPolicy("tova"),
    "h2o:budget=40,recent=12,interval=7": ListPolicy("h2o", interval=7),
    "h2o:budget=40,recent=12,interval=1,heads=kv-max": ListPolicy("h2o", heads="kv-max"),
    "window:budget=40,interval=1": ListPolicy("window"),
}


@pytest.mark.parametrize("family", ["llama", *slow("mpt")])
@pytest.mark.parametrize("policy", [*LISTS, *slow(*LISTS_SLOW)])
def test_an_independent_implementation_with_lists_goes_on_alike(policy: str, family: str) -> None:
    """The same tokens, and the same positions in every head, whatever was evicted in the turns before."""
    lists = ListModel(family, (LISTS | LISTS_SLOW)[policy])
    engine = make_engine(family, backend="cpu", prefix_cache="exact", score_columns=2 if "heads" in policy else 1)
    text: list[int] = []
    for turn, message in enumerate(messages()):
        expected = lists.go_on(message, ANSWER) if turn else lists.generate(message, ANSWER, ANSWER, seed=0)
        text = [*text, *message]
        request = make_request(text, ANSWER, policy)
        (positions,) = run(engine, [request])
        assert request.output_tokens == expected
        assert request.stats.num_cached_tokens == (len(text) - len(message) - 1 if turn else 0)
        assert positions == [
            [lists.heads[layer, g].position_list for g in range(len(heads))] for layer, heads in enumerate(positions)
        ]
        text = request.tokens


@pytest.mark.parametrize("policy", ["sinks:budget=40", "h2o:budget=25%", *slow("h2o:budget=25%,demote=int4:50%")])
def test_the_reference_backend_goes_on_as_one_row(policy: str) -> None:
    """Steps are as long on both sides: products of torch depend on the number of rows."""
    options = {"backend": "reference", "demotes": "demote" in policy}
    engine = make_engine(
        "llama", prefix_cache="exact", max_batched_tokens=STEP_TOKENS, max_running_requests=4, **options
    )
    turns = talk(engine, policy)
    assert [r.output_tokens for (r,) in turns] == talk_in_one_row(policy, **options)
    assert all(r.stats.num_cached_tokens for (r,) in turns[1:])


@pytest.mark.parametrize("policy", ["h2o:budget=25%", "h2o:budget=200", *slow("sinks:budget=40", "gate:budget=50%")])
def test_equal_prompts_that_arrive_together_go_on_alike(policy: str) -> None:
    """Of a leader that holds a selection no row is forked: its followers go on from the same state."""
    engine = make_engine("llama", backend="cpu", prefix_cache="exact")
    turns = talk(engine, policy, num_together=3)
    expected = talk_in_one_row(policy, backend="cpu")
    assert [[r.output_tokens for r in turn] for turn in turns] == [[answer] * 3 for answer in expected]
    for turn, before in zip(turns[1:], turns, strict=False):
        first = len(before[0].tokens) - 1
        assert turn[0].stats.num_cached_tokens == first
        assert {r.stats.num_cached_tokens for r in turn[1:]} <= {0, first}  # 0: forked when the prompt was complete


@pytest.mark.parametrize("interval", [64, *slow(32)])
@pytest.mark.parametrize(
    "policy",
    [
        "h2o:budget=30,prefill=stream,chunk=24",
        *slow("sinks:budget=30,prefill=stream,chunk=9,interval=3", "tova:budget=40,prefill=stream,chunk=40"),
    ],
)
def test_streamed_texts_are_left_at_the_rungs_of_the_ladder(policy: str, interval: int) -> None:
    """Whatever goes on from the text in between: a text that leaves it computes an interval and a chunk at most."""
    rng = random.Random(4)
    text = [rng.randrange(128) for _ in range(440)]
    engine = make_engine("llama", backend="cpu", prefix_cache="exact", snapshot_interval=interval)
    run(engine, [make_request(text, 4, policy)])
    chunk = make_request(text, 4, policy).policy.plan.chunk
    for cut in [rng.randrange(440 - 5 * interval, 440) for _ in range(8)]:
        prompt = [*text[:cut], *(rng.randrange(128) for _ in range(15))]
        request, cold = (make_request(prompt, ANSWER, policy, WITH_LOGPROBS) for _ in range(2))
        positions = run(engine, [request])
        assert positions == run(make_engine("llama", backend="cpu"), [cold])
        assert request.output_tokens == cold.output_tokens
        assert request.logprobs == cold.logprobs  # bit for bit: the same tokens lie in the same slots
        assert cut - request.stats.num_cached_tokens <= interval + chunk
