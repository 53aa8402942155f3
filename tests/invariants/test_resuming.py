"""Laws of resuming: a conversation that goes on from evicted states equals the same conversation without a pause.

The other side of the law is one row that stays open between two requests. It goes on in the pages that it has.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import TargetModel
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.stats.request import RequestMemory
from retain.sampling_params import SamplingParams
from tests.helpers.engines import make_engine, make_request, row_of
from tests.helpers.marks import slow
from tests.helpers.one_row import STEP_TOKENS, OneRow, Positions
from tests.helpers.unlike_family import UNLIKE
from tests.helpers.unlike_family import unlike_family as unlike_family

ANSWER = 20  # tokens
TURNS = (70, 17, 30, 45)  # tokens that the user adds
UNWINDOWED = (1, 3)  # of the layers of the unlike family that have a cache

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

    def close_row(request: Request) -> RequestMemory:
        found.append(row_of(engine, request).positions())
        return close(request)

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


def talk_in_one_row(policy: str, **options: Any) -> tuple[list[Request], list[Positions]]:
    """Hold a conversation without a pause."""
    one_row = OneRow(make_engine(max_batched_tokens=STEP_TOKENS, max_running_requests=4, **options))
    return talk(policy, partial(ask, one_row.engine)), one_row.positions


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


@pytest.mark.parametrize("policy", ["h2o:budget=30%,prefill=stream,chunk=24", *slow("h2o:budget=50%,share=layer")])
def test_unlike_layers_resume(policy: str, unlike_family: None) -> None:
    """Groups of layers that differ in heads and head dims go on together."""
    options = options_of(UNLIKE, policy)
    expected, expected_positions = talk_in_one_row(policy, **options)
    engine = make_engine(prefix_cache="exact", max_running_requests=4, **options)
    found, positions = talk_through_tree(policy, engine)
    assert answers(found) == answers(expected)
    for ours, theirs in zip(positions, expected_positions, strict=True):  # rings may hold tokens that nobody sees
        assert [ours[i] for i in UNWINDOWED] == [theirs[i] for i in UNWINDOWED]
    assert all(r.stats.num_cached_tokens for r in found[1:])


@pytest.mark.parametrize(
    "policy", ["h2o:budget=25%", *slow("sinks:budget=40", "h2o:budget=40,prefill=stream,chunk=24")]
)
def test_drafts_change_no_token_of_a_resumed_turn(policy: str) -> None:
    """A drafter that is never right leaves the same answers and positions as none."""
    options = options_of("llama", policy, prefix_cache="exact", max_running_requests=4)
    expected, expected_positions = talk_through_tree(policy, make_engine(**options))
    found, positions = talk_through_tree(policy, make_engine(drafter=WrongDrafter(), **options))
    assert sum(r.stats.spec_decode.num_rounds for r in found) > 0
    assert answers(found) == answers(expected)
    assert positions == expected_positions


class WrongDrafter:
    """Draft tokens that greedy answers of a tiny model hardly ever have, all equal."""

    k = "3"
    max_draft_tokens = 3

    def attach(self, target: TargetModel) -> None:
        """Need nothing."""

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Draft the token 127."""
        for request, limit in draft_limits:
            request.set_drafts([127] * min(limit, 3))

    def remove_request(self, request: Request) -> None:
        """Keep nothing of a request."""


@pytest.mark.parametrize("policy", POLICIES)
def test_preemption_changes_no_token(policy: str) -> None:
    """A row that is preempted in its answer goes on from its own state, in the first turn and in a resumed one."""
    options = options_of("llama", policy, prefix_cache="exact", max_running_requests=4)
    expected, expected_positions = talk_through_tree(policy, make_engine(**options))
    engine = make_engine(**options)
    positions = record_positions(engine)
    own: list[Positions] = []

    def answer(text: list[int], policy: str) -> Request:
        request = make_request(text, ANSWER, policy, num_system_tokens=5)
        engine.add(request)
        while engine.has_unfinished_requests:
            engine.step()
            if request in engine.scheduler.running and request.num_output_tokens in (3, 9, 19):
                engine.scheduler.preempt(request)
            engine.cache.check()
        own.append(positions[-1])
        return request

    found = talk(policy, answer)
    assert all(r.stats.num_preemptions == 3 for r in found)
    assert answers(found) == answers(expected)
    assert own == expected_positions


def test_company_changes_no_token() -> None:
    """Two conversations and others that step together answer as each of them alone."""
    policy = "h2o:budget=25%"
    options = options_of("llama", policy, prefix_cache="exact", max_running_requests=8)
    alone = [talk(policy, partial(ask, make_engine(**options)), seed=i) for i in (1, 2)]
    engine = make_engine(**options)
    rngs = [random.Random(i) for i in (1, 2)]
    texts: list[list[int]] = [[], []]
    for turn, n in enumerate(TURNS):
        texts = [text + [rng.randrange(128) for _ in range(n)] for text, rng in zip(texts, rngs, strict=True)]
        requests = [make_request(text, ANSWER, policy, num_system_tokens=5) for text in texts]
        others = [make_request(text, ANSWER, policy, num_system_tokens=5) for text in texts]  # from the same states
        run(engine, [*requests, *others])
        expected = [conversation[turn].output_tokens for conversation in alone]
        assert answers(requests) == answers(others) == expected
        assert all(r.stats.num_cached_tokens for r in requests) == bool(turn)
        texts = [[*text, *r.output_tokens] for text, r in zip(texts, requests, strict=True)]


def run(engine: Engine, requests: Sequence[Request]) -> None:
    """Run requests together, each added alone."""
    for request in requests:
        engine.add(request)
    while engine.has_unfinished_requests:
        engine.step()
        engine.cache.check()


NOISED = "keyformer:budget=25%"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"salt": "a"}, {"salt": "b"}),
        ({"policy": "h2o:budget=25%"}, {"policy": "h2o:budget=50%"}),
        ({"policy": "h2o:budget=25%"}, {"policy": "tova:budget=25%"}),
        ({"policy": NOISED, "seed": 1}, {"policy": NOISED, "seed": 2}),
        ({"policy": "h2o:budget=25%,resume=off"}, {"policy": "h2o:budget=25%,resume=off"}),
        ({"policy": "h2o:budget=25%,protect=system", "system": 4}, {"policy": "h2o:budget=25%,protect=system"}),
    ],
)
def test_states_of_others_are_never_found(first: dict[str, Any], second: dict[str, Any]) -> None:
    """Neither across salts or policies, nor across seeds of noise or other system prompts.

    What is found of another policy are pages of the prompt, which change no token.
    """
    engine = make_engine("llama", backend="cpu", prefix_cache="exact")
    plain = make_engine("llama", backend="cpu")

    def send(
        engine: Engine,
        text: list[int],
        policy: str = "h2o:budget=25%",
        salt: str = "",
        seed: int = 0,
        system: int = 0,
    ) -> Request:
        params = SamplingParams(temperature=0, ignore_eos=True, seed=seed)
        request = make_request(text, ANSWER, policy, params, system, salt=salt)
        run(engine, [request])
        return request

    text = random.Random(1).choices(range(128), k=90)
    turn = [*text, *send(engine, text, **first).output_tokens]
    longer = [*turn, 1, 2, 3]
    found = send(engine, longer, **second)
    assert found.output_tokens == send(plain, longer, **second).output_tokens
    assert found.stats.num_cached_tokens <= (0 if "salt" in second else len(text))
    resumes = "off" not in first.get("policy", "")
    assert (send(engine, [*turn, 4, 5, 6], **first).stats.num_cached_tokens > len(text)) == resumes


def test_edited_text_resumes_at_the_last_state_before_the_edit() -> None:
    """The state of the turn before stays; before that, whole pages of the first prompt; else nothing is found."""
    engine = make_engine("llama", backend="cpu", prefix_cache="exact")
    policy = "h2o:budget=25%"
    turns = talk(policy, lambda text, p: ask(engine, text, p), TURNS[:3])
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
    for request in talk("sinks:budget=40,interval=1", lambda text, p: ask(engine, text, p)):
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


@pytest.mark.parametrize(
    "policy",
    [
        "h2o:budget=30,prefill=stream,chunk=24",
        *slow(
            "sinks:budget=40,prefill=stream,chunk=9,interval=3",
            "snapkv:budget=30,prefill=stream,chunk=24",
            "keyformer:budget=30,prefill=stream,chunk=24",
            "tova:budget=30,prefill=stream,chunk=24",
            "h2o:budget=30,heads=union,prefill=stream,chunk=24",
            "gate:budget=40,share=none,prefill=stream,chunk=24,demote=int4:30",
        ),
    ],
)
@pytest.mark.parametrize("family", ["llama", *slow("gemma3_text")])
def test_streamed_prompts_that_begin_alike_equal_cold_ones(policy: str, family: str) -> None:
    """A hit inside a streamed prompt equals no hit: what is kept depends on the text alone."""
    options = options_of(family, policy)
    engine = make_engine(prefix_cache="exact", **options)
    rng = random.Random(3)
    text = [rng.randrange(128) for _ in range(200)]
    prompts = [text, [*text[:199], 1, 2, 3], [*text, 4, 5, 6, *text[:60]], text]
    hits = []
    for prompt in prompts:
        cold_engine = make_engine(**options)
        positions, expected_positions = record_positions(engine), record_positions(cold_engine)
        request = ask(engine, prompt, policy)
        assert answers([request]) == answers([ask(cold_engine, prompt, policy)])
        assert positions[0] == expected_positions[0]
        hits.append(request.stats.num_cached_tokens)
    assert (hits[0] == 0 and min(hits[1:]) >= 150) or policy.startswith("snapkv")


def test_prompt_that_goes_on_from_an_answer_leaves_no_state_inside_it() -> None:
    """What it keeps at the ends of its chunks depends on where the answer ended."""
    engine = make_engine("llama", backend="cpu", prefix_cache="exact")
    turns = talk("h2o:budget=30,prefill=stream,chunk=24", partial(ask, engine), (60, 150))
    edited = [*turns[1].prompt[:-1], 1 + turns[1].prompt[-1] % 100]
    found = ask(engine, edited, "h2o:budget=30,prefill=stream,chunk=24")
    assert found.stats.num_cached_tokens == len(turns[0].tokens) - 1
