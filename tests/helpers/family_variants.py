"""Config variants of every family on which tests compare implementations."""

from __future__ import annotations

from typing import Any

import pytest

from retain import models

Changes = dict[str, Any]
# A family of each kind of cache, on which laws about caches run: heads in groups, ALiBi, windows in some and in all
# layers, shared layers and K = V, sinks and experts, latents, short convolutions, states of both update rules.
CACHE_KINDS = (
    *("llama", "mpt", "gemma3_text", "mistral", "gemma4_text"),
    *("gpt_oss", "deepseek_v3", "lfm2", "qwen3_5_text", "granitemoehybrid"),
)
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
MROPE = {
    "rope_type": "default",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}

VARIANTS: dict[str, list[Changes]] = {
    "llama": [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}, "rope_theta": None},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, **YARN, "beta_fast": 8.0, "truncate": False}},
    ],
    "mistral": [{"sliding_window": 1}],
    "qwen2": [
        {"use_sliding_window": False},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ],
    "qwen3": [{"attention_bias": True, "tie_word_embeddings": False}, {"num_key_value_heads": 4, "head_dim": 8}],
    "qwen3_moe": [
        {"norm_topk_prob": True, "tie_word_embeddings": True, "num_experts_per_tok": 3},
        {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 8, "attention_bias": True},
    ],
    "gpt_oss": [
        {"rope_scaling": {"rope_type": "yarn", **YARN, "truncate": False}, "num_experts_per_tok": 3},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "attention_bias": False},
    ],
    "seed_oss": [{"attention_out_bias": True, "mlp_bias": True}],
    "ernie4_5": [{"use_bias": True, "tie_word_embeddings": True}],
    "smollm3": [
        {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 8, "no_rope_layer_interval": 2, "attention_bias": True},
    ],
    "glm4": [{"attention_bias": False, "partial_rotary_factor": 0.25}],
    "phi3": [{"sliding_window": None, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}],
    "ministral3": [{"sliding_window": 8, "tie_word_embeddings": True}],
    "cohere2": [{"attention_bias": True, "layer_types": ["full_attention", "sliding_attention"] * 2}],
    "granite": [{"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
    "granite_swa": [
        {"layer_rope_theta": [0, 500.0, 10000.0, 500.0, 0], "attention_bias": True, "tie_word_embeddings": False},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + ["full_attention"] * 2},
    ],
    "olmo2": [
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
        {"rope_scaling": {"rope_type": "yarn", **YARN}, "head_dim": 8, "num_key_value_heads": 1},
    ],
    "olmo3": [
        {"layer_types": None, "rope_scaling": None, "rope_theta": None, "attention_bias": True},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, **YARN, "attention_factor": 1.2},
            },
            "rope_scaling": None,
            "tie_word_embeddings": True,
        },
    ],
    "gemma3_text": [
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "sliding_window": 8},
        {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        {"sliding_window_pattern": 3, "attention_bias": True},
    ],
    "gemma3": [],
    "gemma4_text": [
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": None},
        {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
        {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    ],
    "gemma4": [],
    "muse_glimmer_text": [
        {"attention_bias": True, "layer_rope_theta": [0, 10000.0, 0, 10000.0, 10000.0], "post_norm_eps": 0.1},
        {"layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"], "tie_word_embeddings": True},
    ],
    "muse_glimmer": [],
    "lfm2": [
        {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False},
        {"layer_types": None, "full_attn_idxs": [1], "num_key_value_heads": 1},
    ],
    "lfm2_moe": [
        {"use_expert_bias": False, "norm_topk_prob": False, "num_experts_per_tok": 3},
        {"routed_scaling_factor": 1.5, "conv_bias": True, "num_dense_layers": 0},
    ],
    "granitemoe": [{"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 3}],
    "granitemoeshared": [{"shared_intermediate_size": 0, "num_key_value_heads": 4}],
    "granitemoehybrid": [
        {
            "position_embedding_type": "rope",
            "attention_bias": True,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_d_head": 16,
        },
        {
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "time_step_limit": None,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 3,
        },
        {"layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_groups": 8, "mamba_n_heads": 16},
    ],
    "nemotron_h": [
        {"layer_types": None, "hybrid_override_pattern": "M-ME*", "use_bias": True, "mlp_bias": True, "conv_kernel": 3},
        {
            "n_groups": 8,
            "norm_topk_prob": False,
            "use_conv_bias": False,
            "n_group": 1,
            "topk_group": 1,
            "num_key_value_heads": 4,
        },
        {"moe_latent_size": 48, "mlp_bias": True},
    ],
    "deepseek_v2": [
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0},
        {"q_lora_rank": None, "first_k_dense_replace": 0, "attention_bias": True, "mlp_bias": True},
        {"rope_scaling": {**YARN, "type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.3}, "tie_word_embeddings": True},
    ],
    "deepseek_v3": [
        {"q_lora_rank": None, "attention_bias": True, "rope_interleave": False, "norm_topk_prob": False},
        {"rope_scaling": {**YARN, "type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.3}, "n_group": 4, "topk_group": 2},
        {"n_group": 1, "first_k_dense_replace": 2, "tie_word_embeddings": True},
    ],
    "glm4_moe_lite": [
        {"q_lora_rank": None, "tie_word_embeddings": True, "mlp_layer_types": ["sparse", "dense", "sparse"]},
        {"n_group": 2, "topk_group": 1, "rope_scaling": {"rope_type": "yarn", **YARN}, "attention_bias": True},
    ],
    "glm4_moe": [
        {"attention_bias": True, "use_qk_norm": True, "n_group": 4, "topk_group": 2, "tie_word_embeddings": True},
        {"partial_rotary_factor": 0.25, "first_k_dense_replace": 2, "routed_scaling_factor": 2.5, "head_dim": None},
    ],
    "qwen3_next": [
        {"attention_bias": True, "mlp_only_layers": [1, 2], "norm_topk_prob": False, "tie_word_embeddings": True},
        {
            "linear_num_key_heads": 4,
            "linear_conv_kernel_dim": 3,
            "partial_rotary_factor": 0.5,
            "num_experts_per_tok": 3,
        },
    ],
    "qwen3_5_text": [
        {"attention_bias": True, "tie_word_embeddings": True, "linear_value_head_dim": 8},
        {"rope_parameters": MROPE, "rope_theta": None, "linear_num_key_heads": 1},
    ],
    "qwen3_5": [],
    "qwen3_5_moe_text": [{"rope_parameters": MROPE, "rope_theta": None, "tie_word_embeddings": True}],
    "qwen3_5_moe": [],
    "gpt2": [
        {"n_inner": 40, "activation_function": "gelu", "tie_word_embeddings": False},  # as Cerebras-GPT
        {"scale_attn_weights": False, "n_embd": 32},
        {"scale_attn_by_inverse_layer_idx": True},
    ],
    "gptj": [{"rotary_dim": 16}, {"tie_word_embeddings": True, "n_inner": 40, "activation_function": "silu"}],
    "mpt": [
        {"n_heads": 6, "d_model": 96},
        {"n_heads": 12, "d_model": 96, "attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.2}},
    ],
    "opt": [
        {"do_layer_norm_before": False, "word_embed_proj_dim": 24},  # as OPT-350M
        {"_remove_final_layer_norm": True, "enable_bias": False},
        {"tie_word_embeddings": False, "activation_function": "gelu"},
    ],
    "gpt_neox": [
        {"use_parallel_residual": False, "rotary_pct": 1.0},
        {"attention_bias": False, "rotary_emb_base": 300.0, "hidden_act": "gelu_fast", "tie_word_embeddings": True},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_pct": 0.25},
    ],
}
CASES = [(family, changes) for family in models.list_families() for changes in [{}, *VARIANTS[family]]]
each_variant = pytest.mark.parametrize(("family", "changes"), CASES, ids=["+".join([f, *c]) for f, c in CASES])
