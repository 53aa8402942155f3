"""Law 3: speculation changes no token and no distribution, whoever guesses, however badly."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from retain.engine import drafters
from retain.engine.batch import Batch
from retain.engine.drafters import Drafter, TargetModel
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.engine.sampler import compute_probs, penalize_row
from retain.engine.spec_decode.rejection_sampler import rejection_sample, residual, verify_greedy
from retain.sampling_params import SamplingParams
from tests.helpers.engines import (
    RecordingOutput,
    iter_steps,
    make_engine,
    make_request,
    random_prompts,
    run_to_completion,
)

FAMILIES = ["llama", "gpt2", "mpt", "gemma3_text"]


@dataclass
class Seer:
    """Knows the answers, and says every token wrong with a probability."""

    answers: dict[tuple[int, ...], list[int]]
    wrong: float
    max_draft_tokens: int = 9
    k: str = "9"
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> None:
        for r, n in draft_limits:
            rest = self.answers[tuple(r.prompt)][len(r.output_tokens) :][
                : self.rng.randint(0, min(n, self.max_draft_tokens))
            ]
            r.set_drafts([self.rng.randrange(128) if self.rng.random() < self.wrong else t for t in rest])

    def attach(self, target: TargetModel) -> None:
        pass

    def remove_request(self, request: Request) -> None:
        pass


def seer(asked: Sequence[Sequence[int]], answers: Sequence[list[int]], wrong: float) -> Seer:
    return Seer({tuple(p): a for p, a in zip(asked, answers, strict=True)}, wrong)


POLICIES = ["full", "ring:window=24", "sinks:budget=40,interval=3", "window:budget=30%"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_greedy_answers_are_the_plain_ones(family: str, backend: str, wrong: float) -> None:
    asked = random_prompts(12, seed=1)
    chosen = [POLICIES[i % len(POLICIES)] for i in range(len(asked))]

    def go(drafter: Drafter | None) -> tuple[list[list[int]], list[Request]]:
        made = [make_request(p, 50, q) for p, q in zip(asked, chosen, strict=True)]
        return run_to_completion(make_engine(family, backend=backend, drafter=drafter), made), made

    plain, _ = go(None)
    answers, made = go(seer(asked, plain, wrong))
    assert answers == plain
    drafted, accepted = (
        sum(sum(getattr(r.stats.spec_decode, n)) for r in made)
        for n in ("num_drafted_per_position", "num_accepted_per_position")
    )
    assert drafted > 300
    if wrong == 0:
        assert accepted == drafted
    assert accepted > 0.05 * drafted if wrong < 1 else accepted < 0.05 * drafted


REAL = ["ngram:k=5,min=1", "draft:model=any", "draft:k=4,model=any", "draft:k=5,weights=int4"]
REAL += ["self:k=3,budget=48", "self:k=7,budget=16,refresh=1"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", REAL)
def test_every_drafter_gives_the_plain_tokens(family: str, name: str) -> None:
    """Greedy; company of every policy, some of which draw."""
    asked = random_prompts(10, seed=2)
    chosen = [POLICIES[i % len(POLICIES)] for i in range(len(asked))]

    def go(drafter: Drafter | None) -> list[Request]:
        made = [make_request(p, 40, q) for p, q in zip(asked, chosen, strict=True)]
        run_to_completion(make_engine(family, backend="cpu", drafter=drafter), made)
        return made

    plain, made = go(None), go(drafters.parse(name))
    assert [r.output_tokens for r in made] == [r.output_tokens for r in plain]
    if "k=" in name:
        assert sum(sum(r.stats.spec_decode.num_drafted_per_position) for r in made) > 100
    if "k=" in name and "ngram" not in name:  # random models repeat nothing, but look at pages as they look at all
        assert sum(sum(r.stats.spec_decode.num_accepted_per_position) for r in made) > 100
    if "draft" in name:  # the same model: all is accepted where nothing is forgotten
        for r in made[::4]:
            assert r.stats.spec_decode.num_accepted_per_position == r.stats.spec_decode.num_drafted_per_position


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_preemption_cancellation_and_company_in_the_middle_of_rounds(family: str) -> None:
    asked = random_prompts(20, seed=5, max_prompt_len=100)
    plain = run_to_completion(make_engine(family, backend="cpu"), [make_request(p, 40) for p in asked])
    pages = 190 if family == "llama" else 60
    engine = make_engine(family, backend="cpu", num_pages=pages, drafter=seer(asked, plain, 0.2))
    made = [make_request(p, 40) for p in asked]
    engine.add(*made)
    for step in iter_steps(engine):
        if step == 12:
            engine.cancel(made[3])
        if step in (4, 9):
            engine.scheduler.preempt(engine.scheduler.running[0])
    assert [r.output_tokens for i, r in enumerate(made) if i != 3] == plain[:3] + plain[4:]
    assert made[3].output_tokens == plain[3][: len(made[3].output_tokens)]
    assert engine.cache.free_pages == engine.cache.total_pages and sum(r.stats.num_preemptions for r in made) > 0


def test_a_draft_that_was_not_asked_for_long_reads_what_it_missed() -> None:
    """Also where its rings are as small as they get."""
    asked = make_request(random_prompts(1, seed=9)[0], 120)
    plain = run_to_completion(make_engine("gemma3_text", backend="cpu"), [make_request(asked.prompt, 120)])[0]
    drafter = drafters.parse("draft:k=3,model=any")
    engine = make_engine("gemma3_text", backend="cpu", drafter=drafter)
    engine.add(asked)
    while engine.has_unfinished_requests:
        engine.speculator.default = drafter if len(asked.output_tokens) < 20 or len(asked.output_tokens) > 70 else None
        engine.step()
    assert (
        asked.output_tokens == plain
        and asked.stats.spec_decode.num_accepted_per_position == asked.stats.spec_decode.num_drafted_per_position
    )
    assert sum(asked.stats.spec_decode.num_drafted_per_position) > 40


def test_who_stops_inside_a_round_says_nothing_more() -> None:
    asked = random_prompts(10, seed=6)
    plain = run_to_completion(make_engine("llama"), [make_request(p, 40) for p in asked])
    for n in (1, 2, 5, 39):
        made = [make_request(p, n) for p in asked]
        assert run_to_completion(make_engine("llama", drafter=seer(asked, plain, 0)), made) == [a[:n] for a in plain]
    stops = [frozenset({a[17]}) for a in plain]
    made = [make_request(p, 40, stop_ids=s) for p, s in zip(asked, stops, strict=True)]
    output = RecordingOutput()
    answers = run_to_completion(make_engine("llama", drafter=seer(asked, plain, 0), output_processor=output), made)
    assert answers == [a[: a.index(a[17]) + 1] for a in plain]
    assert [a[:-1] for a in answers] == [output.tokens[r] for r in made]  # a stop token is not text


def test_certain_drafts_change_no_drawn_token_either() -> None:
    """A draft of which p is 1 is compared with the token that is drawn anyway, by the same numbers."""
    asked = random_prompts(8, seed=7)
    params = [
        SamplingParams(temperature=0.8, top_k=20, seed=i, ignore_eos=True, repetition_penalty=1.2) for i in range(8)
    ]
    plain = run_to_completion(
        make_engine("llama"), [make_request(p, 30, params=q) for p, q in zip(asked, params, strict=True)]
    )
    made = [make_request(p, 30, params=q) for p, q in zip(asked, params, strict=True)]
    assert run_to_completion(make_engine("llama", drafter=seer(asked, plain, 0.3)), made) == plain
    assert sum(sum(r.stats.spec_decode.num_accepted_per_position) for r in made) > 50


@dataclass
class Blurred:
    """A model that means something else, by noise of its own for every token of the vocabulary."""

    runner: Runner

    def forward(self, batch: Batch) -> Tensor:
        logits = self.runner.forward(batch)
        return logits + torch.randn(logits.shape[1], generator=torch.Generator().manual_seed(3))


def test_answers_follow_the_target_through_the_whole_engine() -> None:
    """Chi-square of answers of four tokens: each place has its own p and q, and requests are in different places."""
    draws, prompt, params = 3000, [3, 1, 4, 1, 5], SamplingParams(temperature=0.5, top_k=2, ignore_eos=True)
    want = answers_of(4, prompt, params)
    drafter = drafters.parse("draft:k=2,model=any")
    engine = make_engine("llama", backend="cpu", max_batched_tokens=512)
    draft = make_engine("llama", backend="cpu")
    runner, cache = draft.runner, draft.cache
    drafter.attach(TargetModel(engine.runner, engine.cache, lambda *_: (Blurred(runner), cache), lambda _: runner))
    engine = Engine(engine.runner, engine.cache, drafter)
    counts = dict.fromkeys(want, 0)
    drafted = accepted = 0
    for first in range(0, draws, 50):
        made = [make_request(prompt, 4, params=replace(params, seed=s)) for s in range(first, first + 50)]
        engine.add(*made)
        while engine.has_unfinished_requests:
            engine.step()
        for r in made:
            counts[tuple(r.output_tokens)] += 1
            drafted += sum(r.stats.spec_decode.num_drafted_per_position)
            accepted += sum(r.stats.spec_decode.num_accepted_per_position)
    assert 0.2 * drafted < accepted < 0.9 * drafted
    assert sum((counts[t] - draws * p) ** 2 / (draws * p) for t, p in want.items()) < 60  # 15 degrees of freedom


def answers_of(n: int, prompt: list[int], params: SamplingParams) -> dict[tuple[int, ...], float]:
    """How likely every answer of n tokens is."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n):
        for answer in list(found):
            given = make_request(prompt, len(answer) + 1, forced_tokens=list(answer), needs_logits=True)
            output = RecordingOutput()
            run_to_completion(make_engine("llama", backend="cpu", output_processor=output), [given])
            q = compute_probs(torch.cat(output.logits[given])[-1:], [params])[0]
            p = found.pop(answer)
            found |= {(*answer, int(t)): p * float(q[t]) for t in q.nonzero()[:, 0]}
    return found


V, DRAWS = 8, 100_000
LOGITS = torch.tensor([[0.3, 1.5, -0.4, 2.0, 0.0, 1.1, -2.0, 0.9], [1.0, -1.0, 0.5, 0.0, 2.2, 0.1, 0.3, -0.5]])
LAST = torch.tensor([0.1, 0.9, -1.0, 0.4, 0.0, 2.0, 0.5, -0.3])
OPTIONS = [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}, {"presence_penalty": 1.0, "repetition_penalty": 1.3}]


def targets(options: dict[str, float], prefix: Sequence[int]) -> Tensor:
    """q after so many drafts, with penalties of what was said before. [3, V]."""
    params = SamplingParams(**options)  # type: ignore[arg-type]
    rows = torch.cat((LOGITS, LAST[None])).clone()
    for i, row in enumerate(rows):
        penalize_row(row, [2, *prefix[:i]], prefix[:i], params)
    return compute_probs(rows, [params] * 3)


def drafts_of(kind: str, q: Tensor, options: dict[str, float]) -> Tensor:
    """p, good, bad, or of disjoint support. [V]."""
    if kind == "good":
        return (q + 0.1 / V) / (q + 0.1 / V).sum()
    if kind == "bad":
        return torch.full((V,), 1 / V)
    p = (q == q.min()).float()  # what the target never says, or least
    return p / p.sum()


@pytest.mark.parametrize(
    ("options", "kind"),
    [*((o, k) for o, k in zip(OPTIONS, ("good", "bad", "disjoint", "bad", "disjoint"), strict=True)), ({}, "disjoint")],
)
def test_drawn_tokens_follow_the_target(options: dict[str, float], kind: str) -> None:
    """Chi-square of pairs of tokens, 100,000 draws: against the target's own; the bound is far out in the tail."""
    assert chi_square(tally(options, kind, residual), options) < 140  # 63 degrees of freedom at most: beyond 1 - 1e-7


def test_a_wrong_residual_is_noticed() -> None:
    """Drawing from q where it should be (q - p)+."""
    assert chi_square(tally({}, "bad", lambda q, p: q, 30_000), {}) > 140


def tally(options: dict[str, float], kind: str, rest: object, draws: int = DRAWS) -> Tensor:
    """How often each pair of tokens came first, [V, V]."""
    from retain.engine.spec_decode import rejection_sampler as rule

    rng, counts = random.Random(1), torch.zeros(V, V)
    first = targets(options, [])[0]
    p0 = drafts_of(kind, first, options)
    q_of = [targets(options, [x]) for x in range(V)]
    guesses = [torch.stack((p0, drafts_of(kind, q[1], options))) for q in q_of]
    real = rule.residual
    try:
        rule.residual = rest  # type: ignore[assignment]
        xs = rng.choices(range(V), p0.tolist(), k=draws)
        for x in xs:
            q, p = q_of[x], guesses[x]
            y = rng.choices(range(V), p[1].tolist())[0]
            tokens = rejection_sample(q, p, [x, y], rng.random)
            if len(tokens) == 1:  # rejected at once: what would have come next is drawn from the target
                tokens += rng.choices(range(V), targets_next(options, tokens[0]))
            counts[tokens[0], tokens[1]] += 1
    finally:
        rule.residual = real
    return counts


CACHE: dict[tuple[str, int], list[float]] = {}


def targets_next(options: dict[str, float], x: int) -> list[float]:
    key = (str(options), x)
    if key not in CACHE:
        CACHE[key] = targets(options, [x])[1].tolist()
    return CACHE[key]


def chi_square(counts: Tensor, options: dict[str, float]) -> float:
    q = targets(options, [])[0]
    want = torch.stack([q[x] * targets(options, [x])[1] for x in range(V)]).double() * counts.sum()
    assert (counts[want == 0] == 0).all()
    some = want > 0
    return float(((counts - want)[some].square() / want[some]).sum())


def test_equal_distributions_accept_everything_and_greedy_is_the_limit() -> None:
    q = torch.rand(6, 50).softmax(-1)
    drafts = [int(i) for i in q[:5].argmax(-1)]
    assert rejection_sample(q, q[:5], drafts, lambda: 0.999999)[:5] == drafts
    assert (
        verify_greedy([1, 2, 3], [1, 2]) == [1, 2, 3]
        and verify_greedy([1, 2, 3], [1, 7]) == [1, 2]
        and verify_greedy([4], []) == [4]
    )
