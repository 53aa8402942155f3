"""Laws of layers that cache states: convolutions and linear attention, beside layers that attend."""

from __future__ import annotations

import random

import pytest
import torch

from tests.helpers.engines import make_engine, make_request, run_to_completion
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
