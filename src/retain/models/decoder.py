"""The decoder that all families share: its spec, its attention, the common layer layouts.

A family (families/<model_type>.py) describes a model in `spec_from_config`, and composes a Decoder in `build`. The
decoder emits itself into a program, which runs prefill chunks, decoding and verification alike.
Letters: T fresh tokens, E hidden size, H query heads, G kv heads, R = H / G, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from retain.kernels.api import Program
from retain.kernels.attention_params import AttentionParams
from retain.kernels.kv_cache_spec import KVCacheSpec, LayerCacheSpec, OwnCacheSpec, uniform_layers
from retain.kernels.rope import Rope
from retain.kernels.shape_checks import WidthError
from retain.models.layers import Embedding, HeadLinear, Layer, Linear
from retain.models.qk_balance import find_qk_factors
from retain.models.weights import Weights


class DecoderLayer(Protocol):
    """A layer between the embedding and the head: a dataclass."""

    @property
    def norm1(self) -> Layer | None:
        """Return the norm that is nearest to attention's input, if there is one."""

    @property
    def attention(self) -> Attention | None:
        """Return the layer's attention, if it has one."""

    def emit(self, program: Program, x: int) -> None:
        """Write the layer into a program; it updates buffer `x` in place."""


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
        """What the layers cache."""
        return KVCacheSpec(self.caches, self.uncached_layers)


def multi_head_spec(
    vocab_size: int, hidden_size: int, num_heads: int, num_layers: int, max_position_embeddings: int
) -> ModelSpec:
    """Return the spec of full multi-head attention, with H = G and D = E / H."""
    head_dim = hidden_size // num_heads
    return ModelSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_heads=num_heads,
        max_position_embeddings=max_position_embeddings,
        caches=uniform_layers(num_heads, head_dim, (None,) * num_layers),
        attention=AttentionParams(head_dim**-0.5),
    )


@dataclass(frozen=True, eq=False)
class Attention:
    """Compute o_proj(attend(q, k, v)). `qkv_proj` returns all heads of q, then those of k, then those of v.

    `layer_idx` is the number of the layer's cache. A layer that shares that of an earlier one has heads of q alone.
    Sizes are those of the cache that it reads.

    Factors of heads (`qk_factors`, see qk_balance.py) leave products q.k as they are. Keys are cached less
    `key_offset`. That changes all scores of a query by the same number, so its weights stay. With a softcap or sink
    logits they would not: then there is no offset.
    """

    layer_idx: int
    spec: ModelSpec
    qkv_proj: Layer  # [T, E] -> [T, (H + G) D + G V], or [T, H D]; a key has D numbers, a value V
    o_proj: Linear
    rope: Rope | None = None
    qk_norm: Layer | None = None  # applied to the heads of q and k before rope
    qk_factors: Tensor | None = None  # float32 [H + G, D], applied next
    own_params: AttentionParams | None = None  # in place of the spec's
    v_norm: Layer | None = None  # applied to the heads of v
    query_growth: tuple[float, int] | None = None  # see Program.scale_by_position: queries grow with their position
    gate_proj: Linear | None = None  # [T, E] -> [T, H V]: outputs are multiplied by its sigmoid
    value_proj: HeadLinear | None = None  # applied to the outputs of heads, which o_proj then reads

    @property
    def sizes(self) -> OwnCacheSpec:
        """The sizes of the cache that the layer attends to."""
        return self.spec.kv_cache.attention(self.layer_idx)

    @property
    def num_written_heads(self) -> int:
        """The heads of k and v that the layer computes and caches: G, or 0."""
        is_own = self.spec.kv_cache.cached_layer(self.layer_idx) == self.layer_idx
        return self.sizes.num_kv_heads if is_own else 0

    @property
    def is_shared(self) -> bool:
        """Whether more than one layer attends to the cache, so that keys must stay as they are."""
        cache = self.spec.kv_cache
        own = cache.cached_layer(self.layer_idx)
        return any(cache.cached_layer(i) == own for i in range(self.spec.num_caches) if i != self.layer_idx)

    @cached_property
    def params(self) -> AttentionParams:
        """What the layer's attention needs beside q, k and v. (k has lost `key_offset` before it is handed on.)"""
        return replace(self._params_without_offset, key_offset=self.key_offset)

    @property
    def _params_without_offset(self) -> AttentionParams:
        return self.own_params or self.spec.attention

    @property
    def key_factors(self) -> Tensor | None:
        """The factors of keys, float32 [G, D]."""
        return None if self.qk_factors is None else self.qk_factors[self.spec.num_heads :]

    @cached_property
    def key_offset(self) -> Tensor | None:
        """The mean of keys' rotated bias, times their factors, over the first positions: float32 [G, D], or None.

        Biases are far larger than the rest of a key in some layers of Qwen2, where rotation is slow. They would take
        the range of the few bits that a slot has.
        """
        bias = getattr(self.qkv_proj, "bias", None)
        is_shift_invariant = self._params_without_offset.is_shift_invariant
        if bias is None or self.qk_norm or self.is_shared or not is_shift_invariant:
            return None
        s = self.spec
        D = self.sizes.k_dim
        end = (s.num_heads + self.num_written_heads) * D
        keys = bias[s.num_heads * D : end].float().view(-1, D)  # [G, D]
        keys = keys if self.key_factors is None else keys * self.key_factors
        if not self.rope:
            return keys
        return self.rope.apply(keys[None], self.rope.mean_angles)[0]

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        H = self.spec.num_heads
        G = self.num_written_heads
        a = self.sizes
        qkv_width = (H + G) * a.k_dim + G * a.v_dim
        qkv = program.buffer(f"qkv {qkv_width}", qkv_width)
        o = program.buffer(f"o {H * a.v_dim}", H * a.v_dim)
        self.qkv_proj.emit(program, x, qkv)
        if self.qk_norm:
            self.qk_norm.emit(program, qkv, qkv)
        if self.v_norm:
            self.v_norm.emit(program, qkv, qkv)
        if self.qk_factors is not None:
            program.scale(qkv, self.qk_factors.flatten())
        if self.query_growth:
            program.scale_by_position(qkv, H * a.k_dim, *self.query_growth)
        program.attend(qkv, o, self.layer_idx, (H, a.num_kv_heads, a.k_dim), self.params, self.rope)
        if self.gate_proj:
            gate = program.buffer(f"output gate {H * a.v_dim}", H * a.v_dim)
            self.gate_proj.emit(program, x, gate)
            program.activation(gate, gate, "sigmoid", H * a.v_dim)
            program.multiply(o, gate)
        if self.value_proj:
            values = program.buffer(f"values {self.value_proj.width}", self.value_proj.width)
            self.value_proj.emit(program, o, values)
            o = values
        self.o_proj.emit(program, o, out, add)


def emit_residual_branch(program: Program, x: int, hidden_size: int, norm: Layer, branch: Layer) -> None:
    """Write x += branch(norm(x)) into a program."""
    h = program.buffer("h", hidden_size)
    norm.emit(program, x, h)
    branch.emit(program, h, x, add=True)


@dataclass(frozen=True, eq=False)
class PreNormLayer:
    """Compute x += attention(norm1(x)), then x += mlp(norm2(x))."""

    norm1: Layer
    attention: Attention
    norm2: Layer
    mlp: Layer

    def emit(self, program: Program, x: int) -> None:
        """Write the layer into a program; it updates buffer `x` in place."""
        for norm, branch in ((self.norm1, self.attention), (self.norm2, self.mlp)):
            emit_residual_branch(program, x, self.attention.spec.hidden_size, norm, branch)


@dataclass(frozen=True, eq=False)
class BranchLayer:
    """Compute x += f(norm1(x)), where f is attention, or another layer in its place."""

    hidden_size: int
    norm1: Layer
    attention: Attention | None
    other: Layer | None = None

    def emit(self, program: Program, x: int) -> None:
        """Write the layer into a program; it updates buffer `x` in place."""
        branch = self.attention or self.other
        assert branch is not None
        emit_residual_branch(program, x, self.hidden_size, self.norm1, branch)


@dataclass(frozen=True, eq=False)
class ParallelLayer:
    """Compute x += attention(norm1(x)) + mlp(norm2(x)). Without norm2, both branches share norm1."""

    norm1: Layer
    attention: Attention
    norm2: Layer | None
    mlp: Layer

    def emit(self, program: Program, x: int) -> None:
        """Write the layer into a program; it updates buffer `x` in place."""
        E = self.attention.spec.hidden_size
        h = g = program.buffer("h", E)
        self.norm1.emit(program, x, h)
        if self.norm2:
            self.norm2.emit(program, x, g := program.buffer("g", E))
        self.attention.emit(program, h, x, add=True)
        self.mlp.emit(program, g, x, add=True)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A whole model, which `emit` writes into a program. `ropes` are all that its layers use."""

    spec: ModelSpec
    embedding: Embedding
    load_layer: Callable[[int], DecoderLayer]  # reads one layer's weights from the checkpoint
    norm: Layer | None
    lm_head: Layer
    ropes: Sequence[Rope] = ()
    num_layers: int | None = None  # where the spec's caches do not tell; None: they do
    num_outputs: int | None = None  # of the head; None: the vocabulary
    # By cache: of the layers that were emitted and have them, [G, D] each.
    key_factors: dict[int, Tensor] = field(default_factory=dict)

    def emit(self, program: Program) -> None:
        """Write the model into a program. Raises ValueError where a tensor's shape contradicts the spec.

        A layer is loaded when the one before it is emitted, so a program that packs weights holds few of the file's.
        """
        s = self.spec
        e = self.embedding
        num_positions = s.max_position_embeddings + e.position_offset
        if e.table.shape[0] < s.vocab_size or (e.position_table is not None and len(e.position_table) < num_positions):
            raise WidthError("the embedding has fewer rows than the vocabulary, or than the context")
        x = program.buffer("x", s.hidden_size)
        last = program.buffer("last", s.hidden_size)
        e.emit(program, x)
        for i in range(s.num_layers if self.num_layers is None else self.num_layers):
            self._load_balanced(i, program).emit(program, x)
        program.gather_rows(x, last)
        if self.norm:
            self.norm.emit(program, last, last)
        self.lm_head.emit(program, last, program.logits_buffer(self.num_outputs or s.vocab_size))
        program.finalize()

    def without_head(self, dtype: torch.dtype) -> Decoder:
        """Return the same model with its last states in place of logits: a head that changes nothing."""
        n = self.spec.hidden_size
        if n > self.spec.vocab_size:
            raise ValueError(f"a model with more hidden numbers ({n}) than tokens cannot embed: see --pooling")
        return replace(self, lm_head=Linear(torch.eye(n, dtype=dtype)), num_outputs=n)

    def _load_balanced(self, i: int, program: Program) -> DecoderLayer:
        layer = _balance(self.load_layer(i), program)
        a = layer.attention
        if a is not None and a.key_factors is not None:
            self.key_factors[a.layer_idx] = a.key_factors
        return layer


def _balance(layer: DecoderLayer, program: Program) -> DecoderLayer:
    """Return the layer with factors of its queries and keys."""
    a = layer.attention
    if a is None or a.is_shared:
        return layer
    heads = a.spec.num_heads, a.sizes.num_kv_heads, a.sizes.k_dim
    factors = find_qk_factors(layer.norm1, a.qkv_proj, a.qk_norm, a.rope, a.key_offset, heads, program.row_energies)
    return cast(DecoderLayer, replace(cast(Any, layer), attention=replace(a, qk_factors=factors)))


def scope_base_model(w: Weights, name: str, *prefixes: str) -> Weights:
    """Scope the weights to the first prefix under which `name` exists, else to the first prefix.

    The file of a base model lacks the prefix of the causal language model.
    """
    return next((w.scope(p) for p in prefixes if p + name in w), w.scope(prefixes[0]))
