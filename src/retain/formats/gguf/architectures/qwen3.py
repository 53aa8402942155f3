"""Qwen 3."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama

ARCHITECTURE = Architecture(
    lambda meta: llama.make_config(meta, "qwen3"),
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS | llama.QK_NORM_TENSORS,
    biases=llama.ATTENTION_BIASES,
)
