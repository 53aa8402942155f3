"""Gemma 3: five layers with a sliding window for each full one, each kind with its own rope base (arXiv 2503.19786).

Norms are before and after both branches and multiply by 1 + w. The MLP is gated with GELU. The embedding is scaled and
tied to the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from retain.kernels.attention_params import AttentionParams
from retain.kernels.rope import Rope
from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec, SandwichNormLayer, load_ends
from retain.models.family_config import add_defaults, check_supported, get_alternating_types, get_windows
from retain.models.layers import Embedding, load_norm
from retain.models.rope import complete_rope_parameters, get_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers; published configs leave out equal values
    "vocab_size": 262208,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS)
    windows = get_windows(get_alternating_types(c, c["sliding_window_pattern"]), c["sliding_window"])
    return replace(llama_like.make_spec(c, windows), attention=AttentionParams(c["query_pre_attn_scalar"] ** -0.5))


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope) -> SandwichNormLayer:
    """Build one layer from the weights in layers.<i>."""
    tensors = llama_like.OptionalTensors.of_attention(w.config["attention_bias"], qk_norm=True)
    attention = llama_like.build_attention(w.scope("self_attn."), i, s, rope, tensors, norm_offset=1)
    return llama_like.load_sandwich_layer(w, attention, w.config["rms_norm_eps"])


def get_ropes(c: Mapping[str, Any], dim: int) -> dict[str, Rope]:
    """Return the Rope of each type of layers. `rope_theta` and `rope_scaling` of an old config are of the full ones."""
    given = c.get("rope_parameters") or {}
    sliding = {"rope_theta": c["rope_local_base_freq"], **(given.get("sliding_attention") or {})}
    full = {"rope_theta": c["rope_theta"], **(given.get("full_attention") or {}), **(c.get("rope_scaling") or {})}
    by_type = {"full_attention": full, "sliding_attention": sliding}
    return {layer_type: get_rope(dim, complete_rope_parameters(p, c)) for layer_type, p in by_type.items()}


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. A file with vision has one of two other prefixes."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    check_supported(c, attn_logit_softcapping=None, final_logit_softcapping=None, use_bidirectional_attention=False)
    s = spec_from_config(c)
    layer_types = get_alternating_types(c, c["sliding_window_pattern"])
    ropes = get_ropes(c, s.kv_cache.attention(0).k_dim)
    m, table, head = load_ends(w, "model.", "model.language_model.", "language_model.model.", "")
    # Rounded to dtype as in training: in bfloat16 25.25, not 25.3.
    scale = torch.tensor(s.hidden_size**0.5, dtype=m.dtype).item()

    def load_layer(i: int) -> SandwichNormLayer:
        return build_layer(m.scope(f"layers.{i}."), i, s, ropes[layer_types[i]])

    norm = load_norm(m, "norm", c["rms_norm_eps"], offset=1)
    return Decoder(s, Embedding(table, scale), load_layer, norm, head, list(ropes.values()))
