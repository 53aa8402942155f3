"""Whatever policy a client's request chooses, its work is bounded: counted steps, computed tokens and evictions."""

import random
from collections.abc import Sequence

import pytest

from retain import LLM, SamplingParams
from retain.engine import drafters
from retain.kv.eviction import cost as policy_cost
from retain.kv.eviction import policies
from retain.kv.eviction.policy import EvictionPolicy
from retain.processing.input import GenerateRequest, PromptTooLongError
from retain.server.config import DRAFTERS
from tests.helpers.engines import make_engine, make_request
from tests.helpers.policy_cost import count_cost, count_policy_cost
from tests.helpers.policy_specs import spec_of
from tests.helpers.schedules import draw_policy

MAX_MODEL_LEN, MAX_BATCHED_TOKENS, MAX_TOKENS = 512, 256, 24
SEPARATOR = 0  # a special token, between messages


def parse(spec: str) -> EvictionPolicy:
    """Return a policy that is given the ids of its instruction, if it has one."""
    policy = policies.parse(spec)
    return policy.with_instruction(range(1, 51), {SEPARATOR}) if policy.instruction else policy


def draw_prompt(rng: random.Random) -> list[int]:
    """Draw a prompt of messages that are all short, or of one."""
    num_tokens, message_len = rng.choice([1, 7, 60, 200, 400]), rng.choice([9, 30, 1000])
    return [rng.randrange(1, 128) if i % message_len else SEPARATOR for i in range(num_tokens)]


def find_excess(policy: EvictionPolicy, prompt: Sequence[int]) -> str | None:
    return policy_cost.find_excess(policy.resolve(len(prompt)), prompt, MAX_MODEL_LEN - len(prompt))


@pytest.mark.parametrize("seed", range(3))
def test_what_a_request_may_choose_has_a_bounded_cost(seed):
    """Each token of the prompt is computed three times at most, 32 at a time; the answer evicts each eighth token."""
    rng = random.Random(seed)
    engine = make_engine(
        "llama",
        backend="cpu",
        num_pages=2000,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        score_columns=2,
        demotes=True,
        looks=True,
    )
    num_accepted = 0
    while num_accepted < 8:
        spec, prompt = draw_policy(rng), draw_prompt(rng)
        policy = parse(spec)
        if find_excess(policy, prompt):
            continue
        num_accepted += 1
        cost, n = count_policy_cost(engine, prompt, MAX_TOKENS, policy), max(len(prompt), 64)
        assert cost.tokens <= 3 * n + MAX_TOKENS, (spec, len(prompt), cost)
        steps = cost.steps - MAX_TOKENS - -(-len(prompt) // MAX_BATCHED_TOKENS)
        assert max(steps, cost.prompt_evictions) <= cost.tokens / 32 + 3, (spec, len(prompt), cost)
        assert cost.answer_evictions <= MAX_TOKENS / 8 + 2, (spec, len(prompt), cost)


@pytest.mark.parametrize("name", policies.names())
def test_every_policy_with_its_defaults_may_be_chosen(name):
    """Any prompt, up to the context."""
    spec = spec_of(name, "budget=25%")
    reads_all = name in ("reread", "gate") or bool(parse(spec).resolve(400).query_blocks)
    specs = [spec, f"{spec},prefill=stream"] if "budget" in spec and not reads_all else [spec]
    if name == "reread":
        specs.append(f"{spec},ask=repeat")
    for policy in map(parse, specs):
        for message_len in (9, 30, 1000):
            for num_tokens in (1, 30, 64, 65, 200, 400):
                prompt = [SEPARATOR if i % message_len == 0 else 1 for i in range(num_tokens)]
                if num_tokens + policy.resolve(num_tokens).scoring_room <= MAX_MODEL_LEN:
                    assert find_excess(policy, prompt) is None, (message_len, num_tokens)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("h2o:budget=1,prefill=stream,chunk=1", "every 1 tokens of the prompt"),
        ("h2o:budget=48,prefill=stream,chunk=31", "every 31 tokens of the prompt"),
        ("h2o:budget=48,prefill=stream,chunk=32", None),
        ("sinks:budget=48,interval=1", "every 1 tokens of the answer"),
        ("sinks:budget=48,interval=8", None),
        ("ring:window=64", None),
        ("reread:budget=48,rereads=1", "1 tokens at a time"),
        ("reread:budget=48,ask=repeat,rereads=51", "52.0 times"),
        ("replay:budget=48,block=20", "20 tokens of the prompt at a time"),
        ("compactor:budget=48,block=32", None),
        ("h2o:budget=48,resume=off,refit=257", "257 queries"),
        ("replay:budget=48", None),
    ],
)
def test_work_is_refused_with_its_reason(spec, why):
    found = find_excess(parse(spec), [1] * 300)
    assert (found is None) if why is None else (why in str(found)), found


def test_short_messages_are_repeated_together():
    """An instruction goes before each part of the prompt, so parts of a few tokens would multiply the work."""
    policy = parse("reread:budget=10,ask=repeat").resolve(400)
    prompt = [SEPARATOR if i % 10 == 0 else i for i in range(400)]
    parts = [list(p.tokens[50:]) for p in policy.scoring_passes(prompt, 112)]
    assert all(p.tokens[:50] == tuple(range(1, 51)) for p in policy.scoring_passes(prompt, 112))
    assert [t for part in parts for t in part] == [t for t in prompt if t != SEPARATOR]
    assert min(map(len, parts)) >= 32


def test_a_second_reading_needs_room_in_the_context():
    """Near the end of the context a few tokens would be read at a time, whoever chose the policy."""
    llm = LLM("random:tiny", max_model_len=512, kv_memory="8MiB", kv_policy="reread:budget=48")
    for n, fits in ((448, True), (449, False), (500, False)):
        g = GenerateRequest([1] * n, SamplingParams(max_tokens=1))
        if fits:
            llm.input_processor.process(g)
            continue
        with pytest.raises(PromptTooLongError) as raised:
            llm.input_processor.process(g)
        assert raised.value.max_context == 448


def test_an_engine_allows_what_its_options_name():
    """Its own policy, and those of allow_policy, whatever the order of their options."""
    own, allowed = "sinks:budget=9,interval=1", "h2o:budget=1,prefill=stream,chunk=1"
    llm = LLM("random:tiny", kv_memory="8MiB", kv_policy=own, allow_policy=(allowed,))
    check = llm.input_processor.check_policy_cost
    for spec in (None, own, allowed, "h2o:chunk=1,budget=1,prefill=stream"):
        check(GenerateRequest([1] * 300, kv_policy=spec))
    with pytest.raises(ValueError, match="--allow-policy"):
        check(GenerateRequest([1] * 300, kv_policy="h2o:budget=2,prefill=stream,chunk=1"))


@pytest.mark.parametrize(("name", "most"), list(zip(DRAFTERS, (16, 8, 24), strict=True)))
def test_a_drafter_that_a_request_may_choose_has_a_bounded_cost(name, most):
    """A step computes a token and its drafts, each of which a drafter computes once at most."""
    drafter = drafters.parse(name)
    engine = make_engine("llama", backend="cpu", num_pages=2000, drafter=drafter)
    cost = count_cost(engine, [make_request([1, 2, 3, 4] * 15, MAX_TOKENS)])
    assert drafter.max_draft_tokens <= most
    assert cost.tokens <= 60 + MAX_TOKENS * (1 + 2 * most)
    assert cost.steps <= 1 + MAX_TOKENS * (1 + most * (name == "self"))
