"""Law 2 for steps that overlap: a step that is launched before the last one's tokens are known changes no token."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import pytest
import torch

from retain.engine import drafters
from retain.engine.request import FinishReason, Request
from tests.helpers.engines import (
    GREEDY,
    make_engine,
    make_request,
    process_to_completion,
    random_prompts,
    record_logits,
    row_of,
    run_to_completion,
)
from tests.helpers.overlap import (
    CANCELLED,
    DRAFTED,
    PENALIZED,
    PREEMPTED,
    STOPPED,
    assert_tokens_equal,
    overlapped_requests,
    run_overlapped,
    watch_launches,
)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("num_pages", [100_000, 40])
def test_a_step_before_known_tokens_changes_no_token(family: str, num_pages: int) -> None:
    """Ends, cancellation, preemption, eviction, rings, penalties and drafts, also where pages are scarce."""
    expected = run_to_completion(make_engine(family, backend="cpu"), overlapped_requests(16))
    stop_token = expected[STOPPED][9]
    requests = overlapped_requests(16, stop_token)
    overlapped = run_overlapped(
        make_engine(family, backend="cpu", num_pages=num_pages, max_batched_tokens=40), requests
    )
    assert_tokens_equal(requests, expected, stop_token)
    reasons = {STOPPED: FinishReason.STOP, CANCELLED: FinishReason.CANCELLED}
    assert [r.finish_reason for r in requests] == [reasons.get(i, FinishReason.LENGTH) for i in range(len(requests))]
    assert requests[PREEMPTED].stats.num_preemptions
    assert not overlapped & {requests[PENALIZED], requests[DRAFTED]}
    assert num_pages < 100 or len(overlapped) == len(requests) - 2


def test_equal_prompts_logprobs_and_logits_are_those_of_single_steps() -> None:
    prompts = random_prompts(3, seed=5)

    def run(depth: int) -> tuple[list[Request], list[torch.Tensor]]:
        engine = make_engine("llama", backend="cpu", max_batched_tokens=70)
        engine.depth = depth
        params = [replace(GREEDY, temperature=0.9, seed=seed, logprobs=2) for seed in range(3)]
        engine.add(*(shared := [make_request(prompts[0], 9, params=p) for p in params]))
        forced = [make_request(p, 5, forced_tokens=[3, 4, 5, 6], needs_logits=True) for p in prompts[1:]]
        return shared, record_logits(engine, forced)

    (requests, logits), (expected, expected_logits) = run(2), run(1)
    assert [r.output_tokens for r in requests] == [r.output_tokens for r in expected]
    assert [r.logprobs for r in requests] == [r.logprobs for r in expected]
    assert all(torch.equal(a, b) for a, b in zip(logits, expected_logits, strict=True))


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_a_text_that_ends_drops_the_tokens_of_steps_behind_it(depth: int) -> None:
    prompts = random_prompts(4, seed=8)
    plain = run_to_completion(make_engine("llama", backend="cpu"), [make_request(p, 20) for p in prompts])
    engine = make_engine("llama", backend="cpu")
    engine.depth = depth
    requests = [make_request(p, 20) for p in prompts]
    stops = [a[n] for a, n in zip(plain, (3, 7, 11, 19), strict=True)]
    with watch_launches(engine) as overlapped:
        process_to_completion(engine, dict(zip(requests, stops, strict=True)))
    assert [r.output_tokens for r in requests] == [a[: a.index(s) + 1] for a, s in zip(plain, stops, strict=True)]
    assert overlapped == set(requests)


def test_a_budget_is_not_halved_while_drafts_of_its_row_are_pending() -> None:
    """Nobody knows yet how many of the row's slots stay: rejected drafts would stay among them."""
    engine = make_engine("llama", num_pages=56, max_batched_tokens=64, page_size=16)
    engine.depth = 2
    engine.speculator.named["ngram"] = drafters.parse("ngram:k=4,min=1,max=2")
    policy = "h2o:budget=64,interval=16,shrink=8"
    drafting = make_request([5, 6, 7, 8, 5, 6, 9] * 12, 60, policy, GREEDY, drafter_name="ngram")
    engine.add(drafting, make_request(list(range(11, 31)), 120, "full"))
    while engine.has_unfinished_requests:
        engine.step()
        if drafting in engine.scheduler.running and not any(
            drafting in s.samples.requests for s in engine.pending_steps
        ):
            kept = [positions for heads in row_of(engine, drafting).positions() for positions in heads if positions]
            assert max(map(max, kept)) < drafting.num_computed_tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_times_of_steps_do_not_overlap(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of computing that a load is compared with counts no moment twice."""
    engine = make_engine("llama", backend="cpu")
    engine.depth = depth
    seconds: list[float] = []
    monkeypatch.setattr(engine.cache.prefix_cache, "record_compute", lambda num_tokens, step_s: seconds.append(step_s))
    started = perf_counter()
    run_to_completion(engine, [make_request(p, 30) for p in random_prompts(3, seed=2)])
    assert len(seconds) >= 30
    assert 0 < sum(seconds) < perf_counter() - started
