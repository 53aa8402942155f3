"""Multi-head latent attention: keys and values of all heads are products of one latent vector (arXiv 2405.04434).

The products are absorbed. A slot of the cache has one head: its key is the rotated part of a key, which all heads
share, and the latent; its value is the latent. With W_K and W_V of a head, q . (W_K c) = (W_K^T q) . c, and the sum of
weights times W_V c is W_V times the sum of weights times c. So queries are multiplied by W_K^T before attention, and
outputs by W_V behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retain.kernels import ops
from retain.kernels.attention_params import AttentionParams
from retain.kernels.head_columns import HeadColumns
from retain.kernels.ops import Buffer, Operation
from retain.kernels.rope import Rope
from retain.kernels.slots.kv_cache_spec import FullAttentionSpec
from retain.kernels.weights.weight import Weight, select_rows, unpack
from retain.models import llama_like
from retain.models.decoder import Attention, Decoder, ModelSpec, PreNormLayer
from retain.models.layers import HeadLinear, Layer, Linear, RMSNorm, load_linear
from retain.models.rope import ROPE_DEFAULTS, get_rope_parameters, get_whole_head_rope, yarn_gain
from retain.models.weights import Weights

NORM_EPS = 1e-6  # of the latents, whatever `rms_norm_eps` says


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a layer. A query has `nope` numbers that are not rotated, then `rope` numbers that are."""

    num_heads: int
    nope: int
    rope: int
    latent: int
    value: int  # numbers of a head's value

    @property
    def query(self) -> int:
        """The numbers of a query before the product with W_K^T."""
        return self.nope + self.rope

    @property
    def key(self) -> int:
        """The numbers of a key in the cache: rotated ones, then the latent."""
        return self.rope + self.latent


def read_sizes(c: Mapping[str, Any]) -> LatentSizes:
    """Read the sizes from a config with its family's defaults. Raises ValueError where pairs do not divide a head."""
    if c["qk_rope_head_dim"] % 2:
        raise ValueError(f"qk_rope_head_dim is {c['qk_rope_head_dim']}, not a multiple of 2")
    return LatentSizes(
        num_heads=c["num_attention_heads"],
        nope=c["qk_nope_head_dim"],
        rope=c["qk_rope_head_dim"],
        latent=c["kv_lora_rank"],
        value=c["v_head_dim"],
    )


def make_spec(c: Mapping[str, Any]) -> ModelSpec:
    """Read the spec from a config with its family's defaults. YaRN's gain of scores is in their scale."""
    sizes = read_sizes(c)
    rope = get_rope_parameters(c, defaults=ROPE_DEFAULTS)
    all_dim = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
    gain = yarn_gain(rope["factor"], all_dim) if all_dim else 1.0
    return ModelSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        num_heads=sizes.num_heads,
        max_position_embeddings=c["max_position_embeddings"],
        caches=(FullAttentionSpec(1, sizes.key, sizes.latent),) * c["num_hidden_layers"],
        attention=AttentionParams(gain**2 / math.sqrt(sizes.query)),
    )


@dataclass(frozen=True, eq=False)
class LowRankLinear:
    """Compute up(norm(down(x)))."""

    down_proj: Linear
    norm: RMSNorm
    up_proj: Linear

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        rank = self.down_proj.weight.shape[0]
        narrow = Buffer(f"narrow {rank}", rank)
        yield from self.down_proj.emit(x, narrow)
        yield from self.norm.emit(narrow, narrow)
        yield from self.up_proj.emit(narrow, out, add)


@dataclass(frozen=True, eq=False)
class LatentProjection:
    """Compute rows [q | k | v] of latent attention, before rotation. Heads of q and k begin with what is rotated."""

    sizes: LatentSizes
    q_proj: Layer  # [T, E] -> [T, H (nope + rope)]
    kv_proj: Linear  # [T, E] -> [T, rope + latent]
    kv_norm: RMSNorm  # of the latent
    key_weight: Weight  # [H latent, nope]: W_K^T of each head

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which writes `out`. Raises ValueError if the output is to be added."""
        if add:
            raise ValueError("rows of q, k and v cannot be added to a buffer")
        s = self.sizes
        H = s.num_heads
        query = Buffer(f"heads of q {H * s.query}", H * s.query)
        latent = Buffer(f"rotated, latent {s.key}", s.key)
        yield from self.q_proj.emit(x, query)
        yield from self.kv_proj.emit(x, latent)
        yield from self.kv_norm.emit(latent, latent)
        rotated = HeadColumns(H, s.rope, s.query, first=s.nope)
        yield ops.CopyColumns(query, out, rotated, HeadColumns(H, s.rope, s.key))
        absorbed = HeadColumns(H, s.latent, s.key, first=s.rope)
        yield ops.HeadMatMul(query, out, self.key_weight, HeadColumns(H, s.nope, s.query), absorbed)
        k = H * s.key
        yield ops.CopyColumns(latent, out, HeadColumns(1, s.key, s.key), HeadColumns(1, s.key, s.key, first=k))
        value = HeadColumns(1, s.latent, s.latent, first=k + s.key)
        yield ops.CopyColumns(latent, out, HeadColumns(1, s.latent, s.latent, first=s.rope), value)


def load_attention(w: Weights, i: int, s: ModelSpec, rope: Rope) -> Attention:
    """Load the attention of layer i from the weights in self_attn. `q_lora_rank` is None where q has one matrix.

    W_K and W_V of all heads are in kv_b_proj. GGUF files have W_K^T in k_b_proj [H, latent, nope], and W_V in v_b_proj
    [H, value, latent], in its place.
    """
    c = w.config
    sizes = read_sizes(c)
    bias = c["attention_bias"]
    kv = load_linear(w, "kv_a_proj_with_mqa", bias=bias)
    rows = torch.arange(kv.weight.shape[0])
    kv_norm = RMSNorm(w["kv_a_layernorm.weight"].view(1, sizes.latent), NORM_EPS, first=sizes.rope)
    if "k_b_proj.weight" in w:
        key_weight, value_weight = (w.load_stack(f"{n}_b_proj.weight", sizes.num_heads) for n in ("k", "v"))
    else:
        key_weight, value_weight = split_heads(w.load_matrix("kv_b_proj.weight"), sizes, w.dtype)
    projection = LatentProjection(
        sizes=sizes,
        q_proj=load_queries(w),
        kv_proj=kv.select(torch.cat((rows[sizes.latent :], rows[: sizes.latent]))),
        kv_norm=kv_norm,
        key_weight=key_weight,
    )
    o_proj = load_linear(w, "o_proj", bias=bias)
    return Attention(i, s, projection, o_proj, rope, value_proj=HeadLinear(value_weight, sizes.num_heads))


def load_queries(w: Weights) -> Layer:
    """Load what gives the heads of q: one matrix, or two with a norm between them."""
    if w.config["q_lora_rank"] is None:
        return load_linear(w, "q_proj", bias=False)
    down = load_linear(w, "q_a_proj", bias=w.config["attention_bias"])
    return LowRankLinear(down, RMSNorm(w["q_a_layernorm.weight"], NORM_EPS), load_linear(w, "q_b_proj", bias=False))


def split_heads(weight: Weight, sizes: LatentSizes, dtype: torch.dtype) -> tuple[Weight, Weight]:
    """Return W_K^T of all heads [H latent, nope], and W_V [H value, latent], of a matrix with rows of both for each.

    W_V keeps its kind. W_K^T is dense: other numbers would share a scale in it, and rounding them again would make
    them other than the file's.
    """
    rows = torch.arange(weight.shape[0]).view(sizes.num_heads, sizes.nope + sizes.value)
    keys = unpack(select_rows(weight, rows[:, : sizes.nope].flatten()))
    dense = keys if isinstance(keys, Tensor) else keys.dequantize(dtype)
    transposed = dense.view(sizes.num_heads, sizes.nope, -1).transpose(1, 2).flatten(0, 1)
    return transposed.contiguous(), select_rows(weight, rows[:, sizes.nope :].flatten())


def build_decoder(
    w: Weights, s: ModelSpec, load_mlp: Callable[[Weights, int], Layer], interleaved: bool = True
) -> Decoder:
    """Build a decoder from weights whose config has its family's defaults. `load_mlp` loads the MLP of a layer."""
    rope = get_whole_head_rope(w.config["qk_rope_head_dim"], w.config, interleaved=interleaved)

    def build_layer(w: Weights, i: int, s: ModelSpec, rope: Rope, _: llama_like.OptionalTensors) -> PreNormLayer:
        norm1, norm2 = llama_like.load_input_norms(w)
        attention = load_attention(w.scope("self_attn."), i, s, rope)
        return PreNormLayer(norm1, attention, norm2, load_mlp(w.scope("mlp."), i))

    return llama_like.build_decoder(w, s, llama_like.OptionalTensors(), build_layer, [rope])
