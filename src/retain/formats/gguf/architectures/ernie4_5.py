"""ERNIE 4.5. Both sides rotate neighbouring pairs, so rows stay in their order."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of ERNIE 4.5. One flag is for all biases."""
    c = llama.make_config(meta, "ernie4_5")
    return c | {"use_bias": c["attention_bias"]}


ARCHITECTURE = Architecture(
    make_config, llama.GLOBAL_TENSORS, llama.LAYER_PREFIX, llama.LAYER_TENSORS, biases=llama.PROJECTION_BIASES
)
