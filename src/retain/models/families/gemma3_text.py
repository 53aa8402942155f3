"""Gemma 3: five layers with a sliding window for each full one, each kind with its own rope base (arXiv 2503.19786).

Norms are before and after both branches and multiply by 1 + w. The MLP is gated with GELU. The embedding is scaled and
tied to the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from retain.kernels.attention_params import AttentionParams
from retain.kernels.ops import Buffer, Operation
from retain.kernels.rope import Rope
from retain.models.decoder import Attention, Decoder, ModelSpec, scope_base_model
from retain.models.families import llama
from retain.models.family_config import add_defaults, check_supported, get_layer_types, get_windows
from retain.models.layers import Embedding, GatedMLP, Layer, RMSNorm, load_linear, load_lm_head
from retain.models.rope import complete_rope_parameters, get_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers; published configs leave out equal values
    "vocab_size": 262208,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10000.0,
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = add_defaults(c, DEFAULTS)
    windows = get_windows(read_layer_types(c), c["sliding_window"])
    return replace(llama.make_spec(c, windows), attention=AttentionParams(c["query_pre_attn_scalar"] ** -0.5))


def read_layer_types(c: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer, from a config with the defaults. Old configs have a pattern only."""
    every = c["sliding_window_pattern"]
    layers = range(1, c["num_hidden_layers"] + 1)
    return get_layer_types(c, ["full_attention" if i % every == 0 else "sliding_attention" for i in layers])


@dataclass(frozen=True, eq=False)
class SandwichNormLayer:
    """Compute x += norm2(attention(norm1(x))), then x += norm4(mlp(norm3(x)))."""

    norm1: Layer
    attention: Attention
    norm2: Layer
    norm3: Layer
    mlp: Layer
    norm4: Layer

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""
        h, y = (Buffer(name, self.attention.spec.hidden_size) for name in ("h", "y"))
        yield from self.norm1.emit(x, h)
        yield from self.attention.emit(h, y)
        yield from self.norm2.emit(y, x, add=True)
        yield from self.norm3.emit(x, h)
        yield from self.mlp.emit(h, y)
        yield from self.norm4.emit(y, x, add=True)


def load_norm(w: Weights, name: str, eps: float) -> RMSNorm:
    """Load a norm that multiplies by 1 + w. The sum is float32: near 1, bfloat16 has only two digits."""
    return RMSNorm(1 + w[f"{name}.weight"].float(), eps)


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope) -> SandwichNormLayer:
    """Build one layer from the weights in layers.<i>."""
    c = w.config
    eps = w.config["rms_norm_eps"]
    tensors = llama.OptionalTensors.of_attention(c["attention_bias"], qk_norm=True)
    gate_up = load_linear(w, "mlp.gate_proj", "mlp.up_proj", bias=False)
    return SandwichNormLayer(
        load_norm(w, "input_layernorm", eps),
        llama.build_attention(w.scope("self_attn."), i, s, rope, tensors, norm_offset=1),
        load_norm(w, "post_attention_layernorm", eps),
        load_norm(w, "pre_feedforward_layernorm", eps),
        GatedMLP(gate_up, load_linear(w, "mlp.down_proj", bias=False), c["hidden_activation"]),
        load_norm(w, "post_feedforward_layernorm", eps),
    )


def get_ropes(c: Mapping[str, Any], dim: int) -> dict[str, Rope]:
    """Return the Rope of each type of layers. `rope_theta` and `rope_scaling` of an old config are of the full ones."""
    given = c.get("rope_parameters") or {}
    sliding = {"rope_theta": c["rope_local_base_freq"], **(given.get("sliding_attention") or {})}
    full = {"rope_theta": c["rope_theta"], **(given.get("full_attention") or {}), **(c.get("rope_scaling") or {})}
    by_type = {"full_attention": full, "sliding_attention": sliding}
    return {layer_type: get_rope(dim, complete_rope_parameters(p, c)) for layer_type, p in by_type.items()}


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names. A file with vision has one of two other prefixes."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    check_supported(c, attn_logit_softcapping=None, final_logit_softcapping=None, use_bidirectional_attention=False)
    s = spec_from_config(c)
    layer_types = read_layer_types(c)
    ropes = get_ropes(c, s.kv_cache.attention(0).k_dim)
    m = scope_base_model(w, "embed_tokens.weight", "model.", "model.language_model.", "language_model.model.", "")
    # Rounded to dtype as in training: in bfloat16 25.25, not 25.3.
    scale = torch.tensor(s.hidden_size**0.5, dtype=m.dtype).item()
    embed = Embedding(m.load_matrix("embed_tokens.weight", embedding=True), scale)
    tied_to = m.full_name("embed_tokens.weight") if c["tie_word_embeddings"] else None
    output = load_lm_head(w, "lm_head", embed.table, tied_to)

    def load_layer(i: int) -> SandwichNormLayer:
        return build_layer(m.scope(f"layers.{i}."), i, s, ropes[layer_types[i]])

    return Decoder(s, embed, load_layer, load_norm(m, "norm", c["rms_norm_eps"]), output, list(ropes.values()))
