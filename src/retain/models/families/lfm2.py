"""LFM2: short convolutions, and attention in some layers (arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.files import quote
from retain.models import lfm2_like
from retain.models.decoder import Decoder, ModelSpec
from retain.models.family_config import add_defaults
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {**lfm2_like.DEFAULTS, "hidden_size": 2560, "full_attn_idxs": None}  # of transformers
ROPE_DEFAULTS = lfm2_like.ROPE_DEFAULTS


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS, lfm2_like.OTHER_NAMES)
    n = c["num_hidden_layers"]
    indices = range(n) if c["full_attn_idxs"] is None else c["full_attn_idxs"]
    if not isinstance(indices, list | range) or any(type(i) is not int for i in indices):
        raise ValueError(f"full_attn_idxs is {quote(indices)}, not a list of layers")
    attending = frozenset(indices)
    return lfm2_like.make_spec(c, [lfm2_like.LAYER_TYPES[i in attending] for i in range(n)])


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS, lfm2_like.OTHER_NAMES)
    return lfm2_like.build_decoder(w, spec_from_config(w.config), lfm2_like.load_mlp)
