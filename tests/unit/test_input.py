"""What is accepted at the door of an engine never fails behind it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain import LLM, SamplingParams
from retain.kv.eviction import policies
from retain.options import bounds_of, field_types
from retain.processing import input as processing_input
from retain.processing.input import GenerateRequest
from retain.processing.output import RequestOutputState
from retain.processing.stop_strings import StopStrings
from tests.helpers.policy_specs import goes_with, spec_of

PROMPT = [1] * 200
NAMES = [name for name in policies.names() if name not in ("full", "ring", "gate", "gate_replay", "reread")]
BUDGETS = [*(spec_of(name, "budget=128") for name in NAMES), "reread:budget=128,rereads=64,ask=repeat"]
OPTIONS = ["", ",protect=system", ",protect=system,prefill=stream,chunk=64", ",protect=system,demote=int4"]
SPECS = ["full", "ring:window=48", *(x + y for x in BUDGETS for y in OPTIONS if goes_with(x, y.removeprefix(",")))]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """An engine whose pool holds about 480 tokens of its context of 2048."""
    demoting = ("h2o:budget=128,demote=int4",)
    options = {"dtype": "float32", "kv_memory": "240KiB", "page_size": 16, "max_running_requests": 4}
    llm = LLM("random:tiny", allow_policy=demoting, **options)
    yield llm
    llm.close()


def is_accepted(llm: LLM, states: list[RequestOutputState]) -> bool:
    """Return whether the engine takes requests that the input processor made."""
    try:
        llm.engine.add(*(s.request for s in states))
    except ValueError:
        return False
    finally:
        for s in states:
            llm.engine.cancel(s.request)
    return True


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("num_system_tokens", [0, 180, 200])
def test_default_output_length_is_the_longest_that_the_engine_accepts(
    llm: LLM, spec: str, num_system_tokens: int
) -> None:
    request = GenerateRequest(PROMPT, kv_policy=spec, num_system_tokens=num_system_tokens)
    states = llm.input_processor.process(request)
    n = states[0].request.input.max_tokens
    assert is_accepted(llm, states)
    assert n == llm.input_processor.max_output_tokens(request, len(PROMPT))
    if n < llm.max_model_len - len(PROMPT):
        more = llm.input_processor.process(replace(request, params=SamplingParams(max_tokens=n + 1)))
        assert not is_accepted(llm, more)


def test_the_longest_output_is_sought_once_for_all_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    pages_needed = llm.cache.pages_needed
    monkeypatch.setattr(llm.cache, "pages_needed", lambda *args: calls.append(args) or pages_needed(*args))
    counts = []
    for n in (1, 8):
        llm.input_processor.process(GenerateRequest(PROMPT, SamplingParams(n=n)))
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1] > 0


def test_a_policy_is_parsed_once_and_planned_once_for_all_answers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the default length of an answer, too. And the engine takes it as it is."""
    parsed, planned = [], []
    parse, plan_policy = policies.parse, llm.cache.plan_policy
    monkeypatch.setattr(policies, "parse", lambda spec: parsed.append(spec) or parse(spec))
    monkeypatch.setattr(llm.cache, "plan_policy", lambda *args: planned.append(args) or plan_policy(*args))
    for _ in range(2):
        request = GenerateRequest(PROMPT, SamplingParams(n=3), "tova:budget=31%,sinks=3")
        llm.input_processor.check_policy_cost(request)
        longest = llm.input_processor.max_output_tokens(request, len(PROMPT))
        states = llm.input_processor.process(replace(request, params=SamplingParams(n=3, max_tokens=longest)))
        assert len(parsed) == 1 and len(planned) == 1
        policy = states[0].request.policy
        assert is_accepted(llm, states) and len(planned) == 1
        assert all(s.request.policy == policy for s in states)


@settings(max_examples=20)
@given(seed=st.one_of(st.integers(0, 2**63 - 1), st.sampled_from([2**63 - 1, 2**63 - 2, 0])), n=st.integers(1, 8))
def test_every_answer_has_a_seed_of_its_own_that_is_accepted(seed: int, n: int) -> None:
    params = SamplingParams(seed=seed, n=n)
    seeds = [params.for_answer(i).seed for i in range(n)]
    assert len({*seeds}) == n and seeds[0] == seed


NOT_AT_BOTH_ENDS = ("max_tokens", "min_tokens", "n", "stop_token_ids")  # an answer of 3 tokens lies between


@pytest.mark.parametrize("name", [x for x in bounds_of(SamplingParams) if x not in NOT_AT_BOTH_ENDS])
@pytest.mark.parametrize("end", [0, 1])
def test_parameters_at_the_ends_of_their_ranges_are_answered(llm: LLM, name: str, end: int) -> None:
    bounds = bounds_of(SamplingParams)[name]
    value = bounds.high if end else bounds.low + 1e-300 if bounds.above else bounds.low
    params = SamplingParams(**{"max_tokens": 3, "n": 2, name: value})  # type: ignore[arg-type]
    outputs = llm.generate([[1, 2, 3]], params)
    assert [len(o.token_ids) for o in outputs] == [3, 3] or any(o.finish_reason == "stop" for o in outputs)


def specs_at_bounds() -> Iterator[str]:
    """Yield a spec for each number of each policy, at both ends of its bounds."""
    for name in policies.names():
        cls = import_module(f"retain.kv.eviction.policies.{name}").Policy
        has_budget = "budget" in field_types(cls)
        needed = spec_of(name, "budget=64").partition(":")[2] + "," if has_budget else ""
        for option, bounds in bounds_of(cls).items():
            ends = (bounds.low + 1e-9 if bounds.above else bounds.low, bounds.high)
            yield from (f"{name}:{needed}{option}={end}" for end in ends)
        if needed:
            yield from (spec_of(name, f"budget={amount}") for amount in (1, 2**28, "1e-9%", "100%"))
            yield from (f"{name}:{needed}recent={amount}" for amount in (1, 2**28, "1e-9%", "100%"))


@pytest.mark.parametrize("spec", [spec for spec in specs_at_bounds() if not spec.startswith("gate")])
def test_a_policy_at_the_ends_of_its_bounds_is_answered_or_refused_at_the_door(llm: LLM, spec: str) -> None:
    request = GenerateRequest(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True, seed=1), kv_policy=spec)
    try:
        states = llm.input_processor.process(request)
    except ValueError:
        return
    if is_accepted(llm, states):
        assert [len(o.token_ids) for o in llm.generate_from_requests([request])] == [4]


def test_stop_strings_are_prepared_once_for_all_answers_of_a_body(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no longer kept than an answer needs them."""
    built = []
    monkeypatch.setattr(processing_input, "StopStrings", lambda strings: built.append(strings) or StopStrings(strings))
    request = GenerateRequest(PROMPT, SamplingParams(n=16, stop=("the end", "##")))
    states = [llm.input_processor.process(replace(request, prompt=prompt)) for prompt in (PROMPT, PROMPT[1:])]
    assert built == [("the end", "##")]
    del states
    gc.collect()
    llm.input_processor.process(request)
    assert len(built) == 2
