"""Gemma 3 with vision. Only the text model is loaded."""

from __future__ import annotations

from typing import Any

from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import gemma3_text
from retain.models.weights import Weights


def spec_from_config(c: dict[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return gemma3_text.spec_from_config(c["text_config"])


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    return gemma3_text.build_text_decoder(w, w.config["text_config"])
