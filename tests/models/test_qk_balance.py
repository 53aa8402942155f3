"""Queries and keys are scaled against each other: no product changes, and keys lose less when they are rounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retain.kernels.attention_params import AttentionParams
from retain.kernels.ops import Attend, Buffer, MatMul, Norm
from retain.kernels.rope import Rope
from retain.kernels.slots.kv_cache_spec import StateSpec
from retain.models.passes.balance import Projection
from retain.models.weights import Weights
from tests.helpers.decoder_runner import ReferenceCache, ReferenceModel, build_model, random_tokens
from tests.helpers.tiny_models import CONFIGS, TinyCheckpoint, tiny_checkpoint

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
# No layer of these has factors.
BALANCED = ("gpt2", "gpt_neox", "mpt", "ernie4_5", "phi3", "deepseek_v2", "deepseek_v3", "glm4_moe_lite")


@torch.inference_mode()
def log_probs(model: ReferenceModel, slots: torch.dtype) -> Tensor:
    """Return log-probabilities behind 40 tokens whose K and V are in slots of this dtype."""
    ids, cache = random_tokens(40), ReferenceCache(model.spec, 1, 40, slots)
    return cache.run(model, ids, torch.arange(40), [40]).log_softmax(-1)


def without_factors(weights: Weights) -> ReferenceModel:
    """Build a model as its weights say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Projection, "find_factors", lambda *args: None)
        return build_model(weights)


class LopsidedCheckpoint(TinyCheckpoint):
    """A model whose keys are large in one rotary pair of eight, where queries are small, and the other way round.

    Its projections make them so, or the weights of their norms where it has any.
    """

    def read(self, name: str) -> Tensor:
        x, row = super().read(name), torch.arange(self.shapes[name][0])
        layer = "norm" if any("q_norm" in other for other in self.shapes) else "proj"
        if name.endswith(f"q_{layer}.weight"):
            x[row % 8 == 3] /= 30
        if name.endswith(f"k_{layer}.weight"):
            x[row % 8 == 3] *= 30
        return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_exact_slots_give_the_same_bits_with_and_without_factors(family: str, dtype: torch.dtype) -> None:
    weights = Weights(tiny_checkpoint(family), dtype)
    model = build_model(weights)
    assert torch.equal(log_probs(model, dtype), log_probs(without_factors(weights), dtype))
    has_factors = bool(model.decoder.key_factors)
    assert not any(isinstance(model.spec.caches[cache], StateSpec) for cache in model.decoder.key_factors)
    assert has_factors or family in BALANCED, "random keys and queries are balanced there, or keys are of unknown kinds"


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2"])
def test_keys_that_are_large_where_queries_are_small_lose_less_in_four_bits(family: str) -> None:
    tiny = tiny_checkpoint(family)
    weights = Weights(LopsidedCheckpoint(tiny.config, tiny.shapes, tiny.seed), torch.float32)
    exact, balanced = (log_probs(build_model(weights), slots) for slots in (torch.float32, INT4))
    plain = log_probs(without_factors(weights), INT4)
    kl, plain_kl = ((exact.exp() * (exact - x)).sum(-1).mean() for x in (balanced, plain))
    assert kl < plain_kl / 4


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_freqs", [4, 2])  # of a head of 8: all numbers are rotated, or half of them
def test_factors_commute_with_rotation(interleaved: bool, num_freqs: int) -> None:
    rope = Rope(torch.rand(num_freqs, generator=torch.Generator().manual_seed(1)), interleaved)
    weight = torch.randn(4 * 8, 16, generator=torch.Generator().manual_seed(2))
    weight[16:24] *= 2.0 ** torch.arange(8)[:, None]  # the keys
    x, qkv = Buffer("x", 16), Buffer("qkv", 32)
    norm = Norm(x, x, torch.ones(16), None, 1e-5, subtract_mean=False)
    attend = Attend(qkv, Buffer("o", 16), 0, (2, 1, 8), AttentionParams(1.0), rope)
    factors = Projection(MatMul(x, qkv, weight), norm, [], attend).find_factors()
    assert factors is not None and len(factors.unique()) > 2
    torch.testing.assert_close(factors[2], 1 / factors[0], rtol=0, atol=0)
    heads, angles = torch.randn(5, 3, 8), rope.angles(torch.arange(5), torch.float32)
    assert torch.equal(rope.apply(heads, angles) * factors, rope.apply(heads * factors, angles))
