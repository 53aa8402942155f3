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

from retain.kernels import Program
from retain.models.parts import Embedding, Linear, Part
from retain.models.rope import Angles, Rope
from retain.models.weights import Weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Layer(Protocol):
    """One of the layers between embedding and head."""

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """[T, E] -> [T, E]."""
        ...

    def emit(self, p: Program, x: int) -> None:
        """The same, in place."""
        ...


@dataclass(frozen=True)
class Spec:
    """The size of a model and how its layers look at the cache."""

    vocab: int
    hidden: int
    heads: int  # H
    kv_heads: int  # G
    head_dim: int  # D
    context: int  # the longest text, in tokens
    windows: tuple[int | None, ...]  # one a layer: how far back it sees; None is everything
    scale: float  # of q.k
    slopes: tuple[float, ...] | None = None  # ALiBi, one a query head

    @property
    def layers(self) -> int:
        """L."""
        return len(self.windows)


def multi_head(vocab: int, hidden: int, heads: int, layers: int, context: int) -> Spec:
    """The spec of plain attention: a kv head for every query head, everything seen, the hidden size shared by heads."""
    dim = hidden // heads
    return Spec(vocab, hidden, heads, heads, dim, context, (None,) * layers, dim**-0.5)


@dataclass(frozen=True, eq=False)
class Attention:
    """out(attend(q, k, v)) of layer `i`; `qkv` gives the heads of q over those of k over those of v."""

    i: int
    spec: Spec
    qkv: Part  # [T, E] -> [T, (H + 2 G) D]
    out: Linear
    rope: Rope | None = None
    norm: Part | None = None  # of the heads of q and k, before they are turned

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """[T, E] -> [T, E]."""
        s = self.spec
        heads = self.qkv(x).view(x.shape[0], -1, s.head_dim)  # [T, H + 2 G, D]
        qk, v = torch.split(heads, [s.heads + s.kv_heads, s.kv_heads], dim=1)
        if self.norm:
            qk = self.norm(qk)
        if self.rope:
            qk = self.rope.turn(qk, angles[self.rope])
        q, k = torch.split(qk, [s.heads, s.kv_heads], dim=1)
        return self.out(attend(self.i, q, k, v).flatten(1))

    def emit(self, p: Program, x: int, out: int, add: bool = False) -> None:
        """The same from buffer `x` into buffer `out`, or added to what that holds."""
        s, turned = self.spec, self.spec.heads + self.spec.kv_heads
        qkv, o = p.buffer("qkv", (turned + s.kv_heads) * s.head_dim), p.buffer("o", s.heads * s.head_dim)
        self.qkv.emit(p, x, qkv)
        if self.norm:
            self.norm.emit(p, qkv, qkv)
        if self.rope:
            p.turn(qkv, self.rope.freqs, self.rope.gain, self.rope.pairs, turned, s.head_dim)
        slopes = None if s.slopes is None else torch.tensor(s.slopes)
        p.attend(qkv, o, self.i, (s.heads, s.kv_heads, s.head_dim), s.scale, slopes)
        self.out.emit(p, o, out, add)


@dataclass(frozen=True, eq=False)
class PreNorm:
    """The usual layer: x += attention(norm1(x)), then x += mlp(norm2(x))."""

    norm1: Part
    attention: Attention
    norm2: Part
    mlp: Part

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """[T, E] -> [T, E]."""
        x = x + self.attention(self.norm1(x), angles, attend)
        return x + self.mlp(self.norm2(x))

    def emit(self, p: Program, x: int) -> None:
        """See Layer."""
        h = p.buffer("h", self.attention.spec.hidden)
        self.norm1.emit(p, x, h)
        self.attention.emit(p, h, x, add=True)
        self.norm2.emit(p, x, h)
        self.mlp.emit(p, h, x, add=True)


@dataclass(frozen=True, eq=False)
class Parallel:
    """Both branches see the same x: x += attention(norm1(x)) + mlp(norm2(x)). Without norm2 they share the first."""

    norm1: Part
    attention: Attention
    norm2: Part | None
    mlp: Part

    def __call__(self, x: Tensor, angles: dict[Rope, Angles], attend: Attend) -> Tensor:
        """[T, E] -> [T, E]."""
        h = self.norm1(x)
        return x + self.attention(h, angles, attend) + self.mlp(self.norm2(x) if self.norm2 else h)

    def emit(self, p: Program, x: int) -> None:
        """See Layer."""
        E = self.attention.spec.hidden
        h = g = p.buffer("h", E)
        self.norm1.emit(p, x, h)
        if self.norm2:
            self.norm2.emit(p, x, g := p.buffer("g", E))
        self.attention.emit(p, h, x, add=True)
        self.mlp.emit(p, g, x, add=True)


@dataclass(frozen=True, eq=False)
class Decoder:
    """A whole model: `forward` for all fresh tokens, `logits` for the few that are sampled from."""

    spec: Spec
    embed: Embedding
    layer: Callable[[int], Layer]  # reads the weights of one layer
    norm: Part | None
    head: Part
    ropes: Sequence[Rope] = ()  # all that the layers turn by

    @cached_property
    def layers(self) -> list[Layer]:
        """All of them, for who computes by them. (A program packs one and lets it go before the next is read.)"""
        return [self.layer(i) for i in range(self.spec.layers)]

    def forward(self, ids: Tensor, pos: Tensor, attend: Attend) -> Tensor:
        """Fresh tokens at their positions, int64 [T] both -> hidden states [T, E]."""
        x = self.embed(ids, pos)  # [T, E]
        angles = {rope: rope.angles(pos, x.dtype) for rope in self.ropes}
        for layer in self.layers:
            x = layer(x, angles, attend)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Hidden states [N, E] -> float32 logits [N, V]."""
        return self.head(self.norm(x) if self.norm else x).float()

    def emit(self, p: Program) -> None:
        """Forward and logits as a program. Raises ValueError where a shape is not as the spec says."""
        s, places = self.spec, self.embed.places
        if self.embed.table.shape[0] < s.vocab or (places is not None and len(places) < s.context + self.embed.offset):
            raise ValueError("the embedding has fewer rows than the vocabulary, or than the context")
        x, last = p.buffer("x", s.hidden), p.buffer("last", s.hidden)
        self.embed.emit(p, x)
        for i in range(s.layers):
            self.layer(i).emit(p, x)
        p.pick(x, last)
        if self.norm:
            self.norm.emit(p, last, last)
        self.head.emit(p, last, p.logits(s.vocab))
        p.finish()


def below(w: Weights, name: str, *prefixes: str) -> Weights:
    """The weights below the first prefix that has `name` (a base model's file lacks the causal model's prefix)."""
    return next((w.at(p) for p in prefixes if p + name in w), w.at(prefixes[0]))


def windows(config: dict[str, Any], kinds: Sequence[str]) -> tuple[int | None, ...]:
    """How far back each layer sees: `layer_types` says which kind it is, or, where the config has none, `kinds`."""
    kinds = config.get("layer_types") or kinds
    sees = {"full_attention": None, "sliding_attention": config["sliding_window"]}
    if len(kinds) != config["num_hidden_layers"] or not set(kinds) <= set(sees):
        raise ValueError(f"layer_types {kinds!r} is not supported: one of {', '.join(sees)} for every layer")
    return tuple(sees[kind] for kind in kinds)


def need(config: dict[str, Any], **only: Any) -> None:
    """Refuse a config that asks for what a family here does not compute: each key's only value (or lack of one)."""
    for key, value in only.items():
        if config.get(key) not in (None, value):
            raise ValueError(f"a model with {key}={config[key]!r} is not supported (only {value!r})")
