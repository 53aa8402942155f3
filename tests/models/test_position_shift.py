"""A rotation depends on distances alone: a text whose positions all are larger by a constant has the same answer."""

from __future__ import annotations

import pytest
import torch

from retain import models
from retain.models.weights import Weights
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.family_variants import VARIANTS
from tests.helpers.tiny_models import MULTIMODAL, tiny_checkpoint

SHIFT = 96  # whole pages, so that states fold at the same tokens
ABSOLUTE = ("gpt2", "opt", "ministral3")  # learned positions; queries that grow with theirs
FAMILIES = [family for family in models.list_families() if family not in MULTIMODAL]


def compute_pair(family: str, changes: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    model = build_model(Weights(tiny_checkpoint(family, **changes), torch.float32))
    steps = [[9], [7], [1]]
    text = [random_tokens(17)]
    (plain,), (shifted,) = (run_decoder(model, text, steps, shift) for shift in (0, SHIFT))
    return plain, shifted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shift_of_all_positions_changes_no_token(family: str) -> None:
    check(family, {})


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes"), [(f, c) for f, variants in VARIANTS.items() for c in variants])
def test_a_shift_changes_no_token_of_a_variant(family: str, changes: dict[str, object]) -> None:
    check(family, changes)


def check(family: str, changes: dict[str, object]) -> None:
    plain, shifted = compute_pair(family, changes)
    if family in ABSOLUTE:
        assert not torch.allclose(plain, shifted, atol=1e-2)
        return
    assert torch.equal(plain.argmax(-1), shifted.argmax(-1))
    torch.testing.assert_close(shifted / plain.std(), plain / plain.std(), atol=1e-3, rtol=0)
