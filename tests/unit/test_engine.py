"""The life of requests: why they end, who waits for whom, what is refused."""

import math

import pytest

from retain.engine.request import FinishReason
from retain.sampling_params import SamplingParams
from tests.helpers.engines import (
    GREEDY,
    RecordingOutput,
    make_engine,
    make_request,
    random_prompts,
    run_alone,
    run_to_completion,
)


def test_a_request_ends_at_a_stop_token_at_its_length_or_when_its_watcher_says_so():
    prompt = random_prompts(1)[0]
    free = run_alone("llama", prompt, 12)
    token = free[5]
    first = free.index(token)
    stopped = make_request(prompt, stop_ids=frozenset({token}))
    watched = make_request(prompt)
    whole = make_request(prompt)
    engine = make_engine("llama", output_processor=RecordingOutput({watched: token}))
    assert run_to_completion(engine, [stopped, watched, whole]) == [
        free[: first + 1],
        free[: first + 1],
        free,
    ]
    assert [r.finish_reason for r in (stopped, watched, whole)] == [
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]


def test_cancelling_frees_the_pages_now_and_disturbs_nobody():
    engine, (a, b, c) = make_engine("llama", max_running_requests=2), [make_request(p, 20) for p in random_prompts(3)]
    for r in (a, b, c):
        engine.add(r)
    for _ in range(3):
        engine.step()
    held = engine.cache.pool.num_used
    engine.cancel(a)
    engine.cancel(c)  # it was still waiting
    engine.cancel(a)
    assert engine.cache.pool.num_used < held and a.row is None
    while engine.has_unfinished_requests:
        engine.step()
        engine.cache.check()
    assert [r.finish_reason for r in (a, b, c)] == [FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.CANCELLED]
    assert b.output_tokens == run_alone("llama", b.prompt, 20) and c.output_tokens == []


def test_a_request_that_can_never_fit_is_refused_at_once():
    engine = make_engine("llama", num_pages=36)  # 3 layers of 2 heads: 6 page lists, so 96 tokens
    with pytest.raises(ValueError, match="needs 42 pages of KV memory and the pool has 36"):
        engine.add(make_request([1] * 80, 18))
    assert not engine.has_unfinished_requests
    (answer,) = run_to_completion(engine, [make_request([1] * 80, 17)])
    assert len(answer) == 17


def test_one_token_steps_go_on_while_a_long_prompt_is_paid():
    engine = make_engine("llama", max_batched_tokens=65)
    short, long = make_request([1, 2, 3], 40), make_request(random_prompts(1, max_prompt_len=9)[0] * 40, 5)
    engine.add(short)
    engine.step()
    engine.add(long)
    while not long.stats.first_token_time:
        before = len(short.output_tokens)
        engine.step()
        assert len(short.output_tokens) == before + 1 or short.finish_reason


def test_the_oldest_always_gets_on_and_the_queue_is_served_in_order():
    engine = make_engine("llama", num_pages=80, backend="cpu")
    asked = [make_request(p, 40) for p in random_prompts(12, seed=4, max_prompt_len=90)]
    ended = []
    for r in asked:
        engine.add(r)
    while engine.has_unfinished_requests:
        oldest = min((r for r in asked if not r.finish_reason), key=lambda r: r.id)
        before = oldest.num_computed_tokens
        engine.step()
        assert oldest.finish_reason or oldest.num_computed_tokens > before
        ended += [r.id for r in asked if r.finish_reason and r.id not in ended]
    assert sum(r.stats.num_preemptions for r in asked) > 0 and len(ended) == 12
    assert ended[0] == asked[0].id


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2},
        {"max_tokens": 0},
        {"repetition_penalty": 0},
        {"seed": -1},
        {"logprobs": -1},
        {"n": 0},
        {"stop": ""},
        {"presence_penalty": math.inf},
    ],
)
def test_parameters_out_of_range_are_refused_in_one_line(bad):
    with pytest.raises(ValueError) as error:
        SamplingParams(**bad)
    assert "\n" not in str(error.value)


def test_stop_may_be_one_string_or_several():
    assert SamplingParams(stop="x").stop == ("x",) and SamplingParams(stop=["x", "y"]).stop == ("x", "y")
    assert GREEDY.greedy and not SamplingParams().greedy
