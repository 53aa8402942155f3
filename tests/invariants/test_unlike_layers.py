"""Layers that differ in head dims, kv heads and windows, and that share a cache, equal plain torch.

The family and its definition in plain torch: tests/helpers/unlike_family.py.
"""

from __future__ import annotations

import pytest
import torch

from retain.kernels import cpu, triton
from tests.helpers.attention_case import assert_close
from tests.helpers.backend_variants import ISAS, use_isa
from tests.helpers.tiny_models import tiny_checkpoint
from tests.helpers.unlike_family import plain_logits
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
