"""Gemma 4."""

from __future__ import annotations

from torch import Tensor

from retain.formats.errors import UnsupportedError
from retain.formats.gguf.architecture import Architecture
from retain.formats.gguf.architectures import gemma3, llama
from retain.formats.gguf.metadata import (
    GGUFMetadata,
    HFConfig,
    check_rope_factors,
    expert_config,
    get_share,
    read_layer_types,
)

NORM_TENSORS = {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "post_norm": "post_per_layer_input_norm",
}
SOFTCAP = 30.0
NEVER = 1e20  # a divisor from here on stops a frequency: llama.cpp's converter writes 1e30


def make_config(meta: GGUFMetadata) -> HFConfig:
    """Return the config of Gemma 4's text model. Layers differ in head sizes, kv heads and widths of the MLP.

    Unlike in Gemma 3, llama.cpp limits logits to 30 where a file does not say to what: 0 is no limit.
    """
    layers = meta.count_blocks()
    shared = meta.get("attention.shared_kv_layers", 0)
    kv_heads = meta.get_per_layer("attention.head_count_kv", layers, meta.get("attention.head_count", 0))
    widths = meta.get_per_layer("feed_forward_length", layers, 0)
    c = llama.make_config(
        meta.with_values({"attention.head_count_kv": kv_heads[0], "feed_forward_length": widths[0]}), "gemma4_text"
    )
    window = meta.get_positive("attention.sliding_window")
    types = read_layer_types(meta, window)
    dim = meta.get_positive("attention.key_length_swa")
    rotated = meta.get_positive("rope.dimension_count_swa", c["head_dim"])
    if not meta.get_positive("attention.value_length_swa") == dim == rotated:
        raise UnsupportedError("heads whose keys, values and rotated part differ in size are not supported")
    scaling = c.pop("rope_scaling")
    if types[-1] != "full_attention" or scaling:
        raise UnsupportedError("a Gemma 4 whose last layer slides, or whose rope is scaled, is not supported")
    if "rope_freqs.weight" not in meta.tensor_shapes:
        raise ValueError("there is no tensor 'rope_freqs.weight'")
    heads_of_type = dict(zip(types, kv_heads, strict=True))
    if kv_heads != [heads_of_type[x] for x in types]:
        raise UnsupportedError(f"{meta.arch}.attention.head_count_kv differs between layers of one type")
    first_full = types.index("full_attention")
    del c["hidden_act"]
    return c | {
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": types,
        "sliding_window": window,
        "use_bidirectional_attention": None,
        "head_dim": dim,
        "global_head_dim": c["head_dim"],
        "num_key_value_heads": heads_of_type.get("sliding_attention", kv_heads[-1]),
        "num_global_key_value_heads": kv_heads[-1],
        "attention_k_eq_v": f"blk.{first_full}.attn_v.weight" not in meta.tensor_shapes,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": check_widths(widths, shared),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": meta.get("rope.freq_base_swa", 10000.0)},
            "full_attention": {"rope_type": "proportional", "rope_theta": c.pop("rope_theta")},
        },
        "final_logit_softcapping": meta.get("final_logit_softcapping", SOFTCAP) or None,
        "hidden_size_per_layer_input": meta.require("embedding_length_per_layer_input", int),
        "vocab_size_per_layer_input": meta.tensor_shapes.get("per_layer_token_embd.weight", (c["vocab_size"],))[0],
        **make_expert_config(meta),
    }


def check_widths(widths: list[int], shared: int) -> bool:
    """Return whether MLPs are twice as wide in the last `shared` layers. Raises UnsupportedError for other widths."""
    own = len(widths) - shared
    factor = 2 if widths[-1] != widths[0] else 1
    if widths != [widths[0] * (factor if i >= own else 1) for i in range(len(widths))]:
        raise UnsupportedError("gemma4.feed_forward_length differs between layers in a way that is not supported")
    return factor == 2


def make_expert_config(meta: GGUFMetadata) -> HFConfig:
    """Return the keys of the experts beside the MLP."""
    if not meta.get("expert_count", 0):
        return {"enable_moe_block": False, "num_experts": None, "top_k_experts": None}
    c = expert_config(meta)
    return {
        "enable_moe_block": True,
        "num_experts": c["num_experts"],
        "top_k_experts": c["num_experts_per_tok"],
        "moe_intermediate_size": meta.get_positive("expert_feed_forward_length"),
    }


def read_rope_factors(factors: Tensor, config: HFConfig) -> HFConfig:
    """Return the share of the pairs of a full layer's heads that turn: the others have a frequency of almost 0."""
    check_rope_factors(factors, config["global_head_dim"])
    n = int((factors == 1).sum())
    if not n or not (factors[:n] == 1).all() or not (factors[n:] >= NEVER).all():
        raise UnsupportedError("the tensor 'rope_freqs.weight' does more than to stop the last pairs of a head")
    full = {**config["rope_parameters"]["full_attention"], "partial_rotary_factor": get_share(n, len(factors))}
    return {"rope_parameters": {**config["rope_parameters"], "full_attention": full}}


ARCHITECTURE = Architecture(
    make_config,
    llama.GLOBAL_TENSORS
    | {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    llama.LAYER_PREFIX,
    llama.LAYER_TENSORS
    | llama.QK_NORM_TENSORS
    | gemma3.NORM_TENSORS
    | NORM_TENSORS
    | {
        "ffn_gate_inp": "router.proj",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
    },
    biases=frozenset(),
    expert_tensors={
        stem: tuple(name.removeprefix("mlp.") for name in names) for stem, names in llama.EXPERT_TENSORS.items()
    },
    whole_names={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    read_rope_factors=read_rope_factors,
)
