"""Qwen 3 with experts: in place of the MLP, the best 8 of 128 experts of each token (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.rope import Rope
from retain.models import llama_like
from retain.models.decoder import Decoder, ModelSpec, PreNormLayer
from retain.models.experts import has_experts, load_softmax_mixture
from retain.models.family_config import add_defaults
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **llama_like.DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
OTHER_NAMES: Mapping[str, str] = {"num_local_experts": "num_experts"}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json. A sliding window is one of all layers."""
    c = add_defaults(c, DEFAULTS, OTHER_NAMES)
    window = c["sliding_window"] if c["use_sliding_window"] else None
    return llama_like.make_spec(c, (window,) * c["num_hidden_layers"])


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, tensors: llama_like.OptionalTensors) -> PreNormLayer:
    """Build one layer from the weights in layers.<i>."""
    mlp = load_softmax_mixture(w.scope("mlp."), w.config["norm_topk_prob"]) if has_experts(w.config, i) else None
    return llama_like.build_layer(w, i, s, rope, tensors, mlp)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    has_bias = w.config["attention_bias"]
    tensors = llama_like.OptionalTensors.of_attention(has_bias, qk_norm=True)
    return llama_like.build_decoder(w, spec_from_config(w.config), tensors, build_layer)
