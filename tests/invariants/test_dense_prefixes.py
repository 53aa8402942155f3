"""Law 2 for rows with a budget before they first evict: they find and leave pages of a text like any other row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.checkpoints.masses import Masses
from retain.kv.eviction import policies
from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.text import Text
from tests.helpers.cached_pages import check_cached_pages
from tests.helpers.engines import iter_steps, make_engine, make_request, run_to_completion
from tests.helpers.marks import slow
from tests.helpers.policy_specs import spec_of
from tests.helpers.unlike_family import UNLIKE
from tests.helpers.unlike_family import unlike_family as unlike_family

pytestmark = pytest.mark.usefixtures("unlike_family")
S = 16  # slots of a page
FAMILIES = ["llama", *slow("gemma3_text", UNLIKE)]
PLAIN = ["full", "sinks:budget=50%", "knorm:budget=40,interval=3", "sinks:budget=105,interval=5"]  # no query adds mass
SCORED = ["h2o:budget=50%", "snapkv:budget=30%", "gate:budget=50%,share=layer", "h2o:budget=130"]
POLICIES = [
    "sinks:budget=50%",
    "h2o:budget=50%",
    *slow(
        *("full", *PLAIN[2:], *SCORED[1:]),
        "tova:budget=40,interval=5",
        "keyformer:budget=40",
        "h2o:budget=40,damping=0.9",
        "h2o:budget=30%,heads=query",
        "h2o:budget=30%,share=all",
        "h2o:budget=30,heads=union",
        "sinks:budget=40,demote=int4:30",
        "h2o:budget=25%,share=all,demote=int4:30%",
        "reread:budget=50%,rereads=40",
        "window:budget=30,prefill=stream,chunk=20",
        "keydiff:budget=40,share=layer",
        "random:budget=50%",
    ),
]


def random_tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(128) for _ in range(n)]


def demotes(*policies: str) -> bool:
    return any("demote" in policy for policy in policies)


def run_checked(engine: Engine, requests: Sequence[Request]) -> list[list[int]]:
    """Run requests together, and check accounts and cached pages after every step."""
    for request in requests:
        engine.add(request)
    for _ in iter_steps(engine):
        check_cached_pages(engine.cache)
    return [r.output_tokens for r in requests]


TEXT = random_tokens(random.Random(0), 100)
PROMPTS = [TEXT, TEXT[:70] + random_tokens(random.Random(1), 30), TEXT + random_tokens(random.Random(2), 21)]
LENGTH = 18  # tokens of an answer: whole pages, and enough for budgets of 105 and 130 tokens to evict


@cache
def cold_answers(family: str, policy: str) -> list[list[int]]:
    """Return the answers to PROMPTS of an engine that caches no prefixes."""
    engine = make_engine(family, backend="cpu", demotes=demotes(policy))
    return [run_to_completion(engine, [make_request(p, LENGTH, policy)])[0] for p in PROMPTS]


def fitting(family: str, policy: str) -> str:
    """Return the policy, or one that layers which differ can carry out."""
    if family != UNLIKE:
        return policy
    return "tova:budget=50%" if policy.startswith("gate") else policy.replace("share=all", "share=layer")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", POLICIES)
def test_what_a_budget_leaves_changes_no_token_of_others(family: str, first: str) -> None:
    """The same prompt again, one with another end, and a longer one, under this policy and every third of others."""
    others = [*PLAIN, *SCORED][len(first) % 3 :: 3]  # the thirds take turns
    first = fitting(family, first)
    for second in dict.fromkeys([first, *(fitting(family, p) for p in others)]):
        engine = make_engine(family, backend="cpu", prefix_cache="exact", demotes=demotes(first, second))
        run_checked(engine, [make_request(TEXT, LENGTH, first)])
        for prompt, answer in zip(PROMPTS, cold_answers(family, second), strict=True):
            assert run_checked(engine, [make_request(prompt, LENGTH, second)]) == [answer]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", [*PLAIN, *SCORED])
def test_a_prompt_is_computed_once_whatever_the_budget(family: str, first: str) -> None:
    text = random_tokens(random.Random(1), 100)
    again_alone = [fitting(family, first), fitting(family, first).replace("50%", "45%")] * (first in SCORED)
    for second in [*PLAIN, *again_alone]:
        engine = make_engine(family, backend="cpu", prefix_cache="exact")
        run_checked(engine, [make_request(text, 8, fitting(family, first))])
        again = make_request(text, 8, second)
        run_checked(engine, [again])
        ends_late = first == "h2o:budget=130" and family != "llama"  # it leaves its end alone
        assert again.stats.num_cached_tokens >= (0 if ends_late else len(text) // S * S)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "policy",
    [
        "sinks:budget=50%",
        *slow(
            "h2o:budget=30%",
            "gate:budget=25%,share=layer",
            "knorm:budget=90",
            "knorm:budget=51,interval=7,share=layer,demote=int4:5",
        ),
    ],
)
def test_a_prompt_that_fits_alone_fits_beside_what_is_cached_of_it(family: str, policy: str) -> None:
    """In a pool of what it needs, pinned or not: cached pages go, and no request begins twice."""
    policy = fitting(family, policy)
    rng = random.Random(3)
    text = random_tokens(rng, 100)
    request = make_request(text, 40, policy)
    options = {"backend": "cpu", "demotes": demotes(policy)}
    sizes = make_engine(family, **options).cache
    num_pages = sizes.pages_needed(sizes.planner.effective_policy(request.policy), 139, 139)
    engine = make_engine(family, prefix_cache="exact", num_pages=num_pages, **options)
    expected = run_to_completion(make_engine(family, **options), [make_request(text, 40, policy)])
    for is_pinned in (False, True, False):
        for length in (32, 100):
            run_checked(engine, [make_request(text[:length], 1)])
        if is_pinned:
            assert engine.cache.hints.retain(request.policy, Text(text), 100.0)
        again = make_request(text, 40, policy)
        assert run_checked(engine, [again]) == expected
        assert not again.stats.num_preemptions


@pytest.mark.parametrize("family", ["llama", *slow("gemma3_text")])
@pytest.mark.parametrize("name", sorted({*policies.names()} - {"reread"}))  # reads the whole prompt again
def test_a_prompt_that_fits_into_a_step_is_found_again(family: str, name: str) -> None:
    """All but its last token, whose logits are needed, or the newest ones, whose queries are.

    Where layers have windows, no row can begin at such a position.
    """
    spec = spec_of(name, "budget=50%")
    num_needed = max(policies.parse(spec).modes.refit, 1)
    engine = make_engine(family, backend="cpu", prefix_cache="exact", max_batched_tokens=512, looks=name == "look")
    requests = [make_request([7 * i % 97 for i in range(400)], 8, spec) for _ in range(2)]
    first, second = (run_checked(engine, [request]) for request in requests)
    assert [r.stats.num_cached_tokens for r in requests] == [
        0,
        0 if num_needed > 1 and family == "gemma3_text" else 400 - num_needed,
    ]
    assert first == second


@pytest.mark.parametrize("place", ["pool", "running"])
@pytest.mark.parametrize(
    "policy",
    [
        "replay:budget=60,block=64,refit=20",
        "gate_replay:budget=60,block=64,refit=0",
        *slow("compactor:budget=60,block=64,sinks=0"),
    ],
)
def test_prompts_that_share_whole_blocks_of_queries_begin_behind_them(policy: str, place: str) -> None:
    """The blocks before the last one of a prompt score alike in any longer text."""
    text = random_tokens(random.Random(0), 150)
    engine = make_engine("llama", backend="cpu", prefix_cache="exact", max_batched_tokens=100)
    first = make_request(text, 10 if place == "pool" else 60, policy)
    engine.add(first)
    next(step for step, _ in enumerate(iter_steps(engine)) if first.num_output_tokens == (10, 1)[place == "running"])
    for shared, cached in ((150, 128), (140, 128), (100, 0)):
        prompt = [*text[:shared], *range(5, 75)]
        other = make_request(prompt, 20, policy)
        run_checked(engine, [other])
        assert other.stats.num_cached_tokens == cached
        assert [other.output_tokens] == run_to_completion(
            make_engine("llama", backend="cpu"), [make_request(prompt, 20, policy)]
        )


@pytest.mark.parametrize("policy", ["h2o:budget=90", "gate:budget=50%"])
def test_rows_that_add_masses_to_shared_pages_change_no_token_of_a_budget(policy: str) -> None:
    """A traced request of the same text writes masses into the pages that the budget's first turn left."""
    answers = []
    for traced in (True, False):
        engine = make_engine("llama", backend="cpu", prefix_cache="exact")
        first = make_request(TEXT[:60], 10, policy)
        run_checked(engine, [first])
        if traced:
            other = make_request([*first.tokens, 1, 2, 3], 10)
            other.attention_trace = AttentionTrace(3, 2)
            run_checked(engine, [other])
        longer = [make_request([*text, *TEXT[60:]], 30, policy) for text in (first.tokens, first.prompt)]
        answers.append([run_checked(engine, [r])[0] for r in longer])
        assert longer[0].stats.num_cached_tokens >= len(first.tokens) - 1 and longer[1].stats.num_cached_tokens
    assert answers[0] == answers[1]


def test_a_prompt_whose_logits_are_computed_again_gets_the_same_masses() -> None:
    """A request that wants the logits of its prompt begins with masses of all of it, and computes its tokens."""
    engine = make_engine("llama", backend="cpu", prefix_cache="exact")
    plain = make_engine("llama", backend="cpu")
    for options in ({}, {"needs_prompt_logits": True}, {"needs_logits": True}):
        requests = [make_request(TEXT, 20, "h2o:budget=50%", **options) for _ in range(2)]
        assert run_checked(engine, requests[:1]) == run_to_completion(plain, requests[1:])


@pytest.mark.parametrize("policy", ["h2o:budget=500", *slow("gate:budget=500", "snapkv:budget=500", "h2o:budget=50%")])
@pytest.mark.parametrize(("length", "more"), [(300, 0), (300, 40), (60, 0)])
def test_a_scored_prompt_of_sliding_layers_comes_again_beside_a_tier(policy: str, length: int, more: int) -> None:
    """Windows are kept at the end of a text, so masses of a prompt inside it may have no windows to go with."""
    engine = make_engine("gemma3_text", prefix_cache="exact", backend="cpu", tiers=["ram:capacity=100MB"])
    prompt = [i % 97 for i in range(length)]
    longer = prompt + [3] * more
    run_checked(engine, [make_request(prompt, 8, policy)])
    (found,) = run_checked(engine, [make_request(longer, 8, policy)])
    cold = make_engine("gemma3_text", backend="cpu")
    assert [found] == run_to_completion(cold, [make_request(longer, 8, policy)])


@pytest.mark.parametrize("policy", ["h2o:budget=500", "tova:budget=50%", *slow("gate:budget=50%", "sinks:budget=50%")])
@pytest.mark.parametrize("length", [150, 160])
def test_a_request_that_is_preempted_in_its_answer_computes_a_token_of_its_prompt(policy: str, length: int) -> None:
    """The whole prompt is cached, masses too; its last token gives the logits of the next one."""
    expected = run_to_completion(make_engine("llama"), [make_request([i % 97 for i in range(length)], 8, policy)])
    engine = make_engine("llama", prefix_cache="exact", max_batched_tokens=64)
    request = make_request([i % 97 for i in range(length)], 8, policy)
    engine.add(request)
    was_preempted = False
    for _ in iter_steps(engine):
        check_cached_pages(engine.cache)
        if request.num_output_tokens == 1 and not was_preempted:
            engine.scheduler.preempt(request)
            was_preempted = True
    assert was_preempted
    assert [request.output_tokens] == expected


@pytest.mark.parametrize("policy", ["h2o:budget=500,resume=off", *slow("h2o:budget=50%,resume=off", "h2o:budget=500")])
def test_masses_go_with_their_texts_and_a_small_shortage_frees_little(policy: str) -> None:
    engine = make_engine("llama", prefix_cache="exact", num_pages=20000)
    rng = random.Random(0)
    prompts = [random_tokens(rng, 200 + 7 * i) for i in range(4)]
    for prompt in prompts:
        run_to_completion(engine, [make_request(prompt, 1 + rng.randrange(30), policy)])
    tree = engine.cache.prefix_cache.tree
    for _ in range(12):
        num_free = engine.cache.pool.num_free
        tree.evict(20)
        assert 20 <= engine.cache.pool.num_free - num_free < 60
        for node in tree.iter_nodes():
            if any(isinstance(c, Masses) for c in node.checkpoints.values()):
                assert node.has_pages or (node.parent and node.parent.has_pages)
        engine.cache.check()
