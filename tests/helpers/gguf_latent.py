"""What llama.cpp's converter does to DeepSeek-V2, V3 and GLM-4 with experts, after its conversion/deepseek.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType, Keys
from numpy.typing import NDArray

Array = NDArray[np.float32]
Config = dict[str, Any]
LATENT_ARCHS = {
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "glm4_moe": "glm4moe",
}
WHOLE_GROUPS = {"q_lora_rank": 32, "qk_nope_head_dim": 32}  # rows of quantized matrices divide into them
STORABLE: dict[str, Config] = {
    "deepseek_v2": WHOLE_GROUPS,
    "deepseek_v3": WHOLE_GROUPS,
    "glm4_moe_lite": WHOLE_GROUPS,
    "glm4_moe": {},
}
DEEPSEEK_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
VARIANTS: list[tuple[str, Config]] = [
    ("deepseek_v2", {"q_lora_rank": None, "first_k_dense_replace": 0, "routed_scaling_factor": 3.0}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "v_head_dim": 32}),
    ("deepseek_v2", {"rope_scaling": {**DEEPSEEK_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("deepseek_v3", {"rope_scaling": {**DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16.0}}),
    ("deepseek_v3", {"norm_topk_prob": False, "n_group": 1, "first_k_dense_replace": 2, "tie_word_embeddings": True}),
    ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "n_group": 4, "topk_group": 2}),
    (
        "glm4_moe",
        {"partial_rotary_factor": 0.25, "first_k_dense_replace": 2, "norm_topk_prob": False, "head_dim": None},
    ),
    ("glm4_moe_lite", {"q_lora_rank": None, "qk_rope_head_dim": 16, "routed_scaling_factor": 1.5}),
]


def expert_metadata(c: Config) -> dict[str, Any]:
    return {
        Keys.LLM.LEADING_DENSE_BLOCK_COUNT: c.get("first_k_dense_replace", 1),
        Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: c["moe_intermediate_size"],
        Keys.LLM.EXPERT_COUNT: c["n_routed_experts"],
        Keys.LLM.EXPERT_USED_COUNT: c["num_experts_per_tok"],
        Keys.LLM.EXPERT_SHARED_COUNT: c["n_shared_experts"],
        Keys.LLM.EXPERT_GROUP_COUNT: c.get("n_group"),
        Keys.LLM.EXPERT_GROUP_USED_COUNT: c.get("topk_group"),
    }


def deepseek2_metadata(c: Config) -> dict[str, Any]:
    rope = c.get("rope_scaling") or {}
    is_sigmoid = c["model_type"] != "deepseek_v2"
    scale = {"deepseek_v2": 1.0, "deepseek_v3": 2.5, "glm4_moe_lite": 1.8}[c["model_type"]]  # transformers' defaults
    return expert_metadata(c) | {
        Keys.Attention.HEAD_COUNT_KV: 1,
        Keys.Attention.Q_LORA_RANK: c["q_lora_rank"],
        Keys.Attention.KV_LORA_RANK: c["kv_lora_rank"],
        Keys.Attention.KEY_LENGTH: c["kv_lora_rank"] + c["qk_rope_head_dim"],
        Keys.Attention.VALUE_LENGTH: c["kv_lora_rank"],
        Keys.Attention.KEY_LENGTH_MLA: c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        Keys.Attention.VALUE_LENGTH_MLA: c["v_head_dim"],
        Keys.LLM.EXPERT_WEIGHTS_SCALE: c.get("routed_scaling_factor", scale),
        Keys.LLM.EXPERT_WEIGHTS_NORM: c.get("norm_topk_prob", is_sigmoid) or None,
        Keys.LLM.EXPERT_GATING_FUNC: int(ExpertGatingFuncType.SIGMOID) if is_sigmoid else None,
        Keys.Rope.DIMENSION_COUNT: c["qk_rope_head_dim"],
        Keys.Rope.SCALING_YARN_LOG_MUL: 0.1 * rope["mscale_all_dim"] if rope else None,
    }


def glm4moe_metadata(c: Config) -> dict[str, Any]:
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return expert_metadata(c) | {
        Keys.LLM.EXPERT_WEIGHTS_SCALE: c.get("routed_scaling_factor", 1.0),
        Keys.LLM.EXPERT_WEIGHTS_NORM: c.get("norm_topk_prob", True),
        Keys.LLM.EXPERT_GATING_FUNC: int(ExpertGatingFuncType.SIGMOID),
        Keys.Rope.DIMENSION_COUNT: int(dim * c.get("partial_rotary_factor", 0.5)),
    }


def convert_expert_bias(name: str, x: Array) -> list[tuple[str, Array]]:
    return [(name.replace("e_score_correction_bias", "e_score_correction.bias"), x)]


def convert_deepseek2_tensor(name: str, x: Array, c: Config) -> list[tuple[str, Array]]:
    return list(split_kv_b({name: x}, c).items()) if "kv_b_proj" in name else convert_expert_bias(name, x)


def split_kv_b(tensors: dict[str, Array], c: Config) -> dict[str, Array]:
    """Split the matrix of the latent by heads, and transpose W_K."""
    found = {}
    for name, x in tensors.items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = x
            continue
        of_heads = x.reshape(c["num_attention_heads"], -1, x.shape[1])
        k, v = np.split(of_heads, [c["qk_nope_head_dim"]], axis=1)
        found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(k.swapaxes(1, 2))
        found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(v)
    return found


METADATA = {"deepseek2": deepseek2_metadata, "glm4moe": glm4moe_metadata}
CONVERTERS = {"deepseek2": convert_deepseek2_tensor, "glm4moe": lambda name, x, c: convert_expert_bias(name, x)}
