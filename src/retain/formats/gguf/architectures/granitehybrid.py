"""Granite 4 with Mamba-2, and what Nemotron-H shares with it."""

from __future__ import annotations

import math

from torch import Tensor

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import granite, llama, qwen3next
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, expert_config, read_kv_heads, read_ssm_heads

MAMBA_TENSORS = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
MAMBA_WHOLE_NAMES = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
MAMBA_BIASES = frozenset(("ssm_in", "ssm_conv1d", "ssm_out"))
NO_LIMIT = (0.0, math.inf)  # of a time step
GATE_UP = {"gate": "shared_mlp.gate_proj", "up": "shared_mlp.up_proj", "down": "shared_mlp.output_linear"}


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Granite 4. Layers without kv heads have Mamba-2."""
    heads = read_kv_heads(meta)
    c = llama.make_config(meta.with_values({"attention.head_count_kv": max(heads)}), "granitemoehybrid")
    sizes = read_mamba_sizes(meta)
    expand, rest = divmod(sizes["heads"] * sizes["head_dim"], c["hidden_size"])
    if rest:
        raise UnsupportedError(f"{meta.arch}.ssm.inner_size is no multiple of the hidden size {c['hidden_size']}")
    has_experts = bool(meta.get("expert_count", 0))
    experts = expert_config(meta) if has_experts else {"num_experts": 0, "num_experts_per_tok": 0}
    return (
        c
        | granite.read_multipliers(meta, c["head_dim"])
        | experts
        | {
            "layer_types": ["full_attention" if n else "linear_attention" for n in heads[: c["num_hidden_layers"]]],
            "position_embedding_type": "rope" if meta.get("rope.scaling.finetuned", True) else None,
            "num_local_experts": experts["num_experts"],
            "mamba_n_heads": sizes["heads"],
            "mamba_d_head": sizes["head_dim"],
            "mamba_n_groups": sizes["groups"],
            "mamba_d_state": sizes["state"],
            "mamba_d_conv": sizes["window"],
            "mamba_expand": expand,
            "mamba_conv_bias": has_bias(meta, "ssm_conv1d"),
            "mamba_proj_bias": has_bias(meta, "ssm_in"),
            "attention_bias": has_bias(meta, "attn_q"),
            "time_step_limit": NO_LIMIT,
        }
    )


def read_mamba_sizes(meta: GGUFMetadata) -> dict[str, int]:
    """Read the sizes of the Mamba-2 layers from a GGUF file's metadata."""
    heads, head_dim = read_ssm_heads(meta)
    return {
        "heads": heads,
        "head_dim": head_dim,
        "groups": meta.get_positive("ssm.group_count"),
        "state": meta.get_positive("ssm.state_size"),
        "window": meta.get_positive("ssm.conv_kernel"),
    }


def has_bias(meta: GGUFMetadata, stem: str) -> bool:
    """Return whether a layer has a bias of this name."""
    return any(f"blk.{i}.{stem}.bias" in meta.tensor_shapes for i in range(meta.count_blocks()))


def read_convolution(x: Tensor) -> Tensor:
    """Return the weight of a convolution with its dimension of 1, or its bias."""
    return x.unsqueeze(1) if x.ndim == 2 else x


MAMBA_VALUES = {
    "ssm_a": lambda x: qwen3next.read_decay(x).flatten(),
    "ssm_d": lambda x: x.flatten(),
    "ssm_norm": lambda x: x.flatten(),  # a row for each group
    "ssm_conv1d": read_convolution,
}

ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    {
        **llama.LAYER_TENSORS,
        **{stem: f"mamba.{name}" for stem, name in MAMBA_TENSORS.items()},
        **{f"ffn_{part}": name for part, name in GATE_UP.items()},  # without experts
        **{f"ffn_{part}_shexp": name for part, name in GATE_UP.items()},
        "ffn_gate_inp": "block_sparse_moe.router",
    },
    biases=llama.ATTENTION_BIASES | MAMBA_BIASES,
    expert_tensors={
        stem: tuple(name.replace("mlp.", "block_sparse_moe.") for name in names)
        for stem, names in llama.EXPERT_TENSORS.items()
    },
    whole_names={stem: f"mamba.{name}" for stem, name in MAMBA_WHOLE_NAMES.items()},
    row_order=llama.pair_halves,
    values=MAMBA_VALUES,
)
