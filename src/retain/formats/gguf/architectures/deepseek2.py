"""DeepSeek-V2, V3 and GLM-4.7-Flash: latent attention. Both sides rotate neighbouring pairs, so rows keep their order.

Newer files split the matrix of the latent by heads, with W_K transposed as attention needs it.
"""

from __future__ import annotations

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import llama
from retain.formats.gguf.metadata import GGUFMetadata, HFConfig, common_config, expert_config, read_rope_scaling

SOFTMAX = 1  # of `expert_gating_func`, as the next
SIGMOID = 2
LAYER_TENSORS = {
    **{stem: name for stem, name in llama.LAYER_TENSORS.items() if stem not in ("attn_k", "attn_v")},
    **llama.NEXTN_TENSORS,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",  # of older files, in place of the next two
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
EXPERT_LAYER_TENSORS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
WHOLE_NAMES = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of DeepSeek-V2 where scores are a softmax, else of DeepSeek-V3, as GLM-4.7-Flash computes.

    Files of newer converters describe heads as the cache has them, and name those of the model `_mla`.
    """
    if meta.get("attention.temperature_scale", 0.0):
        raise UnsupportedError(f"queries that grow with positions are not supported in the architecture {meta.arch}")
    c = common_config(meta) | make_expert_config(meta)
    is_softmax = read_gating(meta, SOFTMAX) == SOFTMAX
    if is_softmax and c["norm_topk_prob"]:
        raise UnsupportedError(f"{meta.arch} with a softmax whose weights are normalized is not supported")
    rope = meta.get_positive("rope.dimension_count")
    query = meta.get_positive("attention.key_length_mla", meta.get("attention.key_length", 0))
    value = meta.get_positive("attention.value_length_mla", meta.get("attention.value_length", 0))
    if query <= rope:
        raise ValueError(f"heads of {query} numbers, of which {rope} are rotated, leave none without rotation")
    return c | {
        "model_type": "deepseek_v2" if is_softmax else "deepseek_v3",
        "topk_method": "greedy" if c["n_group"] == 1 else "group_limited_greedy",
        "q_lora_rank": meta.get("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": meta.get_positive("attention.kv_lora_rank"),
        "qk_nope_head_dim": query - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "rms_norm_eps": meta.require("attention.layer_norm_rms_epsilon", float),
        "rope_theta": meta.get("rope.freq_base", 10000.0),
        "rope_scaling": read_scaling(meta),
        "rope_interleave": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def read_gating(meta: GGUFMetadata, default: int) -> int:
    """Return the scoring function of experts, SOFTMAX or SIGMOID.

    Older files lack it: a bias that only chooses experts implies SIGMOID.
    """
    dense = meta.get("leading_dense_block_count", 0)
    if f"blk.{dense}.exp_probs_b.bias" in meta.tensor_shapes:
        default = SIGMOID
    gating = meta.get("expert_gating_func", 0) or default
    if gating not in (SOFTMAX, SIGMOID):
        raise UnsupportedError(f"{meta.arch}.expert_gating_func is {gating}: only 1 and 2 are supported")
    return gating


def require_sigmoid(meta: GGUFMetadata) -> None:
    """Raise UnsupportedError for another scoring function of experts."""
    if (gating := read_gating(meta, SIGMOID)) != SIGMOID:
        raise UnsupportedError(f"{meta.arch}.expert_gating_func is {gating}: only {SIGMOID}, sigmoid, is supported")


def make_expert_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config keys of the experts, read from a GGUF file's metadata."""
    return make_routing_config(meta) | {
        "moe_intermediate_size": meta.get_positive("expert_feed_forward_length"),
        "n_shared_experts": meta.get_positive("expert_shared_count"),
        "first_k_dense_replace": meta.get("leading_dense_block_count", 0),
    }


def make_routing_config(meta: GGUFMetadata) -> HFConfig:
    """Return how experts are chosen. Older files have no groups, and llama.cpp then computes as with one."""
    c = expert_config(meta)
    groups = meta.get("expert_group_count", 0) or 1
    return c | {
        "n_routed_experts": c["num_experts"],
        "norm_topk_prob": meta.get("expert_weights_norm", False),
        "routed_scaling_factor": meta.get("expert_weights_scale", 0.0) or 1.0,
        "n_group": groups,
        "topk_group": meta.get_positive("expert_group_used_count") if groups > 1 else 1,
    }


def read_scaling(meta: GGUFMetadata) -> HFConfig | None:
    """Return `rope_scaling`. llama.cpp's converter writes a tenth of `mscale_all_dim`, and takes `mscale` to equal it.

    The factor is lost in float32, so the product is rounded (ggml-org/llama.cpp#17945).
    """
    scaling = read_rope_scaling(meta)
    if scaling and "mscale_all_dim" in scaling:
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * scaling["mscale_all_dim"], 6))
    return scaling


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS,
    llama.LAYER_PREFIX,
    LAYER_TENSORS | EXPERT_LAYER_TENSORS,
    biases=frozenset(),
    expert_tensors=llama.EXPERT_TENSORS,
    stacked=frozenset(("attn_k_b", "attn_v_b")),
    whole_names=WHOLE_NAMES,
)
