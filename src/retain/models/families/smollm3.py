"""SmolLM3: Llama in which every fourth layer knows no positions (arXiv 2501.18795)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.files import quote
from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.family_config import add_defaults, get_layer_types, get_windows
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 2000000.0}


def has_rope(c: Mapping[str, Any]) -> list[bool]:
    """Return whether each layer rotates its heads. Raises ValueError for a list of another length."""
    n = c["num_hidden_layers"]
    if (listed := c["no_rope_layers"]) is None:
        return [(i + 1) % c["no_rope_layer_interval"] != 0 for i in range(n)]
    if not isinstance(listed, list) or len(listed) != n or any(x not in (0, 1) for x in listed):
        raise ValueError(f"no_rope_layers is {quote(listed)}, not 0 or 1 for each of {n} layers")
    return [bool(x) for x in listed]  # 1: with rope


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. A window, if any, is one of layers without rope."""
    c = add_defaults(c, DEFAULTS)
    window = c["sliding_window"] if c["use_sliding_window"] else None
    default = ["full_attention" if x or window is None else "sliding_attention" for x in has_rope(c)]
    return llama_like.make_spec(c, get_windows(get_layer_types(c, default), window))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    s = spec_from_config(c)
    rope = get_whole_head_rope(s.kv_cache.attention(0).k_dim, c, ROPE_DEFAULTS)
    tensors = llama_like.OptionalTensors.of_attention(c["attention_bias"], mlp_bias=c["mlp_bias"])
    return llama_like.build_decoder(w, s, tensors, ropes=[rope if is_rotated else None for is_rotated in has_rope(c)])
