"""The sampler against a simple implementation, and samples against their own distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.engine.penalties import LogitPenalties
from retain.engine.request import Request, RequestInput
from retain.engine.sampler import compute_logprobs, compute_probs, sample, sample_inverse_cdf
from retain.kv.eviction.policies import parse
from retain.sampling_params import SamplingParams
from tests.helpers.engines import make_engine, make_request, random_prompts, run_to_completion

FULL = parse("full")
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.25, 3),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.05, 1),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
)
LOGITS = st.lists(st.integers(-24, 24).map(lambda n: n / 4), min_size=7, max_size=7)  # exact in float32


def simple_probs(x: list[float], p: SamplingParams) -> list[float]:
    """Compute the distribution of `compute_probs`, one token at a time."""
    w = [math.exp((v - max(x)) / p.temperature) for v in x]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    kept = order[: p.top_k] if p.top_k else order
    total, mass, nucleus = sum(w[i] for i in kept), 0.0, []
    for i in kept:
        if mass / total < p.top_p or p.top_p == 1:
            nucleus.append(i)
        mass += w[i]
    total, top = sum(w[i] for i in nucleus), w[order[0]]
    nucleus = [i for i in nucleus if w[i] >= p.min_p * top]
    total = sum(w[i] for i in nucleus)
    return [w[i] / total if i in nucleus else 0.0 for i in range(len(x))]


ROWS = given(st.lists(st.tuples(LOGITS, PARAMS), min_size=1, max_size=4))


def check_probs(rows: list[tuple[list[float], SamplingParams]]) -> None:
    found = compute_probs(torch.tensor([x for x, _ in rows]), [p for _, p in rows])
    assert torch.allclose(found.sum(-1), torch.ones(len(rows)))
    for row, (x, p) in zip(found.tolist(), rows, strict=True):
        expected = simple_probs(x, p)
        if sum(v > 0 for v in row) == sum(v > 0 for v in expected):
            assert row == pytest.approx(expected, abs=1e-5)
        else:
            assert 0 < p.top_p < 1 or p.min_p  # a sum at the very edge of the nucleus may round either way


@settings(max_examples=50)
@ROWS
def test_every_row_has_the_distribution_of_its_own_params(rows: list[tuple[list[float], SamplingParams]]) -> None:
    check_probs(rows)


@pytest.mark.slow
@settings(max_examples=400)
@ROWS
def test_many_rows_have_the_distribution_of_their_own_params(rows: list[tuple[list[float], SamplingParams]]) -> None:
    check_probs(rows)


@pytest.mark.parametrize(
    "options",
    [{"top_p": 1e-50}, {"top_p": 1e-50, "top_k": 3}, {"top_p": 1e-50, "temperature": 1e-300}],
)
def test_a_top_p_too_small_for_float32_keeps_the_likeliest_token(options: dict[str, Any]) -> None:
    probs = compute_probs(torch.tensor([[0.0, 2.0, 1.0]]), [SamplingParams(**options)])
    assert probs.tolist() == [[0.0, 1.0, 0.0]]


def test_the_highest_temperature_is_uniform_over_allowed_tokens() -> None:
    probs = compute_probs(torch.tensor([[0.0, 2.0, -math.inf, 1.0]]), [SamplingParams(temperature=1e30)])
    assert probs.tolist() == [pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 4, "top_p": 0.9},
    ],
)
def test_samples_follow_the_distribution(options: dict[str, Any]) -> None:
    """Chi-square of 40,000 samples; the bound is the 1 - 1e-6 quantile for 7 degrees of freedom."""
    x = torch.tensor([0.3, 1.5, -0.4, 2.0, 0.0, 1.1, -2.0, 0.9])
    p = compute_probs(x[None], [SamplingParams(**options)])
    n, generator = 40_000, torch.Generator().manual_seed(1)
    tokens = sample_inverse_cdf(p.expand(n, -1), torch.rand(n, generator=generator, dtype=torch.float64).tolist())
    counts = tokens.bincount(minlength=8).double()
    assert (counts[p[0] == 0] == 0).all()
    possible, expected = p[0] > 0, n * p[0].double()
    assert ((counts - expected)[possible].square() / expected[possible]).sum() < 40
    wrong = compute_probs(x[None] + torch.eye(8)[3] * 0.2, [SamplingParams(**options)])[0].double() * n
    assert ((counts - wrong)[possible].square() / wrong[possible]).sum() > 40  # the test can fail


@given(st.lists(st.sampled_from([0.0, 1e-30, 0.2, 1.0]), min_size=2, max_size=9), st.floats(0, 1, exclude_max=True))
def test_an_impossible_token_is_never_sampled(weights: list[float], u: float) -> None:
    p = torch.tensor(weights) / max(sum(weights), 1e-30)
    if p.sum() > 0:
        for v in (u, 0.0, 1 - 2**-53):
            assert p[sample_inverse_cdf(p[None], [v])] > 0


@given(
    x=LOGITS,
    tokens=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    cut=st.integers(1, 12),
    repetition=st.floats(0.2, 3),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_penalties_follow_their_definitions(
    x: list[float], tokens: list[int], cut: int, repetition: float, presence: float, frequency: float
) -> None:
    p = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    output_tokens, row = tokens[cut:], torch.tensor(x)
    penalties = LogitPenalties(p, row)
    penalties.update(tokens, len(tokens) - len(output_tokens))
    penalties.apply(row)
    for token, logit in enumerate(x):
        if token in tokens:
            logit = logit / repetition if logit > 0 else logit * repetition
        logit -= presence * (token in output_tokens) + frequency * output_tokens.count(token)
        assert row[token].item() == pytest.approx(logit, abs=1e-4)


def test_greedy_random_and_penalized_rows_are_sampled_together() -> None:
    """And the logits stay as they are."""
    x = torch.tensor([[0.0, 5.0, 1.0], [0.0, 5.0, 1.0], [3.0, 5.0, -9.0]])
    before = x.clone()
    greedy = SamplingParams(temperature=0, logprobs=2)
    params = [greedy, SamplingParams(seed=3, top_k=1), replace(greedy, repetition_penalty=10.0)]
    sampled = sample(x, [Request(RequestInput([1], p, FULL, 5)) for p in params]).read()
    assert [[token for token, _ in tokens] for tokens in sampled] == [[1], [1], [0]]
    assert torch.equal(x, before)
    logprob = sampled[2][0][1]
    assert logprob and logprob.logprob == pytest.approx(x[2].log_softmax(-1)[0].item())  # without the penalty
    assert [token for token, _ in logprob.top_logprobs] == [1, 0]
    assert sampled[1][0][1] is None


@given(LOGITS, st.floats(0.01, 5))
def test_a_top_p_of_zero_takes_the_likeliest_token(x: list[float], temperature: float) -> None:
    row = torch.tensor(x)
    params = [SamplingParams(temperature=0), SamplingParams(temperature=temperature, top_p=0)]
    requests = [Request(RequestInput([1], p, FULL, 5)) for p in params]
    (greedy, narrow) = sample(row.repeat(2, 1), requests).read()
    assert greedy == narrow and params[1].greedy


def test_minus_one_stands_for_a_random_seed_and_for_all_tokens() -> None:
    assert SamplingParams(seed=-1, top_k=-1) == SamplingParams()


def test_logprobs_are_those_of_the_whole_distribution() -> None:
    x = torch.randn(50)
    (found,) = compute_logprobs(x[None], [7], 100)  # more than there are tokens
    assert len(found.top_logprobs) == 50
    assert sum(math.exp(v) for _, v in found.top_logprobs) == pytest.approx(1, abs=1e-5)
    assert dict(found.top_logprobs)[7] == found.logprob


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_nan_logits_raise_an_error(temperature: float) -> None:
    request = make_request([1], params=SamplingParams(temperature=temperature, seed=0))
    with pytest.raises(ValueError, match="NaN"):
        sample(torch.tensor([[0.0, float("nan")]]), [request]).read()


def run_seeded(seeds_and_prompts: list[tuple[int, list[int]]], num_pages: int = 100_000) -> tuple[list[list[int]], int]:
    """Return the sampled answers of requests that run together, and the number of preemptions."""
    params = SamplingParams(temperature=1.0, ignore_eos=True)
    requests = [make_request(p, 15, params=replace(params, seed=seed)) for seed, p in seeds_and_prompts]
    answers = run_to_completion(make_engine("llama", backend="cpu", num_pages=num_pages), requests)
    return answers, sum(r.stats.num_preemptions for r in requests)


def test_a_sampled_answer_depends_on_its_seed_and_not_on_company_or_preemption() -> None:
    prompts = list(enumerate(random_prompts(6, seed=9)))
    together, _ = run_seeded(prompts)
    assert [run_seeded([p])[0][0] for p in prompts] == together
    preempted, num_preemptions = run_seeded(prompts, num_pages=75)
    assert preempted == together and num_preemptions > 0
    a, b, c = run_seeded([(seed, prompts[0][1]) for seed in (1, 1, 2)])[0]
    assert a == b != c


STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=3), st.lists(st.integers(0, 6), max_size=3))
)


@given(STEPS, st.lists(st.integers(0, 6), max_size=5), st.sampled_from([1.0, 1.5]), st.sampled_from([0.0, 0.75]))
def test_penalties_of_a_text_that_grows_are_those_of_the_whole_text(
    steps: list[tuple[list[int], list[int]]], prompt: list[int], repetition: float, frequency: float
) -> None:
    """Also after drafts that were rejected; to the last bit, because each penalty is applied once."""
    options = {"repetition_penalty": repetition, "frequency_penalty": frequency, "presence_penalty": -frequency / 2}
    params = SamplingParams(**options, logit_bias=((2, 1.0), (3, -0.5)))
    x = torch.linspace(-2, 3, 7)
    tokens = list(prompt)
    kept = LogitPenalties(params, x)
    for new, drafts in steps:
        tokens += new
        kept.update(tokens, len(prompt))
        for i in range(len(drafts) + 1):
            row = x.clone()
            expected = x.clone()
            kept.apply(row, drafts[:i])
            anew = LogitPenalties(params, x)
            anew.update([*tokens, *drafts[:i]], len(prompt))
            anew.apply(expected)
            assert torch.equal(row, expected)


def test_work_to_penalize_a_token_does_not_grow_with_text_or_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    num_copied = []
    monkeypatch.setattr(
        torch, "tensor", lambda values, **kw: num_copied.append(len(values)) or torch.as_tensor(values, **kw)
    )
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, frequency_penalty=1, logit_bias=[(i, 1) for i in range(99)]
    )
    for length in (100, 1000):
        request = Request(RequestInput(list(range(length)), params, FULL, 5))
        for token in (3, 7):
            num_copied.clear()
            sample(torch.zeros(1, 1000), [request]).read()
            request.append_token(token, None)
        assert sum(num_copied) < 10
