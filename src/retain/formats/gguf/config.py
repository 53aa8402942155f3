"""Build a family's Hugging Face config from a GGUF file's metadata and tensor shapes: one function for each family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from retain.files import quote
from retain.formats.config_limits import MAX_EXPERTS
from retain.formats.errors import UnsupportedError

HFConfig = dict[str, Any]
EXPERT_ARCHITECTURES = ("qwen3moe", "gpt-oss")
T = TypeVar("T")


@dataclass(frozen=True)
class GGUFMetadata:
    """A file's metadata, by keys without the architecture's prefix (`block_count`), and its tensor shapes."""

    arch: str
    entries: Mapping[str, Any]
    tensor_shapes: Mapping[str, tuple[int, ...]]

    def get(self, key: str, default: T) -> T:
        """Return a value of the type of `default`. A list with a value for each layer must hold equal values.

        Raises ValueError for another type, or for layers that differ.
        """
        value: Any = self.entries.get(f"{self.arch}.{key}")
        if value is None:
            return default
        if hasattr(value, "tolist"):
            distinct = set(value.tolist())
            if len(distinct) != 1:
                raise UnsupportedError(f"{self.arch}.{key} differs between layers, which is not supported")
            value = distinct.pop()
        if type(default) is float and type(value) is int:
            value = float(value)
        if type(value) is not type(default):
            raise ValueError(f"{self.arch}.{key} is {quote(value)}, not a value of type {type(default).__name__}")
        result: T = value
        return result

    def get_positive(self, key: str, default: int = 0) -> int:
        """Return a number of at least 1; it is required unless there is a default. Raises ValueError."""
        value = self.get(key, default)
        if value < 1:
            raise ValueError(f"{self.arch}.{key} is {value or 'missing or 0'}")
        return value


def _common_config(meta: GGUFMetadata) -> HFConfig:
    """Return the keys that all configs share. Raises ValueError for more layers than tensors, which bounds loops."""
    layers = meta.get_positive("block_count")
    if layers > len(meta.tensor_shapes):
        raise ValueError(f"{meta.arch}.block_count is {layers}, but there are only {len(meta.tensor_shapes)} tensors")
    if meta.get("expert_count", 0) and meta.arch not in EXPERT_ARCHITECTURES:
        raise UnsupportedError(f"mixtures of experts are not supported in the architecture {meta.arch}")
    if "token_embd.weight" not in meta.tensor_shapes:
        raise ValueError("there is no tensor 'token_embd.weight'")
    return {
        "vocab_size": meta.tensor_shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in meta.tensor_shapes,
        "bos_token_id": meta.entries.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.entries.get("tokenizer.ggml.eos_token_id"),
        "num_hidden_layers": layers,
        "num_attention_heads": meta.get_positive("attention.head_count"),
        "hidden_size": meta.get_positive("embedding_length"),
        "intermediate_size": meta.get_positive("feed_forward_length"),
        "max_position_embeddings": meta.get_positive("context_length"),
    }


def llama_config(meta: GGUFMetadata, model_type: str) -> HFConfig:
    """Return the config of Llama and the families like it. The file has no flags: tensors say whether there are biases.

    `attention.sliding_window` is left to the families that have one: llama.cpp and transformers read it in no other.
    """
    c = _common_config(meta)
    heads = c["num_attention_heads"]
    hidden = c["hidden_size"]
    dim = meta.get_positive("attention.key_length", max(1, hidden // heads))
    if meta.get_positive("attention.value_length", dim) != dim or meta.get_positive("rope.dimension_count", dim) != dim:
        raise UnsupportedError("heads whose keys, values and rotated part differ in size are not supported")
    return c | {
        "model_type": model_type,
        "num_key_value_heads": meta.get_positive("attention.head_count_kv", heads),
        "head_dim": dim,
        "rms_norm_eps": meta.get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in meta.tensor_shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in meta.tensor_shapes,
    }


def qwen3_moe_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Qwen 3 with experts. All layers have experts, and llama.cpp normalizes their weights."""
    c = llama_config(meta, "qwen3_moe") | _expert_config(meta)
    return c | {"norm_topk_prob": True, "moe_intermediate_size": meta.get_positive("expert_feed_forward_length")}


def gpt_oss_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of gpt-oss. Every second layer is full; YaRN's bounds are no whole numbers, as published."""
    c = llama_config(meta, "gpt_oss") | _expert_config(meta)
    if c["rope_scaling"] and c["rope_scaling"]["rope_type"] == "yarn":
        c["rope_scaling"]["truncate"] = False
    return c | {
        "intermediate_size": meta.get_positive("expert_feed_forward_length"),
        "sliding_window": meta.get_positive("attention.sliding_window", 128),
    }


def _expert_config(meta: GGUFMetadata) -> HFConfig:
    """Return how many experts a layer has, and a token. Raises ValueError for too many, which bounds loops."""
    num_experts = meta.get_positive("expert_count")
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{meta.arch}.expert_count is {num_experts}")
    return {"num_experts": num_experts, "num_experts_per_tok": meta.get_positive("expert_used_count")}


def _rope_scaling(meta: GGUFMetadata) -> HFConfig | None:
    """Return `rope_scaling` of config.json."""
    kind = meta.get("rope.scaling.type", "none")
    factor = meta.get("rope.scaling.factor", 1.0)
    if kind == "none":
        linear = meta.get("rope.scale_linear", 1.0)  # the key of old files
        return {"rope_type": "linear", "factor": linear} if linear != 1 else None
    scaling: HFConfig = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if meta.get("rope.scaling.attn_factor", 1.0) != 1:
            raise UnsupportedError("yarn with an attn_factor of its own is not supported")
        scaling["original_max_position_embeddings"] = meta.get_positive("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            if beta := meta.get(f"rope.scaling.yarn_{key}", 0.0):
                scaling[key] = beta
    return scaling


def gemma3_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Gemma 3's text model. Every sixth layer is full by default; without a window all are."""
    c = llama_config(meta, "gemma3_text")
    window = meta.get("attention.sliding_window", 0) or None
    layers = c["num_hidden_layers"]
    heads = c["num_attention_heads"]
    dim = c["head_dim"]
    pattern: Any = meta.entries.get("gemma3.attention.sliding_window_pattern")
    if hasattr(pattern, "tolist"):  # whether each layer is sliding
        is_sliding = [bool(x) for x in pattern.tolist()]
        if len(is_sliding) != layers:
            raise ValueError(f"attention.sliding_window_pattern is for {len(is_sliding)} layers, there are {layers}")
    else:
        every = meta.get_positive("attention.sliding_window_pattern", 6)
        is_sliding = [(i + 1) % every != 0 for i in range(layers)]
    del c["hidden_act"]
    return c | {
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": meta.get("rope.freq_base_swa", 10000.0),
        "sliding_window": window,
        "layer_types": ["sliding_attention" if x and window else "full_attention" for x in is_sliding],
        # Not in the file. Gemma scales by the head dim, except in the 27B model, the only one with 62 layers.
        "query_pre_attn_scalar": c["hidden_size"] // heads if layers == 62 else dim,
        "attn_logit_softcapping": meta.get("attn_logit_softcapping", 0.0) or None,
        "final_logit_softcapping": meta.get("final_logit_softcapping", 0.0) or None,
    }


def gpt2_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of GPT-2. The file lacks the activation; every model that llama.cpp converts has this one."""
    c = _common_config(meta)
    return c | {
        "model_type": "gpt2",
        "n_layer": c["num_hidden_layers"],
        "n_head": c["num_attention_heads"],
        "n_embd": c["hidden_size"],
        "n_inner": c["intermediate_size"],
        "n_positions": c["max_position_embeddings"],
        "layer_norm_epsilon": meta.get("attention.layer_norm_epsilon", 1e-5),
        "activation_function": "gelu_new",
    }


def gpt_neox_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of GPT-NeoX and Pythia."""
    c = _common_config(meta)
    dim = max(1, c["hidden_size"] // c["num_attention_heads"])
    return c | {
        "model_type": "gpt_neox",
        "layer_norm_eps": meta.get("attention.layer_norm_epsilon", 1e-5),
        "rotary_pct": meta.get_positive("rope.dimension_count", dim) / dim,
        "rotary_emb_base": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(meta),
        "use_parallel_residual": meta.get("use_parallel_residual", True),
        "hidden_act": "gelu",
        "attention_bias": "blk.0.attn_qkv.bias" in meta.tensor_shapes,
    }


def mpt_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of MPT, which has a separate dict for attention."""
    c = _common_config(meta)
    alibi = meta.get("attention.max_alibi_bias", 0.0)
    clip = meta.get("attention.clamp_kqv", 0.0)
    return c | {
        "model_type": "mpt",
        "d_model": c["hidden_size"],
        "n_heads": c["num_attention_heads"],
        "n_layers": c["num_hidden_layers"],
        "expansion_ratio": c["intermediate_size"] // c["hidden_size"],
        "max_seq_len": c["max_position_embeddings"],
        "layer_norm_epsilon": meta.get("attention.layer_norm_epsilon", 1e-5),
        "no_bias": "blk.0.attn_norm.bias" not in meta.tensor_shapes,
        "attn_config": {
            "alibi": alibi > 0,
            "alibi_bias_max": alibi,
            "clip_qkv": clip or None,
            "kv_n_heads": meta.get_positive("attention.head_count_kv", c["num_attention_heads"]),
        },
    }


def recover_llama3_scaling(factors: Tensor, theta: float) -> HFConfig | None:
    """Recover Llama 3.1's `rope_scaling` from `factors`, the divisors of the frequencies, float32 [D / 2].

    The file lacks the parameters. All models that Meta released share three of them; the fourth is the largest divisor.
    Returns None where all divisors are 1. Raises ValueError for divisors that do not follow from such parameters.
    """
    if torch.all(factors == 1):
        return None
    c = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    turns = 8192 / (2 * torch.pi) * theta ** -(torch.arange(len(factors), dtype=torch.float64) / len(factors))
    keep = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)  # the unscaled share of each frequency
    if not torch.allclose(1 / (keep + (1 - keep) / c["factor"]), factors.double(), rtol=1e-3):
        raise UnsupportedError("the tensor 'rope_freqs.weight' is not a Llama 3 scaling; no other is supported")
    return {"rope_type": "llama3", **c, "original_max_position_embeddings": 8192}
