"""GPT-J: attention and MLP in parallel after one norm; rope on neighbouring pairs of the first elements of a head.

Wang and Komatsuzaki, 2021: github.com/kingoflolz/mesh-transformer-jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.rope import Rope
from retain.models.decoder import Attention, Decoder, ModelSpec, ParallelLayer, load_ends, multi_head_spec
from retain.models.family_config import GPT2_NAMES, add_defaults
from retain.models.layers import MLP, Embedding, load_layer_norm, load_linear
from retain.models.rope import get_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 50400,
    "n_positions": 2048,
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "rotary_dim": 64,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}
IGNORED_TENSORS = (r"attn\.bias", r"attn\.masked_bias")  # causal masks


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return multi_head_spec(add_defaults(c, DEFAULTS, GPT2_NAMES), "n_embd", "n_head", "n_layer", "n_positions")


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope) -> ParallelLayer:
    """Build one layer from the weights in h.<i>."""
    qkv = load_linear(w, "attn.q_proj", "attn.k_proj", "attn.v_proj", bias=False)
    attention = Attention(i, s, qkv, load_linear(w, "attn.out_proj", bias=False), rope)
    up, down = (load_linear(w, f"mlp.{n}", bias=True) for n in ("fc_in", "fc_out"))
    norm = load_layer_norm(w, "ln_1", w.config["layer_norm_epsilon"])
    return ParallelLayer(norm, attention, None, MLP(up, down, w.config["activation_function"]))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, GPT2_NAMES)
    c = w.config
    s = spec_from_config(w.config)
    rope = get_rope(c["rotary_dim"], {"rope_theta": 10000.0, "rope_type": "default"}, interleaved=True)
    m, table, head = load_ends(w, "transformer.", "", embedding="wte", head_bias=True)
    norm = load_layer_norm(m, "ln_f", c["layer_norm_epsilon"])
    return Decoder(s, Embedding(table), lambda i: build_layer(m.scope(f"h.{i}."), i, s, rope), norm, head, [rope])
