"""Nemotron-H without experts, and what its models with experts share with it."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.architectures.granitehybrid import (
    MAMBA_BIASES,
    MAMBA_TENSORS,
    MAMBA_VALUES,
    MAMBA_WHOLE_NAMES,
    NO_LIMIT,
    has_bias,
    read_mamba_sizes,
)
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, read_kv_heads

GLOBAL_TENSORS = {"token_embd": "model.embeddings", "output_norm": "model.norm_f", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "norm",
    **{stem: name.replace("self_attn.", "mixer.") for stem, name in llama.ATTENTION.items()},
    **{stem: f"mixer.{name}" for stem, name in MAMBA_TENSORS.items()},
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
WHOLE_NAMES = {stem: f"mixer.{name}" for stem, name in MAMBA_WHOLE_NAMES.items()}
BIASES = MAMBA_BIASES | {"ffn_up", "ffn_down"}


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Nemotron-H. No layer has rope, so the number of rotated elements means nothing.

    One epsilon is that of all norms, under either key.
    """
    heads = read_kv_heads(meta)
    widths = meta.get_per_layer("feed_forward_length", len(heads), 0)
    changes = {
        "attention.layer_norm_rms_epsilon": (
            meta.get("attention.layer_norm_rms_epsilon", 0.0) or meta.require("attention.layer_norm_epsilon", float)
        ),
        "attention.head_count_kv": max(heads),
        "feed_forward_length": max(widths),
        "rope.dimension_count": None,
    }
    c = llama.make_config(meta.with_values(changes), "nemotron_h")
    sizes = read_mamba_sizes(meta)
    return c | {
        "layer_types": read_layer_types(meta, heads, widths)[: c["num_hidden_layers"]],
        "layer_norm_epsilon": c.pop("rms_norm_eps"),
        "mamba_num_heads": sizes["heads"],
        "mamba_head_dim": sizes["head_dim"],
        "n_groups": sizes["groups"],
        "ssm_state_size": sizes["state"],
        "conv_kernel": sizes["window"],
        "use_conv_bias": has_bias(meta, "ssm_conv1d"),
        "use_bias": has_bias(meta, "ssm_in"),
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "time_step_limit": NO_LIMIT,
        "mlp_bias": has_bias(meta, "ffn_up") or has_bias(meta, "ffn_up_shexp"),
    }


def read_layer_types(meta: GGUFMetadata, heads: list[int], widths: list[int]) -> list[str]:
    """Return the type of each layer: one without kv heads and an MLP has Mamba-2."""

    def read_type(i: int) -> str:
        if widths[i]:
            return "moe" if f"blk.{i}.ffn_gate_inp.weight" in meta.tensor_shapes else "mlp"
        return "full_attention" if heads[i] else "linear_attention"

    return [read_type(i) for i in range(len(heads))]


ARCHITECTURE = Architecture(
    make_config,
    GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    LAYER_TENSORS,
    biases=BIASES,
    whole_names=WHOLE_NAMES,
    row_order=llama.pair_halves,
    values=MAMBA_VALUES,
)
