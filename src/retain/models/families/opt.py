"""OPT: learned positions from 2 on, ReLU; the 350M has its norms after and a narrow embedding (arXiv 2205.01068)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from retain.kernels import Program
from retain.models.decoder import Attend, Attention, Decoder, Layer, PreNorm, Spec, below, multi_head, need
from retain.models.parts import MLP, Chain, Embedding, Part, head, layer_norm, linear
from retain.models.rope import Angles, Rope
from retain.models.weights import Weights


def spec(c: dict[str, Any]) -> Spec:
    """From config.json."""
    layers, context = c["num_hidden_layers"], c["max_position_embeddings"]
    return multi_head(c["vocab_size"], c["hidden_size"], c["num_attention_heads"], layers, context)


@dataclass(frozen=True, eq=False)
class PostNorm:
    """x = norm1(x + attention(x)), then x = norm2(x + mlp(x))."""

    norm1: Part
    attention: Attention
    norm2: Part
    mlp: Part

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """[T, E] -> [T, E]."""
        x = self.norm1(x + self.attention(x, angles, attend))
        return self.norm2(x + self.mlp(x))

    def emit(self, p: Program, x: int) -> None:
        """See Layer."""
        self.attention.emit(p, x, x, add=True)
        self.norm1.emit(p, x, x)
        self.mlp.emit(p, x, x, add=True)
        self.norm2.emit(p, x, x)


def layer(w: Weights, i: int, s: Spec) -> Layer:
    """One layer, of the weights below layers.<i>."""
    c, a = w.config, w.at("self_attn.")
    attention = Attention(i, s, linear(a, "q_proj", "k_proj", "v_proj"), linear(a, "out_proj"))
    norm1, norm2 = (layer_norm(w, n, 1e-5) for n in ("self_attn_layer_norm", "final_layer_norm"))
    mlp = MLP(linear(w, "fc1"), linear(w, "fc2"), c.get("activation_function", "relu"))
    return (PreNorm if c.get("do_layer_norm_before", True) else PostNorm)(norm1, attention, norm2, mlp)


def build(w: Weights) -> Decoder:
    """The decoder from weights in Hugging Face's names."""
    c, s = w.config, spec(w.config)
    need(c, layer_norm_elementwise_affine=True)
    m = below(w, "embed_tokens.weight", "model.decoder.", "decoder.")
    narrow = c.get("word_embed_proj_dim") not in (None, s.hidden)  # E' < E: projected on the way in and out
    table, places = m.matrix("embed_tokens.weight", embedding=True), m["embed_positions.weight"]
    enter = linear(m, "project_in") if narrow else None
    embed = Embedding(table, places=places, offset=2, project=enter, dtype=m.dtype)
    out = head(w, "lm_head", table, c.get("tie_word_embeddings", True))
    output = Chain((linear(m, "project_out"), out)) if narrow else out
    last = c.get("do_layer_norm_before", True) and not c.get("_remove_final_layer_norm", False)
    norm = layer_norm(m, "final_layer_norm", 1e-5) if last else None
    return Decoder(s, embed, lambda i: layer(m.at(f"layers.{i}."), i, s), norm, output)
