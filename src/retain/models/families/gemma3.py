"""Gemma 3 with vision: of its file the text model is used."""

from __future__ import annotations

from typing import Any

from retain.models.decoder import Decoder, Spec
from retain.models.families import gemma3_text
from retain.models.weights import Weights


def spec(c: dict[str, Any]) -> Spec:
    """From config.json."""
    return gemma3_text.spec(c["text_config"])


def build(w: Weights) -> Decoder:
    """The decoder from weights in Hugging Face's names."""
    return gemma3_text.build_text(w, w.config["text_config"])
