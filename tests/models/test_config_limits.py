"""Numbers of a config.json that no model has are refused in one line, before anything is built from them."""

from __future__ import annotations

from typing import Any

import pytest

from retain.formats.config_limits import check_config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_experts", 10**9),
        ("num_local_experts", "8"),
        ("num_experts_per_tok", -1),
        ("top_k_experts", True),
        ("moe_intermediate_size", 2**30),
        ("global_head_dim", 2**30),
        ("num_global_key_value_heads", 2**24),
        ("hidden_size_per_layer_input", 1.5),
        ("num_kv_shared_layers", -1),
        ("original_max_position_embeddings", 0),
        ("final_logit_softcapping", -1),
        ("final_logit_softcapping", float("nan")),
        ("logits_scaling", 0),
        ("attention_multiplier", float("inf")),
        ("conv_L_cache", 2**20),
        ("num_dense_layers", -1),
        ("routed_scaling_factor", float("inf")),
        ("linear_conv_kernel_dim", 0),
        ("linear_num_value_heads", 2**24),
        ("linear_key_head_dim", 2**16),
        ("full_attention_interval", 0),
        ("mamba_d_state", 2**12),
        ("mamba_d_head", "many"),
        ("mamba_n_groups", 0),
        ("mamba_n_heads", 2**20),
        ("mamba_expand", 2**20),
        ("mamba_d_conv", 128),
        ("ssm_state_size", 2**12),
        ("mamba_num_heads", 2**20),
        ("conv_kernel", 128),
        ("n_routed_experts", -1),
        ("n_groups", 2**20),
        ("norm_eps", 0),
    ],
)
def test_impossible_numbers_are_refused(key: str, value: Any) -> None:
    sizes = dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"), 4)
    check_config(sizes | {key: None})
    with pytest.raises(ValueError, match=f"^{key} is .*, not a ") as e:
        check_config(sizes | {key: value})
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("key", ["num_experts", "hidden_size_per_layer_input", "num_kv_shared_layers"])
def test_a_model_may_have_none(key: str) -> None:
    check_config({key: 0})


def test_a_model_has_a_bounded_number_of_layers() -> None:
    for key, value in (("hybrid_override_pattern", "M" * 5000), ("layers_block_type", ["mlp"] * 5000)):
        with pytest.raises(ValueError, match=f"^{key} has 5000 layers, more than 4096$"):
            check_config({key: value})
    check_config({"hybrid_override_pattern": "M*-E", "mamba_d_head": "auto"})
