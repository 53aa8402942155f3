"""Muse Glimmer, text. Norms of q and k hold one number: the converter writes `qk_scale_factor` into that of q."""

from __future__ import annotations

import math

from torch import Tensor

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import gemma3, llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, read_layer_types

NORMS = ("attn_norm", *gemma3.NORM_TENSORS)  # around 0 in Hugging Face, unlike output_norm


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Muse Glimmer. llama.cpp rotates the sliding layers, by a period of 4 where none is given.

    It limits logits to 30 where a file does not say to what.
    """
    c = llama.make_config(meta, "muse_glimmer_text")
    if c["rope_scaling"] or meta.get("rope.freq_base_swa", c["rope_theta"]) != c["rope_theta"]:
        raise UnsupportedError("Muse Glimmer with scaled rope, or another base in sliding layers, is not supported")
    if not all(f"blk.{i}.attn_q_norm.weight" in meta.tensor_shapes for i in range(c["num_hidden_layers"])):
        raise ValueError("there is a layer without a tensor 'attn_q_norm.weight'")
    window = meta.get_positive("attention.sliding_window")
    types = read_layer_types(meta, window, every=4)
    return c | {
        "hidden_activation": c.pop("hidden_act"),
        "sliding_window": window,
        "layer_types": types,
        "layer_rope_theta": [c["rope_theta"] if t == "sliding_attention" else 0 for t in types],
        "post_norm_eps": 1e-8,  # a constant of llama.cpp
        "output_multiplier": meta.require("logit_scale", float),
        "final_logit_softcapping": meta.get("final_logit_softcapping", 30.0),
    }


def read_scale(x: Tensor, config: HFConfig) -> HFConfig:
    """Return the factor of queries, which are all numbers of the tensor. Raises UnsupportedError for others."""
    factor = x.max().item()
    if not (x == factor).all() or not 0 < factor < math.inf or config.get("qk_scale_factor", factor) != factor:
        raise UnsupportedError("norms of queries other than one number above 0 are not supported in Muse Glimmer")
    return {"qk_scale_factor": factor}


def check_ones(x: Tensor, config: HFConfig) -> HFConfig:
    """Return no change. Raises UnsupportedError for a norm of keys that does more than to normalize."""
    if not (x == 1).all():
        raise UnsupportedError("norms of keys other than 1 are not supported in Muse Glimmer")
    return {}


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS | gemma3.NORM_TENSORS | {"attn_gate": "self_attn.gate_proj"},
    biases=frozenset(),
    row_order=llama.pair_halves,
    values=dict.fromkeys(NORMS, lambda x: x.float() - 1),
    config_tensors={"attn_q_norm": read_scale, "attn_k_norm": check_ones},
)
