"""LFM2's decoder (arXiv 2511.23404): short convolutions, and attention in some layers.

Letters: T fresh tokens, E hidden size, C channels of a convolution, W its window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from retain.kernels import ops
from retain.kernels.ops import Buffer, Operation
from retain.kernels.rope import Rope
from retain.kernels.slots.kv_cache_spec import ConvolutionSpec, LayerCacheSpec, convolution_spec
from retain.models import llama_like
from retain.models.decoder import Attention, BranchLayer, Decoder, DecoderLayer, ModelSpec, PreNormLayer, load_ends
from retain.models.family_config import get_layer_types
from retain.models.layers import Embedding, GatedMLP, Layer, Linear, load_linear, load_norm
from retain.models.linear_attention import load_convolution_weight
from retain.models.rope import get_whole_head_rope
from retain.models.weights import Weights

DEFAULTS: Mapping[str, Any] = {  # of transformers in lfm2 and lfm2_moe; each has more
    "vocab_size": 65536,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,  # hidden_size / num_attention_heads
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
}
OTHER_NAMES: Mapping[str, str] = {"tie_embedding": "tie_word_embeddings"}
ROPE_DEFAULTS: Mapping[str, Any] = {"rope_theta": 1000000.0}
LAYER_TYPES = ("conv", "full_attention")

LoadMLP = Callable[[Weights, int], Layer]


@dataclass(frozen=True, eq=False)
class ShortConvolution:
    """Compute out_proj(c * convolve(b * z)), where b, c and z are linear in x (LFM2, arXiv 2511.23404)."""

    cache: int  # the number of a ConvolutionSpec
    gates_proj: Linear  # [T, E] -> [b | c], [T, 2 C]
    in_proj: Linear  # [T, E] -> z, [T, C]
    weight: Tensor  # [C, W]
    bias: Tensor | None  # [C]
    out_proj: Linear

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        n = len(self.weight)
        gates = Buffer(f"convolution gates {2 * n}", 2 * n)
        z = Buffer(f"convolution input {n}", n)
        y = Buffer(f"convolution {n}", n)
        yield from self.gates_proj.emit(x, gates)
        yield from self.in_proj.emit(x, z)
        yield ops.Multiply(z, gates)
        yield ops.Convolve(z, y, self.cache, self.weight, self.bias)
        yield ops.Multiply(y, gates, first=n)
        yield from self.out_proj.emit(y, out, add)


def make_spec(c: Mapping[str, Any], default_types: list[str] | None) -> ModelSpec:
    """Read the spec from a config with its family's defaults. `default_types` are those of a config without any."""
    layer_types = get_layer_types(c, default_types or (), LAYER_TYPES)
    spec = llama_like.make_spec(c)
    by_type: dict[str, LayerCacheSpec] = {"full_attention": spec.caches[0]}
    if "conv" in layer_types:
        head_dim = c["head_dim"] or c["hidden_size"] // c["num_attention_heads"]
        by_type["conv"] = convolution_spec(c["hidden_size"], c["conv_L_cache"], head_dim // 2)
    return replace(spec, caches=tuple(by_type[layer_type] for layer_type in layer_types))


def load_mlp(w: Weights, i: int) -> GatedMLP:
    """Load the gated MLP of a layer."""
    return GatedMLP(load_linear(w, "w1", "w3", bias=False), load_linear(w, "w2", bias=False), "silu")


def load_convolution(w: Weights, i: int) -> ShortConvolution:
    """Load the convolution of layer i."""
    c = w.config
    has_bias = c["conv_bias"]
    weight = load_convolution_weight(w, "conv.weight", c["hidden_size"], c["conv_L_cache"])
    in_proj = load_linear(w, "in_proj", bias=has_bias)  # its output is [b | c | z]
    rows = torch.arange(in_proj.weight.shape[0])
    n = len(rows) // 3
    bias = w["conv.bias"] if has_bias else None
    return ShortConvolution(
        i,
        in_proj.select(rows[: 2 * n]),
        in_proj.select(rows[2 * n :]),
        weight,
        bias,
        load_linear(w, "out_proj", bias=has_bias),
    )


def load_attention(w: Weights, i: int, s: ModelSpec, rope: Rope) -> Attention:
    """Load the attention of layer i."""
    norm = llama_like.load_qk_norm(w, i, s, w.config["norm_eps"], names=("q_layernorm", "k_layernorm"))
    qkv = load_linear(w, "q_proj", "k_proj", "v_proj", bias=False)
    return Attention(i, s, qkv, load_linear(w, "out_proj", bias=False), rope, norm)


def build_decoder(w: Weights, s: ModelSpec, load_mlp: LoadMLP) -> Decoder:
    """Build a decoder from weights whose config has its family's defaults."""
    c = w.config
    eps = c["norm_eps"]
    rope = get_whole_head_rope(c["head_dim"] or s.hidden_size // s.num_heads, c, ROPE_DEFAULTS)
    m, table, head = load_ends(w, "model.", "")

    def load_layer(i: int) -> DecoderLayer:
        layer = m.scope(f"layers.{i}.")
        norm1, norm2 = (load_norm(layer, name, eps) for name in ("operator_norm", "ffn_norm"))
        mlp = load_mlp(layer.scope("feed_forward."), i)
        if isinstance(s.caches[i], ConvolutionSpec):
            return BranchLayer(s.hidden_size, ((norm1, load_convolution(layer.scope("conv."), i)), (norm2, mlp)))
        return PreNormLayer(norm1, load_attention(layer.scope("self_attn."), i, s, rope), norm2, mlp)

    return Decoder(s, Embedding(table), load_layer, load_norm(m, "embedding_norm", eps), head, [rope])
