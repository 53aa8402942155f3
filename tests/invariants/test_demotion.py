"""Laws of demotion: what a budget forgets first goes to four bits, and is forgotten from there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from retain import LLM, SamplingParams, kernels
from retain.engine.drafters import parse as parse_drafter
from retain.engine.engine import Engine
from retain.kernels import triton
from retain.processing.examples import Example
from retain.tune.tuner import mean_bytes
from tests.helpers.engines import make_engine, make_request, random_prompts, row_of, run_alone, run_to_completion
from tests.helpers.list_model import ListModel, ListPolicy
from tests.helpers.marks import slow
from tests.helpers.slots import read_pages

INT8 = torch.int8
FAMILIES = ["gemma3_text", *slow("llama", "mpt")]
NAMES = [n for n in ("cpu", "reference") if kernels.import_backend(n).unavailable_reason() is None]
needs_triton = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
BACKENDS = [pytest.param(n, marks=pytest.mark.slow if n == "reference" else ()) for n in NAMES]
POLICIES = [
    "h2o:budget=30,demote=int4:20",
    "gate:budget=25%,demote=int4:25%",
    "knorm:budget=25,interval=3,demote=int4",
    "reread:budget=30,demote=int4:10,share=all,rereads=40",
    "h2o:budget=20,prefill=stream,chunk=24,demote=int4:40",
    "sinks:budget=20,prefill=stream,chunk=33,demote=int4",
    "full",
]
NUM_TOKENS = 80  # every policy evicts what it has demoted, those with a limit of demoted tokens
OPTIONS: dict[str, Any] = {"demotes": True, "dtype": torch.bfloat16}

LISTS = {
    "h2o:budget=40,interval=1,demote=int4:10": ListPolicy("h2o", demote=10),
    "h2o:budget=25,recent=7,interval=5,value=norm,share=all,demote=int4:20": ListPolicy(
        "h2o", budget=25, recent=7, interval=5, norm_values=True, share="all", demote=20
    ),
    "gate:budget=20,recent=6,interval=3,demote=int4:35": ListPolicy(
        "gate", budget=20, recent=6, interval=3, share="all", demote=35
    ),
    "h2o:budget=80,recent=24,interval=9,demote=int4:5": ListPolicy(
        "h2o", budget=80, recent=24, interval=9, demote=5
    ),  # the prompt fits
    "reread:budget=20,recent=6,interval=5,rereads=30,first=10,demote=int4:200": ListPolicy(
        "reread", budget=20, recent=6, interval=5, reread_chunk=30, first=10, demote=200
    ),
    "sinks:budget=40,interval=3,demote=int4:12": ListPolicy("sinks", sinks=4, interval=3, demote=12),
    "sinks:budget=20,recent=10,interval=7,prefill=stream,chunk=16,demote=int4": ListPolicy(
        "sinks", budget=20, recent=10, sinks=4, interval=7, chunk=16, demote=1000
    ),
    "h2o:budget=20,recent=6,interval=5,prefill=stream,chunk=17,demote=int4:30": ListPolicy(
        "h2o", budget=20, recent=6, interval=5, chunk=17, demote=30
    ),
    "gate:budget=30,recent=9,interval=6,share=none,prefill=stream,chunk=50,demote=int4": ListPolicy(
        "gate", budget=30, recent=9, interval=6, chunk=50, demote=1000
    ),
}


def list_cases() -> Iterator[Any]:
    """Yield every policy with one family in turn, and those that score keys with each.

    Positions are in the keys of a family with rope only, and rings are beside the layers of another; the policies
    that demote differ in nothing else.
    """
    families = ["llama", "gpt2", "gemma3_text"]
    for i, policy in enumerate(LISTS):
        for f, family in enumerate(families):
            if LISTS[policy].name == "gate" or f == i % len(families):
                yield pytest.param(family, policy, marks=[] if i == 0 else [pytest.mark.slow])


@pytest.mark.parametrize(("family", "policy"), list(list_cases()))
def test_an_independent_implementation_with_lists_keeps_and_demotes_the_same_tokens(family: str, policy: str) -> None:
    lists = ListModel(family, LISTS[policy])
    request = make_request([7 * i % 128 for i in range(70)], NUM_TOKENS + 1, policy)
    expected = lists.generate(request.prompt, NUM_TOKENS, NUM_TOKENS + 1, request.noise_seed)
    engine = make_engine(family, demotes=True, dtype=torch.float32)
    engine.add(request)
    while len(request.output_tokens) < NUM_TOKENS:
        engine.step()
    assert request.output_tokens == expected
    demoted = engine.cache.tables.demoted
    row = row_of(engine, request)
    assert demoted
    for (layer, g), head in lists.heads.items():
        if lists.spec.kv_cache.windows[layer] is None:
            pages = torch.from_numpy(demoted.pages[row.index, layer, g, : demoted.counts[row.index, layer, g]])
            pos = demoted.store.kv.pos[pages.long()].flatten()
            assert sorted(pos[pos >= 0].tolist()) == head.positions[head.demoted].tolist()
            assert row.positions()[layer][g] == head.position_list
            k, v = (x.flatten(0, 1)[pos >= 0] for x in read_pages(engine.cache.backend, demoted.store.kv, pages.long()))
            order = pos[pos >= 0].argsort()
            held = torch.stack((head.keys, head.values), 1)[head.demoted]
            assert_rounded_alike(torch.stack((k, v), 1)[order], held)


def assert_rounded_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check tokens [n, 2, D] that were rounded to 4 bits: equal, but for a few whose last bits fell on a boundary."""
    largest = expected.abs().amax((1, 2))
    error = (found - expected).abs().amax((1, 2))
    assert (error <= largest).all()
    assert (error > 2**-7 * largest).sum() <= 1 + 0.02 * len(expected)  # the scales are rounded to bfloat16


def run(family: str, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], Engine]:
    """Answers of 40 tokens to prompts that run together, each with a policy."""
    engine = make_engine(family, **(OPTIONS | options))
    requests = [make_request(p, 40, POLICIES[i % len(POLICIES)]) for i, p in enumerate(prompts)]
    found = run_to_completion(engine, requests)
    engine.cache.check()
    return found, engine


@pytest.mark.parametrize("kv_dtype", [INT8, *slow(torch.bfloat16)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_company_changes_no_token(family: str, backend: str, kv_dtype: torch.dtype) -> None:
    options = OPTIONS | {"backend": backend, "kv_dtype": kv_dtype}
    prompts = random_prompts(6, seed=1, max_prompt_len=150)
    alone = [run_alone(family, p, 40, POLICIES[i % len(POLICIES)], **options) for i, p in enumerate(prompts)]
    assert run(family, prompts, **options)[0] == alone


@pytest.mark.parametrize("policy", POLICIES[:-1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_chunk_size_changes_no_token(policy: str, backend: str) -> None:
    prompt = random_prompts(1, seed=3)[0] + random_prompts(1, seed=4)[0]
    options = OPTIONS | {"policy": policy, "backend": backend, "kv_dtype": INT8}
    whole = run_alone("gemma3_text", prompt, max_batched_tokens=400, **options)
    for chunk in (65, 97):
        assert run_alone("gemma3_text", prompt, max_batched_tokens=chunk, **options) == whole


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [90, *slow(100)])
def test_a_small_pool_changes_no_token(num_pages: int) -> None:
    """Requests are preempted, pages change their kind, and no page is lost or taken twice."""
    prompts = random_prompts(40, seed=2, max_prompt_len=150)
    expected, _ = run("gemma3_text", prompts, backend="cpu", kv_dtype=INT8)
    found, engine = run("gemma3_text", prompts, backend="cpu", kv_dtype=INT8, num_pages=num_pages)
    assert found == expected
    assert engine.cache.pool.num_used == 0 and engine.cache.pool.peak_used > num_pages - 40


@pytest.mark.parametrize("spec", ["ngram:k=5,min=1", "self:k=3,budget=48"])
def test_greedy_tokens_do_not_depend_on_drafts(spec: str) -> None:
    """Masses of rejected drafts change what scored policies forget, so these score by keys."""
    prompts = random_prompts(6, seed=2)

    def answers(**options: Any) -> list[list[int]]:
        engine = make_engine("gemma3_text", backend="cpu", **(OPTIONS | options))
        return run_to_completion(engine, [make_request(p, 40, "knorm:budget=30,demote=int4:20") for p in prompts])

    assert answers(drafter=parse_drafter(spec)) == answers()


@pytest.mark.parametrize("cached", ["exact", *slow("off")])
def test_samples_of_one_prompt_share_its_computation(cached: str) -> None:
    prompt = random_prompts(1, seed=5)[0] * 2
    requests = [make_request(prompt, 30, p) for p in ("h2o:budget=20,demote=int4:30", "h2o:budget=30,demote=int4:9")]
    alone = [
        run_alone("gemma3_text", prompt, 30, str(p), **OPTIONS)
        for p in ("h2o:budget=20,demote=int4:30", "h2o:budget=30,demote=int4:9")
    ]
    assert run_to_completion(make_engine("gemma3_text", prefix_cache=cached, **OPTIONS), requests) == alone


@pytest.mark.slow
@needs_triton
def test_recorded_steps_attend_to_demoted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs of steps with and without demoted tokens; on a CPU a recorded step is computed from its plan."""
    from retain.kernels.triton import graphs

    monkeypatch.setattr(graphs, "CAPTURE_AFTER", 1)
    specs = ["full", "h2o:budget=8,interval=2,demote=int4:6", "knorm:budget=6,demote=int4:9"]
    sizes = [(3, 2), (16, 4), (18, 3)]  # tokens of prompt and answer

    def answers(backend: str) -> tuple[list[list[int]], Engine]:
        engine = make_engine("llama", backend=backend, demotes=True)
        requests = [make_request(list(range(3, 3 + n)), m, spec) for spec, (n, m) in zip(specs, sizes, strict=True)]
        return run_to_completion(engine, requests[:1]) + run_to_completion(engine, requests[1:]), engine

    (expected, _), (found, engine) = answers("reference"), answers("triton")
    assert found == expected
    program: Any = engine.runner.program  # type: ignore[attr-defined]
    assert {key[0].groups[0].max_demoted_pages for key in program._graphs.graphs} == {0, 1}


def test_demoted_tokens_are_held_in_fewer_bytes() -> None:
    """Four times the tokens of a budget alone take less than twice its pages. Statistics count every token."""
    prompt, held = [i % 50 for i in range(400)], {}
    for policy in ("knorm:budget=100", "knorm:budget=100,demote=int4:300"):
        engine = make_engine("llama", backend="cpu", demotes=True, dtype=torch.bfloat16)
        request = make_request(prompt, 2, policy)
        engine.add(request)
        while not request.output_tokens:
            engine.step()
        positions = row_of(engine, request).positions()
        tokens = sum(len(head) for heads in positions for head in heads)
        assert engine.cache.pool_stats().slots_by_state["budgeted"] == tokens
        held[policy] = tokens, row_of(engine, request).num_pages
    (tokens, pages), (more_tokens, more_pages) = held.values()
    assert more_tokens == 4 * tokens and more_pages < 2 * pages


@pytest.mark.parametrize("policy", [*POLICIES[:-1], "knorm:budget=200,demote=int4"])
@pytest.mark.parametrize("prompt_len", [30, 210, *slow(150)])
def test_a_request_owns_no_more_pages_than_planned(policy: str, prompt_len: int) -> None:
    """Pages of demoted tokens come with the text, so a short one never owns those of a long one."""
    engine = make_engine("llama", max_batched_tokens=64, **OPTIONS)
    request = make_request([7 * i % 50 for i in range(prompt_len)], 61, policy)  # 150 tokens outgrow budget=200
    engine.add(request)
    while len(request.output_tokens) < 60:
        engine.step()
        length = len(request.tokens) - 1 if request.output_tokens else request.num_computed_tokens
        owned = row_of(engine, request).num_pages
        assert owned <= engine.cache.pages_needed(request.policy, length, prompt_len)


@pytest.mark.parametrize("policy", [*POLICIES[:-1], "reread:budget=83%,share=layer,demote=int4:42"])
@pytest.mark.parametrize("prompt_len", [48, *slow(30, 100, 210)])
def test_a_request_ends_in_a_pool_of_the_planned_pages(policy: str, prompt_len: int) -> None:
    """Also where it reads its prompt again between the prompt's last step and the first demotion."""
    options = OPTIONS | {"dtype": torch.float32}
    sizes, prompt = make_engine("llama", **options).cache, [7 * i % 50 for i in range(prompt_len)]
    request = make_request(prompt, 20, policy)
    length = prompt_len + 19
    engine = make_engine(
        "llama",
        num_pages=sizes.pages_needed(sizes.planner.effective_policy(request.policy), length, length),
        max_running_requests=1,
        max_batched_tokens=61,
        **options,
    )
    engine.add(request)
    for _ in range(100):
        engine.step()
        engine.cache.check()
    assert not engine.has_unfinished_requests and not request.stats.num_preemptions
    assert request.output_tokens == run_alone("llama", prompt, 20, policy, **options)


@pytest.mark.parametrize("policy", ["knorm:budget=100,demote=int4:150", "knorm:budget=60%,demote=int4:80%"])
def test_tune_knows_the_pages_of_a_policy_that_demotes(policy: str) -> None:
    prompt = [i % 50 for i in range(300)]
    engine = make_engine("llama", backend="cpu", demotes=True, dtype=torch.bfloat16)
    request = make_request(prompt, 20, policy)
    engine.add(request)
    while len(request.output_tokens) < 19:
        engine.step()
    cache = engine.cache
    held = row_of(engine, request).num_pages * cache.store.page_bytes
    assert held == mean_bytes(cache, policy, [Example(prompt, [0] * 18)])


def test_an_engine_says_what_it_cannot_demote() -> None:
    llm = LLM("random:tiny", kv_memory="2MiB")
    with pytest.raises(ValueError, match="demotes tokens: start the engine with such a policy"):
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), kv_policy="h2o:budget=25%,demote=int4:50%")


def test_requests_may_name_allowed_policies_beside_a_full_cache() -> None:
    """The cache has room for what an allowed policy needs; other requests keep prefixes as ever."""
    demoting, by_head, prompt = "sinks:budget=20,demote=int4", "h2o:budget=9,heads=query", list(range(3, 99))
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    llm = LLM("random:tiny", kv_memory="8MiB", allow_policy=(demoting, by_head))
    outputs = llm.generate([prompt] * 4, params, kv_policy=["full", demoting, by_head, "full"])
    for policy, output in zip(("full", demoting, by_head), outputs, strict=False):
        assert (
            output.token_ids
            == LLM("random:tiny", kv_memory="8MiB", kv_policy=policy).generate([prompt], params)[0].token_ids
        )
    assert llm.generate([prompt], params)[0].cached_tokens
