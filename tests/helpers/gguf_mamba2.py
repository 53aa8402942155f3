"""What llama.cpp's converter does to Granite 4 and Nemotron-H, after its conversion/granite.py, mamba.py, nemotron.py.

LlamaModel, from which these classes derive, interleaves the halves of q and k, though few of these models have rope.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import Keys
from numpy.typing import NDArray

from tests.helpers.gguf_dense import permute_rows
from tests.helpers.gguf_latent import convert_expert_bias, expert_metadata

Array = NDArray[np.float32]
Config = dict[str, Any]
MAMBA2_ARCHS = {"granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h_moe"}
WITHOUT_EXPERTS = ["linear_attention", "mlp", "full_attention", "linear_attention"]
STORABLE: dict[str, Config] = {
    "granitemoehybrid": {  # files store no limits of time steps, and a context of 2^20 without rope
        "time_step_limit": None,
        "max_position_embeddings": 2**20,
        "shared_intermediate_size": 64,
        "attention_multiplier": 0.25,
    },
    "nemotron_h": {
        "layer_types": ["linear_attention", "full_attention", "moe", "linear_attention"],
        "moe_shared_expert_intermediate_size": 64,
        "max_position_embeddings": 2**20,
    },
}
VARIANTS: list[tuple[str, Config]] = [
    ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0, "tie_word_embeddings": True}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "attention_bias": True, "rope_theta": 5000.0}),
    ("granitemoehybrid", {"mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 3, "mamba_n_groups": 4}),
    ("nemotron_h", {"layer_types": WITHOUT_EXPERTS, "tie_word_embeddings": True}),
    ("nemotron_h", {"layer_types": WITHOUT_EXPERTS, "use_bias": True, "mlp_bias": True, "conv_kernel": 3}),
    ("nemotron_h", {"use_conv_bias": False, "n_groups": 8, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("nemotron_h", {"mlp_bias": True, "num_key_value_heads": 4, "layer_norm_epsilon": 1e-3}),
    ("nemotron_h", {"moe_latent_size": 32}),
]


def choose_arch(c: Config) -> str | None:
    """Return the architecture of a config whose family has several."""
    is_dense = c["model_type"] == "nemotron_h" and "moe" not in c["layer_types"]
    return "nemotron_h" if is_dense else None


def mamba2_metadata(c: Config, heads: int, inner: int, sizes: tuple[int, int, int]) -> dict[str, Any]:
    groups, state, window = sizes
    kv_heads = c["num_key_value_heads"]
    return {
        Keys.SSM.CONV_KERNEL: window,
        Keys.SSM.STATE_SIZE: state,
        Keys.SSM.GROUP_COUNT: groups,
        Keys.SSM.INNER_SIZE: inner,
        Keys.SSM.TIME_STEP_RANK: heads,
        Keys.Attention.HEAD_COUNT_KV: [kv_heads if t == "full_attention" else 0 for t in c["layer_types"]],
        Keys.Rope.DIMENSION_COUNT: c["hidden_size"] // c["num_attention_heads"],
        Keys.Rope.SCALING_FINETUNED: c.get("position_embedding_type") == "rope",
        Keys.LLM.CONTEXT_LENGTH: 2**20,
    }


def granite_metadata(c: Config) -> dict[str, Any]:
    inner = c.get("mamba_expand", 2) * c["hidden_size"]
    sizes = c["mamba_n_groups"], c["mamba_d_state"], c.get("mamba_d_conv", 4)
    return mamba2_metadata(c, c["mamba_n_heads"], inner, sizes) | {
        Keys.LLM.EXPERT_COUNT: c["num_local_experts"],
        Keys.LLM.EXPERT_USED_COUNT: c["num_experts_per_tok"],
        Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: c["shared_intermediate_size"],
        Keys.Attention.SCALE: c["attention_multiplier"],
        Keys.LLM.EMBEDDING_SCALE: c["embedding_multiplier"],
        Keys.LLM.RESIDUAL_SCALE: c["residual_multiplier"],
        Keys.LLM.LOGIT_SCALE: c["logits_scaling"],
    }


def nemotron_metadata(c: Config) -> dict[str, Any]:
    heads = c["mamba_num_heads"]
    sizes = c["n_groups"], c["ssm_state_size"], c.get("conv_kernel", 4)
    types = c["layer_types"]
    width = c["moe_intermediate_size"] if "moe" in types else c["intermediate_size"]
    values = {
        Keys.LLM.BLOCK_COUNT: len(types),
        Keys.LLM.FEED_FORWARD_LENGTH: [width if t in ("moe", "mlp") else 0 for t in types],
        Keys.Attention.LAYERNORM_RMS_EPS: c.get("layer_norm_epsilon", 1e-5),
        Keys.Attention.LAYERNORM_EPS: c.get("layer_norm_epsilon", 1e-5),
        Keys.Attention.KEY_LENGTH: c["head_dim"],
        Keys.Attention.VALUE_LENGTH: c["head_dim"],
    }
    if "moe" in types:
        values |= expert_metadata({**c, "n_shared_experts": 1}) | {
            Keys.LLM.LEADING_DENSE_BLOCK_COUNT: None,
            Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: c["moe_shared_expert_intermediate_size"],
            Keys.LLM.EXPERT_WEIGHTS_NORM: c.get("norm_topk_prob", True),
            Keys.LLM.EXPERT_WEIGHTS_SCALE: c["routed_scaling_factor"],
            Keys.LLM.MOE_LATENT_SIZE: c.get("moe_latent_size"),
        }
    return mamba2_metadata(c, heads, heads * c["mamba_head_dim"], sizes) | values


def convert_mamba2_tensor(name: str, x: Array, groups: int) -> list[tuple[str, Array]]:
    prefix, _, part = name.rpartition(".mixer." if ".mixer." in name else ".mamba.")
    layer = prefix.rpartition(".")[2]
    if part == "A_log":
        return [(f"blk.{layer}.ssm_a.<none>", -np.exp(x).reshape(-1, 1))]
    if part == "D":
        return [(f"blk.{layer}.ssm_d.<none>", x.reshape(-1, 1))]
    if part == "dt_bias":
        return [(f"blk.{layer}.ssm_dt.bias", x)]
    if part == "conv1d.weight":
        return [(name, x.squeeze(1))]
    return [(name, x.reshape(groups, -1) if part == "norm.weight" else x)]


def convert_granite_tensor(name: str, x: Array, c: Config) -> list[tuple[str, Array]]:
    layer = name.removeprefix("model.layers.").partition(".")[0]
    kind = "_shexp" if c["num_local_experts"] else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = np.split(x, 2)
        return [(f"blk.{layer}.ffn_gate{kind}.weight", gate), (f"blk.{layer}.ffn_up{kind}.weight", up)]
    if name.endswith("shared_mlp.output_linear.weight"):
        return [(f"blk.{layer}.ffn_down{kind}.weight", x)]
    if name.endswith("router.weight"):
        return [(f"blk.{layer}.ffn_gate_inp.weight", x)]
    if name.endswith("experts.gate_up_proj"):
        halves = zip(("gate", "up"), np.split(x, 2, axis=1), strict=True)
        return [(f"blk.{layer}.ffn_{n}_exps.weight", np.ascontiguousarray(half)) for n, half in halves]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{layer}.ffn_down_exps.weight", x)]
    return convert_mamba2_tensor(name, permute_rows(name, x, c), c.get("mamba_n_groups", 1))


def convert_nemotron_tensor(name: str, x: Array, c: Config) -> list[tuple[str, Array]]:
    name = name.replace("model.", "backbone.", 1)
    layer = name.removeprefix("backbone.layers.").partition(".")[0]
    for part in ("up", "down"):
        if name.endswith(f"experts.{part}_proj"):
            return [(f"blk.{layer}.ffn_{part}_exps.weight", x)]
    [(name, x)] = convert_expert_bias(name, permute_rows(name, x, c))
    return convert_mamba2_tensor(name, x, c["n_groups"])


def split_mamba2_stacks(tensors: dict[str, Array]) -> dict[str, Array]:
    """Name experts and halves of MLPs one by one, as they are read from a file."""
    found = {}
    for name, x in tensors.items():
        if name.endswith("shared_mlp.input_linear.weight"):
            gate, up = np.split(x, 2)
            found |= {name.replace("input_linear", "gate_proj"): gate, name.replace("input_linear", "up_proj"): up}
        elif name.endswith("mixer.experts.up_proj"):
            found |= {name.replace("experts.", f"experts.{e}.") + ".weight": own for e, own in enumerate(x)}
        else:
            found[name] = x
    return found


METADATA = {"granitehybrid": granite_metadata, "nemotron_h": nemotron_metadata, "nemotron_h_moe": nemotron_metadata}
CONVERTERS = {
    "granitehybrid": convert_granite_tensor,
    "granitemoe": convert_granite_tensor,
    "nemotron_h": convert_nemotron_tensor,
    "nemotron_h_moe": convert_nemotron_tensor,
}
