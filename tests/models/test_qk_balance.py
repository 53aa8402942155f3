"""Queries and keys are scaled against each other: no product changes, and keys lose less when they are rounded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from retain import models
from retain.models.decoder import Decoder
from retain.models.layers import Linear, RMSNorm
from retain.models.qk_balance import find_qk_factors
from retain.models.rope import Rope
from retain.models.weights import Weights
from tests.helpers.decoder_runner import ReferenceCache, random_tokens
from tests.helpers.tiny_models import CONFIGS, TinyCheckpoint, tiny_checkpoint, tiny_model

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it


@torch.inference_mode()
def log_probs(model: Decoder, slots: torch.dtype) -> Tensor:
    """Return log-probabilities behind 40 tokens whose K and V are in slots of this dtype."""
    ids, cache = random_tokens(40), ReferenceCache(model.spec, 1, 40, slots)
    x = model.forward(ids, torch.arange(40), cache.make_attend([40], torch.arange(40)))
    return model.compute_logits(x).log_softmax(-1)


def without_factors(model: Decoder) -> Decoder:
    """Return the same model as its weights say."""
    layers = [replace(x, attention=replace(x.attention, qk_factors=None)) for x in model.layers]  # type: ignore[type-var]
    plain = replace(model)
    plain.__dict__["layers"] = layers
    return plain


class LopsidedCheckpoint(TinyCheckpoint):
    """A llama whose keys are large in one rotary pair of eight, where queries are small, and the other way round."""

    def read(self, name: str) -> Tensor:
        x, row = super().read(name), torch.arange(self.shapes[name][0])
        if name.endswith("q_proj.weight"):
            x[row % 8 == 3] /= 30
        if name.endswith("k_proj.weight"):
            x[row % 8 == 3] *= 30
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_exact_slots_give_the_same_bits_with_and_without_factors(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype)
    found = log_probs(model, dtype)
    assert torch.equal(found, log_probs(without_factors(model), dtype))
    has_factors = bool(model.key_factors)
    assert has_factors or family in ("gpt2", "gpt_neox", "mpt"), "random keys and queries are balanced there"


def test_keys_that_are_large_where_queries_are_small_lose_less_in_four_bits() -> None:
    tiny = tiny_checkpoint("llama")
    model = models.build(Weights(LopsidedCheckpoint(tiny.config, tiny.shapes, tiny.seed), torch.float32))
    exact, balanced, plain = (
        log_probs(m, slots) for m, slots in ((model, torch.float32), (model, INT4), (without_factors(model), INT4))
    )
    kl, plain_kl = ((exact.exp() * (exact - x)).sum(-1).mean() for x in (balanced, plain))
    assert kl < plain_kl / 4


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_freqs", [4, 2])  # of a head of 8: all numbers are rotated, or half of them
def test_factors_commute_with_rotation(interleaved: bool, num_freqs: int) -> None:
    rope = Rope(torch.rand(num_freqs, generator=torch.Generator().manual_seed(1)), interleaved)
    weight = torch.randn(4 * 8, 16, generator=torch.Generator().manual_seed(2))
    weight[16:24] *= 2.0 ** torch.arange(8)[:, None]  # the keys
    factors = find_qk_factors(RMSNorm(torch.ones(16), 1e-5), Linear(weight), None, rope, None, (2, 1, 8))
    assert factors is not None and len(factors.unique()) > 2
    torch.testing.assert_close(factors[2], 1 / factors[0], rtol=0, atol=0)
    x, angles = torch.randn(5, 3, 8), rope.angles(torch.arange(5), torch.float32)
    assert torch.equal(rope.apply(x, angles) * factors, rope.apply(x * factors, angles))
