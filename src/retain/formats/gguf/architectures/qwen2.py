"""Qwen 2 and 2.5."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama

ARCHITECTURE = Architecture(
    lambda meta: llama.make_config(meta, "qwen2"),
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS,
    biases=llama.QKV_BIASES,
)
