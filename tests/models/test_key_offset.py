"""Keys are cached without the mean of their rotated bias: nothing that a model computes depends on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from retain.kernels.rope import MEAN_POSITIONS, Rope
from retain.models.passes.balance import Projection
from retain.models.weights import Weights
from tests.helpers.decoder_runner import ReferenceCache, ReferenceModel, build_model, random_tokens
from tests.helpers.tiny_models import TinyCheckpoint, tiny_checkpoint

BIASES = {"qwen2": "k_proj.bias", "opt": "k_proj.bias", "gpt2": "c_attn.bias", "gpt_neox": "query_key_value.bias"}


class BiasedCheckpoint(TinyCheckpoint):
    """A tiny model whose keys have another bias."""

    def __init__(self, family: str, change: Callable[[Tensor], Tensor], **changes: object):
        tiny = tiny_checkpoint(family, **changes)
        super().__init__(tiny.config, tiny.shapes, tiny.seed)
        self.bias, self.change = BIASES[family], change

    def read(self, name: str) -> Tensor:
        x = super().read(name)
        return self.change(x) if name.endswith(self.bias) else x


@torch.inference_mode()
def compute(model: ReferenceModel, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return the logits of 40 tokens, and their keys in the cache, [P, S, D]."""
    ids, cache = random_tokens(40), ReferenceCache(model.spec, 1, 40, dtype)
    logits = cache.run(model, ids, torch.arange(40), [40])
    return logits, torch.cat([kv.k for kv, _ in cache.layers.values()])


def test_without_rotation_a_bias_changes_no_cached_key() -> None:
    """The offset is then the whole bias."""
    (one, k), (other, other_k) = (
        compute(build_model(Weights(BiasedCheckpoint("opt", change), torch.float32)))
        for change in (lambda x: x, lambda x: x + 3)
    )
    torch.testing.assert_close(k, other_k, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        one, other, rtol=1e-3, atol=1e-4
    )  # the bias adds the same number to all scores of a query


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_by_mean_angles_is_the_mean_of_rotations(interleaved: bool) -> None:
    rope = Rope(torch.logspace(0, -5, 4), interleaved, attention_factor=1.5)
    keys = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))  # of 10 numbers 8 are rotated
    rotated = rope.apply(keys.expand(MEAN_POSITIONS, -1, -1), rope.angles(torch.arange(MEAN_POSITIONS), keys.dtype))
    torch.testing.assert_close(rope.apply(keys[None], rope.mean_angles)[0], rotated.mean(0))


@pytest.mark.parametrize("family", BIASES)
def test_a_model_computes_the_same_with_and_without_the_offset(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights(BiasedCheckpoint(family, lambda x: 20 * x), torch.float32)
    model = build_model(weights)
    logits, keys = compute(model)
    assert sorted(model.key_offsets) == list(range(model.spec.num_layers))
    monkeypatch.setattr(Projection, "key_offset", lambda *args: None)
    without, other_keys = compute(build_model(weights))
    assert not torch.allclose(keys, other_keys, atol=0.1)
    torch.testing.assert_close(logits, without, rtol=1e-3, atol=1e-3)


def test_a_large_bias_leaves_int8_slots_as_precise_as_a_small_one() -> None:
    """In the two slowest pairs of a head, as Qwen2 has it. Without the offset it would take the range of 8 bits."""
    slow = torch.zeros(16)
    slow[[6, 7, 14, 15]] = torch.tensor([200.0, -150.0, -100.0, 180.0])

    def error(bias: Tensor) -> float:
        checkpoint = BiasedCheckpoint("qwen2", lambda x: x + bias.repeat(2), rope_theta=1e7, sliding_window=None)
        model = build_model(Weights(checkpoint, torch.float32))
        exact, rounded = compute(model)[0].log_softmax(-1), compute(model, torch.int8)[0].log_softmax(-1)
        return float((exact.exp() * (exact - rounded)).sum(-1).mean())

    assert error(slow) < 4 * error(torch.zeros(16))


@pytest.mark.parametrize(("family", "name"), [("llama", "no bias"), ("qwen3", "normalized keys"), ("mpt", "no bias")])
def test_other_models_have_no_offset(family: str, name: str) -> None:
    assert not build_model(Weights(tiny_checkpoint(family), torch.float32)).key_offsets, name
