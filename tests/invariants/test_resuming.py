"""Laws of resuming, for every policy: a conversation that goes on from what a row kept equals one row without a pause.

The other side of the law is one row that stays open between two requests, or an independent implementation with lists.
Kinds, places and events for a few policies are in tests/invariants/test_checkpoints.py.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kernels.api import NO_WINDOW
from retain.sampling_params import SamplingParams
from retain.types import Ints
from tests.helpers.chats import (
    ANSWER,
    TURNS,
    answers,
    ask,
    open_one_row,
    options_of,
    record_positions,
    talk,
    talk_in_one_row,
)
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.list_model import ListModel, ListPolicy
from tests.helpers.marks import slow
from tests.helpers.one_row import STEP_TOKENS, Positions
from tests.helpers.places import PLACES, Place
from tests.helpers.tiers import offloader_of

POLICIES = [
    "sinks:budget=40",
    "h2o:budget=25%",
    "h2o:budget=50%,share=layer",
    "h2o:budget=64,prefill=stream,chunk=32",
    "gate:budget=50%",
    "h2o:budget=25%,demote=int4:50%",
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
]
STREAMED = [
    "h2o:budget=30,prefill=stream,chunk=24",
    "sinks:budget=40,prefill=stream,chunk=9,interval=3",
    "tova:budget=30,prefill=stream,chunk=40",
    "snapkv:budget=30,prefill=stream,chunk=24",
    "keyformer:budget=30,prefill=stream,chunk=24",
    "h2o:budget=30,heads=union,prefill=stream,chunk=24",
    "gate:budget=40,share=none,prefill=stream,chunk=24,demote=int4:30",
]


def layers_without_windows(engine: Engine, request: Request) -> Ints:
    """Return the layers whose positions can be compared: rings may hold tokens that nobody sees."""
    return np.flatnonzero(engine.cache.planner.windows(request.policy) == NO_WINDOW)


def talk_at(place: Place, policy: str, preempted_at: tuple[int, ...] = ()) -> tuple[list[Request], list[Positions]]:
    """Hold a conversation with pauses, while others use what pages are free; rows are preempted in their answers."""
    found: list[Positions] = []

    def answer(text: list[int], policy: str) -> Request:
        positions = record_positions(place.engine)
        engine = place.engine
        request = make_request(text, ANSWER, policy, num_system_tokens=5)
        engine.add(request)
        while engine.has_unfinished_requests:
            engine.step()
            if request in engine.scheduler.running and request.num_output_tokens in preempted_at:
                engine.scheduler.preempt(request)
                if not place.is_pool:
                    engine.cache.prefix_cache.tree.evict(engine.cache.prefix_cache.tree.num_evictable_pages)
                    place.sync()
            engine.cache.check()
        found.append(positions[-1])
        ask(place.engine, [3, *text[::-1]][:90], policy, salt="other")
        place.pause()
        return request

    return talk(policy, answer), found


@pytest.mark.checked_cases(2)
@pytest.mark.parametrize("preempted_at", [(), (3, 9, 19)])
@pytest.mark.parametrize("max_batched_tokens", [128, 7])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mpt"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_resumed_conversation_equals_one_row(
    policy: str, place: str, family: str, max_batched_tokens: int, preempted_at: tuple[int, ...], tmp_path: Path
) -> None:
    """The same tokens, and the same positions in every head of every layer; only new tokens are computed."""
    options = options_of(family, policy, max_batched_tokens=max_batched_tokens)
    at = Place(place, tmp_path, **options)
    found, positions = talk_at(at, policy, preempted_at)
    expected, expected_positions = talk_in_one_row(policy, family)
    assert answers(found) == expected
    full = layers_without_windows(at.engine, found[0])
    for ours, theirs in zip(positions, expected_positions, strict=True):
        layers = full if preempted_at else range(len(ours))
        assert [ours[i] for i in layers] == [theirs[i] for i in layers]
    if not preempted_at:
        known = [len(r.tokens) - 1 for r in found[:-1]]
        assert [r.stats.num_cached_tokens for r in found[1:]] == known
        if place in ("memory", "folder"):
            hits = at.engine.cache.prefix_cache.hits_by_source()
            assert hits == {"pool": 0, {"memory": "ram", "folder": "disk"}[place]: sum(known)}
    if not at.is_pool:
        assert all(0 < t["bytes"] <= t["capacity"] for t in offloader_of(at.engine).stats() if "capacity" in t)
    at.close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"policy": "h2o:budget=25%,resume=off"}, {"policy": "h2o:budget=25%,resume=off"}),
        ({"policy": "h2o:budget=25%,protect=system", "system": 4}, {"policy": "h2o:budget=25%,protect=system"}),
    ],
)
@pytest.mark.parametrize("place", ["pool", "folder after a restart"])
def test_whoever_does_not_resume_or_protects_others_finds_pages_alone(
    first: dict[str, Any], second: dict[str, Any], place: str, tmp_path: Path
) -> None:
    at = Place(place, tmp_path, **options_of("llama", "h2o"))

    def send(engine: Any, text: list[int], policy: str, system: int = 0) -> Request:
        run_to_completion(engine, [request := make_request(text, ANSWER, policy, num_system_tokens=system)])
        return request

    text = random.Random(1).choices(range(128), k=90)
    turn = [*text, *send(at.engine, text, **first).output_tokens]
    longer = [*turn, 1, 2, 3]
    at.pause()
    found = send(at.engine, longer, **second)
    assert found.output_tokens == send(make_engine("llama", backend="cpu"), longer, **second).output_tokens
    assert found.stats.num_cached_tokens <= (len(text) if at.is_pool else 0)
    at.pause()
    resumes = "off" not in first["policy"]
    assert (send(at.engine, [*turn, 4, 5, 6], **first).stats.num_cached_tokens > len(text)) == resumes
    at.close()


def test_edited_text_resumes_at_the_last_checkpoint_before_the_edit() -> None:
    """That of the turn before stays; before it, whole pages of the first prompt; else nothing is found."""
    engine = make_engine("llama", backend="cpu", prefix_cache="exact")
    policy = "h2o:budget=25%"
    turns = talk(policy, partial(ask, engine), TURNS[:3])
    ends = [len(r.tokens) - 1 for r in turns]
    text = [*turns[2].tokens]
    for edited_at, expected in ((ends[1] + 3, ends[1]), (ends[1] - 3, TURNS[0] // 16 * 16), (10, 0)):
        edited = [*text[:edited_at], (text[edited_at] + 1) % 128, *text[edited_at + 1 :]]
        assert ask(engine, edited, policy).stats.num_cached_tokens == expected
    assert (engine.cache.prefix_cache.tree.num_holders > 0).sum() < engine.cache.total_pages


def test_resumed_row_keeps_sinks_and_the_newest_tokens() -> None:
    """What `sinks` keeps has a closed form: the first four tokens and the newest, whatever was computed when."""
    engine = make_engine("llama", backend="cpu", prefix_cache="exact")
    positions = record_positions(engine)
    for request in talk("sinks:budget=40,interval=1", partial(ask, engine)):
        n = request.num_computed_tokens
        expected = [*range(4), *range(n - 36, n)]
        assert all(head == expected for layer in positions.pop(0) for head in layer)


def test_streamed_prompt_goes_on_from_a_full_budget() -> None:
    """A first turn that evicted nothing may have filled slots that a chunk of the next prompt would need."""
    engine = make_engine("llama", backend="cpu", prefix_cache="exact")
    positions = record_positions(engine)
    policy = "sinks:budget=12,prefill=stream,chunk=9,interval=16"
    turns = talk(policy, partial(ask, engine), (8, 40, 17))
    assert all(r.stats.num_cached_tokens for r in turns[1:])
    assert all(head[:4] == [0, 1, 2, 3] for turn in positions for layer in turn for head in layer)


def test_prompt_that_goes_on_from_an_answer_leaves_no_checkpoint_inside_it() -> None:
    """What it keeps at the ends of its chunks depends on where the answer ended."""
    engine = make_engine("llama", backend="cpu", prefix_cache="exact")
    turns = talk(STREAMED[0], partial(ask, engine), (60, 150))
    edited = [*turns[1].prompt[:-1], 1 + turns[1].prompt[-1] % 100]
    assert ask(engine, edited, STREAMED[0]).stats.num_cached_tokens == len(turns[0].tokens) - 1


@pytest.mark.parametrize("interval", [64, 32])
@pytest.mark.parametrize("policy", STREAMED)
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_streamed_texts_are_left_at_the_rungs_of_the_ladder(policy: str, interval: int, family: str) -> None:
    """A text that leaves one computes an interval and a chunk at most, whatever else goes on from it in between.

    What is kept depends on the text alone: a hit equals no hit, bit for bit, with the same tokens in the same slots.
    """
    rng = random.Random(4)
    text = rng.choices(range(128), k=440)
    options = options_of(family, policy)
    engine = make_engine(prefix_cache="exact", snapshot_interval=interval, **options)
    ask(engine, text, policy, 4)
    chunk = make_request(text, 4, policy).policy.plan.chunk
    params = SamplingParams(temperature=0, ignore_eos=True, logprobs=2, seed=0)
    for cut in [*(rng.randrange(440 - 5 * interval, 440) for _ in range(3)), 440]:
        prompt = [*text[:cut], *rng.choices(range(128), k=15)]
        cold_engine = make_engine(**options)
        positions, expected_positions = record_positions(engine), record_positions(cold_engine)
        request, cold = (ask(e, prompt, policy, 12, params=params) for e in (engine, cold_engine))
        for layer in layers_without_windows(engine, request):
            assert positions[-1][layer] == expected_positions[0][layer]
        assert (request.output_tokens, request.logprobs) == (cold.output_tokens, cold.logprobs)
        # `snapkv` looks at queries before the end of a prompt, which are others' where it ends elsewhere.
        assert cut - request.stats.num_cached_tokens <= interval + chunk or policy.startswith("snapkv")


LISTS = {
    "sinks:budget=40,recent=36,interval=1": ListPolicy("sinks", recent=36, sinks=4),
    "h2o:budget=40,recent=12,interval=1": ListPolicy("h2o"),
    "tova:budget=40,recent=12,interval=1": ListPolicy("tova"),
    "h2o:budget=40,recent=12,interval=7": ListPolicy("h2o", interval=7),
    "h2o:budget=40,recent=12,interval=1,heads=kv-max": ListPolicy("h2o", heads="kv-max"),
    "window:budget=40,interval=1": ListPolicy("window"),
}


@pytest.mark.parametrize("family", ["llama", *slow("mpt")])
@pytest.mark.parametrize("policy", LISTS)
def test_an_independent_implementation_with_lists_goes_on_alike(policy: str, family: str) -> None:
    """The same tokens, and the same positions in every head, whatever was evicted in the turns before."""
    lists = ListModel(family, LISTS[policy])
    engine = make_engine(prefix_cache="exact", **options_of(family, policy))
    all_positions = record_positions(engine)
    known = 0

    def answer(text: list[int], policy: str) -> Request:
        nonlocal known
        message = text[known + 1 if known else 0 :]
        expected = lists.go_on(message, 12) if known else lists.generate(message, 12, 12, seed=0)
        request = ask(engine, text, policy, 12)
        assert (request.output_tokens, request.stats.num_cached_tokens) == (expected, known)
        assert all_positions[-1] == [
            [lists.heads[layer, g].position_list for g in range(len(heads))]
            for layer, heads in enumerate(all_positions[-1])
        ]
        known = len(request.tokens) - 1
        return request

    talk(policy, answer, TURNS[:3])


@pytest.mark.parametrize("policy", ["sinks:budget=40", "h2o:budget=25%", *slow("h2o:budget=25%,demote=int4:50%")])
def test_the_reference_backend_goes_on_as_one_row(policy: str) -> None:
    """Steps are as long on both sides: products of torch depend on the number of rows."""
    options = options_of("llama", policy) | {"backend": "reference"}
    engine = make_engine(prefix_cache="exact", max_batched_tokens=STEP_TOKENS, max_running_requests=4, **options)
    turns = talk(policy, partial(ask, engine, max_tokens=12), TURNS[:3])
    one_row = open_one_row(**options).engine
    assert answers(turns) == answers(talk(policy, partial(ask, one_row, max_tokens=12), TURNS[:3]))
    assert all(r.stats.num_cached_tokens for r in turns[1:])
