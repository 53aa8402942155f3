"""Granite 4: Mamba-2 (arXiv 2405.21060) in most layers, attention in the others; each has an MLP beside experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from retain.kernels.rope import Rope
from retain.models import granite_like
from retain.models.decoder import BranchLayer, Decoder, DecoderLayer, ModelSpec, load_ends
from retain.models.family_config import add_defaults, get_layer_types
from retain.models.layers import Embedding, RMSNorm
from retain.models.llama_like import OptionalTensors, load_input_norms
from retain.models.mamba2 import Mamba2Config, load_mamba2, read_time_step_limits
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **granite_like.EXPERT_DEFAULTS,
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
    spec = granite_like.make_spec(c)
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


def load_layer(w: Weights, layer_type: str, cache: int, s: ModelSpec, rope: Rope | None) -> DecoderLayer:
    """Load a layer; `cache` is the number of its first cache."""
    mlp = granite_like.load_shared_mlp(w)
    if layer_type == "full_attention":
        tensors = OptionalTensors.of_attention(w.config["attention_bias"])
        return granite_like.build_layer(w, cache, s, rope, tensors, mlp)
    norm1, norm2 = load_input_norms(w)
    mixer = load_mamba2(w.scope("mamba."), cache, read_mamba2_config(w.config))
    out_proj = granite_like.multiply(mixer.out_proj, w.config["residual_multiplier"])
    return BranchLayer(s.hidden_size, ((norm1, replace(mixer, out_proj=out_proj)), (norm2, mlp)))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. The last norm divides logits by their scaling."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    c = w.config
    s = spec_from_config(c)
    types = read_layer_types(c)
    first_caches = s.kv_cache.first_caches
    head_dim = c["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
    rope = get_whole_head_rope(head_dim, c) if c["position_embedding_type"] == "rope" else None
    m, table, head = load_ends(w, "model.", "")
    return Decoder(
        s,
        Embedding(table, scale=float(c["embedding_multiplier"])),
        lambda i: load_layer(m.scope(f"layers.{i}."), types[i], first_caches[i], s, rope),
        RMSNorm(m["norm.weight"] / w.logits_factor(c["logits_scaling"]), c["rms_norm_eps"]),
        head,
        [rope] if rope else [],
    )
