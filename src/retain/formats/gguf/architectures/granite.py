"""Granite 3, and the dense models of Granite 4 without Mamba layers."""

from __future__ import annotations

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Granite. Files say by `rope.scaling.finetuned` whether there is rope at all."""
    c = llama.make_config(meta, "granite")
    meta.require("logit_scale", float)
    if not meta.get("rope.scaling.finetuned", True):
        raise UnsupportedError("Granite without rope is not supported")
    return c | read_multipliers(meta, c["head_dim"])


def read_multipliers(meta: GGUFMetadata, head_dim: int) -> HFConfig:
    """Return the multipliers of Granite. A missing one is 1, that of attention 1 / sqrt(head_dim)."""
    return {
        "attention_multiplier": meta.get("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": meta.get("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": meta.get("residual_scale", 0.0) or 1.0,
        "logits_scaling": meta.get("logit_scale", 0.0) or 1.0,  # logits are divided by it, unlike in Cohere's files
    }


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS,
    biases=llama.PROJECTION_BIASES,
    row_order=llama.pair_halves,
)
