"""Qwen3.5 with experts and vision, of which only the text is computed: qwen3_5_moe_text in a multimodal config."""

from retain.models.composite import text_model
from retain.models.families import qwen3_5_moe_text

IGNORED_TENSORS = qwen3_5_moe_text.IGNORED_TENSORS
MTP_LAYER = qwen3_5_moe_text.MTP_LAYER.of_text()
spec_from_config, build = text_model(qwen3_5_moe_text, is_tied=False)
