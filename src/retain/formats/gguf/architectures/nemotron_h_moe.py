"""Nemotron-H with experts, which have no gates."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import deepseek2, llama, nemotron_h
from retain.formats.gguf.architectures.granitehybrid import MAMBA_VALUES
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Nemotron-H with experts. llama.cpp knows no other scoring function than a sigmoid."""
    deepseek2.require_sigmoid(meta)
    latent = {"moe_latent_size": meta.get("moe_latent_size", 0) or None}
    return nemotron_h.make_config(meta) | deepseek2.make_routing_config(meta) | latent


ARCHITECTURE = Architecture(
    make_config,
    nemotron_h.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    {
        **nemotron_h.LAYER_TENSORS,
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    biases=nemotron_h.BIASES | {"ffn_up_shexp", "ffn_down_shexp", "ffn_latent_down", "ffn_latent_up"},
    expert_tensors={"ffn_up_exps": ("mixer.experts.{}.up_proj",), "ffn_down_exps": ("mixer.experts.{}.down_proj",)},
    whole_names=nemotron_h.WHOLE_NAMES | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    row_order=llama.pair_halves,
    values=MAMBA_VALUES,
)
