"""Phi-3, Phi-4: Llama with q, k and v in one matrix, gate and up in another (arXiv 2404.14219).

Of the two lists of factors of `longrope`, an engine uses one: the short one if its context (`max_model_len`) is at most
the original one, else the long one, as in vLLM. transformers chooses by each text, so a short text in a long context
differs from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.rope import Rope
from retain.models import llama_like
from retain.models.decoder import Attention, Decoder, ModelSpec, PreNormLayer
from retain.models.family_config import add_defaults
from retain.models.layers import load_linear
from retain.models.rope import get_partial_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "num_key_value_heads": None,  # num_attention_heads
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. A window is one of all layers."""
    c = add_defaults(c, DEFAULTS)
    return llama_like.make_spec(c, (c["sliding_window"] or None,) * c["num_hidden_layers"])


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, tensors: llama_like.OptionalTensors) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>."""
    qkv, o = (load_linear(w, f"self_attn.{name}", bias=False) for name in ("qkv_proj", "o_proj"))
    norm1, norm2 = llama_like.load_input_norms(w)
    return PreNormLayer(norm1, Attention(i, s, qkv, o, rope), norm2, llama_like.load_stacked_mlp(w.scope("mlp.")))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    s = spec_from_config(w.config)
    limit = w.context_limit or s.max_position_embeddings
    rope = get_partial_rope(s.kv_cache.attention(0).k_dim, w.config, ROPE_DEFAULTS, context_limit=limit)
    return llama_like.build_decoder(w, s, llama_like.OptionalTensors(), build_layer, [rope])
