"""A GGUF file's metadata, and the parts of a Hugging Face config that architectures share.

What a file does not say is what llama.cpp takes then: its `load_hparams` requires a key, or has a default of its own.
Defaults of transformers' config classes belong to config.json, so configs made here leave nothing to them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from retain.files import quote
from retain.formats.config_limits import MAX_EXPERTS
from retain.formats.errors import UnsupportedError

HFConfig = dict[str, Any]
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

    def get_per_layer(self, key: str, layers: int, default: T) -> list[T]:
        """Return a value of the type of `default` for each layer; a value that is no list is that of all.

        Raises ValueError for another type, or a list of fewer values.
        """
        value: Any = self.entries.get(f"{self.arch}.{key}")
        if not hasattr(value, "tolist"):
            return [self.get(key, default)] * layers
        values: list[T] = value.tolist()
        if len(values) < layers:
            raise ValueError(f"{self.arch}.{key} is for {len(values)} layers, there are {layers}")
        if any(type(x) is not type(default) for x in values):
            raise ValueError(f"{self.arch}.{key} is not a list of values of type {type(default).__name__}")
        return values[:layers]

    def require(self, key: str, kind: type[T]) -> T:
        """Return a value of this type. Raises ValueError where it is missing, as llama.cpp does."""
        if self.entries.get(f"{self.arch}.{key}") is None:
            raise ValueError(f"{self.arch}.{key} is missing")
        return self.get(key, kind())

    def get_positive(self, key: str, default: int = 0) -> int:
        """Return a number of at least 1; it is required unless there is a default. Raises ValueError."""
        value = self.get(key, default)
        if value < 1:
            raise ValueError(f"{self.arch}.{key} is {value or 'missing or 0'}")
        return value

    def count_blocks(self) -> int:
        """Return the number of layers, with MTP layers.

        Raises ValueError for more layers than tensors, which bounds loops and lists.
        """
        layers = self.get_positive("block_count")
        if layers > (n := len(self.tensor_shapes)):
            raise ValueError(f"{self.arch}.block_count is {layers}, but there are only {n} tensors")
        return layers

    def with_values(self, values: Mapping[str, Any]) -> GGUFMetadata:
        """Return the metadata with other values of some keys; None removes a key."""
        changed = {f"{self.arch}.{key}": value for key, value in values.items()}
        return replace(self, entries={**self.entries, **changed})


def common_config(meta: GGUFMetadata) -> HFConfig:
    """Return the keys that all configs share.

    The last layers may be MTP layers, of which models/mtp.py reads the first.
    """
    layers = meta.count_blocks()
    mtp_layers = meta.get("nextn_predict_layers", 0)
    if not 0 <= mtp_layers < layers:
        raise ValueError(f"{meta.arch}.nextn_predict_layers is {mtp_layers}, of {layers} layers")
    if "token_embd.weight" not in meta.tensor_shapes:
        raise ValueError("there is no tensor 'token_embd.weight'")
    return {
        "vocab_size": meta.tensor_shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in meta.tensor_shapes,
        "bos_token_id": meta.entries.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.entries.get("tokenizer.ggml.eos_token_id"),
        "num_hidden_layers": layers - mtp_layers,
        "num_nextn_predict_layers": mtp_layers,
        "num_attention_heads": meta.get_positive("attention.head_count"),
        "hidden_size": meta.get_positive("embedding_length"),
        "intermediate_size": meta.get_positive("feed_forward_length"),
        "max_position_embeddings": meta.get_positive("context_length"),
    }


def expert_config(meta: GGUFMetadata) -> HFConfig:
    """Return how many experts a layer has, and a token. Raises ValueError for too many, which bounds loops."""
    num_experts = meta.get_positive("expert_count")
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"{meta.arch}.expert_count is {num_experts}")
    return {"num_experts": num_experts, "num_experts_per_tok": meta.get_positive("expert_used_count")}


def read_expert_width(meta: GGUFMetadata) -> int:
    """Return the width of an expert: where the file does not say it, those of a token have that of an MLP together."""
    width = meta.get("feed_forward_length", 0) // meta.get_positive("expert_used_count")
    return meta.get_positive("expert_feed_forward_length", width)


def read_layer_types(meta: GGUFMetadata, window: int | None, every: int = 0) -> list[str]:
    """Return the type of each layer: a bool of a list, or one full layer in so many.

    Where the file is silent it is one in `every`, and the key is required where that is 0. Without a window all layers
    are full. Raises ValueError for a list of another length.
    """
    layers = meta.count_blocks()
    pattern: Any = meta.entries.get(f"{meta.arch}.attention.sliding_window_pattern")
    if hasattr(pattern, "tolist"):
        is_sliding = [bool(x) for x in pattern.tolist()]
        if len(is_sliding) != layers:
            raise ValueError(f"attention.sliding_window_pattern is for {len(is_sliding)} layers, there are {layers}")
    else:
        period = meta.get_positive("attention.sliding_window_pattern", every)
        is_sliding = [(i + 1) % period != 0 for i in range(layers)]
    return ["sliding_attention" if x and window else "full_attention" for x in is_sliding]


def read_kv_heads(meta: GGUFMetadata) -> list[int]:
    """Return the kv heads of each layer; 0 where a layer has no attention. Raises UnsupportedError for other counts.

    A file that says nothing has as many as heads of queries.
    """
    layers = meta.count_blocks()
    if meta.entries.get(f"{meta.arch}.attention.head_count_kv") is None:
        return [meta.get_positive("attention.head_count")] * layers
    heads = meta.get_per_layer("attention.head_count_kv", layers, 0)
    if len(set(heads) - {0}) > 1:
        raise UnsupportedError(f"{meta.arch}.attention.head_count_kv differs between layers, which is not supported")
    return heads


def read_ssm_heads(meta: GGUFMetadata) -> tuple[int, int]:
    """Return the number of value heads of a layer with a state, which llama.cpp calls `time_step_rank`; their size."""
    heads = meta.get_positive("ssm.time_step_rank")
    size, rest = divmod(meta.get_positive("ssm.inner_size"), heads)
    if rest:
        raise ValueError(f"{meta.arch}.ssm.inner_size is no multiple of {heads} heads")
    return heads, size


def refuse_mrope(meta: GGUFMetadata) -> None:
    """Raise UnsupportedError for a file whose rope has sections: it is that of a vision model."""
    if meta.entries.get(f"{meta.arch}.rope.dimension_sections") is not None:
        raise UnsupportedError(f"M-RoPE (vision models) is not supported in the architecture {meta.arch}")


def get_share(part: int, whole: int) -> float:
    """Return the share that gives `part` when it is multiplied by `whole` and rounded down."""
    share = part / whole
    return share if int(share * whole) == part else math.nextafter(share, 1)


def read_rope_scaling(meta: GGUFMetadata) -> HFConfig | None:
    """Return `rope_scaling` of config.json. Without a type it is linear, and without a factor there is none."""
    kind = meta.get("rope.scaling.type", "linear")
    old = meta.get("rope.scale_linear", 0.0)  # the key of old files
    factor = meta.get("rope.scaling.factor", old) or 1.0
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    scaling: HFConfig = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if meta.get("rope.scaling.attn_factor", 1.0) != 1:
            raise UnsupportedError("yarn with an attn_factor of its own is not supported")
        scaling["original_max_position_embeddings"] = read_original_context(meta)
        if meta.get("rope.scaling.yarn_ext_factor", 1.0) != 1:
            raise UnsupportedError("yarn with an ext_factor of its own is not supported")
        if factor := meta.get("rope.scaling.yarn_attn_factor", 0.0):
            scaling["attention_factor"] = factor
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            scaling[key] = meta.get(f"rope.scaling.yarn_{key}", default)
        if all_dim := meta.get("rope.scaling.yarn_log_multiplier", 0.0):
            scaling |= {"mscale": 1.0, "mscale_all_dim": all_dim}
    return scaling


def read_original_context(meta: GGUFMetadata) -> int:
    """Return the context before scaling, in tokens: the whole context where the file does not say it."""
    return meta.get_positive("rope.scaling.original_context_length", meta.get_positive("context_length"))


def read_llama3_rope_factors(factors: Tensor, config: HFConfig) -> HFConfig:
    """Return the `rope_scaling` that divisors of the rope frequencies stand for (Llama 3.1 and later)."""
    if "rope_scaling" not in config or config["rope_scaling"]:
        raise UnsupportedError(f"rope_freqs.weight in a {config['model_type']} model with another scaling")
    check_rope_factors(factors, config.get("head_dim"))
    return {"rope_scaling": recover_llama3_scaling(factors, config["rope_theta"])}


def check_rope_factors(factors: Tensor, head_dim: int | None) -> None:
    """Raise ValueError unless there is a divisor for each pair of elements of a head."""
    if factors.ndim != 1 or 2 * len(factors) != head_dim:
        raise ValueError(f"the tensor 'rope_freqs.weight' has the shape {tuple(factors.shape)}")


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
