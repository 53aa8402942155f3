"""Qwen3.5, text: Qwen3-Next with an MLP in place of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.linear_attention import LinearAttention
from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import llama, qwen3_next
from retain.models.family_config import add_defaults
from retain.models.layers import Layer, Linear, load_linear
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **qwen3_next.SHARED_DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
ROPE_DEFAULTS = qwen3_next.ROPE_DEFAULTS
IGNORED_TENSORS = (*qwen3_next.IGNORED_TENSORS, r"visual\..*")


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return qwen3_next.make_spec(add_defaults(c, DEFAULTS))


def load_projections(w: Weights, p: LinearAttention) -> tuple[Linear, Linear, Linear]:
    """Load what gives [q | k | v], the gates and z."""
    gates = load_linear(w, "in_proj_a", "in_proj_b", bias=False)
    return load_linear(w, "in_proj_qkv", bias=False), gates, load_linear(w, "in_proj_z", bias=False)


def load_mlp(w: Weights, i: int) -> Layer:
    """Load the MLP of a layer."""
    return llama.load_mlp(w)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. A file with vision has another prefix."""
    w = w.with_defaults(DEFAULTS)
    return qwen3_next.build_decoder(w, qwen3_next.make_spec(w.config), load_projections, load_mlp)
