"""LFM2 with experts in place of most MLPs: sigmoid scores, and a bias that only chooses (arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.kernels.experts import Router
from retain.models import lfm2_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.experts import load_mixture
from retain.models.family_config import add_defaults
from retain.models.layers import Layer
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    **lfm2_like.DEFAULTS,
    "hidden_size": 2048,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
ROPE_DEFAULTS = lfm2_like.ROPE_DEFAULTS


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json, which lists the type of each layer."""
    return lfm2_like.make_spec(add_defaults(c, DEFAULTS, lfm2_like.OTHER_NAMES), None)


def load_mlp(w: Weights, i: int) -> Layer:
    """Load the experts of layer i, or its MLP."""
    c = w.config
    if i < c["num_dense_layers"]:
        return lfm2_like.load_mlp(w, i)
    router = Router(
        c["num_experts_per_tok"],
        is_sigmoid=True,
        normalize=c["norm_topk_prob"],
        scale=c["routed_scaling_factor"],
        bias=w["expert_bias"].float() if c["use_expert_bias"] else None,
        sum_epsilon=1e-6,
    )
    return load_mixture(w, c["num_experts"], router, "silu", names=("w1", "w3", "w2"))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, lfm2_like.OTHER_NAMES)
    return lfm2_like.build_decoder(w, spec_from_config(w.config), load_mlp)
