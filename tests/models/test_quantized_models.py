"""A quantized model computes what the same model computes with its matrices dequantized, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from retain import models
from retain.kernels import ops
from retain.kernels.api import KV
from retain.kernels.ops import ACTIVATIONS, Buffer
from retain.kernels.reference.program import ReferenceProgram
from retain.kernels.reference.rows import ACTIVATION_FUNCTIONS, linear
from retain.kernels.weights.quantized import Int4, Int8, quantize_int4, quantize_int8
from retain.kernels.weights.weight import Weight
from retain.models.layers import CappedHead, Linear, Sequential, resolve_activation
from retain.models.weights import Weights
from tests.helpers.decoder_runner import ReferenceModel, build_model, random_tokens, run_decoder
from tests.helpers.family_variants import Changes
from tests.helpers.tiny_models import tiny_checkpoint, tiny_model

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
each_variant = pytest.mark.parametrize(("family", "changes"), CASES, ids=["+".join([f, *c]) for f, c in CASES])


class DequantizedWeights(Weights):
    """Weights whose quantized matrices are dequantized after loading."""

    def load_matrix(self, name: str, embedding: bool = False, transposed: bool = False) -> Weight:
        m = super().load_matrix(name, embedding, transposed)
        return m if isinstance(m, Tensor) else m.dequantize(self.dtype)

    def load_stack(self, name: str, n: int, transposed: bool = False) -> Weight:
        m = super().load_stack(name, n, transposed)
        return m if isinstance(m, Tensor) else m.dequantize(self.dtype)


@each_variant
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantized_model_equals_its_dequantized_weights(family: str, changes: Changes, quantization: str) -> None:
    checkpoint, texts, steps = tiny_checkpoint(family, **changes), [random_tokens(24)], [[20], [1], [3]]
    model, dense = (build_model(cls(checkpoint, torch.float32, quantization)) for cls in (Weights, DequantizedWeights))
    exact = build_model(Weights(checkpoint, torch.float32))
    assert isinstance(model.decoder.embedding.table, Int8) and isinstance(dense.decoder.embedding.table, Tensor)
    operations = model.decoder.load_layer(1).emit(Buffer("x", model.spec.hidden_size))
    kinds = [type(op.weight) for op in operations if isinstance(op, ops.MatMul)]
    assert (Int8 if quantization == "int8" else Int4) in kinds
    (ours,), (dequantized,), (unquantized,) = (run_decoder(m, texts, steps) for m in (model, dense, exact))
    # GPT-2's factor on q goes into the scales, which are rounded to float16.
    tolerance = 4e-3 if "scale_attn_by_inverse_layer_idx" in changes else 1e-4
    std = dequantized.std()
    torch.testing.assert_close(ours / std, dequantized / std, atol=tolerance, rtol=0)
    # Of most tokens: one that takes another expert for a last bit differs by far more.
    error = ((ours - unquantized).std(dim=1) / unquantized.std()).median()
    assert (0.001 < error < 0.1) if quantization == "int8" else (0.01 < error < 0.8)


@each_variant
def test_tied_head_is_the_embedding_table(family: str, changes: Changes) -> None:
    for quantization in ("auto", "int8"):
        checkpoint = tiny_checkpoint(family, **changes)
        model = build_model(Weights(checkpoint, torch.bfloat16, quantization)).decoder
        head = model.lm_head.layers[-1] if isinstance(model.lm_head, Sequential) else model.lm_head
        head = head.linear if isinstance(head, CappedHead) else head
        assert isinstance(head, Linear)
        assert (head.weight is model.embedding.table) == ("lm_head.weight" not in checkpoint.names())


@each_variant
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_hidden_states_stay_bfloat16(family: str, changes: Changes, quantization: str) -> None:
    dtypes = set()

    def write(kv: KV, slots: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> None:
        dtypes.update((k.dtype, v.dtype))

    def attend(q: Tensor, *_: Any, **options: Any) -> Tensor:
        dtypes.add(q.dtype)
        return q

    program = ReferenceProgram(torch.bfloat16, write, attend)
    weights = Weights(tiny_checkpoint(family, **changes), torch.bfloat16, quantization)
    model = ReferenceModel(models.build(weights, program), program)
    (logits,) = run_decoder(model, [random_tokens(3)], [[3]])
    assert logits.dtype == torch.float32
    assert dtypes == {torch.bfloat16}


def test_linear_layer_multiplies_quantized_weights_in_float32() -> None:
    x, w, b = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in ((5, 64), (8, 64), (8,)))
    for m in (quantize_int4(w), quantize_int8(w)):
        for bias in (None, b.bfloat16()):
            expected = x.bfloat16().float() @ m.dequantize().T + (0 if bias is None else bias.float())
            ours = linear(x.bfloat16(), m, bias)
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(ours.float(), expected, rtol=2**-8, atol=1e-6)


def test_activation_aliases_resolve_to_one_name() -> None:
    names = {"silu": "silu swish", "relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new gelu_pytorch_tanh gelu_fast"}
    names |= {"sigmoid": "sigmoid", "relu2": "relu2"}
    assert [*names, "swiglu_oai"] == list(ACTIVATIONS) == [*ACTIVATION_FUNCTIONS, "swiglu_oai"]  # no config names it
    for name, others in names.items():
        assert {resolve_activation(other) for other in others.split()} == {name}
    assert get_activation("gpt2") == get_activation("gptj") == get_activation("gemma3_text") == "gelu_tanh"
    assert (get_activation("llama"), get_activation("opt"), get_activation("mpt")) == ("silu", "relu", "gelu")


def get_activation(family: str) -> str:
    return tiny_model(family).decoder.load_layer(0).mlp.act  # type: ignore[attr-defined]
