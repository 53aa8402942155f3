"""Command R7B, Command A: parallel branches; every fourth layer is full, without rope (arXiv 2504.00698)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.rope import Rope
from retain.models.decoder import Decoder, ModelSpec, ParallelLayer, load_ends
from retain.models.family_config import add_defaults, get_alternating_types, get_windows
from retain.models.layers import Embedding, LayerNorm, load_layer_norm
from retain.models.llama_like import OptionalTensors, build_attention, load_mlp, make_spec
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 256000,
    "hidden_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,  # num_attention_heads
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "sliding_window": 4096,
    "attention_bias": False,
    "tie_word_embeddings": True,
}
PATTERN = 4  # a full layer in so many


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. Heads share the hidden size."""
    c = add_defaults(c, DEFAULTS)
    windows = get_windows(get_alternating_types(c, PATTERN), c["sliding_window"])
    return make_spec({**c, "head_dim": None}, windows)


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope | None, tensors: OptionalTensors) -> ParallelLayer:
    """Build one layer from the weights in layers.<i>."""
    norm = load_layer_norm(w, "input_layernorm", w.config["layer_norm_eps"], bias=False)
    attention = build_attention(w.scope("self_attn."), i, s, rope, tensors)
    return ParallelLayer(norm, attention, None, load_mlp(w.scope("mlp.")))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. The last norm multiplies logits by their scale."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    s = spec_from_config(c)
    layer_types = get_alternating_types(c, PATTERN)
    tensors = OptionalTensors.of_attention(c["attention_bias"])
    rope = get_whole_head_rope(s.kv_cache.attention(0).k_dim, c, interleaved=True)
    m, table, head = load_ends(w, "model.", "")

    def load_layer(i: int) -> ParallelLayer:
        own_rope = rope if layer_types[i] == "sliding_attention" else None
        return build_layer(m.scope(f"layers.{i}."), i, s, own_rope, tensors)

    norm = LayerNorm(m["norm.weight"].float() * w.logits_factor(c["logit_scale"]), None, c["layer_norm_eps"])
    return Decoder(s, Embedding(table), load_layer, norm, head, [rope])
