"""Olmo 2: norms behind attention and the MLP, not before; norms over all heads of q and of k (arXiv 2501.00656)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from retain.kernels.ops import Buffer, Operation
from retain.kernels.rope import Rope
from retain.models.decoder import Attention, Decoder, ModelSpec
from retain.models.families import llama
from retain.models.family_config import add_defaults
from retain.models.layers import Layer, PartNorms, RMSNorm
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 50304,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,  # num_attention_heads
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": False,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return llama.make_spec(add_defaults(c, DEFAULTS))


@dataclass(frozen=True, eq=False)
class OutputNormLayer:
    """Compute x += attention_norm(attention(x)), then x += mlp_norm(mlp(x))."""

    attention: Attention
    attention_norm: Layer
    mlp: Layer
    mlp_norm: Layer

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""
        y = Buffer("y", self.attention.spec.hidden_size)
        for branch, norm in ((self.attention, self.attention_norm), (self.mlp, self.mlp_norm)):
            yield from branch.emit(x, y)
            yield from norm.emit(y, x, add=True)


def load_wide_qk_norm(w: Weights, i: int, s: ModelSpec) -> PartNorms:
    """Load the norms of all heads of q as one group of numbers, and of all heads of k as another; `i` is the cache."""
    sizes = s.kv_cache.attention(i)
    q = w["q_norm.weight"].view(1, s.num_heads * sizes.k_dim)
    k = w["k_norm.weight"].view(1, sizes.num_kv_heads * sizes.k_dim)
    eps = w.config["rms_norm_eps"]
    return PartNorms((RMSNorm(q, eps), RMSNorm(k, eps, first=q.numel())))


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, tensors: llama.OptionalTensors) -> OutputNormLayer:
    """Build one layer from the weights in layers.<i>."""
    a = w.scope("self_attn.")
    attention = replace(llama.build_attention(a, i, s, rope, tensors), qk_norm=load_wide_qk_norm(a, i, s))
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    norm1, norm2 = (RMSNorm(w[f"{name}.weight"], w.config["rms_norm_eps"]) for name in norms)
    return OutputNormLayer(attention, norm1, llama.load_mlp(w.scope("mlp.")), norm2)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    tensors = llama.OptionalTensors.of_attention(w.config["attention_bias"])
    return llama.build_decoder(w, spec_from_config(w.config), tensors, build_layer)
