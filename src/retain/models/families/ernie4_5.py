"""ERNIE 4.5: Llama with neighbouring numbers of a head rotated as pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.family_config import add_defaults
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 103424,
    "hidden_size": 1024,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "use_bias": False,
}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 500000.0}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. All layers have full attention."""
    return llama_like.make_spec(add_defaults(c, DEFAULTS))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    s = spec_from_config(c)
    bias = bool(c["use_bias"])
    rope = get_whole_head_rope(s.kv_cache.attention(0).k_dim, c, ROPE_DEFAULTS, interleaved=True)
    return llama_like.build_decoder(w, s, llama_like.OptionalTensors.of_attention(bias, mlp_bias=bias), ropes=[rope])
