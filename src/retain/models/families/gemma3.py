"""Gemma 3 with vision, of which only the text model is computed: gemma3_text in a multimodal config."""

from retain.models.composite import text_model
from retain.models.families import gemma3_text

spec_from_config, build = text_model(gemma3_text, is_tied=True)
