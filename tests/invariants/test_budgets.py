"""Laws of budgets: an independent implementation keeps the same tokens; policies that must agree do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv.eviction import policies
from retain.kv.row import Row
from retain.sampling_params import SamplingParams
from tests.helpers.attention_case import assert_close
from tests.helpers.engines import make_engine, make_request, random_prompts, row_of, run_alone, run_to_completion
from tests.helpers.list_model import ListModel, ListPolicy
from tests.helpers.marks import every_third, slow
from tests.helpers.policy_specs import spec_of
from tests.helpers.slots import read_pages

FAMILIES = ["llama", *slow("gpt2", "mpt", "gemma3_text")]  # grouped heads, learned positions, ALiBi, sliding layers
BACKENDS = ["cpu", *slow("reference")]
INSTRUCTION = tuple(range(30, 60))
KEY_SCORES = ("knorm", "keydiff")  # equal tokens score equally but for rounding, which differs between backends

POLICIES = {
    "h2o:budget=40,interval=1": ListPolicy("h2o"),
    "h2o:budget=40,interval=7,sinks=3,recent=10": ListPolicy("h2o", recent=10, sinks=3, interval=7),
    "h2o:budget=40,interval=1,damping=0.9": ListPolicy("h2o", damping=0.9),
    "h2o:budget=40,interval=5,value=norm": ListPolicy("h2o", norm_values=True, interval=5),
    "h2o:budget=40,interval=5,heads=kv-max": ListPolicy("h2o", heads="kv-max", interval=5),
    "h2o:budget=40,interval=5,heads=query": ListPolicy("h2o", heads="query", interval=5),
    "h2o:budget=24,recent=7,interval=5,heads=union": ListPolicy("h2o", heads="union", interval=5, budget=24, recent=7),
    "h2o:budget=40,interval=5,scope=shared": ListPolicy("h2o", scope="shared", interval=5),
    "h2o:budget=40,interval=5,share=layer": ListPolicy("h2o", share="layer", interval=5),
    "h2o:budget=40,interval=5,share=all": ListPolicy("h2o", share="all", interval=5),
    "keyformer:budget=40,interval=1": ListPolicy("keyformer"),
    "keyformer:budget=40,interval=5,redraw=once": ListPolicy("keyformer", noise_period=0, interval=5),
    "keyformer:budget=40,interval=5,redraw=4": ListPolicy("keyformer", noise_period=4, interval=5),
    "tova:budget=40,interval=1": ListPolicy("tova"),
    "snapkv:budget=40,interval=4,queries=16": ListPolicy("snapkv", num_queries=16, interval=4),
    "reread:budget=40,interval=3,rereads=30": ListPolicy("reread", interval=3, reread_chunk=30),
    "reread:budget=40,interval=3,share=all,mix=h2o,value=norm": ListPolicy(
        "reread", interval=3, reread_chunk=1024, share="all", mix_h2o=True, norm_values=True
    ),
    "reread:budget=40,interval=3,rereads=30,first=10": ListPolicy("reread", interval=3, reread_chunk=30, first=10),
    "reread:budget=40,interval=5,rereads=30,first=24,share=all": ListPolicy(
        "reread", interval=5, reread_chunk=30, first=24, share="all"
    ),
    "reread:budget=40,interval=5,ask=repeat": ListPolicy(
        "reread", interval=5, reread_chunk=1024, instruction=INSTRUCTION
    ),
    "reread:budget=40,interval=5,rereads=40,first=10,ask=repeat": ListPolicy(
        "reread", interval=5, reread_chunk=40, first=10, instruction=INSTRUCTION
    ),
    "gate:budget=40,interval=3,recent=12": ListPolicy("gate", interval=3, share="all"),
    "gate:budget=40,interval=5,recent=12,share=none": ListPolicy("gate", interval=5),
    "gate:budget=30,recent=9,share=none,prefill=stream,chunk=13": ListPolicy(
        "gate", budget=30, recent=9, interval=16, chunk=13
    ),
    "knorm:budget=40,interval=3": ListPolicy("knorm", interval=3),
    "keydiff:budget=40,interval=3": ListPolicy("keydiff", interval=3),
    "knorm:budget=40,interval=3,share=all": ListPolicy("knorm", interval=3, share="all"),
    "sinks:budget=40,interval=3": ListPolicy("sinks", sinks=4, interval=3),
    "dilated:budget=40,interval=3": ListPolicy("dilated", interval=3),
    "window:budget=40,interval=1": ListPolicy("window"),
    "random:budget=40,interval=2": ListPolicy("random", interval=2),
    "h2o:budget=30,prefill=stream,chunk=13": ListPolicy("h2o", budget=30, recent=9, interval=16, chunk=13),
    "keyformer:budget=30,prefill=stream,chunk=25": ListPolicy("keyformer", budget=30, recent=9, interval=16, chunk=25),
}


def head_positions(engine: Engine, row: Row, layer: int, g: int) -> set[int]:
    """Return the positions in the slots of a head."""
    cache = engine.cache
    pages = torch.from_numpy(cache.tables.pages[row.index, layer, g, : cache.tables.counts[row.index, layer, g]]).long()
    return {p for p in cache.kv.pos[pages].flatten().tolist() if p >= 0}


def head_contents(engine: Engine, row: Row, layer: int, g: int) -> Tensor:
    """Return keys and values of a head's tokens by position, [n, 2, D]."""
    cache = engine.cache
    pages = torch.from_numpy(cache.tables.pages[row.index, layer, g, : cache.tables.counts[row.index, layer, g]]).long()
    pos = cache.kv.pos[pages].flatten()
    kv = torch.stack([x.flatten(0, 1) for x in read_pages(cache.backend, cache.kv, pages)], 1)
    return kv[pos >= 0][pos[pos >= 0].argsort()]


PROMPT, NUM_TOKENS = [7 * i % 128 for i in range(70)], 50


@cache
def answer_of_lists(family: str, policy: str) -> tuple[ListModel, list[int]]:
    """Return the lists and the greedy answer that every backend must give."""
    lists = ListModel(family, POLICIES[policy])
    return lists, lists.generate(PROMPT, NUM_TOKENS, NUM_TOKENS + 1, seed=0)


FAST = [policy for policy in POLICIES if POLICIES[policy].name not in KEY_SCORES][::9]


def list_cases() -> Iterator[Any]:
    """Yield every policy with one family and another in turn on one backend, and in turn on the reference as well.

    Policies that score keys have every family, because families differ in what is in a key. That the backends agree is
    a law of tests/kernels.
    """
    names = ["llama", "gpt2", "mpt", "gemma3_text"]
    for (f, family), (i, policy) in product(enumerate(names), enumerate(POLICIES)):
        name = POLICIES[policy].name
        if name not in (*KEY_SCORES, "gate") and f not in (0, 1 + i % 3):
            continue
        backends = ["reference"] if name in KEY_SCORES else ["cpu", *["reference"] * (i % 4 == f)]
        for backend in backends:
            is_fast = policy in FAST and (family, backend) == ("llama", "cpu")
            yield pytest.param(family, policy, backend, marks=[] if is_fast else [pytest.mark.slow])


@pytest.mark.parametrize(("family", "policy", "backend"), list(list_cases()))
def test_an_independent_implementation_with_lists_keeps_the_same_tokens(family: str, policy: str, backend: str) -> None:
    spec = ListModel(family, POLICIES[policy]).spec
    lists, expected = answer_of_lists(family, policy)
    engine = make_engine(family, backend=backend, score_columns=spec.num_heads // spec.kv_cache.only_group.num_kv_heads)
    parsed = policies.parse(policy).with_instruction(lists.policy.instruction)
    request = make_request(PROMPT, NUM_TOKENS + 1, parsed)
    assert request.noise_seed == 0
    engine.add(request)
    while len(request.output_tokens) < NUM_TOKENS:
        engine.step()
    assert request.output_tokens == expected
    row = row_of(engine, request)
    for (layer, g), head in lists.heads.items():
        if spec.kv_cache.windows[layer] is None:
            kept = head_positions(engine, row, layer, g)
            has_positions_in_keys = spec.attention.alibi_slopes is None
            if lists.policy.name == "keydiff" and not has_positions_in_keys:  # equal tokens: equal but for rounding
                assert {request.tokens[p] for p in kept} == {request.tokens[p] for p in head.position_list}
                continue
            assert kept == set(head.position_list)
            assert_close(head_contents(engine, row, layer, g), torch.stack((head.keys, head.values), 1))


BUDGET_POLICIES = [n for n in policies.names() if n not in ("full", "look", "ring")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", every_third(BUDGET_POLICIES))
def test_a_budget_of_at_least_the_whole_text_equals_full(name: str, family: str) -> None:
    prompts = random_prompts(4, max_prompt_len=60)
    full = generate(family, prompts, "full")
    assert generate(family, prompts, spec_of(name, "budget=200")) == full
    assert generate(family, prompts, spec_of(name, "budget=90,interval=1")) == full


def generate(family: str, prompts: list[list[int]], policy: str) -> list[list[int]]:
    """Return answers of 30 tokens, of requests that run together."""
    return run_to_completion(make_engine(family, backend="cpu"), [make_request(p, 30, policy) for p in prompts])


@pytest.mark.parametrize("family", FAMILIES)
def test_policies_that_define_the_same_priority_agree(family: str) -> None:
    prompts = [p for p in random_prompts(20, max_prompt_len=150) if len(p) > 60][:3]
    h2o = generate(family, prompts, "h2o:budget=30")
    assert h2o == generate(family, prompts, "keyformer:budget=30,noise=none,tau=1")
    assert h2o == generate(family, prompts, "keyformer:budget=30,noise=constant,tau=1")
    assert h2o == generate(family, prompts, "snapkv:budget=30,queries=1000")
    assert h2o != generate(family, prompts, "tova:budget=30")
    window = generate(family, prompts, "window:budget=30")
    assert window == generate(family, prompts, "sinks:budget=30,sinks=0")
    assert window == generate(family, prompts, "dilated:budget=30,stride=1")
    assert window == generate(family, prompts, "h2o:budget=30,recent=30")


@pytest.mark.parametrize("family", ["llama", *slow("gpt2", "mpt")])
def test_a_window_budget_equals_a_ring(family: str) -> None:
    """From prompts that fit: a ring slides while the prompt is computed, a budget only afterwards.

    The newest token attends to `budget` others, so the ring has one slot more.
    """
    prompts = random_prompts(4, max_prompt_len=25)
    assert generate(family, prompts, "window:budget=32,interval=1") == generate(family, prompts, "ring:window=33")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_company_of_other_policies_changes_no_token(family: str, backend: str) -> None:
    specs = ["h2o:budget=30", "full", "keyformer:budget=50%,interval=2", "ring:window=20", "tova:budget=20"]
    params = [SamplingParams(temperature=0, ignore_eos=True, seed=i) for i in range(5)]
    prompts = [p for p in random_prompts(30, max_prompt_len=150) if len(p) > 40][:5]

    def request(i: int) -> Request:
        return make_request(prompts[i], 30, specs[i], params[i])

    together = run_to_completion(make_engine(family, backend=backend), [request(i) for i in range(5)])
    alone = [run_to_completion(make_engine(family, backend=backend), [request(i)])[0] for i in range(5)]
    assert together == alone


def test_eviction_frees_whole_pages() -> None:
    engine = make_engine("llama", page_size=16, backend="cpu")
    request = make_request([i % 128 for i in range(120)], 150, "h2o:budget=40,interval=8")
    engine.add(request)
    engine.step()
    num_heads = 3 * 2
    assert engine.cache.total_pages - engine.cache.free_pages == num_heads * 3  # for 40 tokens
    while len(request.output_tokens) < 149:
        engine.step()
        assert engine.cache.total_pages - engine.cache.free_pages == num_heads * 3  # for 48, with those of an interval
        engine.cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_computed_in_one_step_keeps_what_one_in_chunks_keeps(family: str, backend: str) -> None:
    """Alone and in company."""
    prompts = [p for p in random_prompts(30, max_prompt_len=150) if len(p) > 120][:2]

    def generate(max_batched_tokens: int, prompts: list[list[int]]) -> list[list[int]]:
        engine = make_engine(family, backend=backend, max_batched_tokens=max_batched_tokens)
        return run_to_completion(engine, [make_request(p, 30, "h2o:budget=20,interval=4") for p in prompts])

    expected = [generate(100, [p])[0] for p in prompts]
    assert generate(256, prompts[:1]) == expected[:1]
    assert generate(256, prompts) == expected


def test_a_prompt_longer_than_memory_streams_through_its_budget() -> None:
    """300 tokens in pages for 64: refused as a whole, and computed chunk by chunk without ever owning more."""
    num_heads, policy = 3 * 2, "h2o:budget=40,interval=8"
    prompt = [7 * i % 128 for i in range(300)]
    engine = make_engine("llama", num_pages=num_heads * 4, max_batched_tokens=24, max_running_requests=4)
    with pytest.raises(ValueError, match="pages"):
        engine.add(make_request(prompt, 40, policy))
    request = make_request(prompt, 40, f"{policy},prefill=stream,chunk=24")
    (answer,) = run_to_completion(engine, [request])
    assert len(answer) == 40
    assert max(request.stats.peak_slots) == 64
    assert max(request.stats.final_slots) == 48


@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_prompt_that_fits_its_budget_equals_full(family: str) -> None:
    prompts = random_prompts(4, max_prompt_len=60)
    full = run_to_completion(make_engine(family, backend="cpu"), [make_request(p, 20) for p in prompts])
    engine = make_engine(family, backend="cpu", max_batched_tokens=24, max_running_requests=8)
    streamed = [make_request(p, 20, "h2o:budget=90,prefill=stream,chunk=24") for p in prompts]
    assert run_to_completion(engine, streamed) == full


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *slow("mpt")])
@pytest.mark.parametrize("share", ["all", *slow("none")])
def test_budgets_shrink_before_a_request_is_preempted(family: str, share: str) -> None:
    """A request that keeps everything grows; the others shrink, at most to their floors, and answer to the end."""
    prompts = [p for p in random_prompts(40, seed=8) if len(p) > 100][:5]
    policy = f"h2o:budget=60%,interval=4,share={share}"

    def run(shrink: str, num_pages: int) -> list[Request]:
        engine = make_engine(family, backend="cpu", num_pages=num_pages)
        requests = [make_request(prompts[0], 300), *(make_request(p, 260, policy + shrink) for p in prompts[1:])]
        run_to_completion(engine, requests)
        return requests

    # All requests fit at first, but the first one cannot grow to its end beside them.
    spec = make_engine(family).cache.spec
    num_pages = 40 * len(spec.windows) * spec.only_group.num_kv_heads
    fixed, shrinking = run("", num_pages), run(",shrink=16", num_pages)
    assert sum(r.stats.num_preemptions for r in fixed) and not sum(r.stats.num_preemptions for r in shrinking)
    assert fixed[0].output_tokens == shrinking[0].output_tokens == run("", 10_000)[0].output_tokens
    most_slots = [[max(r.stats.final_slots) for r in requests[1:]] for requests in (shrinking, fixed)]
    assert min(most_slots[0]) < max(most_slots[1])


@pytest.mark.parametrize(
    "policy", ["h2o:budget=50%", "h2o:budget=480", "reread:budget=50%", "tova:budget=9,prefill=stream"]
)
@pytest.mark.parametrize("family", ["gemma3_text", *slow("llama", "gpt2")])
def test_texts_may_fill_the_context(family: str, policy: str) -> None:
    """However many spare slots a policy wants, none lies beyond the table."""
    for prompt_len, interval in ((505, 16), (505, 5000), (511, 1), (500, 7)):
        request = make_request([i % 128 for i in range(prompt_len)], 513 - prompt_len, f"{policy},interval={interval}")
        (answer,) = run_to_completion(make_engine(family, backend="cpu"), [request])
        assert len(answer) == 513 - prompt_len


@pytest.mark.parametrize("prompt_len", [10, 17, *slow(33, 60)])
def test_a_second_reading_ends_in_a_pool_of_the_planned_pages(prompt_len: int) -> None:
    """Also in a model with rings, whose copies take whole pages."""
    prompt, policy = [7 * i % 50 for i in range(prompt_len)], "reread:budget=8"
    sizes, request = make_engine("gemma3_text").cache, make_request(prompt, 2, policy)
    num_pages = sizes.pages_needed(sizes.planner.effective_policy(request.policy), prompt_len + 1, prompt_len + 1)
    engine = make_engine("gemma3_text", num_pages=num_pages)
    engine.add(request)
    for _ in range(50):
        engine.step()
        engine.cache.check()
    assert not engine.has_unfinished_requests and not request.stats.num_preemptions
    assert request.output_tokens == run_alone("gemma3_text", prompt, 2, policy)
