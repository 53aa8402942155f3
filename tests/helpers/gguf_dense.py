"""What llama.cpp's converter does to the dense families of 2024 and 2025, after its files conversion/*.py.

`text_model_metadata` is TextModel.set_gguf_parameters; a function of METADATA adds what the class of a family does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Config = dict[str, Any]
DENSE_ARCHS = {
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "phi3": "phi3",
    "ernie4_5": "ernie4_5",
    "granite": "granite",
    "glm4": "glm4",
    "cohere2": "cohere2",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "ministral3": "mistral3",
    "muse_glimmer_text": "muse-glimmer",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
}
PERMUTED = ("llama", "granite", "smollm3", "mistral3", "muse-glimmer")  # most are the converter's LlamaModel


def dense_metadata(arch: str, c: Config) -> dict[str, Any]:
    """Convert config.json to the metadata of a dense family, less the prefix of its keys."""
    values = text_model_metadata(c)
    if arch in PERMUTED:
        values["rope.dimension_count"] = get_head_dim(c)
    return METADATA.get(arch, lambda c, values: values)(c, values)


def get_head_dim(c: Config) -> int:
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def text_model_metadata(c: Config) -> dict[str, Any]:
    """Return what all text models write."""
    values = {
        "block_count": c.get("num_hidden_layers"),
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
    }
    rope = {**(c.get("rope_parameters") or c.get("rope_scaling") or {})}
    full = {"rope_theta": c.get("rope_theta"), **rope.get("full_attention", rope)}
    if full.get("rope_type", full.get("type")) in ("linear", "yarn"):
        values |= scaling_metadata(full)
    values |= {
        "rope.freq_base": full.get("rope_theta"),
        "rope.freq_base_swa": rope.get("sliding_attention", {}).get("rope_theta"),
        "attention.layer_norm_rms_epsilon": c.get("rms_norm_eps"),
        "attention.layer_norm_epsilon": c.get("layer_norm_eps"),
        "attention.key_length": c.get("head_dim"),
        "attention.value_length": c.get("head_dim"),
    }
    return {key: value for key, value in values.items() if value is not None}


def scaling_metadata(rope: Mapping[str, Any]) -> dict[str, Any]:
    prefix = "rope.scaling."
    values = {prefix + "type": rope["rope_type"], prefix + "factor": rope["factor"]}
    if rope["rope_type"] == "yarn":
        values[prefix + "original_context_length"] = rope["original_max_position_embeddings"]
        for key, hf_key in (("ext_factor", "extrapolation_factor"), ("attn_factor", "attention_factor")):
            values[f"{prefix}yarn_{key}"] = rope.get(hf_key)
        for key in ("beta_fast", "beta_slow"):
            values[f"{prefix}yarn_{key}"] = rope.get(key)
    return values


def add_olmo2(c: Config, values: dict[str, Any]) -> dict[str, Any]:
    if "sliding_window" not in c:
        return values
    n = c["num_hidden_layers"]
    types = c.get("layer_types") or ["full_attention" if i % 4 == 3 else "sliding_attention" for i in range(n)]
    return values | {
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": [t == "sliding_attention" for t in types],
    }


def add_phi3(c: Config, values: dict[str, Any]) -> dict[str, Any]:
    """Phi3MiniModel writes its keys without TextModel: none of the head's size or of scaling."""
    size = int(c.get("partial_rotary_factor", 1.0) * c["hidden_size"]) // c["num_attention_heads"]
    kept = {key: value for key, value in values.items() if not key.endswith(("_length", "type", "factor"))}
    rope = c.get("rope_scaling") or {}
    original = rope.get("original_max_position_embeddings", c["max_position_embeddings"])
    if "long_factor" in rope:
        scale = c["max_position_embeddings"] / original
        kept["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    return kept | {
        "context_length": c["max_position_embeddings"],
        "rope.scaling.original_context_length": original,
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "rope.dimension_count": size,
        "attention.sliding_window": c.get("sliding_window") or 0,
    }


def longrope_tensors(c: Config) -> dict[str, NDArray[np.float32]]:
    """Return the lists of factors of long contexts, as Phi3MiniModel.generate_extra_tensors."""
    rope = c.get("rope_scaling") or {}
    keys = [key for key in ("long", "short") if f"{key}_factor" in rope]
    return {f"rope_factors_{key}.weight": np.array(rope[f"{key}_factor"], np.float32) for key in keys}


def add_granite(c: Config, values: dict[str, Any]) -> dict[str, Any]:
    """A head_dim is ignored."""
    scales = {
        "attention.scale": c["attention_multiplier"],
        "embedding_scale": c["embedding_multiplier"],
        "residual_scale": c["residual_multiplier"],
        "logit_scale": c["logits_scaling"],
    }
    return {key: value for key, value in values.items() if "_length" not in key or "attention" not in key} | {
        key: value for key, value in scales.items() if value
    }


def add_granite_experts(c: Config, values: dict[str, Any]) -> dict[str, Any]:
    return add_granite(c, values) | {
        "rope.dimension_count": get_head_dim(c),
        "expert_count": c["num_local_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "expert_shared_feed_forward_length": c.get("shared_intermediate_size") or None,
    }


def add_glm4(c: Config, values: dict[str, Any]) -> dict[str, Any]:
    return values | {"rope.dimension_count": int(get_head_dim(c) * c.get("partial_rotary_factor", 0.5))}


def add_cohere2(c: Config, values: dict[str, Any]) -> dict[str, Any]:
    return values | {
        "logit_scale": c["logit_scale"],
        "attention.sliding_window": c["sliding_window"],
        "vocab_size": c["vocab_size"],
        "rope.dimension_count": get_head_dim(c),
        "rope.scaling.type": "none",
    }


def add_mistral3(c: Config, values: dict[str, Any]) -> dict[str, Any]:
    rope = c.get("rope_parameters") or {}
    if c["model_type"] != "ministral3":
        return values
    return values | {
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def add_muse_glimmer(c: Config, values: dict[str, Any]) -> dict[str, Any]:
    n = c["num_hidden_layers"]
    types = c.get("layer_types") or ["sliding_attention" if (n - 1 - i) % 4 else "full_attention" for i in range(n)]
    return values | {
        "final_logit_softcapping": c.get("final_logit_softcapping", 20.0),
        "logit_scale": c["output_multiplier"],
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": [t == "sliding_attention" for t in types],
    }


def qk_norm_tensors(arch: str, c: Config) -> dict[str, NDArray[np.float32]]:
    """Return the norms that MuseGlimmerModel adds, of which that of q holds a factor."""
    if arch != "muse-glimmer":
        return {}
    values = {"q": c["qk_scale_factor"], "k": 1.0}
    return {
        f"blk.{i}.attn_{name}_norm.weight": np.full(c["head_dim"], x, np.float32)
        for i in range(c["num_hidden_layers"])
        for name, x in values.items()
    }


METADATA: dict[str, Callable[[Config, dict[str, Any]], dict[str, Any]]] = {
    "olmo2": add_olmo2,
    "phi3": add_phi3,
    "granite": add_granite,
    "granitemoe": add_granite_experts,
    "glm4": add_glm4,
    "cohere2": add_cohere2,
    "mistral3": add_mistral3,
    "muse-glimmer": add_muse_glimmer,
}


def permute_rows(name: str, a: NDArray[np.float32], c: Config) -> NDArray[np.float32]:
    """Interleave the halves of each head of q and k, as LlamaModel does."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return a
    heads = c["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
    return a.reshape(heads, 2, a.shape[0] // heads // 2, *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)
