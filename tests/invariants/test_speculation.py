"""Law 3: speculation changes no greedy token and no distribution, whatever the drafter and however bad its drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from retain.engine import drafters
from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import Drafter, DrafterNeeds, TargetModel
from retain.engine.penalties import LogitPenalties
from retain.engine.request import FinishReason, Request
from retain.engine.runner import Runner
from retain.engine.sampler import compute_probs
from retain.engine.spec_decode import rejection_sampler
from retain.engine.spec_decode.rejection_sampler import rejection_sample, verify_greedy
from retain.kernels.api import Batch
from retain.kv.draft_tables import DraftTables
from retain.sampling_params import SamplingParams
from tests.helpers import tiny_heads
from tests.helpers.engines import (
    GREEDY,
    PlanningEngine,
    iter_steps,
    make_engine,
    make_request,
    process_to_completion,
    random_prompts,
    record_logits,
    run_to_completion,
)
from tests.helpers.marks import every_third, slow

FAMILIES = ["gemma3_text", *slow("llama", "gpt2", "mpt")]
POLICIES = ["full", "ring:window=24", "sinks:budget=40,interval=3", "window:budget=30%"]


@dataclass
class OracleDrafter:
    """Draft the known answers, up to 9 tokens, each replaced by a random token with probability `error_rate`."""

    answers: dict[tuple[int, ...], list[int]]  # by prompt
    error_rate: float
    max_draft_tokens: int = 9
    needs: ClassVar[DrafterNeeds] = DrafterNeeds()
    k: str = "9"
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        for request, limit in draft_limits:
            rest = self.answers[tuple(request.prompt)][len(request.output_tokens) :]
            rest = rest[: self.rng.randint(0, min(limit, self.max_draft_tokens))]
            request.set_drafts([self.rng.randrange(128) if self.rng.random() < self.error_rate else t for t in rest])

    def attach(self, target: TargetModel) -> None:
        pass

    def remove_request(self, request: Request) -> None:
        pass


def oracle(prompts: Sequence[Sequence[int]], answers: Sequence[list[int]], error_rate: float) -> OracleDrafter:
    return OracleDrafter({tuple(p): a for p, a in zip(prompts, answers, strict=True)}, error_rate)


def num_drafted(requests: Sequence[Request]) -> int:
    return sum(sum(r.stats.spec_decode.num_drafted_per_position) for r in requests)


def num_accepted(requests: Sequence[Request]) -> int:
    return sum(sum(r.stats.spec_decode.num_accepted_per_position) for r in requests)


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
def test_greedy_tokens_do_not_depend_on_drafts(family: str, backend: str, error_rate: float) -> None:
    prompts = random_prompts(12, seed=1)

    def run(drafter: Drafter | None) -> tuple[list[list[int]], list[Request]]:
        requests = [make_request(p, 50, POLICIES[i % len(POLICIES)]) for i, p in enumerate(prompts)]
        return run_to_completion(make_engine(family, backend=backend, drafter=drafter), requests), requests

    plain, _ = run(None)
    answers, requests = run(oracle(prompts, plain, error_rate))
    assert answers == plain
    drafted, accepted = num_drafted(requests), num_accepted(requests)
    assert drafted > 300
    if error_rate == 0:
        assert accepted == drafted
    assert accepted > 0.05 * drafted if error_rate < 1 else accepted < 0.05 * drafted


DRAFTERS = ["ngram:k=5,min=1", "draft:model=any", "draft:k=4,model=any", "draft:k=5,weights=int4"]
DRAFTERS += ["suffix:k=5,min=1", "self:k=3,budget=48", "self:k=7,budget=16,refresh=1"]
DRAFTERS += ["self:k=4,dtype=int4", "self:dtype=k8v4"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", every_third(DRAFTERS))
def test_every_drafter_gives_the_greedy_tokens_of_plain_decoding(family: str, spec: str) -> None:
    """In company of requests with other policies."""
    prompts = random_prompts(10, seed=2)

    def run(drafter: Drafter | None) -> list[Request]:
        requests = [make_request(p, 40, POLICIES[i % len(POLICIES)]) for i, p in enumerate(prompts)]
        run_to_completion(make_engine(family, backend="cpu", drafter=drafter), requests)
        return requests

    plain, requests = run(None), run(drafters.parse(spec))
    assert [r.output_tokens for r in requests] == [r.output_tokens for r in plain]
    if "k=" in spec:
        assert num_drafted(requests) > 100
    if "k=" in spec and not spec.startswith(("ngram", "suffix")):  # a random model agrees with itself on few pages
        assert num_accepted(requests) > 100
    if "draft" in spec:  # the same model: all drafts are accepted where nothing is evicted
        for request in requests[::4]:
            stats = request.stats.spec_decode
            assert stats.num_accepted_per_position == stats.num_drafted_per_position


def test_pages_are_selected_in_every_so_many_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    rank_pages = DraftTables.rank_pages

    def count_selections(refresh: int) -> int:
        calls: list[int] = []

        def rank_and_count(*args: Any) -> Any:
            calls.append(1)
            return rank_pages(*args)

        monkeypatch.setattr(DraftTables, "rank_pages", rank_and_count)
        drafter = drafters.parse(f"self:k=1,budget=96,refresh={refresh}")
        engine = make_engine("llama", backend="cpu", drafter=drafter)
        run_to_completion(engine, [make_request([i % 100 for i in range(150)], 30)])
        return len(calls)

    each, every_second, every_fourth = (count_selections(n) for n in (1, 2, 4))
    assert every_second > 1
    assert each == pytest.approx(2 * every_second, abs=2)
    assert every_second == pytest.approx(2 * every_fourth, abs=2)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_preemption_and_cancellation_amid_drafts_change_no_token(family: str) -> None:
    prompts = random_prompts(20, seed=5, max_prompt_len=100)
    plain = run_to_completion(make_engine(family, backend="cpu"), [make_request(p, 40) for p in prompts])
    num_pages = 190 if family == "llama" else 60
    engine = make_engine(family, backend="cpu", num_pages=num_pages, drafter=oracle(prompts, plain, 0.2))
    requests = [make_request(p, 40) for p in prompts]
    engine.add(*requests)
    for step in iter_steps(engine):
        if step == 12:
            engine.cancel(requests[3])
        if step in (4, 9):
            engine.scheduler.preempt(next(iter(engine.scheduler.running)))
    assert [r.output_tokens for i, r in enumerate(requests) if i != 3] == plain[:3] + plain[4:]
    assert requests[3].output_tokens == plain[3][: len(requests[3].output_tokens)]
    assert engine.cache.free_pages == engine.cache.total_pages
    assert sum(r.stats.num_preemptions for r in requests) > 0


def test_a_draft_model_computes_the_tokens_that_it_missed() -> None:
    """Also with rings that are shrunk to their windows."""
    request = make_request(random_prompts(1, seed=9)[0], 120)
    plain = run_to_completion(make_engine("gemma3_text", backend="cpu"), [make_request(request.prompt, 120)])[0]
    drafter = drafters.parse("draft:k=3,model=any")
    engine = make_engine("gemma3_text", backend="cpu", drafter=drafter)
    engine.add(request)
    while engine.has_unfinished_requests:
        engine.speculator.default = None if 20 <= len(request.output_tokens) <= 70 else drafter
        engine.step()
    assert request.output_tokens == plain
    stats = request.stats.spec_decode
    assert stats.num_accepted_per_position == stats.num_drafted_per_position
    assert num_drafted([request]) > 40


def test_a_request_that_stops_amid_accepted_drafts_gets_no_more_tokens() -> None:
    prompts = random_prompts(10, seed=6)
    plain = run_to_completion(make_engine("llama", backend="cpu"), [make_request(p, 40) for p in prompts])

    def run(requests: list[Request], **options: Any) -> list[list[int]]:
        engine = make_engine("llama", backend="cpu", drafter=oracle(prompts, plain, 0), **options)
        return run_to_completion(engine, requests)

    for max_tokens in (1, 2, 5, 39):
        assert run([make_request(p, max_tokens) for p in prompts]) == [a[:max_tokens] for a in plain]
    stops = [a[17] for a in plain]
    requests = [make_request(p, 40, stop_ids=frozenset({s})) for p, s in zip(prompts, stops, strict=True)]
    expected = [a[: a.index(s) + 1] for a, s in zip(plain, stops, strict=True)]
    assert run(requests) == expected
    for num_more in (0, 1):  # tokens of the answer after the stop string, if none before it is the same
        stopped = [make_request(p, 18 + num_more, params=replace(GREEDY, logprobs=0)) for p in prompts]
        engine = make_engine("llama", backend="cpu", drafter=oracle(prompts, plain, 0))
        texts = process_to_completion(engine, dict(zip(stopped, stops, strict=True)))
        assert texts == [r.output_tokens for r in stopped] == expected
        assert [[logprob.token_id for logprob in r.logprobs] for r in stopped] == expected
        assert {r.finish_reason for r in stopped} == {FinishReason.STOP}


def test_deterministic_drafts_change_no_sampled_token() -> None:
    """A draft with p = 1 is compared with the token that is sampled anyway, from the same random numbers."""
    prompts = random_prompts(8, seed=7)
    params = SamplingParams(temperature=0.8, top_k=20, ignore_eos=True, repetition_penalty=1.2)

    def make_requests() -> list[Request]:
        return [make_request(p, 30, params=replace(params, seed=i)) for i, p in enumerate(prompts)]

    plain = run_to_completion(make_engine("llama", backend="cpu"), make_requests())
    requests = make_requests()
    engine = make_engine("llama", backend="cpu", drafter=oracle(prompts, plain, 0.3))
    assert run_to_completion(engine, requests) == plain
    assert num_accepted(requests) > 50


# ---- distributions ---------------------------------------------------------------------------------------------------


@dataclass
class NoisyRunner:
    """Run another model in effect: the logits of each token of the vocabulary get a noise of their own."""

    runner: Runner

    def forward(self, batch: Batch) -> Tensor:
        logits = self.runner.forward(batch)
        return logits + torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(3))

    @property
    def hidden_states(self) -> Tensor | None:
        return self.runner.hidden_states

    @property
    def state_size(self) -> int:
        """Numbers of the hidden state that each request brings into a batch."""
        return self.runner.state_size


@pytest.mark.slow
def test_sampled_answers_follow_the_target_through_the_whole_engine() -> None:
    """Chi-square of answers of four tokens: each position has its own p and q, and requests are at different ones."""
    prompt = [3, 1, 4, 1, 5]
    params = SamplingParams(temperature=0.5, top_k=2, ignore_eos=True)
    expected = answer_probs("llama", 4, prompt, params)
    drafter = drafters.parse("draft:k=2,model=any")
    engine = make_engine("llama", backend="cpu", max_batched_tokens=512)
    draft = make_engine("llama", backend="cpu")
    noisy = NoisyRunner(draft.runner)
    loaders = (lambda *_: (noisy, draft.cache), lambda _: draft.runner, lambda *_: draft.runner)
    drafter.attach(TargetModel(engine.runner, engine.cache, *loaders))
    check_answers(PlanningEngine(engine.runner, engine.cache, drafter), prompt, params, expected)


BIAS = ((5, 100.0), (9, 100.0), (77, 100.0))  # as large as it may be


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("gemma4_text", "assistant:k=2,model=any"),
        ("gemma4_text", "assistant:k=1,model=ordered"),
        ("qwen3_5_text", "mtp:k=2"),
        ("deepseek_v3", "mtp:k=1"),
        ("llama", "eagle3:k=2,model=plain"),
    ],
)
def test_sampled_answers_of_drafts_by_a_head_follow_the_target(
    family: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens are likely, so that those of random weights are accepted now and then."""
    monkeypatch.setitem(tiny_heads.EAGLE3_CONFIGS, "plain", {})  # it knows the three
    temperature = 20 if family == "gemma4_text" else 3  # whose logits are capped
    params = SamplingParams(temperature=temperature, ignore_eos=True, logit_bias=BIAS, top_k=3)
    prompt = [3, 1, 4, 1, 5]
    expected = answer_probs(family, 3, prompt, params)
    engine = make_engine(family, backend="cpu", max_batched_tokens=512, drafter=drafters.parse(spec))
    check_answers(engine, prompt, params, expected)


def check_answers(
    engine: PlanningEngine, prompt: list[int], params: SamplingParams, expected: dict[tuple[int, ...], float]
) -> None:
    """Compare how often 3,000 seeds give each answer with its probability, where some drafts are accepted."""
    num_draws = 3000
    length = len(next(iter(expected)))
    counts = dict.fromkeys(expected, 0)
    requests: list[Request] = []
    for first in range(0, num_draws, 50):
        batch = [make_request(prompt, length, params=replace(params, seed=s)) for s in range(first, first + 50)]
        engine.add(*batch)
        while engine.has_unfinished_requests:
            engine.step()
        for request in batch:
            counts[tuple(request.output_tokens)] += 1
        requests += batch
    drafted = num_drafted(requests)
    assert 0.2 * drafted < num_accepted(requests) < 0.9 * drafted
    chi_square = sum((counts[t] - num_draws * p) ** 2 / (num_draws * p) for t, p in expected.items())
    assert chi_square < len(expected) + 8 * len(expected) ** 0.5, chi_square  # degrees of freedom; 6 deviations


def answer_probs(
    family: str, num_tokens: int, prompt: list[int], params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Return the probability of every answer of `num_tokens` tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        for answer in list(found):
            request = make_request(prompt, len(answer) + 1, forced_tokens=list(answer), needs_logits=True)
            (logits,) = record_logits(make_engine(family, backend="cpu"), [request])
            for token, bias in params.logit_bias:
                logits[:, token] += bias
            q = compute_probs(logits[-1:], [params])[0]
            p = found.pop(answer)
            found |= {(*answer, int(t)): p * float(q[t]) for t in q.nonzero()[:, 0]}
    return found


V = 8
LOGITS = torch.tensor(
    [
        [0.3, 1.5, -0.4, 2.0, 0.0, 1.1, -2.0, 0.9],
        [1.0, -1.0, 0.5, 0.0, 2.2, 0.1, 0.3, -0.5],
        [0.1, 0.9, -1.0, 0.4, 0.0, 2.0, 0.5, -0.3],
    ]
)
PAIR_TEST_BOUND = 140  # of a chi-square with 63 degrees of freedom at most: beyond the 1 - 1e-7 quantile

PLAIN = SamplingParams()


@cache
def target_probs(params: SamplingParams, *drafts: int) -> Tensor:
    """Return the target's distributions [3, V] after 0, 1 and 2 drafts, with penalties for tokens before."""
    rows = LOGITS.clone()
    for i, row in enumerate(rows):
        penalties = LogitPenalties(params, row)
        penalties.update([2, *drafts[:i]], 1)
        penalties.apply(row)
    return compute_probs(rows, [params] * 3)


def make_draft_probs(kind: str, q: Tensor) -> Tensor:
    """Return p [V] for a target q: near to it, uniform, or where q is lowest, if possible 0."""
    if kind == "near":
        return (q + 0.1 / V) / (q + 0.1 / V).sum()
    if kind == "uniform":
        return torch.full((V,), 1 / V)
    p = (q == q.min()).float()
    return p / p.sum()


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (PLAIN, "near"),
        pytest.param(SamplingParams(temperature=0.5), "uniform", marks=pytest.mark.slow),
        pytest.param(SamplingParams(top_k=3), "disjoint", marks=pytest.mark.slow),
        (SamplingParams(presence_penalty=1.0, repetition_penalty=1.3), "disjoint"),
        pytest.param(SamplingParams(top_p=0.7), "uniform", marks=pytest.mark.slow),
        pytest.param(PLAIN, "disjoint", marks=pytest.mark.slow),
    ],
)
def test_tokens_after_rejection_sampling_follow_the_target(params: SamplingParams, kind: str) -> None:
    """Chi-square of pairs of tokens against the target's own probabilities."""
    assert chi_square_of_pairs(count_pairs(params, kind, 5_000), params) < PAIR_TEST_BOUND


def test_a_wrong_residual_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling from q where it should be the positive part of q - p."""
    monkeypatch.setattr(rejection_sampler, "residual", lambda q, p: q)
    assert chi_square_of_pairs(count_pairs(PLAIN, "uniform", 5_000), PLAIN) > PAIR_TEST_BOUND


def count_pairs(params: SamplingParams, kind: str, num_draws: int) -> Tensor:
    """Verify two drafts `num_draws` times. Returns how often each pair of tokens came first, [V, V]."""
    rng, counts = random.Random(1), torch.zeros(V, V)
    vocabulary = range(V)
    first_p = make_draft_probs(kind, target_probs(params)[0])
    targets = [target_probs(params, x) for x in vocabulary]
    draft_probs = [torch.stack((first_p, make_draft_probs(kind, q[1]))) for q in targets]
    next_weights, draft_weights = [q[1].tolist() for q in targets], [p[1].tolist() for p in draft_probs]
    pairs: Counter[tuple[int, int]] = Counter()
    for x in rng.choices(vocabulary, first_p.tolist(), k=num_draws):
        y = rng.choices(vocabulary, draft_weights[x])[0]
        tokens = rejection_sample(targets[x], draft_probs[x], [x, y], rng.random)
        if len(tokens) == 1:  # rejected at once: the next token would be sampled from the target
            tokens += rng.choices(vocabulary, next_weights[tokens[0]])
        pairs[tokens[0], tokens[1]] += 1
    for pair, n in pairs.items():
        counts[pair] = n
    return counts


def chi_square_of_pairs(counts: Tensor, params: SamplingParams) -> float:
    q = target_probs(params)[0]
    expected = torch.stack([q[x] * target_probs(params, x)[1] for x in range(V)]).double() * counts.sum()
    assert (counts[expected == 0] == 0).all()
    is_possible = expected > 0
    return float(((counts - expected)[is_possible].square() / expected[is_possible]).sum())


def test_drafts_from_the_target_itself_are_all_accepted() -> None:
    q = torch.rand(6, 50).softmax(-1)
    drafts = [int(i) for i in q[:5].argmax(-1)]
    assert rejection_sample(q, q[:5], drafts, lambda: 0.999999)[:5] == drafts


def test_greedy_verification_keeps_the_drafts_that_equal_the_target_tokens() -> None:
    assert verify_greedy([1, 2, 3], [1, 2]) == [1, 2, 3]
    assert verify_greedy([1, 2, 3], [1, 7]) == [1, 2]
    assert verify_greedy([4], []) == [4]
