"""Gemma 3 with vision. Only the text model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import gemma3_text
from retain.models.family_config import FamilyConfig
from retain.models.weights import Weights


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return gemma3_text.spec_from_config(get_text_config(c))


def get_text_config(c: Mapping[str, Any], is_tied: bool = True) -> FamilyConfig:
    """Return the config of the text model. Whether head and embedding are tied stands beside it, or is `is_tied`."""
    tied = {"tie_word_embeddings": c.get("tie_word_embeddings", is_tied)}
    return FamilyConfig({**FamilyConfig(c)["text_config"], **tied})


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    return gemma3_text.build(w.with_config(get_text_config(w.config)))
