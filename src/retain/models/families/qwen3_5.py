"""Qwen3.5 with vision, of which only the text model is computed: qwen3_5_text in a multimodal config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import qwen3_5_text
from retain.models.families.gemma3 import get_text_config
from retain.models.weights import Weights

IGNORED_TENSORS = qwen3_5_text.IGNORED_TENSORS


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return qwen3_5_text.spec_from_config(get_text_config(c, is_tied=False))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    return qwen3_5_text.build(w.with_config(get_text_config(w.config, is_tied=False)))
