"""Laws of layers that cache states: convolutions and linear attention, beside layers that attend."""

from __future__ import annotations

import random

import pytest
import torch

from retain import models
from retain.kv.eviction.demotion import DEMOTED_DTYPE
from retain.kv.memory.group_pages import divide_pages, fold_states
from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.stats.request import RequestMemory
from tests.helpers.engines import iter_steps, make_engine, make_request, row_of, run_to_completion
from tests.helpers.state_family import VARIANTS, plain_logits
from tests.helpers.state_family import state_family as state_family
from tests.helpers.tiny_models import tiny_checkpoint

FLOAT32 = torch.float32
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
    request.attention_trace = AttentionTrace(len(spec.caches), spec.num_traced_heads)
    engine.add(request)
    for _ in iter_steps(engine):
        if request in engine.scheduler.running:
            row_of(engine, request).record_attention(request.attention_trace)
    _, kept = request.attention_trace.scores(None)
    assert (kept == 1).all()


def test_a_state_is_no_saving() -> None:
    engine = make_engine("state", backend="reference")
    request = make_request(list(range(100)), 4)
    engine.add(request)
    while request.num_output_tokens < 2:
        engine.step()
    row = row_of(engine, request)
    memory = row.parts.slots.peak_slots_per_layer(row.index)
    stats = engine.cache.request_stats(request.policy, request.num_computed_tokens, RequestMemory(memory, memory, 0))
    assert stats["bytes_peak"] == stats["bytes_if_full"]
    assert {g["policy"] for g in stats["groups"]} == {"full", "state"}


@pytest.mark.parametrize("family", ["llama", "lfm2", "qwen3_5_text", "qwen3_next", "gemma4_text", "nemotron_h"])
def test_layers_have_the_numbers_of_the_model(family: str) -> None:
    """However many caches a layer has. Of each kind the statistics name the layers of that kind."""
    checkpoint = tiny_checkpoint(family)
    spec = models.load_family(family).spec_from_config(checkpoint.config)
    types = checkpoint.config.get("layer_types", [])
    assert spec.num_layers == checkpoint.config.get("num_hidden_layers", len(types))
    uncached = {i for i, name in enumerate(types) if name in ("mlp", "moe")}
    assert {*spec.kv_cache.layer_numbers} == {*range(spec.num_layers)} - uncached
    engine = make_engine(family)
    run_to_completion(engine, [request := make_request([1, 2, 3], 2)])
    groups = engine.cache.request_stats(request.policy, 4, RequestMemory([], [], 0))["groups"]
    listed = [layer for group in groups for layer in group["layers"]]
    own = {spec.kv_cache.layer_numbers[layer] for group in spec.kv_cache.groups for layer in group.caches}
    assert sorted(listed) == sorted(own)
    assert {g["kind"] for g in groups} <= {"full", "sliding", "state"}
    if types:
        full = [layer for group in groups if group["kind"] == "full" for layer in group["layers"]]
        assert full == [i for i, name in enumerate(types) if name == "full_attention"]


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_pages_of_states_are_counted_as_such(family: str) -> None:
    engine = make_engine(family)
    engine.add(make_request(list(range(40)), 4))
    counts = [engine.cache.pool_stats().pages_by_state for _ in iter_steps(engine)]
    assert max(c["state"] for c in counts) > 0 and max(c["full"] for c in counts) > 0
    assert not any(c["ring"] for c in counts)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_states_have_no_demoted_format(family: str) -> None:
    """So no page has positions and masses of one."""
    spec = fold_states(
        models.load_family(family).spec_from_config(tiny_checkpoint(family).config).kv_cache, 16, FLOAT32
    )
    plain, demoting = (divide_pages(spec, 16, FLOAT32, 1, dtype) for dtype in (None, DEMOTED_DTYPE))
    assert [f is None for f in demoting.demoted_formats] == [g.is_state for g in spec.groups]
    of_attention = sum(f.slot_state_bytes for f in demoting.demoted_formats if f)
    assert demoting.page_bytes - plain.page_bytes == of_attention


def test_demotion_applies_to_layers_that_attend() -> None:
    engine = make_engine("lfm2", kv_dtype=torch.bfloat16, demotes=True)
    (answer,) = run_to_completion(engine, [make_request(list(range(100)), 8, "h2o:budget=40,demote=int4")])
    assert len(answer) == 8
    engine.cache.check()
