"""A program that is divided among ranks computes what one rank computes, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retain import models
from retain.models.weights import Weights
from tests.helpers.decoder_runner import build_model, random_tokens, run_decoder
from tests.helpers.ranks import ThreadRanks, run_ranks
from tests.helpers.tiny_models import tiny_checkpoint


def compute_logits(family: str, ranks: ThreadRanks | None = None) -> Tensor:
    model = build_model(Weights(tiny_checkpoint(family), torch.float32).with_passes(ranks=ranks))
    text = random_tokens(19)
    return run_decoder(model, [text, random_tokens(11, seed=1)], [[12, 5], [1, 1], [6, 5]])[0]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("family", models.list_families())
def test_logits_of_ranks_are_those_of_one(family: str, size: int) -> None:
    alone = compute_logits(family)
    together = run_ranks(size, lambda ranks: compute_logits(family, ranks))
    for logits in together:
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits, together[0])
    print(family, (together[0] - alone).abs().max())
