"""Gemma 4 with vision or audio, of which only the text model is computed: gemma4_text in a multimodal config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import gemma4_text
from retain.models.families.gemma3 import get_text_config
from retain.models.weights import Weights

IGNORED_TENSORS = gemma4_text.IGNORED_TENSORS
READS_PER_LAYER_CONFIG = True


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return gemma4_text.spec_from_config(get_text_config(c))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    return gemma4_text.build(w.with_config(get_text_config(w.config)))
