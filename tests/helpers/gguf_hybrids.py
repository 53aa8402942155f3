"""What llama.cpp's converter does for models whose layers differ, after its conversion/gemma.py, qwen.py and lfm2.py.

Tensors keep Hugging Face's names where the map of the `gguf` library has them, and have llama.cpp's elsewhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import Keys
from numpy.typing import NDArray

Array = NDArray[np.float32]
Tensors = dict[str, Array]
# Changes to the config of a tiny model, whose options a GGUF file cannot store otherwise.
STORABLE: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 50000.0, "partial_rotary_factor": 0.25},
        }
    },
}
# Further changes to each of them that files can store.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gemma4_text", {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": None}),
    (
        "gemma4_text",
        {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}),
    ("gemma4_text", {"layer_types": ["full_attention"] * 4, "tie_word_embeddings": False}),
]
NO_LEAF = ".<none>"  # at the end of the name of a tensor that is no `.weight`


def hybrid_metadata(arch: str, c: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that differ from those of other models; None where there is none."""
    values = {"gemma4": gemma4_metadata}.get(arch, lambda c: {})(c)
    return {key.format(arch=arch): value for key, value in values.items()}


def convert_hybrid_tensors(arch: str, tensors: Tensors, c: dict[str, Any]) -> Tensors:
    """Convert the names and the layouts of tensors."""
    convert = {"gemma4": convert_gemma4_tensor}.get(arch)
    return dict(pair for n, x in tensors.items() for pair in convert(n, x, c)) if convert else tensors


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
