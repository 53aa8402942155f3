"""GLM-4.5 to 4.7: both sides rotate halves of a part of each head, so rows keep their order. DeepSeek-V3's experts."""

from __future__ import annotations

from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import deepseek2, llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, refuse_mrope

LAYER_TENSORS = {
    **llama.POST_ATTENTION_NORM_TENSORS,
    **llama.QK_NORM_TENSORS,
    **llama.NEXTN_TENSORS,
    **deepseek2.EXPERT_LAYER_TENSORS,
}


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of GLM-4.5. Files with sections of rope (M-RoPE) are those of vision models."""
    refuse_mrope(meta)
    deepseek2.require_sigmoid(meta)
    c = llama.make_partial_rope_config(meta, "glm4_moe") | deepseek2.make_expert_config(meta)
    return c | {
        "first_k_dense_replace": meta.require("leading_dense_block_count", int),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in meta.tensor_shapes,
    }


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    LAYER_TENSORS,
    biases=llama.QKV_BIASES,
    expert_tensors=llama.EXPERT_TENSORS,
    whole_names=deepseek2.WHOLE_NAMES,
)
