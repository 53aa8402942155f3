"""Requests in the engine: why they end, in which order they are served, and which are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from retain.engine.request import FinishReason, Request, RequestInput
from retain.engine.sampler import sample
from retain.kv.eviction.policies import parse
from retain.processing.output import find_end
from retain.sampling_params import SamplingParams
from tests.helpers.engines import (
    GREEDY,
    iter_steps,
    make_engine,
    make_request,
    process_to_completion,
    random_prompts,
    run_alone,
    run_to_completion,
)


def test_a_request_ends_at_a_stop_token_at_a_stop_string_or_at_its_length() -> None:
    prompt = random_prompts(1)[0]
    unstopped = run_alone("llama", prompt, 12)
    token = unstopped[5]
    stopped_answer = unstopped[: unstopped.index(token) + 1]
    at_token = make_request(prompt, stop_ids=frozenset({token}))
    at_string, at_length = make_request(prompt), make_request(prompt)
    requests = [at_token, at_string, at_length]
    texts = process_to_completion(make_engine("llama"), {at_token: None, at_string: token, at_length: None})
    assert texts == [stopped_answer[:-1], stopped_answer, unstopped]  # a stop token is not text
    assert [r.output_tokens for r in requests] == [stopped_answer, stopped_answer, unstopped]
    reasons = [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]
    assert [r.finish_reason for r in requests] == reasons


class Uncopied(list[int]):
    """A text of which no part is copied but a few of its tokens."""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        assert not isinstance(key, slice) or len(found) < 10
        return found


def test_no_token_costs_a_copy_of_the_text_before_it() -> None:
    """From the sampler to the reason to go on."""
    options = SamplingParams(temperature=0, min_tokens=300, frequency_penalty=0.5, repetition_penalty=1.5)
    request = Request(RequestInput([1] * 100, options, parse("full"), 500, frozenset({9})))
    request.text.ids += [1, 2, 3, 4] * 30
    sample(torch.zeros(1, 10), [request]).read()
    request.text.ids = Uncopied(request.tokens)
    request.num_computed_tokens = len(request.tokens) - 1
    for _ in range(3):
        ((token, logprob),) = sample(torch.zeros(1, 10), [request]).read()[0]
        request.append_token(token, logprob)
        assert request.check_stop() is None and find_end(request, [token], None) is None
        request.num_computed_tokens += 1
        assert request.max_drafts == 500 - request.num_output_tokens - 1


class DeadEnd:
    """A grammar that refuses every token after the first few."""

    error, is_complete = "nothing follows", False

    def __init__(self, num_allowed: int):
        self.num_left = num_allowed

    def mask_logits(self, logits: Tensor, drafts: Sequence[int]) -> None:
        """Mask nothing."""

    def accept_token(self, token: int) -> bool:
        self.num_left -= 1
        return self.num_left >= 0


@pytest.mark.parametrize(("num_allowed", "depth"), [(0, 1), (3, 1), (3, 2)])
def test_a_request_fails_at_a_dead_end_of_its_grammar(num_allowed: int, depth: int) -> None:
    """Also where the end of the text is sampled there: what the grammar refuses is no part of the answer."""
    prompt, other = random_prompts(2)
    tokens = run_alone("llama", prompt, 12)
    failing, beside = make_request(prompt, stop_ids=frozenset({tokens[num_allowed]})), make_request(other, 12)
    failing.grammar = DeadEnd(num_allowed)
    engine = make_engine("llama")
    engine.depth = depth
    process_to_completion(engine, {failing: None, beside: None})
    assert [failing.output_tokens, beside.output_tokens] == [tokens[:num_allowed], run_alone("llama", other, 12)]
    assert (failing.finish_reason, beside.finish_reason) == (FinishReason.FAILED, FinishReason.LENGTH)
    assert failing.stats.arrival_time < failing.stats.first_token_time <= failing.stats.finish_time


def test_cancelled_request_frees_its_pages_at_once_and_changes_no_other_answer() -> None:
    engine = make_engine("llama", max_running_requests=2)
    first, second, waiting = requests = [make_request(p, 20) for p in random_prompts(3)]
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    num_used = engine.cache.pool.num_used
    engine.cancel(first)
    assert engine.cache.pool.num_used < num_used and first not in engine.scheduler.running
    engine.cancel(waiting)
    engine.cancel(first)  # a second time: no effect
    for _ in iter_steps(engine):
        pass
    reasons = [FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.CANCELLED]
    assert [r.finish_reason for r in requests] == reasons
    assert second.output_tokens == run_alone("llama", second.prompt, 20)
    assert waiting.output_tokens == []


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    engine = make_engine("llama", num_pages=36)  # 3 layers of 2 heads with 6 pages each, so 96 tokens
    with pytest.raises(ValueError, match="needs 42 pages of KV memory and the pool has 36"):
        engine.add(make_request([1] * 80, 18))
    assert not engine.has_unfinished_requests
    (answer,) = run_to_completion(engine, [make_request([1] * 80, 17)])
    assert len(answer) == 17


@pytest.mark.parametrize(
    ("policy", "prefix_cache", "prompt_len", "max_tokens"),
    [
        ("full", "off", 80, 60),
        ("full", "exact", 80, 60),
        ("h2o:budget=110,interval=5", "exact", 80, 60),
        ("ring:window=110", "exact", 110, 5),
    ],
)
def test_a_request_whose_plan_was_too_small_fails_and_the_others_go_on(
    monkeypatch, caplog, policy, prefix_cache, prompt_len, max_tokens
) -> None:
    """It runs out of pages in its answer, or in its prompt, with nobody left who could give some back."""
    engine = make_engine("llama", num_pages=36, backend="cpu", prefix_cache=prefix_cache)  # 96 tokens
    monkeypatch.setattr(engine.cache, "pages_needed", lambda *_: 1)
    requests = [
        make_request([2] * 20, 5),
        make_request([1] * prompt_len, max_tokens, policy),
        make_request([3] * 20, 5),
    ]
    engine.add(*requests)
    ended = []
    for step in iter_steps(engine):
        assert step < 500
        ended += [r.id for r in requests if r.finish_reason and r.id not in ended]
    reasons = [FinishReason.LENGTH, FinishReason.OUT_OF_MEMORY, FinishReason.LENGTH]
    assert [r.finish_reason for r in requests] == reasons
    assert [len(r.output_tokens) for r in requests[::2]] == [5, 5]
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 1
    assert engine.cache.free_pages == engine.cache.total_pages


def test_a_request_that_got_a_token_further_is_not_stalled() -> None:
    scheduler = make_engine("llama").scheduler
    request = make_request([1] * 20, 5)
    scheduler.enqueue(request)
    assert scheduler.find_stalled() is None
    request.text.ids.append(1)
    assert scheduler.find_stalled() is None
    assert scheduler.find_stalled() is request


def test_decoding_goes_on_while_a_long_prompt_is_computed() -> None:
    engine = make_engine("llama", max_batched_tokens=65)
    decoding = make_request([1, 2, 3], 40)
    prefilling = make_request(random_prompts(1, max_prompt_len=9)[0] * 40, 5)
    engine.add(decoding)
    engine.step()
    engine.add(prefilling)
    while not prefilling.stats.first_token_time:
        num_tokens = len(decoding.output_tokens)
        engine.step()
        assert len(decoding.output_tokens) == num_tokens + 1 or decoding.finish_reason


def test_the_oldest_request_always_advances_and_ends_first() -> None:
    engine = make_engine("llama", num_pages=80, backend="cpu")
    requests = [make_request(p, 40) for p in random_prompts(12, seed=4, max_prompt_len=90)]
    finished: list[int] = []
    for request in requests:
        engine.add(request)
    while engine.has_unfinished_requests:
        oldest = min((r for r in requests if not r.finish_reason), key=lambda r: r.id)
        num_computed = oldest.num_computed_tokens
        engine.step()
        assert oldest.finish_reason or oldest.num_computed_tokens > num_computed
        finished += [r.id for r in requests if r.finish_reason and r.id not in finished]
    assert sum(r.stats.num_preemptions for r in requests) > 0
    assert len(finished) == 12 and finished[0] == requests[0].id


def test_stop_may_be_one_string_or_several() -> None:
    assert SamplingParams(stop="x").stop == ("x",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")  # type: ignore[arg-type]


def test_temperature_0_is_greedy() -> None:
    assert GREEDY.greedy and not SamplingParams().greedy
