"""Muse Glimmer, of which only the text model is computed: muse_glimmer_text in a multimodal config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.models.decoder import Decoder, ModelSpec
from retain.models.families import muse_glimmer_text
from retain.models.families.gemma3 import get_text_config
from retain.models.weights import Weights


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return muse_glimmer_text.spec_from_config(get_text_config(c, is_tied=False))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    return muse_glimmer_text.build(w.with_config(get_text_config(w.config, is_tied=False)))
