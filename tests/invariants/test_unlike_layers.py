"""Layers that differ in head dims, kv heads and windows, and that share a cache, equal plain torch.

The family and its definition in plain torch: tests/helpers/unlike_family.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from retain.engine import drafters
from retain.engine.engine import Engine
from retain.kernels import cpu, triton
from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AutoPolicy
from tests.helpers.attention_case import assert_close, torch_threads
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.decoder_runner import random_tokens
from tests.helpers.engines import iter_steps, make_engine, make_request, record_logits, row_of, run_to_completion
from tests.helpers.list_model import ListModel, ListPolicy
from tests.helpers.marks import slow
from tests.helpers.schedule_runner import ScheduleRun
from tests.helpers.schedules import UNLIKE_FAMILIES, draw_schedule
from tests.helpers.tiers import offloader_of
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.unlike_family import plain_answer, plain_logits
from tests.helpers.unlike_family import unlike_family as unlike_family
from tests.models.test_programs import make_prompts, program_logits

needs_cpu = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))
needs_triton = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
STEPS = [(20, 3), (1, 10), (0, 9), (18, 1), (1, 0)]  # fresh tokens of two requests
PROMPT, NUM_TOKENS = [7 * i % 128 for i in range(50)], 30
POLICIES = {
    "sinks:budget=40,interval=3": ListPolicy("sinks", sinks=4, interval=3),
    "h2o:budget=40,interval=5": ListPolicy("h2o", interval=5),
    "h2o:budget=40,interval=5,heads=query": ListPolicy("h2o", heads="query", interval=5),
    "h2o:budget=40,interval=5,share=layer": ListPolicy("h2o", share="layer", interval=5),
    "keyformer:budget=40,interval=5": ListPolicy("keyformer", interval=5),
}


@needs_cpu
def test_the_cpu_program_equals_plain_torch(unlike_family: str) -> None:
    expected = torch.cat([plain_logits(prompt.tolist()) for prompt in make_prompts(128, STEPS)])
    for isa in ISAS:
        with use_isa(isa):
            assert_close(program_logits(tiny_checkpoint(unlike_family), STEPS), expected, 2e-5, isa)


@needs_triton
@pytest.mark.slow
def test_the_triton_program_equals_plain_torch(unlike_family: str) -> None:
    steps = [(5, 3), (1, 1), (1, 1), (1, 1)]  # the last ones replay what was captured
    expected = torch.cat([plain_logits(prompt.tolist()) for prompt in make_prompts(128, steps)])
    assert_close(program_logits(tiny_checkpoint(unlike_family), steps, backend=triton), expected, 2e-5)


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_cpu)])
def test_an_engine_equals_plain_torch(unlike_family: str, backend: str) -> None:
    expected = plain_answer(PROMPT, NUM_TOKENS)
    engine = make_engine(unlike_family, backend=backend, max_batched_tokens=32)
    first, second = make_request(PROMPT, NUM_TOKENS), make_request(PROMPT[:20], NUM_TOKENS)
    assert run_to_completion(engine, [first, second]) == [expected, plain_answer(PROMPT[:20], NUM_TOKENS)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_cpu), *slow("reference")])
def test_budgets_keep_the_tokens_of_plain_torch(unlike_family: str, policy: str, backend: str) -> None:
    """Of lists of tokens, whose attention is written out, in every layer and head of both groups."""
    lists = ListModel(unlike_family, POLICIES[policy])
    expected = lists.generate(PROMPT, NUM_TOKENS, NUM_TOKENS, seed=0)
    spec = lists.spec
    columns = max(spec.num_heads // g.num_kv_heads for g in spec.kv_cache.groups)
    engine = make_engine(unlike_family, backend=backend, score_columns=columns)
    request = make_request(PROMPT, NUM_TOKENS + 1, policy)
    engine.add(request)
    while len(request.output_tokens) < NUM_TOKENS:
        engine.step()
        engine.cache.check()
    assert request.output_tokens == expected
    layers = [layer for layer in range(spec.num_caches) if spec.kv_cache.source_cache(layer) == layer]
    for layer, kept in zip(layers, row_of(engine, request).positions(), strict=True):
        if spec.kv_cache.windows[layer] is None:
            assert kept == [sorted(lists.heads[layer, g].position_list) for g in range(len(kept))]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_cpu), *slow("reference")])
def test_a_prompt_computed_in_one_step_keeps_the_same_tokens(unlike_family: str, policy: str, backend: str) -> None:
    """Where layers of several groups evict."""
    answers = {}
    for max_batched_tokens in (256, 100):
        engine = make_engine("unlike_full", backend=backend, score_columns=4, max_batched_tokens=max_batched_tokens)
        (answers[max_batched_tokens],) = run_to_completion(engine, [make_request(PROMPT * 3, 20, policy)])
    assert answers[256] == answers[100]


def test_a_layer_that_differs_in_nothing_but_its_heads_is_a_group_of_its_own(unlike_family: str) -> None:
    """Pages have one size in bytes, so those of the smaller slots have more of them, and a block has several of one."""
    cache = make_engine(unlike_family, page_size=16).cache
    assert [t.page_size for t in cache.slots.tables] == [32, 16]
    assert cache.planner.block_size == 32 and cache.planner.pages.unused_bytes == (0, 0)
    assert [t.layers.tolist() for t in cache.slots.tables] == [[0, 2, 4], [1]]


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_cpu), *slow("reference")])
def test_a_prefix_hit_equals_no_hit_wherever_texts_part(unlike_family: str, backend: str) -> None:
    text = random_tokens(110).tolist()
    engine = make_engine(unlike_family, backend=backend, prefix_cache="exact", max_batched_tokens=48)
    run_keeping_prefixes(engine, text, 20)
    num_hits = 0
    for cut in (110, 96, 95, 64, 63, 40, 33, 32, 31):
        prompt = [*text[:cut], 5, 99]
        before = engine.cache.prefix_cache.num_reused_tokens
        assert run_keeping_prefixes(engine, prompt, 8) == plain_answer(prompt, 8), cut
        num_hits += engine.cache.prefix_cache.num_reused_tokens > before
    assert num_hits >= 4  # sliding layers resume where windows were stored


@pytest.mark.parametrize("kv_dtype", [None, *slow(torch.int8)])
@pytest.mark.parametrize("tier", ["ram:capacity=100MB", "disk:path={path},capacity=100MB"])
def test_a_text_that_went_to_a_tier_and_back_is_the_same(
    unlike_family: str, tier: str, kv_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    text, answers = random_tokens(100).tolist(), []
    for _ in range(2):  # a disk outlives the engine
        engine = make_engine(
            unlike_family,
            backend="cpu" if cpu.unavailable_reason() is None else "reference",
            prefix_cache="exact",
            tiers=[tier.format(path=tmp_path)],
            max_batched_tokens=48,
            kv_dtype=kv_dtype,
        )
        answers.append(run_keeping_prefixes(engine, text, 20))
        tree = engine.cache.prefix_cache.tree
        tree.evict(tree.num_evictable_pages)
        assert not tree.num_evictable_pages
        offloader_of(engine).sync()
        answers.append(run_keeping_prefixes(engine, text, 20))
        hits = engine.cache.prefix_cache.hits_by_source()
        assert hits["ram" if tier.startswith("ram") else "disk"] >= 96
        engine.cache.prefix_cache.close_offloader()
    assert answers == [answers[0]] * 4
    if kv_dtype is None:
        assert answers[0] == plain_answer(text, 20)


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_cpu)])
def test_slots_of_8_bits_hold_nearly_what_plain_torch_computes(unlike_family: str, backend: str) -> None:
    """Keys are rotated in blocks of 64 in one group, of 128 in the other."""
    engine = make_engine(unlike_family, backend=backend, kv_dtype=torch.int8)
    found = record_logits(engine, [make_request(PROMPT, 1, needs_logits=True)])[0][-1]
    expected = plain_logits(PROMPT)[-1]
    assert not torch.equal(found, expected) and (found - expected).abs().max() < 0.1 * expected.std()


@pytest.mark.parametrize("seed", [*range(2), *slow(*range(2, 12))])
def test_every_request_of_a_random_schedule_equals_itself_alone(unlike_family: str, seed: int, tmp_path: Path) -> None:
    """With drafts, prefixes, tiers, preemption, demotion and slots of few bits; what is refused is not drawn."""
    run = ScheduleRun(draw_schedule(seed, families=UNLIKE_FAMILIES), tmp_path)
    with torch_threads(1):
        run.run()
        assert not list(run.differences())


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            "h2o:budget=20,share=all",
            "share=all, share=fitted and scope=shared need layers without a window that are alike",
        ),
        (
            "h2o:budget=20,share=fitted",
            "share=all, share=fitted and scope=shared need layers without a window that are alike",
        ),
        (
            "h2o:budget=20,scope=shared",
            "share=all, share=fitted and scope=shared need layers without a window that are alike",
        ),
        ("gate:budget=20,share=layer", "layers without a window must be alike here: they differ in heads or head dims"),
    ],
)
def test_what_needs_equal_layers_is_refused(unlike_family: str, policy: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(unlike_family).add(make_request(PROMPT, 4, policy))


def test_auto_stands_for_a_policy_that_works(unlike_family: str) -> None:
    for family in UNLIKE_FAMILIES:
        cache = make_engine(family).cache
        auto = AutoPolicy(can_compare_layers=cache.spec.can_compare_layers)
        for options in ("budget=20", "budget=50%,prefill=stream"):
            cache.plan_policy(policies.parse(auto.choose(f"auto:{options}")), 50)


def test_drafters_and_loaders_that_need_equal_layers_are_refused(unlike_family: str, tmp_path: Path) -> None:
    for spec, option in (("self", "self: dtype=auto"), ("draft:weights=int4", "draft: weights=int4")):
        with pytest.raises(ValueError, match=f"^{option} needs layers that are alike"):
            make_engine(unlike_family, drafter=drafters.parse(spec))
    tiers = [f"disk:path={tmp_path},capacity=10MB"]
    with pytest.raises(ValueError, match="selective needs layers that cache alike"):
        make_engine(unlike_family, prefix_cache="selective:ratio=0.5", tiers=tiers)


def run_keeping_prefixes(engine: Engine, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Run a request alone, with the accountant checked after each step. Its prefix stays in the pool."""
    request = make_request(prompt, num_tokens)
    engine.add(request)
    for _ in iter_steps(engine):
        pass
    return request.output_tokens
