"""Bounds on the numbers of a config.json: a damaged or hostile one must cost neither minutes nor gigabytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retain.files import quote

MAX_LAYERS = 4096
MAX_WIDTH = 2**20
MAX_HEADS = 2**16
MAX_EXPERTS = 4096
MAX_CONVOLUTION = 64
MAX_LINEAR_HEAD = 1024  # a state has its square in numbers
MAX_EXPANSION = 64
MAX_CONTEXT = 2**24  # the largest position that float32 angles hold exactly
# Whole numbers from 1 on, with the largest that is accepted. Families name the same size differently.
SIZES = {
    "num_hidden_layers": MAX_LAYERS,
    "n_layer": MAX_LAYERS,
    "n_layers": MAX_LAYERS,
    "hidden_size": MAX_WIDTH,
    "n_embd": MAX_WIDTH,
    "d_model": MAX_WIDTH,
    "intermediate_size": 2**24,
    "num_attention_heads": MAX_HEADS,
    "n_head": MAX_HEADS,
    "n_heads": MAX_HEADS,
    "vocab_size": 2**24,
    "max_position_embeddings": MAX_CONTEXT,
    "n_positions": MAX_CONTEXT,
    "max_seq_len": MAX_CONTEXT,
}
# The same, and null, which is the family's default.
OPTIONAL_SIZES = {
    "word_embed_proj_dim": MAX_WIDTH,
    "num_key_value_heads": MAX_HEADS,
    "head_dim": 2**16,
    "rotary_dim": 2**16,
    "n_inner": 2**24,
    "sliding_window": 2**31 - 1,
    "sliding_window_pattern": MAX_LAYERS,
    "top_k_experts": MAX_EXPERTS,
    "moe_intermediate_size": 2**24,
    "moe_latent_size": MAX_WIDTH,
    "global_head_dim": 2**16,
    "num_global_key_value_heads": MAX_HEADS,
    "vocab_size_per_layer_input": 2**24,
    "no_rope_layer_interval": MAX_LAYERS,
    "decoder_sparse_step": MAX_LAYERS,
    "original_max_position_embeddings": MAX_CONTEXT,
    "conv_L_cache": MAX_CONVOLUTION,
    "linear_conv_kernel_dim": MAX_CONVOLUTION,
    "linear_num_key_heads": MAX_HEADS,
    "linear_num_value_heads": MAX_HEADS,
    "linear_key_head_dim": MAX_LINEAR_HEAD,
    "linear_value_head_dim": MAX_LINEAR_HEAD,
    "full_attention_interval": MAX_LAYERS,
    "shared_expert_intermediate_size": 2**24,
    "shared_intermediate_size": 2**24,
    "mamba_n_heads": MAX_HEADS,
    "mamba_n_groups": MAX_HEADS,
    "mamba_d_state": MAX_LINEAR_HEAD,
    "mamba_d_head": MAX_LINEAR_HEAD,
    "mamba_d_conv": MAX_CONVOLUTION,
    "mamba_expand": MAX_EXPANSION,
    "mamba_num_heads": MAX_HEADS,
    "mamba_head_dim": MAX_LINEAR_HEAD,
    "ssm_state_size": MAX_LINEAR_HEAD,
    "n_groups": MAX_HEADS,
    "n_group": MAX_EXPERTS,
    "topk_group": MAX_EXPERTS,
    "conv_kernel": MAX_CONVOLUTION,
    "q_lora_rank": MAX_WIDTH,
    "kv_lora_rank": MAX_WIDTH,
    "qk_nope_head_dim": 2**16,
    "qk_rope_head_dim": 2**16,
    "v_head_dim": 2**16,
}
OTHER_VALUES = (
    ("sliding_window", 0),  # some files write no window so
    ("mamba_d_head", "auto"),
    ("shared_intermediate_size", 0),  # no MLP beside experts
    ("vocab_size_per_layer_input", 0),  # an assistant has no inputs of layers
)
# The same, and 0, which means that a model has none.
SIZES_OR_NONE = {
    "num_experts": MAX_EXPERTS,
    "num_local_experts": MAX_EXPERTS,
    "num_experts_per_tok": MAX_EXPERTS,
    "n_routed_experts": MAX_EXPERTS,
    "hidden_size_per_layer_input": MAX_WIDTH,
    "num_kv_shared_layers": MAX_LAYERS,
    "num_dense_layers": MAX_LAYERS,
    "n_shared_experts": MAX_EXPERTS,
    "first_k_dense_replace": MAX_LAYERS,
}
# Finite numbers above 0, or null.
POSITIVE = (
    "norm_eps",
    "routed_scaling_factor",
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rope_theta",
    "rope_local_base_freq",
    "rotary_emb_base",
    "rotary_pct",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
    "output_multiplier",
    "qk_scale_factor",
    "post_norm_eps",
    "embedding_multiplier",
    "attention_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "logit_scale",
)
# Lists of layers, or letters.
LISTS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
ROPE_OPTIONS = ("rope_scaling", "rope_parameters")


def check_config_file(config: Mapping[str, Any], path: Path) -> None:
    """Check the config of this file. Raises ValueError, in one line that names the file."""
    try:
        check_config(config)
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from None


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ValueError, in one line, for a number of the wrong type or out of its bounds."""
    for key, largest in {**SIZES, **OPTIONAL_SIZES}.items():
        value = config.get(key, 1)
        if (value is None and key in OPTIONAL_SIZES) or (type(value) is int and 1 <= value <= largest):
            continue
        if (key, value) in OTHER_VALUES:
            continue
        raise ValueError(f"{key} is {quote(value)}, not a whole number from 1 to {largest}")
    for key, largest in SIZES_OR_NONE.items():
        value = config.get(key)
        if value is not None and not (type(value) is int and 0 <= value <= largest):
            raise ValueError(f"{key} is {quote(value)}, not a whole number from 0 to {largest}")
    for key in POSITIVE:
        if (value := config.get(key)) is not None and not _is_positive(value):
            raise ValueError(f"{key} is {quote(value)}, not a number above 0")
    for key in LISTS:
        if isinstance(value := config.get(key), list | str) and len(value) > MAX_LAYERS:
            raise ValueError(f"{key} has {len(value)} layers, more than {MAX_LAYERS}")
    for key in ROPE_OPTIONS:
        if (value := config.get(key)) is not None:
            _check_finite(key, value)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e30


def _check_finite(key: str, value: Any, depth: int = 0) -> None:
    """Check the options of RoPE: an object, in which some families have one for each type of layer."""
    if depth == 0 and not isinstance(value, Mapping):
        raise ValueError(f"{key} is {quote(value)}, not an object")
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        if isinstance(child, Mapping | list):
            if depth == 2:
                raise ValueError(f"{key} is nested too deeply")
            _check_finite(f"{key}.{name}", child, depth + 1)
        elif type(child) in (int, float) and not (math.isfinite(child) and abs(child) <= 1e30):
            raise ValueError(f"{quote(f'{key}.{name}')} is {quote(child)}, not a finite number")
