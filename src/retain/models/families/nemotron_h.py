"""Nemotron-H (arXiv 2504.03624): each layer is Mamba-2, attention without rope, an MLP of squared ReLU, or experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retain.files import quote
from retain.kernels.attention_params import AttentionParams
from retain.kernels.experts import Experts
from retain.kernels.ops import WidthError
from retain.kernels.slots.kv_cache_spec import LayerCacheSpec, uniform_layers
from retain.kernels.weights.weight import concat_rows
from retain.models import llama_like
from retain.models.decoder import BranchLayer, Decoder, ModelSpec, load_ends
from retain.models.experts import MixtureOfExperts, SharedExpertMixture, load_gate, load_sigmoid_router
from retain.models.family_config import add_defaults, check_supported, get_layer_types
from retain.models.layers import MLP, Embedding, Layer, load_linear, load_norm, resolve_activation
from retain.models.mamba2 import Mamba2Config, load_mamba2, read_time_step_limits
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 131072,
    "hidden_size": 4096,
    "layers_block_type": None,
    "tie_word_embeddings": False,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "conv_kernel": 4,
    "time_step_limit": (0.0, float("inf")),
    "use_conv_bias": True,
    "moe_latent_size": None,  # experts read and write whole hidden states
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
}
OTHER_NAMES: Mapping[str, str] = {
    "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
IGNORED_TENSORS = (r"mtp\..*",)  # an MTP layer
LETTERS: Mapping[str, str] = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
DEFAULT_TYPES = ["linear_attention", "moe", "full_attention", "mlp"]


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS, OTHER_NAMES)
    by_type = read_caches(c)
    types = read_layer_types(c)
    caches = tuple(cache for layer_type in types for cache in by_type[layer_type])
    if not caches:
        raise ValueError("a model without layers of Mamba-2 or attention is not supported")
    return ModelSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_heads=c["num_attention_heads"],
        max_position_embeddings=c["max_position_embeddings"],
        caches=caches,
        attention=AttentionParams(c["head_dim"] ** -0.5),
        uncached_layers=tuple(i for i, layer_type in enumerate(types) if not by_type[layer_type]),
    )


def read_layer_types(c: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer. Older files have one letter for each, and a list counts more."""
    types = c["layers_block_type"]
    pattern = c.get("hybrid_override_pattern")
    if types is None and pattern is None:
        types = DEFAULT_TYPES
    elif types is None:
        types = [LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    if not isinstance(types, list):
        raise ValueError(f"the types of layers are {quote(types)}, not a list")
    return get_layer_types({"layer_types": types, "num_hidden_layers": len(types)}, (), tuple(LETTERS.values()))


def read_caches(c: Mapping[str, Any]) -> dict[str, tuple[LayerCacheSpec, ...]]:
    """Return what a layer of each type caches."""
    return {
        "linear_attention": read_mamba2_config(c).specs,
        "full_attention": uniform_layers(c["num_key_value_heads"] or c["num_attention_heads"], c["head_dim"], (None,)),
        "mlp": (),
        "moe": (),
    }


def read_mamba2_config(c: Mapping[str, Any]) -> Mamba2Config:
    """Read what the config says about layers of Mamba-2.

    transformers 5 takes `time_step_min` for the lower limit (huggingface/transformers#48989); no model was trained so.
    """
    return Mamba2Config(
        num_groups=c["n_groups"],
        num_heads=c["mamba_num_heads"],
        state_size=c["ssm_state_size"],
        head_dim=c["mamba_head_dim"],
        window=c["conv_kernel"],
        act=c["mamba_hidden_act"],
        eps=c["layer_norm_epsilon"],
        conv_bias=c["use_conv_bias"],
        proj_bias=c["use_bias"],
        time_step_limits=read_time_step_limits(c["time_step_limit"]),
    )


def load_mlp(w: Weights) -> MLP:
    """Load an MLP without gates."""
    bias = w.config["mlp_bias"]
    up, down = (load_linear(w, name, bias=bias) for name in ("up_proj", "down_proj"))
    return MLP(up, down, w.config["mlp_hidden_act"])


def load_mixture(w: Weights) -> SharedExpertMixture:
    """Load the experts of a layer, one by one or stacked, and the one of all tokens. They have no gates.

    Raises ValueError where the layer before them makes other latent vectors than the config says.
    """
    c = w.config
    n = c["n_routed_experts"]
    router = load_sigmoid_router(w)
    if "experts.up_proj" in w:
        up, down = (w.load_stack(f"experts.{name}", n) for name in ("up_proj", "down_proj"))
    else:
        names = ([f"experts.{e}.{name}.weight" for e in range(n)] for name in ("up_proj", "down_proj"))
        up, down = (concat_rows([w.load_matrix(name) for name in group]) for group in names)
    experts = Experts(n, up, down, router, resolve_activation(c["mlp_hidden_act"]), is_gated=False)
    latent = None
    if size := c["moe_latent_size"]:
        before, behind = (load_linear(w, f"fc{i}_latent_proj", bias=c["mlp_bias"]) for i in (1, 2))
        if before.weight.shape[0] != size:
            raise WidthError(f"latent vectors have {before.weight.shape[0]} numbers, but {size} in the config")
        latent = before, behind
    mixture = MixtureOfExperts(load_gate(w), experts, latent)
    return SharedExpertMixture(mixture, load_mlp(w.scope("shared_experts.")))


def load_layer(w: Weights, i: int, layer_type: str, s: ModelSpec) -> BranchLayer:
    """Load layer i: attention, Mamba-2 or an MLP."""
    first_caches = s.kv_cache.first_caches
    norm = load_norm(w, "norm", w.config["layer_norm_epsilon"])
    m = w.scope("mixer.")
    branch: Layer
    if layer_type == "full_attention":
        branch = llama_like.build_attention(m, first_caches[i], s, None, llama_like.OptionalTensors())
    elif layer_type == "linear_attention":
        branch = load_mamba2(m, first_caches[i], read_mamba2_config(w.config))
    else:
        branch = load_mlp(m) if layer_type == "mlp" else load_mixture(m)
    return BranchLayer(s.hidden_size, ((norm, branch),))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. Published files call the base model backbone."""
    w = w.with_defaults(DEFAULTS, OTHER_NAMES)
    c = w.config
    check_supported(c, sliding_window=None)
    s = spec_from_config(c)
    types = read_layer_types(c)
    m, table, head = load_ends(w, "model.", "backbone.", "", embedding="embeddings")
    return Decoder(
        s,
        Embedding(table),
        lambda i: load_layer(m.scope(f"layers.{i}."), i, types[i], s),
        load_norm(m, "norm_f", c["layer_norm_epsilon"]),
        head,
    )
