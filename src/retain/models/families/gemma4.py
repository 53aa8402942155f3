"""Gemma 4 with vision or audio, of which only the text model is computed: gemma4_text in a multimodal config."""

from retain.models.composite import text_model
from retain.models.families import gemma4_text

IGNORED_TENSORS = gemma4_text.IGNORED_TENSORS
READS_PER_LAYER_CONFIG = True
spec_from_config, build = text_model(gemma4_text, is_tied=True)
