"""Laws of layers that cache states: convolutions and linear attention, beside layers that attend."""

from __future__ import annotations

import random

import pytest
import torch

from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.stats.request import RequestMemory
from tests.helpers.engines import iter_steps, make_engine, make_request, run_to_completion
from tests.helpers.state_family import VARIANTS, plain_logits
from tests.helpers.state_family import state_family as state_family

pytestmark = pytest.mark.usefixtures("state_family")


def random_tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(128) for _ in range(n)]


@pytest.mark.parametrize("family", VARIANTS)
def test_answers_are_those_of_a_recurrence(family: str) -> None:
    prompt = random_tokens(random.Random(0), 70)
    (answer,) = run_to_completion(make_engine(family, backend="reference"), [make_request(prompt, 24)])
    logits = plain_logits(prompt + answer, family)
    assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunks_change_no_token(chunk: int) -> None:
    prompt = random_tokens(random.Random(1), 75)
    whole = make_engine("state", backend="reference")
    chunked = make_engine("state", backend="reference", max_batched_tokens=max(chunk, 8))
    assert run_to_completion(whole, [make_request(prompt, 8)]) == run_to_completion(chunked, [make_request(prompt, 8)])


@pytest.mark.parametrize("family", ["state", "gemma3_text"])
def test_statistics_say_that_a_full_cache_keeps_all_it_can(family: str) -> None:
    """Also of layers that have no slots of tokens."""
    engine = make_engine(family, backend="reference")
    request = make_request(list(range(7)), 4)
    spec = engine.cache.spec
    request.attention_trace = AttentionTrace(len(spec.layers), spec.num_traced_heads)
    engine.add(request)
    for _ in iter_steps(engine):
        if request.row:
            request.row.record_attention(request.attention_trace, request.num_computed_tokens)
    _, kept = request.attention_trace.scores(None)
    assert (kept == 1).all()


def test_a_state_is_no_saving() -> None:
    engine = make_engine("state", backend="reference")
    request = make_request(list(range(100)), 4)
    engine.add(request)
    while request.num_output_tokens < 2:
        engine.step()
    memory = request.row.parts.slots.peak_slots_per_layer(request.row.index) if request.row else []
    stats = engine.cache.request_stats(request.policy, request.num_computed_tokens, RequestMemory(memory, memory, 0))
    assert stats["bytes_peak"] == stats["bytes_if_full"]
    assert {g["policy"] for g in stats["groups"]} == {"full", "state"}
