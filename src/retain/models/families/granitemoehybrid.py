"""Granite 4: Mamba-2 (arXiv 2405.21060) in most layers, attention in the others; each has an MLP beside experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retain.kernels.rope import Rope
from retain.models.decoder import Decoder, DecoderLayer, ModelSpec, PreNormLayer, scope_base_model
from retain.models.experts import SharedExpertMixture
from retain.models.families import granite, granitemoe, llama
from retain.models.families.granite import multiply
from retain.models.families.granitemoe import load_mixture
from retain.models.family_config import add_defaults, get_layer_types
from retain.models.layers import (
    Embedding,
    GatedMLP,
    Layer,
    RMSNorm,
    load_linear,
    load_lm_head,
)
from retain.models.linear_attention import StateLayer
from retain.models.mamba2 import Mamba2Config, load_mamba2, read_time_step_limits
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **granitemoe.DEFAULTS,
    "position_embedding_type": None,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, float("inf")),
}
OTHER_NAMES: Mapping[str, str] = {"layers_block_type": "layer_types"}
LAYER_TYPES = ("linear_attention", "full_attention")


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS, OTHER_NAMES)
    spec = granite.make_spec(c)
    types = read_layer_types(c)
    by_type = {"full_attention": spec.caches[:1]}
    if "linear_attention" in types:
        by_type["linear_attention"] = read_mamba2_config(c).specs
    caches = tuple(cache for layer_type in types for cache in by_type[layer_type])
    return replace(spec, caches=caches)


def read_layer_types(c: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer."""
    return get_layer_types(c, ["linear_attention"] * c["num_hidden_layers"], LAYER_TYPES)


def read_mamba2_config(c: Mapping[str, Any]) -> Mamba2Config:
    """Read what the config says about layers of Mamba-2. Raises ValueError."""
    width = c["mamba_expand"] * c["hidden_size"]
    heads = c["mamba_n_heads"]
    head_dim = width // heads if c["mamba_d_head"] == "auto" else c["mamba_d_head"]
    if heads * head_dim != width:
        raise ValueError(
            f"{heads} heads of Mamba-2 with {head_dim} numbers are not mamba_expand x hidden_size, {width}"
        )
    return Mamba2Config(
        num_groups=c["mamba_n_groups"],
        num_heads=heads,
        state_size=c["mamba_d_state"],
        head_dim=head_dim,
        window=c["mamba_d_conv"],
        act=c["hidden_act"],
        eps=c["rms_norm_eps"],
        conv_bias=c["mamba_conv_bias"],
        proj_bias=c["mamba_proj_bias"],
        time_step_limits=read_time_step_limits(c["time_step_limit"]),
    )


def load_mlp(w: Weights) -> Layer:
    """Load the MLP of a layer and its experts, if it has any. Their last products take the residual's multiplier.

    Gates and up projections are one matrix, and two in GGUF files.
    """
    c = w.config
    down = multiply(load_linear(w, "shared_mlp.output_linear", bias=False), c["residual_multiplier"])
    is_one = "shared_mlp.input_linear.weight" in w
    names = ("shared_mlp.input_linear",) if is_one else ("shared_mlp.gate_proj", "shared_mlp.up_proj")
    mlp = GatedMLP(load_linear(w, *names, bias=False), down, c["hidden_act"])
    return SharedExpertMixture(load_mixture(w.scope("block_sparse_moe.")), mlp) if c["num_local_experts"] else mlp


def load_layer(w: Weights, layer_type: str, cache: int, s: ModelSpec, rope: Rope | None) -> DecoderLayer:
    """Load a layer; `cache` is the number of its first cache."""
    c = w.config
    factor = c["residual_multiplier"]
    norm1, norm2 = (
        RMSNorm(w[f"{n}.weight"], c["rms_norm_eps"]) for n in ("input_layernorm", "post_attention_layernorm")
    )
    if layer_type == "linear_attention":
        mixer = load_mamba2(w.scope("mamba."), cache, read_mamba2_config(c))
        mixer = replace(mixer, out_proj=multiply(mixer.out_proj, factor))
        return StateLayer(s.hidden_size, norm1, mixer, norm2, load_mlp(w))
    tensors = llama.OptionalTensors.of_attention(c["attention_bias"])
    attention = llama.build_attention(w.scope("self_attn."), cache, s, rope, tensors)
    attention = replace(attention, o_proj=multiply(attention.o_proj, factor))
    return PreNormLayer(norm1, attention, norm2, load_mlp(w))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. The last norm divides logits by their scaling."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    c = w.config
    s = spec_from_config(c)
    types = read_layer_types(c)
    first_caches = s.kv_cache.first_caches
    head_dim = c["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
    rope = get_whole_head_rope(head_dim, c) if c["position_embedding_type"] == "rope" else None
    m = scope_base_model(w, "embed_tokens.weight", "model.", "")
    table = m.load_matrix("embed_tokens.weight", embedding=True)
    tied_to = m.full_name("embed_tokens.weight") if c["tie_word_embeddings"] else None
    return Decoder(
        s,
        Embedding(table, scale=float(c["embedding_multiplier"])),
        lambda i: load_layer(m.scope(f"layers.{i}."), types[i], first_caches[i], s, rope),
        RMSNorm(m["norm.weight"] / w.logits_factor(c["logits_scaling"]), c["rms_norm_eps"]),
        load_lm_head(w, "lm_head", table, tied_to),
        [rope] if rope else [],
    )
