"""Qwen 3."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.architectures.qwen2 import NO_WINDOW

ARCHITECTURE = Architecture(
    lambda meta: llama.make_config(meta, "qwen3") | NO_WINDOW,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS | llama.QK_NORM_TENSORS,
    biases=llama.ATTENTION_BIASES,
)
