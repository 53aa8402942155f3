"""Decoders like Llama's, which most families vary: RMS norms, rope, grouped query heads, a gated MLP.

A family takes the whole decoder, or its layers, or their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from retain.kernels.attention_params import AttentionParams
from retain.kernels.rope import Rope
from retain.kernels.slots.kv_cache_spec import uniform_layers
from retain.models.decoder import (
    Attention,
    Decoder,
    DecoderLayer,
    ModelSpec,
    OutputNormLayer,
    PreNormLayer,
    SandwichNormLayer,
    load_ends,
)
from retain.models.layers import Embedding, GatedMLP, Layer, PartNorms, RMSNorm, load_linear, load_norm
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers in many families; each has more
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "head_dim": None,  # hidden_size / num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class OptionalTensors:
    """The tensors that only some families have, or some models of a family."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @classmethod
    def of_attention(cls, bias: bool, mlp_bias: bool = False, qk_norm: bool = False) -> OptionalTensors:
        """Return those where all linear layers of attention have biases, or none."""
        return cls(bias, bias, mlp_bias, qk_norm)


def make_spec(c: Mapping[str, Any], windows: tuple[int | None, ...] | None = None) -> ModelSpec:
    """Read the spec from a config with its family's defaults. Without `windows` all layers have full attention."""
    heads = c["num_attention_heads"]
    head_dim = c["head_dim"] or c["hidden_size"] // heads
    return ModelSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_heads=heads,
        max_position_embeddings=c["max_position_embeddings"],
        caches=uniform_layers(c["num_key_value_heads"] or heads, head_dim, windows or (None,) * c["num_hidden_layers"]),
        attention=AttentionParams(head_dim**-0.5),
    )


def load_mlp(w: Weights, bias: bool = False, act_key: str = "hidden_act") -> GatedMLP:
    """Load a gated MLP from gate_proj, up_proj and down_proj. `act_key` is the activation's key in the config."""
    gate_up = load_linear(w, "gate_proj", "up_proj", bias=bias)
    return GatedMLP(gate_up, load_linear(w, "down_proj", bias=bias), w.config[act_key])


def load_stacked_mlp(w: Weights) -> GatedMLP:
    """Load a gated MLP from gate_up_proj, where gates are stacked over the up projection, and down_proj."""
    gate_up, down = (load_linear(w, name, bias=False) for name in ("gate_up_proj", "down_proj"))
    return GatedMLP(gate_up, down, w.config["hidden_act"])


def load_input_norms(w: Weights, offset: float = 0.0) -> tuple[RMSNorm, RMSNorm]:
    """Load the norms before both branches of a layer, which multiply by w + `offset`."""
    eps = w.config["rms_norm_eps"]
    return load_norm(w, "input_layernorm", eps, offset), load_norm(w, "post_attention_layernorm", eps, offset)


def build_layer(
    w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: OptionalTensors, mlp: Layer | None = None
) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>, with this MLP or its own."""
    norm1, norm2 = load_input_norms(w)
    attention = build_attention(w.scope("self_attn."), i, s, rope, tensors)
    return PreNormLayer(norm1, attention, norm2, mlp or load_mlp(w.scope("mlp."), tensors.mlp_bias))


def build_attention(
    w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: OptionalTensors, norm_offset: float = 0.0
) -> Attention:
    """Build the attention of one layer. Norms of q and k heads, if any, multiply by w + `norm_offset`."""
    norm = load_qk_norm(w, i, s, w.config["rms_norm_eps"], norm_offset) if tensors.qk_norm else None
    qkv = load_linear(w, "q_proj", "k_proj", "v_proj", bias=tensors.qkv_bias)
    return Attention(i, s, qkv, load_linear(w, "o_proj", bias=tensors.o_bias), rope, norm)


def load_qk_norm(
    w: Weights, i: int, s: ModelSpec, eps: float, offset: float = 0.0, names: tuple[str, str] = ("q_norm", "k_norm")
) -> RMSNorm:
    """Load the norm of the q and k heads of a layer, which multiplies by w + `offset`; `i` is its cache."""
    q, k = (w[f"{name}.weight"].float() for name in names)
    num_kv_heads = s.kv_cache.attention(i).num_kv_heads
    return RMSNorm(torch.cat((q.expand(s.num_heads, -1), k.expand(num_kv_heads, -1))) + offset, eps)  # [H + G, D]


def load_wide_qk_norm(w: Weights, i: int, s: ModelSpec) -> PartNorms:
    """Load the norms of all heads of q as one group of numbers, and of all heads of k as another; `i` is the cache."""
    sizes = s.kv_cache.attention(i)
    q = w["q_norm.weight"].view(1, s.num_heads * sizes.k_dim)
    k = w["k_norm.weight"].view(1, sizes.num_kv_heads * sizes.k_dim)
    eps = w.config["rms_norm_eps"]
    return PartNorms((RMSNorm(q, eps), RMSNorm(k, eps, first=q.numel())))


def build_output_norm_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, tensors: OptionalTensors) -> OutputNormLayer:
    """Build one layer with norms behind its branches, as Olmo 2's, from the weights in layers.<i>."""
    a = w.scope("self_attn.")
    attention = replace(build_attention(a, i, s, rope, tensors), qk_norm=load_wide_qk_norm(a, i, s))
    names = ("post_attention_layernorm", "post_feedforward_layernorm")
    norm1, norm2 = (load_norm(w, name, w.config["rms_norm_eps"]) for name in names)
    return OutputNormLayer(attention, norm1, load_mlp(w.scope("mlp.")), norm2)


def load_sandwich_layer(w: Weights, attention: Attention, post_eps: float) -> SandwichNormLayer:
    """Load the MLP of a layer, and norms before and behind both branches, which multiply by 1 + w, as Gemma 3's.

    `post_eps` is that of norms behind a branch.
    """
    eps = w.config["rms_norm_eps"]
    return SandwichNormLayer(
        norm1=load_norm(w, "input_layernorm", eps, offset=1),
        attention=attention,
        norm2=load_norm(w, "post_attention_layernorm", post_eps, offset=1),
        norm3=load_norm(w, "pre_feedforward_layernorm", eps, offset=1),
        mlp=load_mlp(w.scope("mlp."), act_key="hidden_activation"),
        norm4=load_norm(w, "post_feedforward_layernorm", post_eps, offset=1),
    )


def build_decoder(
    w: Weights,
    s: ModelSpec,
    tensors: OptionalTensors,
    build: Callable[..., DecoderLayer] = build_layer,
    ropes: Sequence[Rope | None] = (),
) -> Decoder:
    """Build a decoder from weights whose config has its family's defaults.

    `build` builds a layer, as build_layer. `ropes` has the Rope of each layer, or one for all; without it layers rotate
    whole heads as the config says.
    """
    ropes = ropes or [get_whole_head_rope(s.kv_cache.attention(0).k_dim, w.config)]
    of_layers = ropes if len(ropes) > 1 else [*ropes] * s.num_layers
    m, table, head = load_ends(w, "model.", "")
    return Decoder(
        s,
        Embedding(table),
        lambda i: build(m.scope(f"layers.{i}."), i, s, of_layers[i], tensors),
        load_norm(m, "norm", w.config["rms_norm_eps"]),
        head,
        list({id(rope): rope for rope in ropes if rope}.values()),
    )
