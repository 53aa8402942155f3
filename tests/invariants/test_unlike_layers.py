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
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.unlike_family import plain_answer, plain_logits
from tests.helpers.unlike_family import unlike_family as unlike_family
from tests.models.test_programs import make_prompts, program_logits

needs_cpu = pytest.mark.skipif(cpu.unavailable_reason() is not None, reason=str(cpu.unavailable_reason()))
needs_triton = pytest.mark.skipif(triton.unavailable_reason() is not None, reason=str(triton.unavailable_reason()))
STEPS = [(20, 3), (1, 10), (0, 9), (18, 1), (1, 0)]  # fresh tokens of two requests


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


PROMPT, NUM_TOKENS = [7 * i % 128 for i in range(50)], 30


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=needs_cpu)])
def test_an_engine_equals_plain_torch(unlike_family: str, backend: str) -> None:
    expected = plain_answer(PROMPT, NUM_TOKENS)
    engine = make_engine(unlike_family, backend=backend, max_batched_tokens=32)
    first, second = make_request(PROMPT, NUM_TOKENS), make_request(PROMPT[:20], NUM_TOKENS)
    assert run_to_completion(engine, [first, second]) == [expected, plain_answer(PROMPT[:20], NUM_TOKENS)]
