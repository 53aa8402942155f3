"""OPT: learned positions from 2 on, ReLU (arXiv 2205.01068). The 350M has post-norm layers and a narrow embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from retain.kernels.api import Program
from retain.models.decoder import (
    Attend,
    Attention,
    Decoder,
    DecoderLayer,
    ModelSpec,
    PreNormLayer,
    check_supported,
    multi_head_spec,
    scope_base_model,
)
from retain.models.layers import MLP, Embedding, Layer, Sequential, load_layer_norm, load_linear, load_lm_head
from retain.models.rope import Angles, Rope
from retain.models.weights import Weights


def spec_from_config(c: dict[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    layers, context = c["num_hidden_layers"], c["max_position_embeddings"]
    return multi_head_spec(c["vocab_size"], c["hidden_size"], c["num_attention_heads"], layers, context)


@dataclass(frozen=True, eq=False)
class PostNormLayer:
    """Compute x = norm1(x + attention(x)), then x = norm2(x + mlp(x))."""

    norm1: Layer
    attention: Attention
    norm2: Layer
    mlp: Layer

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """Compute [T, E] -> [T, E]."""
        x = self.norm1(x + self.attention(x, angles, attend))
        return self.norm2(x + self.mlp(x))

    def emit(self, program: Program, x: int) -> None:
        """See DecoderLayer."""
        self.attention.emit(program, x, x, add=True)
        self.norm1.emit(program, x, x)
        self.mlp.emit(program, x, x, add=True)
        self.norm2.emit(program, x, x)


def build_layer(w: Weights, i: int, s: ModelSpec) -> DecoderLayer:
    """Build one layer from the weights in layers.<i>."""
    c, a = w.config, w.scope("self_attn.")
    attention = Attention(i, s, load_linear(a, "q_proj", "k_proj", "v_proj"), load_linear(a, "out_proj"))
    norm1, norm2 = (load_layer_norm(w, n, 1e-5) for n in ("self_attn_layer_norm", "final_layer_norm"))
    mlp = MLP(load_linear(w, "fc1"), load_linear(w, "fc2"), c.get("activation_function", "relu"))
    layer = PreNormLayer if c.get("do_layer_norm_before", True) else PostNormLayer
    return layer(norm1, attention, norm2, mlp)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    c, s = w.config, spec_from_config(w.config)
    check_supported(c, layer_norm_elementwise_affine=True)
    m = scope_base_model(w, "embed_tokens.weight", "model.decoder.", "decoder.")
    is_narrow = c.get("word_embed_proj_dim") not in (None, s.hidden_size)  # E' < E: projected on the way in and out
    table, positions = m.load_matrix("embed_tokens.weight", embedding=True), m["embed_positions.weight"]
    projection = load_linear(m, "project_in") if is_narrow else None
    embed = Embedding(table, position_table=positions, position_offset=2, projection=projection, dtype=m.dtype)
    lm_head = load_lm_head(w, "lm_head", table, c.get("tie_word_embeddings", True))
    output = Sequential((load_linear(m, "project_out"), lm_head)) if is_narrow else lm_head
    has_norm = c.get("do_layer_norm_before", True) and not c.get("_remove_final_layer_norm", False)
    norm = load_layer_norm(m, "final_layer_norm", 1e-5) if has_norm else None
    return Decoder(s, embed, lambda i: build_layer(m.scope(f"layers.{i}."), i, s), norm, output)
