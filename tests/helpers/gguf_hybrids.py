"""What llama.cpp's converter does for models whose layers differ, after its conversion/gemma.py, qwen.py and lfm2.py.

Tensors keep Hugging Face's names where the map of the `gguf` library has them, and have llama.cpp's elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gguf import ExpertGatingFuncType, Keys
from numpy.typing import NDArray

from tests.helpers import gguf_latent, gguf_mamba2

Array = NDArray[np.float32]
Tensors = dict[str, Array]
EVERY_SECOND: dict[str, Any] = {
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_value_head_dim": 32,  # in whole groups of quantized matrices, as the next
    "shared_expert_intermediate_size": 64,
}
# Changes to the config of a tiny model, whose options a GGUF file cannot store otherwise.
STORABLE: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.25},
        }
    },
}
STORABLE |= {family: {"rope_theta": 1000000.0} for family in ("lfm2", "lfm2_moe")}
STORABLE |= dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), EVERY_SECOND)
STORABLE |= gguf_latent.STORABLE | gguf_mamba2.STORABLE
# Further changes to each of them that files can store.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    (
        "gemma4_text",
        {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}),
    ("qwen3_next", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.5}),
    ("qwen3_5_text", {"linear_num_key_heads": 1, "linear_value_head_dim": 24, "tie_word_embeddings": True}),
    ("qwen3_5_text", {"linear_num_value_heads": 6, "linear_value_head_dim": 8, "partial_rotary_factor": 0.5}),
    ("qwen3_5_text", {"linear_num_key_heads": 4}),
    ("qwen3_5_moe_text", {"linear_num_value_heads": 6, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    ("lfm2", {"conv_L_cache": 4, "tie_word_embeddings": False, "num_key_value_heads": 1, "rope_theta": 5000.0}),
    ("lfm2_moe", {"use_expert_bias": False, "num_experts_per_tok": 3, "num_dense_layers": 0}),
    ("gemma4_text", {"layer_types": ["full_attention"] * 4, "tie_word_embeddings": False}),
    *gguf_latent.VARIANTS,
    *gguf_mamba2.VARIANTS,
]
# Never quantized.
EXACT = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "shortconv.conv", "ssm_a", "ssm_d", "ssm_norm")
NO_LEAF = ".<none>"  # at the end of the name of a tensor that is no `.weight`


def hybrid_metadata(arch: str, c: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that differ from those of other models; None where there is none."""
    values = METADATA[arch](c) if arch in METADATA else {}
    return {key.format(arch=arch): value for key, value in values.items()}


def convert_hybrid_tensors(arch: str, tensors: Tensors, c: dict[str, Any]) -> Tensors:
    """Convert the names and the layouts of tensors."""
    if arch not in CONVERTERS:
        return tensors
    return dict(pair for name, x in tensors.items() for pair in CONVERTERS[arch](name, x, c))


def extra_tensors(arch: str, c: dict[str, Any]) -> Tensors:
    """Return tensors that the converter adds."""
    if arch != "gemma4":
        return {}
    rotated = int(c["global_head_dim"] * c["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    values = [1.0] * rotated + [1e30] * (c["global_head_dim"] // 2 - rotated)
    return {"rope_freqs.weight": np.array(values, np.float32)}


def split_halves(tensors: Tensors) -> Tensors:
    """Name experts that are stacked in one tensor one by one: [n, gates and up projections, in], [n, out, in]."""
    found = {}
    for name, x in tensors.items():
        prefix, is_stack, rest = name.partition("experts.")
        if not is_stack or x.ndim != 3:
            found[name] = x
            continue
        parts = {"gate_proj": 0, "up_proj": 1} if rest == "gate_up_proj" else {"down_proj": 0}
        for part, i in parts.items():
            for e, own in enumerate(x):
                found[f"{prefix}experts.{e}.{part}.weight"] = np.split(own, len(parts))[i]
    return found


Converter = Callable[[str, Array, dict[str, Any]], list[tuple[str, Array]]]

# Gemma 4


def gemma4_metadata(c: dict[str, Any]) -> dict[str, Any]:
    rope = c["rope_parameters"]
    is_sliding = [t == "sliding_attention" for t in c["layer_types"]]
    shared = c.get("num_kv_shared_layers", 0)
    heads, full_heads = c["num_key_value_heads"], c.get("num_global_key_value_heads")
    width, layers = c["intermediate_size"], c["num_hidden_layers"]
    values = {
        Keys.Attention.SHARED_KV_LAYERS: shared,
        Keys.LLM.EMBD_LENGTH_PER_LAYER_INP: c.get("hidden_size_per_layer_input") or 0,
        Keys.Attention.SLIDING_WINDOW: c["sliding_window"],
        Keys.Attention.SLIDING_WINDOW_PATTERN: is_sliding,
        Keys.Attention.KEY_LENGTH: c["global_head_dim"],
        Keys.Attention.VALUE_LENGTH: c["global_head_dim"],
        Keys.Attention.KEY_LENGTH_SWA: c["head_dim"],
        Keys.Attention.VALUE_LENGTH_SWA: c["head_dim"],
        Keys.Attention.HEAD_COUNT_KV: [heads if x else full_heads for x in is_sliding] if full_heads else heads,
        Keys.Attention.LAYERNORM_RMS_EPS: c["rms_norm_eps"],
        Keys.Attention.LAYERNORM_EPS: None,
        Keys.Rope.DIMENSION_COUNT: c["global_head_dim"],
        Keys.Rope.DIMENSION_COUNT_SWA: c["head_dim"],
        Keys.Rope.FREQ_BASE: rope["full_attention"]["rope_theta"],
        Keys.Rope.FREQ_BASE_SWA: rope["sliding_attention"]["rope_theta"],
        Keys.LLM.FINAL_LOGIT_SOFTCAPPING: c.get("final_logit_softcapping"),
    }
    if c.get("use_double_wide_mlp"):
        values[Keys.LLM.FEED_FORWARD_LENGTH] = [width * (2 if i >= layers - shared else 1) for i in range(layers)]
    if c.get("num_experts"):
        values |= {
            Keys.LLM.EXPERT_COUNT: c["num_experts"],
            Keys.LLM.EXPERT_USED_COUNT: c["top_k_experts"],
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: c["moe_intermediate_size"],
        }
    return values


def convert_gemma4_tensor(name: str, x: Array, c: dict[str, Any]) -> list[tuple[str, Array]]:
    layer = name.removeprefix("model.layers.").partition(".")[0]
    if name.endswith("router.scale"):
        return [(f"blk.{layer}.ffn_gate_inp.scale", x)]
    if name.endswith("router.per_expert_scale"):
        return [(f"blk.{layer}.ffn_down_exps.scale", x)]
    if name.endswith("layer_scalar") or (".experts." in name and not name.endswith(".weight")):
        return [(f"{name}.weight", x)]
    return [(name, x)]


# Qwen3-Next and Qwen3.5


def qwen_metadata(c: dict[str, Any]) -> dict[str, Any]:
    values = {
        Keys.Attention.HEAD_COUNT_KV: c["num_key_value_heads"],
        Keys.Attention.LAYERNORM_RMS_EPS: c["rms_norm_eps"],
        Keys.Attention.LAYERNORM_EPS: None,
        Keys.Attention.KEY_LENGTH: c["head_dim"],
        Keys.Attention.VALUE_LENGTH: c["head_dim"],
        Keys.Rope.FREQ_BASE: c["rope_theta"],
        Keys.Rope.DIMENSION_COUNT: int(c["head_dim"] * c.get("partial_rotary_factor", 0.25)),
        Keys.Rope.DIMENSION_SECTIONS: [11, 11, 10, 0],
        Keys.SSM.CONV_KERNEL: c.get("linear_conv_kernel_dim", 4),
        Keys.SSM.STATE_SIZE: c["linear_key_head_dim"],
        Keys.SSM.GROUP_COUNT: c["linear_num_key_heads"],
        Keys.SSM.TIME_STEP_RANK: c["linear_num_value_heads"],
        Keys.SSM.INNER_SIZE: c["linear_value_head_dim"] * c["linear_num_value_heads"],
        Keys.LLM.FULL_ATTENTION_INTERVAL: c["full_attention_interval"],
    }
    if "num_experts" in c:
        values |= {
            Keys.LLM.EXPERT_COUNT: c["num_experts"],
            Keys.LLM.EXPERT_USED_COUNT: c["num_experts_per_tok"],
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: c["moe_intermediate_size"],
            Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: c["shared_expert_intermediate_size"],
        }
    return values


def convert_qwen3next_tensor(name: str, x: Array, c: dict[str, Any]) -> list[tuple[str, Array]]:
    prefix, _, part = name.rpartition("linear_attn.")
    if part == "A_log":
        return [(name + NO_LEAF, -np.exp(x))]
    if part == "dt_bias":
        return [(f"{prefix}linear_attn.dt_proj.bias", x)]
    if part == "conv1d.weight":
        return [(name, x.squeeze(1) if x.ndim == 3 else x)]
    if part == "in_proj_qkvz.weight":
        qkv, z = split_qkvz(x, c)
        return [(name.replace("qkvz", "qkv"), qkv), (name.replace("qkvz", "z"), z)]
    if name.endswith("norm.weight") and part != "norm.weight":
        return [(name, x + 1)]
    if name.endswith("shared_expert_gate.weight"):
        return [(name, x.squeeze(0))]
    return list(split_halves({name: x}).items())


def split_qkvz(x: Array, c: dict[str, Any]) -> tuple[Array, Array]:
    """Return the rows of all q, then k, then v; and those of all z."""
    heads, size = c["linear_num_key_heads"], c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] // heads * c["linear_value_head_dim"]
    of_heads = np.split(x.reshape(heads, -1, x.shape[1]), [size, 2 * size, 2 * size + values], axis=1)
    q, k, v, z = (part.reshape(-1, x.shape[1]) for part in of_heads)
    return np.concatenate([q, k, v]), z


def convert_qwen35_tensor(name: str, x: Array, c: dict[str, Any]) -> list[tuple[str, Array]]:
    part = name.rpartition("linear_attn.")[2]
    first = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        x = np.concatenate([x[:first], tile_value_heads(x[first:], c)])
    elif part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        x = tile_value_heads(x, c)
    elif part == "out_proj.weight":
        x = tile_value_heads(x.T, c).T
    return convert_qwen3next_tensor(name, x, c)


def tile_value_heads(x: Array, c: dict[str, Any]) -> Array:
    """Put the value heads in the order that ggml broadcasts key heads in: the first of each, then the second."""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    size = len(x) // values
    heads = [x[i * size : (i + 1) * size] for i in range(values)]
    return np.concatenate([heads[k * (values // keys) + i] for i in range(values // keys) for k in range(keys)])


# LFM2


def lfm2_metadata(c: dict[str, Any]) -> dict[str, Any]:
    values = {
        Keys.Attention.HEAD_COUNT_KV: [0 if t == "conv" else c["num_key_value_heads"] for t in c["layer_types"]],
        Keys.Attention.LAYERNORM_RMS_EPS: c["norm_eps"],
        Keys.Attention.LAYERNORM_EPS: None,
        Keys.Rope.FREQ_BASE: c["rope_theta"],
        Keys.ShortConv.L_CACHE: c.get("conv_L_cache", 3),
    }
    if "num_experts" in c:
        values |= {
            Keys.LLM.EXPERT_COUNT: c["num_experts"],
            Keys.LLM.EXPERT_USED_COUNT: c["num_experts_per_tok"],
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: c["moe_intermediate_size"],
            Keys.LLM.EXPERT_GATING_FUNC: int(ExpertGatingFuncType.SIGMOID),
            Keys.LLM.LEADING_DENSE_BLOCK_COUNT: c["num_dense_layers"],
        }
    return values


def convert_lfm2_tensor(name: str, x: Array, c: dict[str, Any]) -> list[tuple[str, Array]]:
    if name.endswith("conv.conv.weight"):
        return [(name, x.squeeze(1))]
    if name.endswith("expert_bias"):
        return [(f"{name}.bias", x)]
    if ".experts." in name:
        return [(name.removeprefix("model."), x)]
    return [(name, x)]


METADATA: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "gemma4": gemma4_metadata,
    "lfm2": lfm2_metadata,
    "lfm2moe": lfm2_metadata,
    "qwen3next": qwen_metadata,
    "qwen35": qwen_metadata,
    "qwen35moe": qwen_metadata,
    **gguf_latent.METADATA,
    **gguf_mamba2.METADATA,
}
CONVERTERS: dict[str, Converter] = {
    "gemma4": convert_gemma4_tensor,
    "lfm2": convert_lfm2_tensor,
    "lfm2moe": convert_lfm2_tensor,
    "qwen3next": convert_qwen3next_tensor,
    "qwen35": convert_qwen35_tensor,
    "qwen35moe": convert_qwen35_tensor,
    **gguf_latent.CONVERTERS,
    **gguf_mamba2.CONVERTERS,
}
