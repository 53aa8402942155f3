"""Decoders like Qwen3-Next's: linear attention (arXiv 2412.06464) in most layers, attention with a gate in the others.

Norms multiply by 1 + w. Families differ in what takes the place of the MLP, and in how their files lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from retain.kernels.linear_attention import LinearAttention
from retain.kernels.rope import Rope
from retain.kernels.weights.weight import stack_rows
from retain.models import llama_like
from retain.models.decoder import Attention, BranchLayer, Decoder, DecoderLayer, ModelSpec, PreNormLayer, load_ends
from retain.models.experts import SharedExpertMixture, load_shared_expert, load_softmax_mixture
from retain.models.family_config import MTPLayer, add_defaults, get_layer_types, one_more_layer
from retain.models.layers import Embedding, Layer, Linear, RMSNorm, load_linear, load_norm, resolve_activation
from retain.models.linear_attention import (
    ConvolvedAttention,
    GatedDeltaNet,
    linear_attention_specs,
    load_convolution_weight,
    make_qk_norm,
)
from retain.models.rope import get_partial_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers in all these families; each has more
    **llama_like.DEFAULTS,
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}
LAYER_TYPES = ("linear_attention", "full_attention")

LoadMLP = Callable[[Weights, int], Layer]
LoadProjections = Callable[[Weights, LinearAttention], tuple[Linear, Linear, Linear]]


def make_spec(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from a config with its family's defaults."""
    spec = llama_like.make_spec(c)
    linear = linear_attention_specs(
        c["linear_num_key_heads"],
        c["linear_num_value_heads"],
        c["linear_key_head_dim"],
        c["linear_value_head_dim"],
        c["linear_conv_kernel_dim"],
    )
    by_type = {"linear_attention": linear, "full_attention": spec.caches[:1]}
    return replace(spec, caches=tuple(cache for t in read_layer_types(c) for cache in by_type[t]))


def read_layer_types(c: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer."""
    period = c["full_attention_interval"]
    default = [LAYER_TYPES[(i + 1) % period == 0] for i in range(c["num_hidden_layers"])]
    return get_layer_types(c, default, LAYER_TYPES)


def mtp_layer(defaults: Mapping[str, Any]) -> MTPLayer:
    """Return how files have an MTP layer, in a family with these defaults."""

    def add_layer(config: Mapping[str, Any]) -> Mapping[str, Any]:
        c = add_defaults(config, defaults)
        return one_more_layer(c, layer_types=[*read_layer_types(c), "full_attention"])

    return MTPLayer(add_layer, norm_offset=1.0, passes_normed=True)


def load_split_projections(w: Weights, p: LinearAttention) -> tuple[Linear, Linear, Linear]:
    """Load what gives [q | k | v], the gates and z."""
    gates = load_linear(w, "in_proj_a", "in_proj_b", bias=False)
    return load_linear(w, "in_proj_qkv", bias=False), gates, load_linear(w, "in_proj_z", bias=False)


def load_linear_attention(w: Weights, cache: int, load_projections: LoadProjections) -> GatedDeltaNet:
    """Load a layer of linear attention; `cache` is the number of its first cache."""
    c = w.config
    p = LinearAttention(
        num_key_heads=c["linear_num_key_heads"],
        num_value_heads=c["linear_num_value_heads"],
        k_dim=c["linear_key_head_dim"],
        v_dim=c["linear_value_head_dim"],
        decay=-w["A_log"].float().exp(),
        time_bias=w["dt_bias"].float(),
    )
    qkv_proj, gates_proj, z_proj = load_projections(w, p)
    attention = ConvolvedAttention(
        cache=cache,
        params=p,
        qkv_proj=qkv_proj,
        gates_proj=gates_proj,
        weight=load_convolution_weight(w, "conv1d.weight", p.qkv_width, c["linear_conv_kernel_dim"]),
        act=resolve_activation(c["hidden_act"]),
        qk_norm=make_qk_norm(p),
    )
    norm = RMSNorm(w["norm.weight"].view(1, p.v_dim).expand(p.num_value_heads, -1), c["rms_norm_eps"])
    return GatedDeltaNet(attention, z_proj, norm, load_linear(w, "out_proj", bias=False))


def load_attention(w: Weights, cache: int, s: ModelSpec, rope: Rope) -> Attention:
    """Load a layer of attention. The file has rows of q and of the output gate for one head after another."""
    c = w.config
    bias = c["attention_bias"]
    q_and_gate = load_linear(w, "q_proj", bias=bias)
    rows = torch.arange(q_and_gate.weight.shape[0]).view(s.num_heads, 2, -1)
    q, gate = (part.flatten() for part in rows.unbind(1))
    kv = load_linear(w, "k_proj", "v_proj", bias=bias)
    q_proj = q_and_gate.select(q)
    biases = [x for x in (q_proj.bias, kv.bias) if x is not None]
    stacked = stack_rows([q_proj.weight, kv.weight])
    qkv = Linear(stacked, torch.cat(biases) if biases else None, (*q_proj.rows, *kv.rows))
    norm = llama_like.load_qk_norm(w, cache, s, c["rms_norm_eps"], offset=1)
    return Attention(cache, s, qkv, load_linear(w, "o_proj", bias=bias), rope, norm, gate_proj=q_and_gate.select(gate))


def load_mixture(w: Weights, normalize: bool) -> SharedExpertMixture:
    """Load the experts of a layer, and the one of all tokens."""
    return SharedExpertMixture(load_softmax_mixture(w, normalize), load_shared_expert(w, w.config["hidden_act"]))


def build_decoder(w: Weights, s: ModelSpec, load_projections: LoadProjections, load_mlp: LoadMLP) -> Decoder:
    """Build a decoder from weights whose config has its family's defaults."""
    c = w.config
    layer_types = read_layer_types(c)
    first_caches = s.kv_cache.first_caches
    rope = get_partial_rope(c["head_dim"], c, ROPE_DEFAULTS)
    m, table, head = load_ends(w, "model.", "model.language_model.", "")

    def load_layer(i: int) -> DecoderLayer:
        layer = m.scope(f"layers.{i}.")
        norm1, norm2 = llama_like.load_input_norms(layer, offset=1)
        mlp = load_mlp(layer.scope("mlp."), i)
        if layer_types[i] == "linear_attention":
            mixer = load_linear_attention(layer.scope("linear_attn."), first_caches[i], load_projections)
            return BranchLayer(s.hidden_size, ((norm1, mixer), (norm2, mlp)))
        return PreNormLayer(norm1, load_attention(layer.scope("self_attn."), first_caches[i], s, rope), norm2, mlp)

    norm = load_norm(m, "norm", c["rms_norm_eps"], offset=1)
    return Decoder(s, Embedding(table), load_layer, norm, head, [rope])
