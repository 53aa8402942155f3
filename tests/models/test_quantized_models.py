"""Every family, its matrices quantised, computes what it computes with the dense numbers of the same quanta."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from retain import models
from retain.kernels.quantized import Int4, Int8, Weight, quantize_int4, quantize_int8
from retain.models.layers import ACTIVATIONS, Linear, Sequential, resolve_activation
from retain.models.weights import Weights
from tests.helpers.tiny_models import tiny_checkpoint
from tests.models.test_families import Changes, random_tokens, run_decoder

CASES: list[tuple[str, Changes]] = [
    *((family, {}) for family in models.list_families()),
    ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
    ("gpt2", {"n_inner": 40, "tie_word_embeddings": False}),  # 40 inputs stay dense
    ("mpt", {"attn_config": {"clip_qkv": 0.7}}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),  # as OPT-350M
    ("opt", {"_remove_final_layer_norm": True, "tie_word_embeddings": False}),
    ("gpt_neox", {"tie_word_embeddings": True, "use_parallel_residual": False}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
]
each_case = pytest.mark.parametrize(("family", "changes"), CASES, ids=["+".join([f, *c]) for f, c in CASES])


class DequantizedWeights(Weights):
    """The dense numbers of the quanta."""

    def load_matrix(self, name: str, embedding: bool = False, transposed: bool = False) -> Weight:
        m = super().load_matrix(name, embedding, transposed)
        return m if isinstance(m, Tensor) else m.dequantize(self.dtype)

    def scope(self, prefix: str) -> Weights:
        return DequantizedWeights(self.checkpoint, self.dtype, self.quantization, self.prefix + prefix)


@each_case
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_equals_its_dense_numbers(family: str, changes: Changes, weights: str) -> None:
    source, texts, steps = tiny_checkpoint(family, **changes), [random_tokens(24)], [[20], [1], [3]]
    model, dense = (models.build(W(source, torch.float32, weights)) for W in (Weights, DequantizedWeights))
    exact = models.build(Weights(source, torch.float32))
    assert isinstance(model.embedding.table, Int8) and isinstance(dense.embedding.table, Tensor)
    assert isinstance(model.layers[1].attention.o_proj.weight, Int8 if weights == "int8" else Int4)  # type: ignore[attr-defined]
    (ours,), (theirs,), (right,) = (run_decoder(m, texts, steps) for m in (model, dense, exact))
    # GPT-2's factor on q moves into the scales, which are rounded to float16.
    near = 4e-3 if "scale_attn_by_inverse_layer_idx" in changes else 1e-4
    torch.testing.assert_close(ours / theirs.std(), theirs / theirs.std(), atol=near, rtol=0)
    error = (ours - right).std() / right.std()
    assert (0.001 < error < 0.1) if weights == "int8" else (0.01 < error < 0.7)


@each_case
def test_a_tied_head_is_the_embedding(family: str, changes: Changes) -> None:
    for weights in ("auto", "int8"):
        source = tiny_checkpoint(family, **changes)
        model = models.build(Weights(source, torch.bfloat16, weights))
        head = model.lm_head.layers[-1] if isinstance(model.lm_head, Sequential) else model.lm_head
        assert isinstance(head, Linear)
        assert (head.weight is model.embedding.table) == ("lm_head.weight" not in source.names())


@each_case
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_what_is_between_stays_bfloat16(family: str, changes: Changes, weights: str) -> None:
    source, seen = tiny_checkpoint(family, **changes), set()
    model = models.build(Weights(source, torch.bfloat16, weights))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.update((q.dtype, k.dtype, v.dtype))
        return q

    x = model.forward(torch.arange(3), torch.arange(3), attend)
    assert {x.dtype, *seen} == {torch.bfloat16}
    assert model.compute_logits(x).dtype == torch.float32


def test_a_linear_layer_multiplies_in_float32() -> None:
    x, w, b = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in ((5, 64), (8, 64), (8,)))
    for m in (quantize_int4(w), quantize_int8(w)):
        for bias in (None, b.bfloat16()):
            right = x.bfloat16().float() @ m.dequantize().T + (0 if bias is None else bias.float())
            ours = Linear(m, bias)(x.bfloat16())
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(ours.float(), right, rtol=2**-8, atol=1e-6)


def test_activations_have_one_name() -> None:
    """The lowering of a decoder goes by it."""
    names = {"silu": "silu swish", "relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new gelu_pytorch_tanh gelu_fast"}
    assert names.keys() == ACTIVATIONS.keys()
    for name, others in names.items():
        assert {resolve_activation(other) for other in others.split()} == {name}
    assert get_activation("gpt2") == get_activation("gptj") == get_activation("gemma3_text") == "gelu_tanh"
    assert (get_activation("llama"), get_activation("opt"), get_activation("mpt")) == ("silu", "relu", "gelu")


def get_activation(family: str) -> str:
    return models.build(Weights(tiny_checkpoint(family), torch.float32)).layers[0].mlp.act  # type: ignore[attr-defined]
