"""Law 2: chunk size, batch company, preemption and resumption change no token. Law 1: ring(W) == full with a mask."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest
import torch

from retain import kernels
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kv import capacity
from retain.kv.capacity import CapacityPlanner, GroupPlanner
from retain.kv.memory import cache as memory_cache
from retain.sampling_params import SamplingParams
from tests.helpers.engines import (
    iter_steps,
    make_engine,
    make_request,
    random_prompts,
    run_alone,
    run_to_completion,
)
from tests.helpers.family_variants import CACHE_KINDS
from tests.helpers.marks import slow
from tests.helpers.tiny_models import CONFIGS, MULTIMODAL, has_states, tiny_model

FAST = ["llama", "gemma3_text"]
NAMES = [n for n in ("cpu", "reference") if kernels.import_backend(n).unavailable_reason() is None]
BACKENDS = [pytest.param(n, marks=pytest.mark.slow if n == "reference" else ()) for n in NAMES]


CHUNKED_POLICIES = [
    "full",
    "ring:window=24",
    "h2o:budget=40,prefill=stream,chunk=30",
    "reread:budget=50,rereads=40",
    "h2o:budget=25%",
    "replay:budget=40,block=50",
    "expected:budget=25%,queries=70",
]


def chunked_cases() -> Iterator[Any]:
    """Yield a family of each kind of cache with every policy, and every other family with one of them in turn.

    The backends take turns, but states are for the fast one: the reference takes seconds, and test_states.py runs it.
    """
    others = sorted(set(CONFIGS) - {*CACHE_KINDS, *MULTIMODAL})
    cases = [*product(CACHE_KINDS, CHUNKED_POLICIES), *zip(others, cycle(CHUNKED_POLICIES), strict=False)]
    for i, (family, policy) in enumerate(cases):
        backend = NAMES[0] if has_states(family) else NAMES[i % len(NAMES)]
        is_fast = (family, backend) in (("llama", NAMES[0]), ("gemma3_text", NAMES[0]))
        yield pytest.param(family, policy, backend, marks=[] if is_fast else [pytest.mark.slow])


@pytest.mark.parametrize(("family", "policy", "backend"), list(chunked_cases()))
def test_chunk_size_changes_no_token(family: str, policy: str, backend: str) -> None:
    prompt = random_prompts(1, seed=3)[0] + random_prompts(1, seed=4)[0]
    whole = run_alone(family, prompt, policy=policy, backend=backend, max_batched_tokens=400)
    for chunk in (65, 97):
        assert run_alone(family, prompt, policy=policy, backend=backend, max_batched_tokens=chunk) == whole


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", [*FAST, *slow("mpt")])
def test_company_changes_no_token(family: str, backend: str) -> None:
    prompts, policies = random_prompts(10, seed=1), ["full", "ring:window=20", "ring:window=50"]
    requests = [make_request(p, 12, policies[i % 3]) for i, p in enumerate(prompts)]
    together = run_to_completion(make_engine(family, backend=backend), requests)
    alone = [run_alone(family, p, policy=policies[i % 3], backend=backend) for i, p in enumerate(prompts)]
    assert together == alone


SHARING_POLICIES = [
    "reread:budget=400,rereads=50",
    "h2o:budget=40",
    "full",
    "h2o:budget=25%,share=layer",
    "window:budget=30",
    "reread:budget=30,rereads=50",
    "reread:budget=60",
    "ring:window=20",
    "reread:budget=20,rereads=50,value=norm",
    "knorm:budget=50%",
    "replay:budget=40",
    "replay:budget=25%,interval=5",
    "gate_replay:budget=30,block=40",
    "gate_replay:budget=40,share=none,interval=5",
    "press:budget=30,press=tests.helpers.presses.ExpectedAttention",
    "compactor:budget=30,block=40",
    "compactor:budget=50,block=40",
    "expected:budget=30",
    "expected:budget=30,sinks=1",
    "full",
]


@pytest.mark.parametrize("family", ["gemma3_text", *slow("llama", "mpt")])
@pytest.mark.parametrize("num_pages", [500, *slow(100_000)])
def test_sharing_the_computation_of_equal_prompts_changes_no_token(family: str, num_pages: int) -> None:
    """Under any policies, and when the request that computes the prompt is cancelled, is preempted or ends early."""
    pair = [p for p in random_prompts(30, seed=3) if len(p) > 100][:2]
    prompts = pair * len(SHARING_POLICIES)
    policies = [p for p in SHARING_POLICIES for _ in pair]
    lengths = [1 if i in (8, 9) else 20 + i for i in range(len(prompts))]
    arguments = list(zip(prompts, lengths, policies, strict=True))
    expected = [run_alone(family, p, n, backend="cpu", policy=policy) for p, n, policy in arguments]
    engine = make_engine(family, backend="cpu", num_pages=num_pages, max_batched_tokens=90)
    requests = [make_request(p, n, policy) for p, n, policy in arguments]
    engine.add(*requests)
    for step in iter_steps(engine):
        if step == 0:
            engine.cancel(requests[0])
        if step == 5:
            for request in list(engine.scheduler.running)[:2]:
                engine.scheduler.preempt(request)
    assert [r.output_tokens for r in requests[1:]] == expected[1:]
    assert engine.cache.free_pages == engine.cache.total_pages


@pytest.mark.slow
@pytest.mark.parametrize("policies", [("full", "full"), ("full", "h2o:budget=20"), ("h2o:budget=20", "full")])
def test_equal_prompts_get_the_logits_that_each_reads(policies: tuple[str, str]) -> None:
    """A forced answer samples no first token, so its step computes logits only where a caller reads them."""
    prompt, forced = random_prompts(1, seed=5)[0], [3, 4, 5]
    readings = [
        {"forced_tokens": tokens, "needs_logits": needs_logits, "needs_prompt_logits": needs_prompt_logits}
        for tokens in ([], forced)
        for needs_logits, needs_prompt_logits in ((False, False), (True, False), (False, True))
    ]
    alone = {p: [run_with_logits([make_request(prompt, 5, p, **r)])[0] for r in readings] for p in policies}
    for i, first in enumerate(readings):
        for j, second in enumerate(readings):
            pair = [make_request(prompt, 5, p, **r) for p, r in zip(policies, (first, second), strict=True)]
            found, expected = run_with_logits(pair), [alone[policies[0]][i], alone[policies[1]][j]]
            assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], (first, second)
            for (_, a), (_, b) in zip(found, expected, strict=True):
                assert_same_sums(a, b)


def assert_same_sums(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check logits that may differ by how sums are rounded: a BLAS adds in an order that follows from the rows.

    A sum of E products is rounded E times, each time by at most half a unit in the last place of the largest logit.
    """
    bound = (
        CONFIGS["llama"]["hidden_size"]
        * torch.finfo(expected.dtype).eps
        * max(expected.abs().flatten().tolist(), default=0.0)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def iter_logits(engine: Engine) -> Iterator[dict[Request, torch.Tensor]]:
    """Step until no request is left, and yield the logits that each step gave."""
    while engine.has_unfinished_requests:
        yield engine.step().logits
        engine.cache.check()


def run_with_logits(requests: list[Request]) -> list[tuple[list[int], torch.Tensor]]:
    """Run requests that are added together. Returns the tokens of each, and the logits [n, V] that it read."""
    engine, logits = make_engine("llama"), {r: [torch.empty(0, 128)] for r in requests}
    engine.add(*requests)
    for step in iter_logits(engine):
        for request, read in step.items():
            logits[request].append(read.clone())
    return [(r.output_tokens, torch.cat(logits[r])) for r in requests]


@pytest.mark.parametrize("depth", [1, 2])
def test_who_waits_draws_each_token_once(depth: int) -> None:
    """It has its first token before the scoring pass of the other one ends, and that one may have ended meanwhile."""
    prompt, sampling = random_prompts(1, seed=5)[0], SamplingParams(temperature=1.0, seed=3, ignore_eos=True)
    engine = make_engine("llama")
    engine.depth = depth
    leader = make_request(prompt, 1, "reread:budget=20,rereads=30")
    follower = make_request(prompt, 6, params=sampling)
    engine.add(leader, follower)
    for _ in iter_steps(engine):
        pass
    ((expected, _),) = run_with_logits([make_request(prompt, 6, params=sampling)])
    assert follower.output_tokens == expected


@pytest.mark.parametrize("part", ["runner.forward", "sharing.release"])
def test_a_step_that_fails_changes_nothing_for_who_waits_for_an_equal_prompt(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever part of it fails: random numbers and logits of the request that waits come again."""
    prompt, sampling = random_prompts(1, seed=5)[0], SamplingParams(temperature=1.0, seed=3, ignore_eos=True)
    engine = make_engine("llama")
    leader, follower = (make_request(prompt, 5, params=sampling, needs_logits=True) for _ in range(2))
    engine.add(leader, follower)
    owner, name = part.split(".")

    def fail(*_: object) -> None:
        raise RuntimeError("a part fails")

    with monkeypatch.context() as broken, pytest.raises(RuntimeError):
        broken.setattr(getattr(engine, owner), name, fail)
        engine.step()
    engine.cancel(leader)  # as the engine thread ends those that ran
    logits = [step[follower].clone() for step in iter_logits(engine)]
    alone = make_request(prompt, 5, params=sampling, needs_logits=True)
    (expected, expected_logits), *_ = run_with_logits([alone])
    assert follower.output_tokens == expected
    assert_same_sums(torch.cat(logits), expected_logits)


def test_equal_prompts_are_computed_once() -> None:
    engine = make_engine("llama", max_batched_tokens=100)
    policies = ("h2o:budget=20", "h2o:budget=90", "full", "window:budget=50%")
    requests = [make_request([1, 2, 3] * 50, 5, policy) for policy in policies]
    engine.add(*requests)
    engine.step()
    engine.step()
    assert all(len(r.output_tokens) == 1 for r in requests)  # 150 tokens in two steps of 100


def test_a_group_with_a_request_that_can_never_fit_is_refused_whole() -> None:
    engine = make_engine("llama", num_pages=30)
    with pytest.raises(ValueError, match="pages"):
        engine.add(make_request([1, 2], 5), make_request([1] * 100, 5))
    assert not engine.has_unfinished_requests


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_pages"), [("llama", 190), ("gemma3_text", 60), ("gpt2", 400)])
def test_preemption_of_64_requests_changes_no_token(family: str, num_pages: int) -> None:
    prompts = random_prompts(64, seed=2, max_prompt_len=120)
    alone = [run_alone(family, p, 30, backend="cpu") for p in prompts]
    assert run_to_completion(make_engine(family, backend="cpu"), [make_request(p, 30) for p in prompts]) == alone
    requests = [make_request(p, 30) for p in prompts]
    assert run_to_completion(make_engine(family, backend="cpu", num_pages=num_pages), requests) == alone
    assert sum(r.stats.num_preemptions for r in requests) > 0


@pytest.mark.parametrize(
    "policy",
    [
        "h2o:budget=40,interval=5",
        "keyformer:budget=30%",
        "reread:budget=30%,rereads=40",
        "tova:budget=9,prefill=stream,chunk=20",
    ],
)
@pytest.mark.parametrize("family", ["gemma3_text", *slow("llama", "gpt2")])
def test_a_preempted_request_evicts_the_same_tokens_again(family: str, policy: str) -> None:
    """The answer is computed again many tokens at a time, but no step goes past an eviction."""
    prompts = [p for p in random_prompts(20, seed=2) if len(p) > 60][:4]
    params = SamplingParams(temperature=0, ignore_eos=True, seed=3)

    def make_requests() -> list[Request]:
        return [make_request(p, 60, policy, params) for p in prompts]

    undisturbed = run_to_completion(make_engine(family, backend="cpu"), make_requests())
    engine, requests = make_engine(family, backend="cpu", max_batched_tokens=70), make_requests()
    for request in requests:
        engine.add(request)
    for step in iter_steps(engine):
        if step % 31 == 30 and step < 140:
            for request in list(engine.scheduler.running):
                engine.scheduler.preempt(request)
    assert [r.output_tokens for r in requests] == undisturbed
    assert all(r.stats.num_preemptions for r in requests)


@pytest.mark.parametrize("family", ["gemma3_text", *slow("llama", "mpt", "gpt2")])
def test_a_ring_equals_full_with_a_window_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring gives what a model with that window in every layer gives from a cache that evicts nothing."""
    W, prompt = 24, random_prompts(1, seed=5, max_prompt_len=150)[0] + [7] * 40
    windows = tiny_model(family).spec.kv_cache.windows
    masked = run_without_eviction(monkeypatch, family, tuple(min(w or W, W) for w in windows), prompt)
    assert run_alone(family, prompt, 40, policy=f"ring:window={W}") == masked
    full = run_alone(family, prompt, 40)
    assert full == run_without_eviction(monkeypatch, family, windows, prompt)
    assert full != masked


def run_without_eviction(
    monkeypatch: pytest.MonkeyPatch, family: str, windows: tuple[int | None, ...], prompt: list[int]
) -> list[int]:
    """Return the answer of an engine in which every layer keeps all slots, and windows only hide them."""
    engine = make_engine(family)
    visible = np.array([w or kernels.api.NO_WINDOW for w in windows], np.int32)
    unbounded = np.full(len(windows), 2**30, np.int32)
    with monkeypatch.context() as patch:
        for planner in (CapacityPlanner, GroupPlanner):
            patch.setattr(planner, "windows", lambda self, policy: visible)
        for module in (capacity, memory_cache):
            patch.setattr(module, "ring_capacities", lambda windows, fresh, page_size, block_size: unbounded)
        return run_to_completion(engine, [make_request(prompt, 40)])[0]


@pytest.mark.parametrize("family", ["gemma3_text", *slow("llama")])
def test_a_ring_longer_than_the_text_equals_full(family: str) -> None:
    prompt = random_prompts(1, seed=6)[0]
    assert run_alone(family, prompt, policy="ring:window=400") == run_alone(family, prompt)


@pytest.mark.parametrize("begun", [False, True], ids=["new prompt", "cached prompt"])
@pytest.mark.parametrize("family", ["gemma3_text", *slow(*sorted(set(CACHE_KINDS) - {"gemma3_text"}))])
def test_a_follower_may_have_more_to_compute_than_its_leader(family: str, begun: bool) -> None:
    """It goes on with a copy of the leader's rings, which have room for what the leader had to compute."""
    prompt, forced = [[*range(i, i + n)] for i, n in ((0, 16), (16, 60))]
    params = SamplingParams(temperature=0.0, logprobs=1)

    def follower() -> Request:
        return make_request(prompt, 4, params=params, forced_tokens=forced)

    alone = follower()
    run_to_completion(make_engine(family), [alone])
    engine = make_engine(family, prefix_cache="exact" if begun else "off")
    if begun:
        run_to_completion(engine, [make_request(prompt, 1)])
    found = follower()
    engine.add(make_request(prompt, 1, params=params), found)
    run_to_completion(engine, [])
    assert [x.logprob for x in found.logprobs] == pytest.approx([x.logprob for x in alone.logprobs], abs=1e-3)


def test_a_follower_without_rings_computes_as_much_in_a_step_as_alone() -> None:
    prompt, forced = [*range(16)], [t % 128 for t in range(400)]
    engine = make_engine("llama", max_batched_tokens=128)
    engine.add(make_request(prompt, 1), make_request(prompt, 1, forced_tokens=forced))
    assert sum(1 for _ in iter_steps(engine)) <= 5
