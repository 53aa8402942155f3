"""Qwen 2 and 2.5."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama

NO_WINDOW = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 0}  # llama.cpp reads none

ARCHITECTURE = Architecture(
    lambda meta: llama.make_config(meta, "qwen2") | NO_WINDOW,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS,
    biases=llama.QKV_BIASES,
)
