"""OPT: learned positions from 2 on, ReLU (arXiv 2205.01068). The 350M has post-norm layers and a narrow embedding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from retain.kernels.ops import Buffer, Operation
from retain.models.decoder import Attention, Decoder, DecoderLayer, ModelSpec, PreNormLayer, load_ends, multi_head_spec
from retain.models.family_config import add_defaults, check_supported
from retain.models.layers import MLP, Embedding, Layer, Sequential, load_layer_norm, load_linear
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "enable_bias": True,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "word_embed_proj_dim": None,  # hidden_size
    "tie_word_embeddings": True,
}


def spec_from_config(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from config.json."""
    return multi_head_spec(add_defaults(c, DEFAULTS))


@dataclass(frozen=True, eq=False)
class PostNormLayer:
    """Compute x = norm1(x + attention(x)), then x = norm2(x + mlp(x))."""

    norm1: Layer
    attention: Attention
    norm2: Layer
    mlp: Layer

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""
        yield from self.attention.emit(x, x, add=True)
        yield from self.norm1.emit(x, x)
        yield from self.mlp.emit(x, x, add=True)
        yield from self.norm2.emit(x, x)


def build_layer(w: Weights, i: int, s: ModelSpec) -> DecoderLayer:
    """Build one layer from the weights in layers.<i>."""
    c = w.config
    a = w.scope("self_attn.")
    bias = w.config["enable_bias"]
    qkv = load_linear(a, "q_proj", "k_proj", "v_proj", bias=bias)
    attention = Attention(i, s, qkv, load_linear(a, "out_proj", bias=bias))
    norm1, norm2 = (load_layer_norm(w, n, 1e-5) for n in ("self_attn_layer_norm", "final_layer_norm"))
    up, down = (load_linear(w, n, bias=bias) for n in ("fc1", "fc2"))
    mlp = MLP(up, down, c["activation_function"])
    layer = PreNormLayer if c["do_layer_norm_before"] else PostNormLayer
    return layer(norm1, attention, norm2, mlp)


def build(w: Weights) -> Decoder:
    """Build the decoder from weights with Hugging Face's names."""
    w = w.with_defaults(DEFAULTS)
    c = w.config
    s = spec_from_config(w.config)
    check_supported(c, layer_norm_elementwise_affine=True)
    m, table, lm_head = load_ends(w, "model.decoder.", "decoder.")
    is_narrow = c["word_embed_proj_dim"] not in (None, s.hidden_size)  # E' < E: projected on the way in and out
    positions = m["embed_positions.weight"]
    projection = load_linear(m, "project_in", bias=False) if is_narrow else None
    embed = Embedding(table, position_table=positions, position_offset=2, projection=projection)
    output = Sequential((load_linear(m, "project_out", bias=False), lm_head)) if is_narrow else lm_head
    has_norm = c["do_layer_norm_before"] and not c["_remove_final_layer_norm"]
    norm = load_layer_norm(m, "final_layer_norm", 1e-5) if has_norm else None
    return Decoder(s, embed, lambda i: build_layer(m.scope(f"layers.{i}."), i, s), norm, output)
