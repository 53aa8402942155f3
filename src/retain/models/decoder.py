"""What every family is made of: a description, layers of parts (parts.py), and the decoder that strings them together.

A family (families/<model_type>.py) says in `spec` how large the model is and how it looks at the cache, and composes in
`build` a `Decoder`. The decoder computes and knows no cache: attention is a function it is given,

    attend(layer, q [T, H, D], k [T, G, D], v [T, G, D]) -> o [T, H, D]

which writes k and v into slots and looks. So one and the same code serves prefill chunks, decoding and verification.
Like the parts, layers are said twice: `__call__` defines in torch what `emit` writes into a program.
Letters: T tokens of the step, E hidden size, H query heads, G kv heads, R = H / G, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from retain.kernels.api import Program
from retain.models.layers import Embedding, Layer, Linear
from retain.models.rope import Angles, Rope
from retain.models.weights import Weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class DecoderLayer(Protocol):
    """One of the layers between embedding and head."""

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """[T, E] -> [T, E]."""
        ...

    def emit(self, program: Program, x: int) -> None:
        """The same, in place."""
        ...


@dataclass(frozen=True)
class ModelSpec:
    """The size of a model and how its layers look at the cache."""

    vocab_size: int
    hidden_size: int
    num_heads: int  # H
    num_kv_heads: int  # G
    head_dim: int  # D
    max_position_embeddings: int  # the longest text, in tokens
    windows: tuple[int | None, ...]  # one a layer: how far back it sees; None is everything
    scale: float  # of q.k
    alibi_slopes: tuple[float, ...] | None = None  # ALiBi, one a query head

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.windows)


def multi_head_spec(
    vocab_size: int, hidden_size: int, num_heads: int, num_layers: int, max_position_embeddings: int
) -> ModelSpec:
    """The spec of plain attention: a kv head for every query head, everything seen, the hidden size shared by heads."""
    dim = hidden_size // num_heads
    return ModelSpec(
        vocab_size, hidden_size, num_heads, num_heads, dim, max_position_embeddings, (None,) * num_layers, dim**-0.5
    )


@dataclass(frozen=True, eq=False)
class Attention:
    """out(attend(q, k, v)) of layer `i`; `qkv` gives the heads of q over those of k over those of v."""

    layer_idx: int
    spec: ModelSpec
    qkv_proj: Layer  # [T, E] -> [T, (H + 2 G) D]
    o_proj: Linear
    rope: Rope | None = None
    qk_norm: Layer | None = None  # of the heads of q and k, before they are turned

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """[T, E] -> [T, E]."""
        s = self.spec
        heads = self.qkv_proj(x).view(x.shape[0], -1, s.head_dim)  # [T, H + 2 G, D]
        qk, v = torch.split(heads, [s.num_heads + s.num_kv_heads, s.num_kv_heads], dim=1)
        if self.qk_norm:
            qk = self.qk_norm(qk)
        if self.rope:
            qk = self.rope.apply(qk, angles[self.rope])
        q, k = torch.split(qk, [s.num_heads, s.num_kv_heads], dim=1)
        return self.o_proj(attend(self.layer_idx, q, k, v).flatten(1))

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """The same from buffer `x` into buffer `out`, or added to what that holds."""
        s, turned = self.spec, self.spec.num_heads + self.spec.num_kv_heads
        qkv, o = (
            program.buffer("qkv", (turned + s.num_kv_heads) * s.head_dim),
            program.buffer("o", s.num_heads * s.head_dim),
        )
        self.qkv_proj.emit(program, x, qkv)
        if self.qk_norm:
            self.qk_norm.emit(program, qkv, qkv)
        if self.rope:
            program.rope(qkv, self.rope.freqs, self.rope.attention_factor, self.rope.interleaved, turned, s.head_dim)
        slopes = None if s.alibi_slopes is None else torch.tensor(s.alibi_slopes)
        program.attend(qkv, o, self.layer_idx, (s.num_heads, s.num_kv_heads, s.head_dim), s.scale, slopes)
        self.o_proj.emit(program, o, out, add)


@dataclass(frozen=True, eq=False)
class PreNormLayer:
    """The usual layer: x += attention(norm1(x)), then x += mlp(norm2(x))."""

    norm1: Layer
    attention: Attention
    norm2: Layer
    mlp: Layer

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """[T, E] -> [T, E]."""
        x = x + self.attention(self.norm1(x), angles, attend)
        return x + self.mlp(self.norm2(x))

    def emit(self, program: Program, x: int) -> None:
        """See Layer."""
        h = program.buffer("h", self.attention.spec.hidden_size)
        self.norm1.emit(program, x, h)
        self.attention.emit(program, h, x, add=True)
        self.norm2.emit(program, x, h)
        self.mlp.emit(program, h, x, add=True)


@dataclass(frozen=True, eq=False)
class ParallelLayer:
    """Both branches see the same x: x += attention(norm1(x)) + mlp(norm2(x)). Without norm2 they share the first."""

    norm1: Layer
    attention: Attention
    norm2: Layer | None
    mlp: Layer

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """[T, E] -> [T, E]."""
        h = self.norm1(x)
        return x + self.attention(h, angles, attend) + self.mlp(self.norm2(x) if self.norm2 else h)

    def emit(self, program: Program, x: int) -> None:
        """See Layer."""
        E = self.attention.spec.hidden_size
        h = g = program.buffer("h", E)
        self.norm1.emit(program, x, h)
        if self.norm2:
            self.norm2.emit(program, x, g := program.buffer("g", E))
        self.attention.emit(program, h, x, add=True)
        self.mlp.emit(program, g, x, add=True)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A whole model: `forward` for all fresh tokens, `logits` for the few that are sampled from."""

    spec: ModelSpec
    embedding: Embedding
    load_layer: Callable[[int], DecoderLayer]  # reads the weights of one layer
    norm: Layer | None
    lm_head: Layer
    ropes: Sequence[Rope] = ()  # all that the layers turn by

    @cached_property
    def layers(self) -> list[DecoderLayer]:
        """All of them, for who computes by them. (A program packs one and lets it go before the next is read.)"""
        return [self.load_layer(i) for i in range(self.spec.num_layers)]

    def forward(self, ids: Tensor, pos: Tensor, attend: Attend) -> Tensor:
        """Fresh tokens at their positions, int64 [T] both -> hidden states [T, E]."""
        x = self.embedding(ids, pos)  # [T, E]
        angles = {rope: rope.angles(pos, x.dtype) for rope in self.ropes}
        for layer in self.layers:
            x = layer(x, angles, attend)
        return x

    def compute_logits(self, x: Tensor) -> Tensor:
        """Hidden states [N, E] -> float32 logits [N, V]."""
        return self.lm_head(self.norm(x) if self.norm else x).float()

    def emit(self, program: Program) -> None:
        """Forward and logits as a program. Raises ValueError where a shape is not as the spec says."""
        s, places = self.spec, self.embedding.position_table
        if self.embedding.table.shape[0] < s.vocab_size or (
            places is not None and len(places) < s.max_position_embeddings + self.embedding.position_offset
        ):
            raise ValueError("the embedding has fewer rows than the vocabulary, or than the context")
        x, last = program.buffer("x", s.hidden_size), program.buffer("last", s.hidden_size)
        self.embedding.emit(program, x)
        for i in range(s.num_layers):
            self.load_layer(i).emit(program, x)
        program.gather_rows(x, last)
        if self.norm:
            self.norm.emit(program, last, last)
        self.lm_head.emit(program, last, program.logits_buffer(s.vocab_size))
        program.finalize()


def scope_base_model(w: Weights, name: str, *prefixes: str) -> Weights:
    """The weights below the first prefix that has `name` (a base model's file lacks the causal model's prefix)."""
    return next((w.scope(p) for p in prefixes if p + name in w), w.scope(prefixes[0]))


def get_layer_windows(config: dict[str, Any], layer_types: Sequence[str]) -> tuple[int | None, ...]:
    """How far back each layer sees: `layer_types` says which kind it is, or, where the config has none, `kinds`."""
    layer_types = config.get("layer_types") or layer_types
    sees = {"full_attention": None, "sliding_attention": config["sliding_window"]}
    if len(layer_types) != config["num_hidden_layers"] or not set(layer_types) <= set(sees):
        raise ValueError(f"layer_types {layer_types!r} is not supported: one of {', '.join(sees)} for every layer")
    return tuple(sees[kind] for kind in layer_types)


def check_supported(config: dict[str, Any], **supported: Any) -> None:
    """Refuse a config that asks for what a family here does not compute: each key's only value (or lack of one)."""
    for key, value in supported.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"a model with {key}={config[key]!r} is not supported (only {value!r})")
