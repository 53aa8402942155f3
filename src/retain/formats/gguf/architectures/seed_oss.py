"""Seed-OSS."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig

NORM_TENSORS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Seed-OSS."""
    c = llama.make_config(meta, "seed_oss")
    return c | {"attention_out_bias": "blk.0.attn_output.bias" in meta.tensor_shapes}


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.PROJECTIONS | NORM_TENSORS,
    biases=llama.PROJECTION_BIASES,
)
