"""Gemma 4's assistant, a draft head: the layers of a Gemma 4 without keys and values, between two projections."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from retain.formats.gguf.architectures import gemma4
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig

GLOBAL_TENSORS = {"nextn.pre_projection": "pre_projection", "nextn.post_projection": "post_projection"}


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of an assistant. All of its layers predict further tokens, and none has a cache of its own.

    llama.cpp gives logits to all tokens, and reads no clusters; so do we where a file is llama.cpp's.
    """
    layers = meta.count_blocks()
    inputs = {"nextn_predict_layers": 0, "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": layers}
    text = gemma4.make_config(meta.with_values(inputs)) | {"final_logit_softcapping": None}
    return {
        "model_type": "gemma4_assistant",
        "text_config": text,
        "backbone_hidden_size": meta.get_positive("embedding_length_out"),
        "use_ordered_embeddings": False,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
    }


def read_rope_factors(factors: Tensor, config: HFConfig) -> HFConfig:
    """Return the share of the pairs of a full layer's heads that turn."""
    text = config["text_config"]
    return {"text_config": text | gemma4.read_rope_factors(factors, text)}


ARCHITECTURE = replace(
    gemma4.ARCHITECTURE,
    make_config=make_config,
    global_tensors={**gemma4.ARCHITECTURE.global_tensors, **GLOBAL_TENSORS},
    read_rope_factors=read_rope_factors,
)
