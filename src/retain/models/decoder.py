"""The decoder that all families share: its spec, its attention, the common layer layouts.

A family (families/<model_type>.py) describes a model in `spec_from_config`, and composes a Decoder in `build`. The
decoder yields operations (kernels/ops.py), which serve prefill chunks, decoding and verification alike.
Letters: T fresh tokens, E hidden size, H query heads, G kv heads, R = H / G, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor

from retain.kernels import ops
from retain.kernels.attention_params import AttentionParams
from retain.kernels.ops import Buffer, Operation, WidthError
from retain.kernels.ranks import ALL_HEADS, KVHeads
from retain.kernels.rope import Rope
from retain.kernels.slots.kv_cache_spec import KVCacheSpec, LayerCacheSpec, OwnCacheSpec, uniform_layers
from retain.kernels.weights.weight import Weight
from retain.models.layers import Embedding, HeadLinear, Layer, Linear, load_lm_head
from retain.models.weights import Weights


class DecoderLayer(Protocol):
    """A layer between the embedding and the head."""

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""


@dataclass(frozen=True)
class ModelSpec:
    """The sizes of a model, and what its layers cache.

    `caches` are in the order in which the model uses them. A layer of linear attention has several, an MLP none.
    """

    vocab_size: int
    hidden_size: int
    num_heads: int  # H
    max_position_embeddings: int  # context length, in tokens
    caches: tuple[LayerCacheSpec, ...]
    attention: AttentionParams  # of every layer that has none of its own
    uncached_layers: tuple[int, ...] = ()  # the numbers of layers that cache nothing

    @property
    def num_caches(self) -> int:
        """Return the number of caches, shared ones included."""
        return len(self.caches)

    @property
    def num_layers(self) -> int:
        """Return L, the layers of the model: one of linear attention has several caches."""
        return self.kv_cache.num_layers

    @cached_property
    def kv_cache(self) -> KVCacheSpec:
        """What the layers keep in the KV cache, by layer."""
        return KVCacheSpec(self.caches, self.uncached_layers)


def multi_head_spec(
    c: Mapping[str, Any],
    hidden_size: str = "hidden_size",
    num_heads: str = "num_attention_heads",
    num_layers: str = "num_hidden_layers",
    context: str = "max_position_embeddings",
) -> ModelSpec:
    """Return the spec of full multi-head attention, with H = G and D = E / H. Sizes have these keys in the config."""
    heads = c[num_heads]
    head_dim = c[hidden_size] // heads
    return ModelSpec(
        vocab_size=c["vocab_size"],
        hidden_size=c[hidden_size],
        num_heads=heads,
        max_position_embeddings=c[context],
        caches=uniform_layers(heads, head_dim, (None,) * c[num_layers]),
        attention=AttentionParams(head_dim**-0.5),
    )


@dataclass(frozen=True, eq=False)
class Attention:
    """Compute o_proj(attend(q, k, v)). `qkv_proj` returns all heads of q, then those of k, then those of v.

    `layer_idx` is the number of the layer's cache. A layer that shares that of an earlier one has heads of q alone.
    Sizes are those of the cache that it reads.
    """

    layer_idx: int
    spec: ModelSpec
    qkv_proj: Layer  # [T, E] -> [T, (H + G) D + G V], or [T, H D]; a key has D numbers, a value V
    o_proj: Linear
    rope: Rope | None = None
    qk_norm: Layer | None = None  # applied to the heads of q and k before rope
    own_params: AttentionParams | None = None  # in place of the spec's
    v_norm: Layer | None = None  # applied to the heads of v
    query_growth: tuple[float, int] | None = None  # see ops.ScaleByPosition: queries grow with their position
    gate_proj: Linear | None = None  # [T, E] -> [T, H V]: outputs are multiplied by its sigmoid
    value_proj: HeadLinear | None = None  # applied to the outputs of heads, which o_proj then reads

    @property
    def sizes(self) -> OwnCacheSpec:
        """The sizes of the cache that the layer attends to."""
        return self.spec.kv_cache.attention(self.layer_idx)

    @property
    def num_written_heads(self) -> int:
        """The heads of k and v that the layer computes and caches: G, or 0."""
        is_own = self.spec.kv_cache.source_cache(self.layer_idx) == self.layer_idx
        return self.sizes.num_kv_heads if is_own else 0

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        H = self.spec.num_heads
        G = self.num_written_heads
        a = self.sizes
        qkv_width = (H + G) * a.k_dim + G * a.v_dim
        qkv = Buffer(f"qkv {qkv_width}", qkv_width)
        o = Buffer(f"o {H * a.v_dim}", H * a.v_dim)
        yield from self.qkv_proj.emit(x, qkv)
        if self.qk_norm:
            yield from self.qk_norm.emit(qkv, qkv)
        if self.v_norm:
            yield from self.v_norm.emit(qkv, qkv)
        if self.query_growth:
            yield ops.ScaleByPosition(qkv, H * a.k_dim, *self.query_growth)
        params = self.own_params or self.spec.attention
        yield ops.Attend(qkv, o, self.layer_idx, (H, a.num_kv_heads, a.k_dim), params, self.rope)
        if self.gate_proj:
            gate = Buffer(f"output gate {H * a.v_dim}", H * a.v_dim)
            yield from self.gate_proj.emit(x, gate)
            yield ops.Activate(gate, gate, "sigmoid")
            yield ops.Multiply(o, gate)
        if self.value_proj:
            values = Buffer(f"values {self.value_proj.width}", self.value_proj.width)
            yield from self.value_proj.emit(o, values)
            o = values
        yield from self.o_proj.emit(o, out, add)


@dataclass(frozen=True, eq=False)
class BranchLayer:
    """Compute x += branch(norm(x)) for each pair of a norm and a branch, one after another."""

    hidden_size: int
    branches: tuple[tuple[Layer, Layer], ...]

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""
        h = Buffer("h", self.hidden_size)
        for norm, branch in self.branches:
            yield from norm.emit(x, h)
            yield from branch.emit(h, x, add=True)


@dataclass(frozen=True, eq=False)
class PreNormLayer:
    """Compute x += attention(norm1(x)), then x += mlp(norm2(x))."""

    norm1: Layer
    attention: Attention
    norm2: Layer
    mlp: Layer

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""
        branches = (self.norm1, self.attention), (self.norm2, self.mlp)
        return BranchLayer(self.attention.spec.hidden_size, branches).emit(x)


@dataclass(frozen=True, eq=False)
class ParallelLayer:
    """Compute x += attention(norm1(x)) + mlp(norm2(x)). Without norm2, both branches share norm1."""

    norm1: Layer
    attention: Attention
    norm2: Layer | None
    mlp: Layer

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""
        E = self.attention.spec.hidden_size
        h = g = Buffer("h", E)
        yield from self.norm1.emit(x, h)
        if self.norm2:
            yield from self.norm2.emit(x, g := Buffer("g", E))
        yield from self.attention.emit(h, x, add=True)
        yield from self.mlp.emit(g, x, add=True)


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
        yield from self.emit_mlp(x, h, y)
        yield from self.norm4.emit(y, x, add=True)

    def emit_mlp(self, x: Buffer, h: Buffer, y: Buffer) -> Iterator[Operation]:
        """Yield the operations of the MLP: `x` is its input, `h` that behind a norm, `y` the output."""
        return self.mlp.emit(h, y)


@dataclass(frozen=True, eq=False)
class OutputNormLayer:
    """Compute x += attention_norm(attention(x)), then x += mlp_norm(mlp(x))."""

    attention: Attention
    attention_norm: Layer
    mlp: Layer
    mlp_norm: Layer

    def emit(self, x: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which updates buffer `x` in place."""
        y = Buffer("y", self.attention.spec.hidden_size)
        for branch, norm in ((self.attention, self.attention_norm), (self.mlp, self.mlp_norm)):
            yield from branch.emit(x, y)
            yield from norm.emit(y, x, add=True)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A whole model. `ropes` are all that its layers use."""

    spec: ModelSpec
    embedding: Embedding
    load_layer: Callable[[int], DecoderLayer]  # reads one layer's weights from the checkpoint
    norm: Layer | None
    lm_head: Layer
    ropes: Sequence[Rope] = ()
    num_layers: int | None = None  # where the spec's caches do not tell; None: they do
    key_factors: dict[int, Tensor] = field(default_factory=dict)  # by cache, [G, D]: see passes/balance.py
    attention: dict[int, ops.Attend] = field(default_factory=dict)  # by cache: see passes/note_attention.py
    kv_heads: KVHeads = ALL_HEADS  # of attention, that this rank has

    @property
    def token_embedding(self) -> Embedding:
        """The embedding of tokens alone, without positions and inputs of layers, as a draft head reads it."""
        return Embedding(self.embedding.table, self.embedding.scale)

    def emit(self) -> Iterator[Operation]:
        """Yield the operations of the model. Raises WidthError where an embedding's shape contradicts the spec.

        A layer is loaded when the operations before it are done, so a program that packs weights holds few of the
        file's.
        """
        s = self.spec
        e = self.embedding
        num_positions = s.max_position_embeddings + e.position_offset
        if e.table.shape[0] < s.vocab_size or (e.position_table is not None and len(e.position_table) < num_positions):
            raise WidthError("the embedding has fewer rows than the vocabulary, or than the context")
        x = Buffer("x", s.hidden_size)
        last = Buffer("last", s.hidden_size)
        yield from e.emit(x)
        for i in range(s.num_layers if self.num_layers is None else self.num_layers):
            yield from self.load_layer(i).emit(x)
        yield ops.GatherRows(x, last)
        if self.norm:
            yield from self.norm.emit(last, last)
        yield from self.lm_head.emit(last, Buffer(ops.LOGITS, s.vocab_size))


def load_ends(
    w: Weights, *prefixes: str, embedding: str = "embed_tokens", head: str = "lm_head", head_bias: bool = False
) -> tuple[Weights, Weight, Linear]:
    """Return the weights of the base model, the table of its embedding, and the head, which the config may tie to it.

    The base model has the first prefix under which the embedding exists. The file of a base model alone lacks the
    prefix of the causal language model.
    """
    name = f"{embedding}.weight"
    m = w.scope(next((p for p in prefixes if p + name in w), prefixes[0]))
    table = m.load_matrix(name, embedding=True)
    tied_to = m.full_name(name) if w.config["tie_word_embeddings"] else None
    return m, table, load_lm_head(w, head, table, tied_to, head_bias)
