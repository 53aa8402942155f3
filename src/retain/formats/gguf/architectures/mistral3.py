"""Ministral 3, and Mistral Small 3.1 and later."""

from __future__ import annotations

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Ministral 3, whose queries grow, or of Mistral, whose do not. Neither has a window."""
    c = llama.make_config(meta, "mistral") | {"sliding_window": None}
    beta = meta.get("attention.temperature_scale", 0.0)
    if not beta:
        return c
    scaling = c["rope_scaling"] or {}
    if scaling.get("rope_type") != "yarn":
        raise UnsupportedError("queries that grow with their position are not supported without yarn")
    return c | {"model_type": "ministral3", "rope_scaling": {**scaling, "llama_4_scaling_beta": beta}}


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS,
    biases=frozenset(),
    row_order=llama.pair_halves,
)
