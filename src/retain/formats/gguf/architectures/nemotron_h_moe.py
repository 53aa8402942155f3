"""Nemotron-H with experts, which have no gates."""

from __future__ import annotations

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import deepseek2, llama, nemotron_h
from retain.formats.gguf.architectures.granitehybrid import MAMBA_VALUES
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Nemotron-H with experts. llama.cpp knows no other scoring function than a sigmoid."""
    if meta.get("moe_latent_size", 0):
        raise UnsupportedError(f"experts of a latent vector are not supported in the architecture {meta.arch}")
    deepseek2.require_sigmoid(meta)
    return nemotron_h.make_config(meta) | deepseek2.make_expert_config(meta)


ARCHITECTURE = Architecture(
    make_config,
    nemotron_h.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    {
        **nemotron_h.LAYER_TENSORS,
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    },
    biases=nemotron_h.BIASES | {"ffn_up_shexp", "ffn_down_shexp"},
    expert_tensors={"ffn_up_exps": ("mixer.experts.{}.up_proj",), "ffn_down_exps": ("mixer.experts.{}.down_proj",)},
    whole_names=nemotron_h.WHOLE_NAMES | {"exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    row_order=llama.pair_halves,
    values=MAMBA_VALUES,
)
