"""Muse Glimmer, of which only the text model is computed: muse_glimmer_text in a multimodal config."""

from retain.models.composite import text_model
from retain.models.families import muse_glimmer_text

spec_from_config, build = text_model(muse_glimmer_text, is_tied=False)
