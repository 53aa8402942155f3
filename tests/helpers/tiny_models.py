"""Tiny random models of every family, generated in memory in about a millisecond.

    tiny_model("llama")                            a program of the reference; equal arguments give equal weights
    tiny_checkpoint("opt", seed=1, ffn_dim=48)     its Checkpoint: config, names, tensors

Weights are large enough for logits to differ clearly. Norm weights are far from 1 and of either sign; otherwise a tied
head would repeat the last token. tests/models/test_families.py compares names, shapes and results with transformers.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from retain import models
from retain.kernels.ops import MixExperts
from retain.models.weights import Weights
from tests.helpers.decoder_runner import ReferenceModel, build_model

Shapes = Iterator[tuple[str, tuple[int, ...]]]

LLAMA: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
GEMMA: dict[str, Any] = {
    **LLAMA,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "sliding_window": 16,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 20,
    "rope_theta": 100000.0,
    "rope_local_base_freq": 1000.0,
    "tie_word_embeddings": True,
}
GEMMA4: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
}
MUSE: dict[str, Any] = {
    **{k: v for k, v in LLAMA.items() if k != "rope_theta"},
    "num_hidden_layers": 5,
    "sliding_window": 8,
    "rms_norm_eps": 1e-2,  # what it adds to counts
    "output_multiplier": 0.5,
}
LFM2: dict[str, Any] = {
    **{k: v for k, v in LLAMA.items() if k not in ("head_dim", "rms_norm_eps", "rope_theta")},
    "norm_eps": 1e-5,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
QWEN_LINEAR: dict[str, Any] = {
    **LLAMA,
    "rms_norm_eps": 1e-2,  # outputs of linear attention are small where q and k differ: rounding would count
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
QWEN_EXPERTS: dict[str, Any] = {
    **QWEN_LINEAR,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
GRANITE: dict[str, Any] = {
    **LLAMA,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
}
GRANITE_EXPERTS: dict[str, Any] = {
    **{k: v for k, v in GRANITE.items() if k != "head_dim"},
    "intermediate_size": 32,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
GRANITE_HYBRID: dict[str, Any] = {
    **{k: v for k, v in LLAMA.items() if k not in ("rope_theta", "head_dim")},
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,  # a power of two: scales of quantized rows are rounded
    "logits_scaling": 0.5,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "shared_intermediate_size": 48,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "time_step_limit": [0.3, 1.0],
}
NEMOTRON_H: dict[str, Any] = {
    **{k: LLAMA[k] for k in ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads")},
    "head_dim": 24,
    "max_position_embeddings": 512,
    "layer_types": ["linear_attention", "full_attention", "moe", "mlp", "linear_attention"],
    "intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "time_step_min": 1e-30,  # of initial weights; transformers takes it for a limit, which no published model has
}
DEEPSEEK_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
}
LATENT: dict[str, Any] = {
    **{k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")},
    **DEEPSEEK_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
GPT: dict[str, Any] = {
    "vocab_size": 128,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "layer_norm_epsilon": 1e-5,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 8},
    "qwen2": {**LLAMA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {**LLAMA, "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {**LLAMA, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {
        **LLAMA,
        "sliding_window": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "rope_theta": 150000.0,
    },
    "seed_oss": {**LLAMA, "head_dim": 8, "attention_bias": True},
    "ernie4_5": {**LLAMA, "rope_theta": 500000.0},
    "smollm3": {**LLAMA, "num_hidden_layers": 4, "pad_token_id": 0},
    "glm4": {**LLAMA, "attention_bias": True, "pad_token_id": 0},
    "phi3": {**LLAMA, "sliding_window": 8, "pad_token_id": 0},
    "ministral3": {
        **{k: v for k, v in LLAMA.items() if k != "rope_theta"},
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "cohere2": {
        **{k: v for k, v in LLAMA.items() if k not in ("rms_norm_eps", "head_dim")},
        "num_hidden_layers": 4,
        "layer_norm_eps": 1e-5,
        "sliding_window": 8,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    "granite": GRANITE,
    "granite_swa": {**GRANITE, "num_hidden_layers": 5, "sliding_window": 8},
    "olmo2": LLAMA,
    "olmo3": {
        **LLAMA,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "pad_token_id": 0,
    },
    "gemma3_text": GEMMA,
    "gemma3": {"text_config": GEMMA, "tie_word_embeddings": True},
    "gemma4_text": GEMMA4,
    "gemma4": {"text_config": GEMMA4, "tie_word_embeddings": True},
    "muse_glimmer_text": MUSE,
    "muse_glimmer": {"text_config": MUSE},
    "lfm2": LFM2,
    "lfm2_moe": {
        **{k: v for k, v in LFM2.items() if k != "block_auto_adjust_ff_dim"},
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "granitemoe": GRANITE_EXPERTS,
    "granitemoeshared": {**GRANITE_EXPERTS, "shared_intermediate_size": 64},
    "granitemoehybrid": GRANITE_HYBRID,
    "nemotron_h": NEMOTRON_H,
    "deepseek_v2": {**LATENT, "first_k_dense_replace": 1},
    "deepseek_v3": {**LATENT, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "glm4_moe_lite": LATENT,
    "glm4_moe": {**LLAMA, **DEEPSEEK_EXPERTS},
    "qwen3_next": QWEN_EXPERTS,
    "qwen3_5_text": QWEN_LINEAR,
    "qwen3_5": {"text_config": QWEN_LINEAR},
    "qwen3_5_moe_text": QWEN_EXPERTS,
    "qwen3_5_moe": {"text_config": QWEN_EXPERTS},
    "gpt2": GPT,
    "gptj": {**GPT, "rotary_dim": 8},
    "mpt": {"vocab_size": 128, "d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 512},
    "opt": {
        "vocab_size": 128,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "word_embed_proj_dim": 64,
    },
    "gpt_neox": {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu",
        "rotary_pct": 0.5,
        "tie_word_embeddings": False,
    },
}


MULTIMODAL = tuple(family for family, config in CONFIGS.items() if "text_config" in config)


def has_states(model_type: str) -> bool:
    """Whether layers of a family cache states: such a model cannot be computed without a cache."""
    config = {"model_type": model_type, **CONFIGS[model_type]}
    return models.load_family(model_type).spec_from_config(config).kv_cache.has_states


@functools.cache
def has_experts(model_type: str) -> bool:
    """Whether some layer of a family's tiny model is a mixture of experts."""
    operations = models.load_family(model_type).build(Weights(tiny_checkpoint(model_type), torch.float32)).emit()
    return any(isinstance(op, MixExperts) for op in operations)


def tiny_model(model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> ReferenceModel:
    """Build a tiny model of a family, with `changes` to its config."""
    return build_model(Weights(tiny_checkpoint(model_type, seed, **changes), dtype))


def tiny_checkpoint(model_type: str, seed: int = 0, **changes: Any) -> TinyCheckpoint:
    """Create the checkpoint of a tiny model, with `changes` to its config; None removes a key.

    But for `q_lora_rank`, where None means something.
    """
    config = {"model_type": model_type, **CONFIGS[model_type], **changes}
    config = {k: v for k, v in config.items() if v is not None or k == "q_lora_rank"}
    return TinyCheckpoint(config, dict(TENSOR_SHAPES[model_type](config)), seed)


class TinyCheckpoint:
    """A Checkpoint of random tensors, each a function of the seed and its name alone."""

    def __init__(self, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], seed: int):
        self.config, self.shapes, self.seed = config, shapes, seed

    def names(self) -> set[str]:
        return set(self.shapes)

    def read(self, name: str) -> Tensor:
        shape, model_type = self.shapes[name], self.config["model_type"]
        is_gemma = model_type.startswith("gemma3")
        is_linear = model_type.startswith(("qwen3_next", "qwen3_5"))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()) + self.seed))
        if name.endswith("bias"):
            return x / 20
        if len(shape) == 1:  # a norm's weight: 0.5 to 1.5, of either sign
            y = x.sign() * (0.5 + x.abs() % 1)
            is_centered = model_type.startswith("muse_glimmer") and name.endswith("layernorm.weight")
            return y - 1 if is_gemma or is_centered or (is_linear and "linear_attn" not in name) else y
        if "emb" in name or name.split(".")[-2] in ("wte", "wpe"):
            return x / 8 if is_gemma else x  # Gemma multiplies by the root of E, which is 8
        if len(shape) == 3:  # [experts, in, out], or [experts, out, in]
            return x * 2 / shape[1 if self.config["model_type"] == "gpt_oss" else 2] ** 0.5
        in_dim = shape[0] if self.config["model_type"] == "gpt2" and name != "lm_head.weight" else shape[1]
        if name.endswith("k_proj.weight"):  # smaller in a quarter of the rotary pairs, so keys and queries are balanced
            x[1::4] /= 4
        return x * 2 / in_dim**0.5

    def read_stored(self, name: str, transposed: bool = False) -> None:
        return None


NORMS = {
    "cohere2": ("input",),
    "glm4": ("input", "post_attention", "post_self_attn", "post_mlp"),
    "gemma3_text": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "muse_glimmer_text": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "olmo2": ("post_attention", "post_feedforward"),
    "olmo3": ("post_attention", "post_feedforward"),
}


def llama_shapes(c: dict[str, Any], prefix: str = "model.") -> Shapes:
    E, F, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    D = c.get("head_dim") or E // c["num_attention_heads"]
    H, G = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    model_type = c.get("model_type", "gemma3_text")
    yield prefix + "embed_tokens.weight", (V, E)
    for i in range(c["num_hidden_layers"]):
        p = f"{prefix}layers.{i}."
        bias = c.get("attention_bias", c.get("use_bias", model_type == "gpt_oss"))
        if model_type == "phi3":
            yield p + "self_attn.qkv_proj.weight", (H + 2 * G, E)
        else:
            for name, out in (("q", H), ("k", G), ("v", G)):
                yield from linear_shapes(f"{p}self_attn.{name}_proj", out, E, model_type == "qwen2" or bias)
        o_bias = c.get("attention_out_bias", bias and model_type not in ("seed_oss", "glm4", "glm4_moe"))
        yield from linear_shapes(p + "self_attn.o_proj", E, H, o_bias)
        if model_type in ("qwen3", "qwen3_moe", "gemma3_text") or c.get("use_qk_norm"):
            yield p + "self_attn.q_norm.weight", (D,)
            yield p + "self_attn.k_norm.weight", (D,)
        yield from special_attention_shapes(p + "self_attn.", c, H, G)
        if model_type == "gpt_oss":
            yield from stacked_expert_shapes(p + "mlp.", c["num_local_experts"], E, F)
        elif model_type == "qwen3_moe" and (i + 1) % c.get("decoder_sparse_step", 1) == 0:
            yield from expert_shapes(p + "mlp.", c["num_experts"], E, c["moe_intermediate_size"])
        elif model_type == "glm4_moe" and i >= c.get("first_k_dense_replace", 1):
            yield from deepseek_expert_shapes(p + "mlp.", c)
        elif model_type in ("granitemoe", "granitemoeshared"):
            yield from granite_expert_shapes(p, c)
        elif model_type in ("glm4", "phi3"):
            yield p + "mlp.gate_up_proj.weight", (2 * F, E)
            yield p + "mlp.down_proj.weight", (E, F)
        else:
            yield from mlp_shapes(p + "mlp.", E, F, c.get("mlp_bias", c.get("use_bias", False)))
        for name in NORMS.get(model_type, ("input", "post_attention")):
            yield f"{p}{name}_layernorm.weight", (E,)
    yield prefix + "norm.weight", (E,)
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (V, E)


def special_attention_shapes(prefix: str, c: dict[str, Any], q: int, k: int) -> Shapes:
    if c.get("model_type") in ("olmo2", "olmo3"):
        yield prefix + "q_norm.weight", (q,)
        yield prefix + "k_norm.weight", (k,)
    if c.get("model_type") in ("gpt_oss", "granite_swa"):
        yield prefix + "sinks", (c["num_attention_heads"],)
    if c.get("model_type") == "muse_glimmer_text":
        yield prefix + "gate_proj.weight", (q, c["hidden_size"])


def mlp_shapes(prefix: str, E: int, F: int, bias: bool = False) -> Shapes:
    for name, shape in (("gate", (F, E)), ("up", (F, E)), ("down", (E, F))):
        yield from linear_shapes(f"{prefix}{name}_proj", *shape, bias)


def expert_shapes(prefix: str, num_experts: int, E: int, F: int) -> Shapes:
    yield prefix + "gate.weight", (num_experts, E)
    for e in range(num_experts):
        yield from mlp_shapes(f"{prefix}experts.{e}.", E, F)


def stacked_expert_shapes(prefix: str, num_experts: int, E: int, F: int) -> Shapes:
    yield from linear_shapes(prefix + "router", num_experts, E)
    yield prefix + "experts.gate_up_proj", (num_experts, E, 2 * F)  # transposed, unlike in other families
    yield prefix + "experts.gate_up_proj_bias", (num_experts, 2 * F)
    yield prefix + "experts.down_proj", (num_experts, F, E)
    yield prefix + "experts.down_proj_bias", (num_experts, E)


def gemma3_shapes(c: dict[str, Any]) -> Shapes:
    yield from llama_shapes(c["text_config"], "model.language_model.")


def muse_shapes(c: dict[str, Any]) -> Shapes:
    text = {**c["text_config"], "model_type": "muse_glimmer_text", "tie_word_embeddings": c.get("tie_word_embeddings")}
    yield from llama_shapes(text, "model.language_model.")


def gemma4_shapes(c: dict[str, Any], prefix: str = "model.") -> Shapes:
    E, F, V, L, H = (
        c[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads")
    )
    P, G = c["hidden_size_per_layer_input"], c["num_key_value_heads"]
    yield prefix + "embed_tokens.weight", (V, E)
    if P:
        yield prefix + "embed_tokens_per_layer.weight", (V, L * P)
        yield prefix + "per_layer_model_projection.weight", (L * P, E)
        yield prefix + "per_layer_projection_norm.weight", (P,)
    for i, layer_type in enumerate(c["layer_types"]):
        p, is_full = f"{prefix}layers.{i}.", layer_type == "full_attention"
        D = c["global_head_dim"] if is_full else c["head_dim"]
        own_G = c.get("num_global_key_value_heads") or G if is_full else G
        is_shared = i >= L - c.get("num_kv_shared_layers", 0)
        yield p + "self_attn.q_proj.weight", (H * D, E)
        yield p + "self_attn.q_norm.weight", (D,)
        yield p + "self_attn.o_proj.weight", (E, H * D)
        if not is_shared:
            yield p + "self_attn.k_proj.weight", (own_G * D, E)
            yield p + "self_attn.k_norm.weight", (D,)
            if not (is_full and c.get("attention_k_eq_v")):
                yield p + "self_attn.v_proj.weight", (own_G * D, E)
        yield from mlp_shapes(p + "mlp.", E, 2 * F if is_shared and c.get("use_double_wide_mlp") else F)
        norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"]
        for name in norms:
            yield f"{p}{name}_layernorm.weight", (E,)
        yield p + "layer_scalar", (1,)
        if P:
            yield p + "per_layer_input_gate.weight", (P, E)
            yield p + "per_layer_projection.weight", (E, P)
            yield p + "post_per_layer_input_norm.weight", (E,)
        if c.get("enable_moe_block"):
            n, size = c["num_experts"], c["moe_intermediate_size"]
            for name in ("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"):
                yield f"{p}{name}.weight", (E,)
            yield p + "router.scale", (E,)
            yield p + "router.per_expert_scale", (n,)
            yield p + "router.proj.weight", (n, E)
            yield p + "experts.gate_up_proj", (n, 2 * size, E)
            yield p + "experts.down_proj", (n, E, size)
    yield prefix + "norm.weight", (E,)
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (V, E)


def gemma4_vision_shapes(c: dict[str, Any]) -> Shapes:
    yield from gemma4_shapes(c["text_config"], "model.language_model.")


def lfm2_shapes(c: dict[str, Any]) -> Shapes:
    E, F, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    D = c.get("head_dim") or E // c["num_attention_heads"]
    H, G = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    bias = c.get("conv_bias", False)
    attending = c.get("full_attn_idxs") or range(c["num_hidden_layers"])
    default = ["full_attention" if i in attending else "conv" for i in range(c["num_hidden_layers"])]
    yield "model.embed_tokens.weight", (V, E)
    for i, layer_type in enumerate(c.get("layer_types", default)):
        p = f"model.layers.{i}."
        if layer_type == "conv":
            yield from linear_shapes(p + "conv.in_proj", 3 * E, E, bias)
            yield p + "conv.conv.weight", (E, 1, c.get("conv_L_cache", 3))
            if bias:
                yield p + "conv.conv.bias", (E,)
            yield from linear_shapes(p + "conv.out_proj", E, E, bias)
        else:
            for name, shape in (("q_proj", (H, E)), ("k_proj", (G, E)), ("v_proj", (G, E)), ("out_proj", (E, H))):
                yield f"{p}self_attn.{name}.weight", shape
            yield p + "self_attn.q_layernorm.weight", (D,)
            yield p + "self_attn.k_layernorm.weight", (D,)
        experts, size = [""], F
        if i >= c.get("num_dense_layers", c["num_hidden_layers"]):
            experts, size = [f"experts.{e}." for e in range(c["num_experts"])], c["moe_intermediate_size"]
            yield p + "feed_forward.gate.weight", (c["num_experts"], E)
            if c.get("use_expert_bias", True):
                yield p + "feed_forward.expert_bias", (c["num_experts"],)
        for expert in experts:
            for name, shape in (("w1", (size, E)), ("w3", (size, E)), ("w2", (E, size))):
                yield f"{p}feed_forward.{expert}{name}.weight", shape
        yield p + "operator_norm.weight", (E,)
        yield p + "ffn_norm.weight", (E,)
    yield "model.embedding_norm.weight", (E,)
    if not c.get("tie_word_embeddings", True):
        yield "lm_head.weight", (V, E)


def mamba2_shapes(prefix: str, E: int, heads: int, head_dim: int, keys: int, window: int, **has_bias: bool) -> Shapes:
    n = heads * head_dim
    yield from linear_shapes(prefix + "in_proj", 2 * n + 2 * keys + heads, E, has_bias["proj"])
    yield prefix + "conv1d.weight", (n + 2 * keys, 1, window)
    if has_bias["conv"]:
        yield prefix + "conv1d.bias", (n + 2 * keys,)
    for name in ("A_log", "D", "dt_bias"):
        yield prefix + name, (heads,)
    yield prefix + "norm.weight", (n,)
    yield from linear_shapes(prefix + "out_proj", E, n, has_bias["proj"])


def granite_expert_shapes(prefix: str, c: dict[str, Any]) -> Shapes:
    E, F, n, shared = (
        c["hidden_size"],
        c["intermediate_size"],
        c["num_local_experts"],
        c.get("shared_intermediate_size"),
    )
    if n:
        yield prefix + "block_sparse_moe.router.weight", (n, E)
        yield prefix + "block_sparse_moe.experts.gate_up_proj", (n, 2 * F, E)
        yield prefix + "block_sparse_moe.experts.down_proj", (n, E, F)
    if shared:
        yield prefix + "shared_mlp.input_linear.weight", (2 * shared, E)
        yield prefix + "shared_mlp.output_linear.weight", (E, shared)


def granite_hybrid_shapes(c: dict[str, Any]) -> Shapes:
    E, V = c["hidden_size"], c["vocab_size"]
    D = E // c["num_attention_heads"]
    G = c["num_key_value_heads"] * D
    yield "model.embed_tokens.weight", (V, E)
    for i, layer_type in enumerate(c["layer_types"]):
        p = f"model.layers.{i}."
        if layer_type in ("full_attention", "attention"):
            for name, shape in (("q", (E, E)), ("k", (G, E)), ("v", (G, E)), ("o", (E, E))):
                yield from linear_shapes(f"{p}self_attn.{name}_proj", *shape, c.get("attention_bias", False))
        else:
            heads, keys = c["mamba_n_heads"], c["mamba_n_groups"] * c["mamba_d_state"]
            width, window = c.get("mamba_expand", 2) * E, c.get("mamba_d_conv", 4)
            has_bias = {"proj": c.get("mamba_proj_bias", False), "conv": c.get("mamba_conv_bias", True)}
            yield from mamba2_shapes(p + "mamba.", E, heads, width // heads, keys, window, **has_bias)
        yield from granite_expert_shapes(p, c)
        yield p + "input_layernorm.weight", (E,)
        yield p + "post_attention_layernorm.weight", (E,)
    yield "model.norm.weight", (E,)
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (V, E)


def deepseek_expert_shapes(prefix: str, c: dict[str, Any]) -> Shapes:
    E, n, size = c["hidden_size"], c["n_routed_experts"], c["moe_intermediate_size"]
    yield from expert_shapes(prefix, n, E, size)
    if c["model_type"] != "deepseek_v2":
        yield prefix + "gate.e_score_correction_bias", (n,)
    yield from mlp_shapes(prefix + "shared_experts.", E, size * c["n_shared_experts"], c.get("mlp_bias", False))


def deepseek_shapes(c: dict[str, Any]) -> Shapes:
    E, V, H = c["hidden_size"], c["vocab_size"], c["num_attention_heads"]
    nope, rope, latent, value = (c[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim"))
    bias, rank = c.get("attention_bias", False), c["q_lora_rank"]
    types = c.get("mlp_layer_types") or ["dense"] * c.get("first_k_dense_replace", 1)
    yield "model.embed_tokens.weight", (V, E)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        if rank is None:
            yield p + "self_attn.q_proj.weight", (H * (nope + rope), E)
        else:
            yield from linear_shapes(p + "self_attn.q_a_proj", rank, E, bias)
            yield p + "self_attn.q_a_layernorm.weight", (rank,)
            yield p + "self_attn.q_b_proj.weight", (H * (nope + rope), rank)
        yield from linear_shapes(p + "self_attn.kv_a_proj_with_mqa", latent + rope, E, bias)
        yield p + "self_attn.kv_a_layernorm.weight", (latent,)
        yield p + "self_attn.kv_b_proj.weight", (H * (nope + value), latent)
        yield from linear_shapes(p + "self_attn.o_proj", E, H * value, bias)
        if i < len(types) and types[i] == "dense":
            yield from mlp_shapes(p + "mlp.", E, c["intermediate_size"], c.get("mlp_bias", False))
        else:
            yield from deepseek_expert_shapes(p + "mlp.", c)
        yield p + "input_layernorm.weight", (E,)
        yield p + "post_attention_layernorm.weight", (E,)
    yield "model.norm.weight", (E,)
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (V, E)


def nemotron_h_shapes(c: dict[str, Any]) -> Shapes:
    E, V, D = c["hidden_size"], c["vocab_size"], c["head_dim"]
    H, G = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    bias = c.get("mlp_bias", False)
    yield "model.embeddings.weight", (V, E)
    for i, layer_type in enumerate(c.get("layer_types") or [kinds[x] for x in c["hybrid_override_pattern"]]):
        p = f"model.layers.{i}."
        yield p + "norm.weight", (E,)
        p += "mixer."
        if layer_type == "full_attention":
            for name, shape in (("q", (H, E)), ("k", (G, E)), ("v", (G, E)), ("o", (E, H))):
                yield f"{p}{name}_proj.weight", shape
        elif layer_type == "linear_attention":
            keys = c["n_groups"] * c["ssm_state_size"]
            has_bias = {"proj": c.get("use_bias", False), "conv": c.get("use_conv_bias", True)}
            sizes = c["mamba_num_heads"], c["mamba_head_dim"], keys, c.get("conv_kernel", 4)
            yield from mamba2_shapes(p, E, *sizes, **has_bias)
        elif layer_type == "mlp":
            yield from linear_shapes(p + "up_proj", c["intermediate_size"], E, bias)
            yield from linear_shapes(p + "down_proj", E, c["intermediate_size"], bias)
        else:
            n, F, shared = c["n_routed_experts"], c["moe_intermediate_size"], c["moe_shared_expert_intermediate_size"]
            yield p + "gate.weight", (n, E)
            yield p + "gate.e_score_correction_bias", (n,)
            latent = c.get("moe_latent_size") or E
            yield p + "experts.up_proj", (n, F, latent)
            yield p + "experts.down_proj", (n, latent, F)
            if latent != E:
                yield from linear_shapes(p + "fc1_latent_proj", latent, E, bias)
                yield from linear_shapes(p + "fc2_latent_proj", E, latent, bias)
            yield from linear_shapes(p + "shared_experts.up_proj", shared, E, bias)
            yield from linear_shapes(p + "shared_experts.down_proj", E, shared, bias)
    yield "model.norm_f.weight", (E,)
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (V, E)


def qwen_linear_shapes(c: dict[str, Any], prefix: str = "model.") -> Shapes:
    E, V, D = c["hidden_size"], c["vocab_size"], c["head_dim"]
    H, G = c["num_attention_heads"] * D, c["num_key_value_heads"] * D
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    num_values = c["linear_num_value_heads"]
    values = num_values * c["linear_value_head_dim"]
    is_interleaved = c.get("model_type") == "qwen3_next"
    yield prefix + "embed_tokens.weight", (V, E)
    for i, layer_type in enumerate(c["layer_types"]):
        p = f"{prefix}layers.{i}."
        if layer_type == "full_attention":
            for name, shape in (("q", (2 * H, E)), ("k", (G, E)), ("v", (G, E)), ("o", (E, H))):
                yield from linear_shapes(f"{p}self_attn.{name}_proj", *shape, c.get("attention_bias", False))
            yield p + "self_attn.q_norm.weight", (D,)
            yield p + "self_attn.k_norm.weight", (D,)
        else:
            apart = {"qkv": 2 * keys + values, "z": values, "a": num_values, "b": num_values}
            together = {"qkvz": 2 * (keys + values), "ba": 2 * num_values}
            for name, out in (together if is_interleaved else apart).items():
                yield f"{p}linear_attn.in_proj_{name}.weight", (out, E)
            yield p + "linear_attn.conv1d.weight", (2 * keys + values, 1, c.get("linear_conv_kernel_dim", 4))
            yield p + "linear_attn.A_log", (num_values,)
            yield p + "linear_attn.dt_bias", (num_values,)
            yield p + "linear_attn.norm.weight", (c["linear_value_head_dim"],)
            yield p + "linear_attn.out_proj.weight", (E, values)
        if "num_experts" in c and i not in c.get("mlp_only_layers", ()):
            if is_interleaved:
                yield from expert_shapes(p + "mlp.", c["num_experts"], E, c["moe_intermediate_size"])
            else:
                n, size = c["num_experts"], c["moe_intermediate_size"]
                yield p + "mlp.gate.weight", (n, E)
                yield p + "mlp.experts.gate_up_proj", (n, 2 * size, E)
                yield p + "mlp.experts.down_proj", (n, E, size)
            yield from mlp_shapes(p + "mlp.shared_expert.", E, c["shared_expert_intermediate_size"])
            yield p + "mlp.shared_expert_gate.weight", (1, E)
        else:
            yield from mlp_shapes(p + "mlp.", E, c["intermediate_size"])
        yield p + "input_layernorm.weight", (E,)
        yield p + "post_attention_layernorm.weight", (E,)
    yield prefix + "norm.weight", (E,)
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (V, E)


def qwen_vision_shapes(c: dict[str, Any]) -> Shapes:
    yield from qwen_linear_shapes(c["text_config"], "model.language_model.")


def norm_shapes(name: str, E: int) -> Shapes:
    yield name + ".weight", (E,)
    yield name + ".bias", (E,)


def linear_shapes(name: str, out: int, in_dim: int, bias: bool = True) -> Shapes:
    yield name + ".weight", (out, in_dim)
    if bias:
        yield name + ".bias", (out,)


def gpt2_shapes(c: dict[str, Any]) -> Shapes:
    E, F, V = c["n_embd"], c.get("n_inner") or 4 * c["n_embd"], c["vocab_size"]
    yield "transformer.wte.weight", (V, E)
    yield "transformer.wpe.weight", (c["n_positions"], E)
    for i in range(c["n_layer"]):
        p = f"transformer.h.{i}."
        yield from norm_shapes(p + "ln_1", E)
        sizes = {"attn.c_attn": (E, 3 * E), "attn.c_proj": (E, E), "mlp.c_fc": (E, F), "mlp.c_proj": (F, E)}
        for name, (in_dim, out) in sizes.items():
            yield f"{p}{name}.weight", (in_dim, out)  # transposed, unlike in other families
            yield f"{p}{name}.bias", (out,)
        yield from norm_shapes(p + "ln_2", E)
    yield from norm_shapes("transformer.ln_f", E)
    if not c.get("tie_word_embeddings", True):
        yield "lm_head.weight", (V, E)


def gptj_shapes(c: dict[str, Any]) -> Shapes:
    E, F, V = c["n_embd"], c.get("n_inner") or 4 * c["n_embd"], c["vocab_size"]
    yield "transformer.wte.weight", (V, E)
    for i in range(c["n_layer"]):
        p = f"transformer.h.{i}."
        yield from norm_shapes(p + "ln_1", E)
        for name in ("q", "k", "v", "out"):
            yield from linear_shapes(f"{p}attn.{name}_proj", E, E, bias=False)
        yield from linear_shapes(p + "mlp.fc_in", F, E)
        yield from linear_shapes(p + "mlp.fc_out", E, F)
    yield from norm_shapes("transformer.ln_f", E)
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (V, E)
    yield "lm_head.bias", (V,)


def mpt_shapes(c: dict[str, Any]) -> Shapes:
    E, V = c["d_model"], c["vocab_size"]
    yield "transformer.wte.weight", (V, E)
    for i in range(c["n_layers"]):
        p = f"transformer.blocks.{i}."
        yield p + "norm_1.weight", (E,)
        yield p + "attn.Wqkv.weight", (3 * E, E)
        yield p + "attn.out_proj.weight", (E, E)
        yield p + "norm_2.weight", (E,)
        yield p + "ffn.up_proj.weight", (4 * E, E)
        yield p + "ffn.down_proj.weight", (E, 4 * E)
    yield "transformer.norm_f.weight", (E,)


def opt_shapes(c: dict[str, Any]) -> Shapes:
    E, F, V, narrow = c["hidden_size"], c["ffn_dim"], c["vocab_size"], c["word_embed_proj_dim"]
    bias, before = c.get("enable_bias", True), c.get("do_layer_norm_before", True)
    yield "model.decoder.embed_tokens.weight", (V, narrow)
    yield "model.decoder.embed_positions.weight", (c["max_position_embeddings"] + 2, E)
    if narrow != E:
        yield "model.decoder.project_in.weight", (E, narrow)
        yield "model.decoder.project_out.weight", (narrow, E)
    for i in range(c["num_hidden_layers"]):
        p = f"model.decoder.layers.{i}."
        for name in ("q", "k", "v", "out"):
            yield from linear_shapes(f"{p}self_attn.{name}_proj", E, E, bias)
        yield from norm_shapes(p + "self_attn_layer_norm", E)
        yield from linear_shapes(p + "fc1", F, E, bias)
        yield from linear_shapes(p + "fc2", E, F, bias)
        yield from norm_shapes(p + "final_layer_norm", E)
    if before and not c.get("_remove_final_layer_norm"):
        yield from norm_shapes("model.decoder.final_layer_norm", E)
    if not c.get("tie_word_embeddings", True):
        yield "lm_head.weight", (V, narrow)


def gpt_neox_shapes(c: dict[str, Any]) -> Shapes:
    E, F, V, bias = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c.get("attention_bias", True)
    yield "gpt_neox.embed_in.weight", (V, E)
    for i in range(c["num_hidden_layers"]):
        p = f"gpt_neox.layers.{i}."
        yield from norm_shapes(p + "input_layernorm", E)
        yield from norm_shapes(p + "post_attention_layernorm", E)
        yield from linear_shapes(p + "attention.query_key_value", 3 * E, E, bias)
        yield from linear_shapes(p + "attention.dense", E, E, bias)
        yield from linear_shapes(p + "mlp.dense_h_to_4h", F, E)
        yield from linear_shapes(p + "mlp.dense_4h_to_h", E, F)
    yield from norm_shapes("gpt_neox.final_layer_norm", E)
    if not c.get("tie_word_embeddings"):
        yield "lm_head.weight", (V, E)


TENSOR_SHAPES = {
    "llama": llama_shapes,
    "mistral": llama_shapes,
    "qwen2": llama_shapes,
    "qwen3": llama_shapes,
    "qwen3_moe": llama_shapes,
    "gpt_oss": llama_shapes,
    "seed_oss": llama_shapes,
    "ernie4_5": llama_shapes,
    "smollm3": llama_shapes,
    "glm4": llama_shapes,
    "phi3": llama_shapes,
    "ministral3": llama_shapes,
    "cohere2": llama_shapes,
    "granite": llama_shapes,
    "granite_swa": llama_shapes,
    "olmo2": llama_shapes,
    "olmo3": llama_shapes,
    "gemma3_text": llama_shapes,
    "gemma3": gemma3_shapes,
    "gemma4_text": gemma4_shapes,
    "gemma4": gemma4_vision_shapes,
    "muse_glimmer_text": llama_shapes,
    "muse_glimmer": muse_shapes,
    "lfm2": lfm2_shapes,
    "lfm2_moe": lfm2_shapes,
    "granitemoe": llama_shapes,
    "granitemoeshared": llama_shapes,
    "granitemoehybrid": granite_hybrid_shapes,
    "nemotron_h": nemotron_h_shapes,
    "deepseek_v2": deepseek_shapes,
    "deepseek_v3": deepseek_shapes,
    "glm4_moe_lite": deepseek_shapes,
    "glm4_moe": llama_shapes,
    "qwen3_next": qwen_linear_shapes,
    "qwen3_5_text": qwen_linear_shapes,
    "qwen3_5": qwen_vision_shapes,
    "qwen3_5_moe_text": qwen_linear_shapes,
    "qwen3_5_moe": qwen_vision_shapes,
    "gpt2": gpt2_shapes,
    "gptj": gptj_shapes,
    "mpt": mpt_shapes,
    "opt": opt_shapes,
    "gpt_neox": gpt_neox_shapes,
}
