"""The sampler against a slow and plain one, and its draws against their own distribution."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.engine.request import Request, RequestInput
from retain.engine.sampler import compute_logprobs, compute_probs, penalize_row, sample, sample_inverse_cdf
from retain.kv.eviction.policies import parse
from retain.sampling_params import SamplingParams
from tests.helpers.engines import make_engine, make_request, random_prompts, run_to_completion

FULL = parse("full")
params = st.builds(
    SamplingParams,
    temperature=st.floats(0.25, 3),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.05, 1),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
)
logits = st.lists(st.integers(-24, 24).map(lambda n: n / 4), min_size=7, max_size=7)  # exact in float32


def plain(x: list[float], p: SamplingParams) -> list[float]:
    """The same distribution, one token at a time."""
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


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(logits, params), min_size=1, max_size=4))
def test_every_row_has_the_distribution_of_its_own_parameters(rows):
    got = compute_probs(torch.tensor([x for x, _ in rows]), [p for _, p in rows])
    assert torch.allclose(got.sum(-1), torch.ones(len(rows)))
    for row, (x, p) in zip(got.tolist(), rows, strict=True):
        want = plain(x, p)
        kept = sum(v > 0 for v in want)
        border = sum(v > 0 for v in row) != kept  # a sum at the very edge of the nucleus may round either way
        if not border:
            assert row == pytest.approx(want, abs=1e-5)
        else:
            assert 0 < p.top_p < 1 or p.min_p


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
def test_draws_follow_the_distribution(options):
    """Chi-square over 40,000 draws; the bound is the 1 - 1e-6 quantile for 7 degrees of freedom."""
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
def test_an_impossible_token_is_never_drawn(weights, u):
    p = torch.tensor(weights) / max(sum(weights), 1e-30)
    if p.sum() > 0:
        for v in (u, 0.0, 1 - 2**-53):
            assert p[sample_inverse_cdf(p[None], [v])] > 0


@given(
    x=logits,
    tokens=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    cut=st.integers(1, 12),
    repetition=st.floats(0.2, 3),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_penalties(x, tokens, cut, repetition, presence, frequency):
    p = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    answer, got = tokens[cut:], torch.tensor(x)
    penalize_row(got, tokens, answer, p)
    for i, v in enumerate(x):
        if i in tokens:
            v = v / repetition if v > 0 else v * repetition
        v -= presence * (i in answer) + frequency * answer.count(i)
        assert got[i].item() == pytest.approx(v, abs=1e-4)


def test_sample_mixes_greedy_drawn_and_penalised_rows_and_leaves_the_logits_alone():
    x = torch.tensor([[0.0, 5.0, 1.0], [0.0, 5.0, 1.0], [3.0, 5.0, -9.0]])
    before = x.clone()
    greedy = SamplingParams(temperature=0, logprobs=2)
    asked = [greedy, SamplingParams(seed=3, top_k=1), replace(greedy, repetition_penalty=10.0)]
    out = sample(x, [Request(RequestInput([1], p, FULL, 5)) for p in asked])
    assert [[t for t, _ in drawn] for drawn in out] == [[1], [1], [0]]
    assert torch.equal(x, before)
    lp = out[2][0][1]
    assert lp.logprob == pytest.approx(x[2].log_softmax(-1)[0].item())  # the model's own opinion, not the penalised one
    assert [t for t, _ in lp.top_logprobs] == [1, 0] and out[1][0][1] is None


def test_logprobs_are_those_of_the_whole_distribution():
    x = torch.randn(50)
    (lp,) = compute_logprobs(x[None], [7], 50)
    assert sum(math.exp(v) for _, v in lp.top_logprobs) == pytest.approx(1, abs=1e-5)
    assert dict(lp.top_logprobs)[7] == lp.logprob


def test_nan_is_an_error_and_not_an_answer():
    with pytest.raises(ValueError, match="NaN"):
        sample(torch.tensor([[0.0, float("nan")]]), [make_request([1])])


def test_a_seed_decides_and_company_does_not():
    p = SamplingParams(temperature=1.0, seed=11, ignore_eos=True)
    asked = random_prompts(6, seed=9)
    together = run_to_completion(
        make_engine("llama"), [make_request(q, 15, params=replace(p, seed=i)) for i, q in enumerate(asked)]
    )
    for i, q in enumerate(asked):
        assert (
            run_to_completion(make_engine("llama"), [make_request(q, 15, params=replace(p, seed=i))])[0] == together[i]
        )
    twice = run_to_completion(
        make_engine("llama"), [make_request(asked[0], 15, params=replace(p, seed=s)) for s in (1, 1, 2)]
    )
    assert twice[0] == twice[1] != twice[2]
    preempted = [make_request(q, 15, params=replace(p, seed=i)) for i, q in enumerate(asked)]
    assert run_to_completion(make_engine("llama", num_pages=75), preempted) == together
    assert sum(r.stats.num_preemptions for r in preempted) > 0
