"""Layers that differ in head dims, kv heads and windows, and that share a cache, equal plain torch.

The family and its definition in plain torch: tests/helpers/unlike_family.py.
"""

from __future__ import annotations

import pytest
import torch

from retain.kernels import cpu, triton
from tests.helpers.attention_case import assert_close
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.engines import make_engine, make_request, run_to_completion
from tests.helpers.list_model import ListModel, ListPolicy
from tests.helpers.marks import slow
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
    assert request.row
    layers = [layer for layer in range(spec.num_layers) if spec.kv_cache.cached_layer(layer) == layer]
    for layer, kept in zip(layers, request.row.positions(), strict=True):
        if spec.kv_cache.windows[layer] is None:
            assert kept == [sorted(lists.heads[layer, g].position_list) for g in range(len(kept))]
