"""Gemma 3: five layers with a sliding window for each full one, each kind with its own rope base (arXiv 2503.19786).

Norms are before and after both branches and multiply by 1 + w. The MLP is gated with GELU. The embedding is scaled and
tied to the head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from retain.kernels.api import Program
from retain.models.decoder import (
    Attend,
    Attention,
    Decoder,
    ModelSpec,
    check_supported,
    get_layer_windows,
    scope_base_model,
)
from retain.models.families import llama
from retain.models.layers import Embedding, GatedMLP, Layer, RMSNorm, load_linear, load_lm_head
from retain.models.rope import Angles, Rope, get_rope, get_rope_parameters
from retain.models.weights import Weights

DEFAULTS = {  # of transformers; published configs leave out equal values
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
    "rope_local_base_freq": 10000.0,
}


def spec_from_config(c: dict[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    c = {**DEFAULTS, **c}
    every, layers = c["sliding_window_pattern"], range(1, c["num_hidden_layers"] + 1)
    layer_types = ["full_attention" if i % every == 0 else "sliding_attention" for i in layers]
    windows = get_layer_windows(c, layer_types)
    return replace(llama.spec_from_config(c), windows=windows, scale=c["query_pre_attn_scalar"] ** -0.5)


@dataclass(frozen=True, eq=False)
class SandwichNormLayer:
    """Compute x += norm2(attention(norm1(x))), then x += norm4(mlp(norm3(x)))."""

    norm1: Layer
    attention: Attention
    norm2: Layer
    norm3: Layer
    mlp: Layer
    norm4: Layer

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """Compute [T, E] -> [T, E]."""
        x = x + self.norm2(self.attention(self.norm1(x), angles, attend))
        return x + self.norm4(self.mlp(self.norm3(x)))

    def emit(self, program: Program, x: int) -> None:
        """See DecoderLayer."""
        h, y = (program.buffer(name, self.attention.spec.hidden_size) for name in ("h", "y"))
        self.norm1.emit(program, x, h)
        self.attention.emit(program, h, y)
        self.norm2.emit(program, y, x, add=True)
        self.norm3.emit(program, x, h)
        self.mlp.emit(program, h, y)
        self.norm4.emit(program, y, x, add=True)


def load_norm(w: Weights, name: str, eps: float) -> RMSNorm:
    """Load a norm that multiplies by 1 + w. The sum is float32: near 1, bfloat16 has only two digits."""
    return RMSNorm(1 + w[f"{name}.weight"].float(), eps)


def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, eps: float, act: str) -> SandwichNormLayer:
    """Build one layer from the weights in layers.<i>."""
    return SandwichNormLayer(
        load_norm(w, "input_layernorm", eps),
        llama.build_attention(w.scope("self_attn."), i, s, rope, eps, norm_offset=1),
        load_norm(w, "post_attention_layernorm", eps),
        load_norm(w, "pre_feedforward_layernorm", eps),
        GatedMLP(load_linear(w, "mlp.gate_proj", "mlp.up_proj"), load_linear(w, "mlp.down_proj"), act),
        load_norm(w, "post_feedforward_layernorm", eps),
    )


def get_ropes(c: dict[str, Any], dim: int) -> tuple[Rope, Rope]:
    """Return the Ropes of full and of sliding layers.

    In an old config, `rope_theta` and `rope_scaling` are those of the full layers.
    """
    local = {"rope_theta": c["rope_local_base_freq"], "rope_parameters": c.get("rope_parameters")}
    full = get_rope_parameters(c, "full_attention", default_theta=1_000_000.0)
    return get_rope(dim, full), get_rope(dim, get_rope_parameters(local, "sliding_attention"))


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    return build_text_decoder(w, w.config)


def build_text_decoder(w: Weights, config: dict[str, Any]) -> Decoder:
    """Build the decoder from a text model's config. A file with vision has one of two other prefixes."""
    check_supported(
        config, attn_logit_softcapping=None, final_logit_softcapping=None, use_bidirectional_attention=False
    )
    c, s = {**DEFAULTS, **config}, spec_from_config(config)
    eps, act = c["rms_norm_eps"], c["hidden_activation"]
    full_rope, sliding_rope = get_ropes(c, s.head_dim)
    m = scope_base_model(w, "embed_tokens.weight", "model.", "model.language_model.", "language_model.model.", "")
    # Rounded to dtype as in training: in bfloat16 25.25, not 25.3.
    scale = torch.tensor(s.hidden_size**0.5, dtype=m.dtype).item()
    embed = Embedding(m.load_matrix("embed_tokens.weight", embedding=True), scale, dtype=m.dtype)
    output = load_lm_head(w, "lm_head", embed.table, c.get("tie_word_embeddings", True))

    def load_layer(i: int) -> SandwichNormLayer:
        rope = sliding_rope if s.windows[i] else full_rope
        return build_layer(m.scope(f"layers.{i}."), i, s, rope, eps, act)

    return Decoder(s, embed, load_layer, load_norm(m, "norm", eps), output, [full_rope, sliding_rope])
