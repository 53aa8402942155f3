"""What every family is made of: a description, a few parts, and the decoder that strings them together.

A family (families/<model_type>.py) says in `spec` how large the model is and how it looks at the cache, and composes in
`build` a `Decoder` of the parts below. The decoder computes and knows no cache: attention is a function it is given,

    attend(layer, q [T, H, D], k [T, G, D], v [T, G, D]) -> o [T, H, D]

which writes k and v into slots and looks. So one and the same code serves prefill chunks, decoding and verification.
Letters: T tokens of the step, E hidden size, H query heads, G kv heads, R = H / G, D head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from retain.models.matrix import Matrix, rows, stack
from retain.models.rope import Angles, Rope
from retain.models.weights import Weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Part = Callable[[Tensor], Tensor]  # [T, in] -> [T, out]
Layer = Callable[[Tensor, dict[Rope, Angles], Attend], Tensor]  # x [T, E] -> [T, E]


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


class Linear:
    """y = x W^T + b; weight [out, in], dense or quantised."""

    def __init__(self, weight: Matrix, bias: Tensor | None = None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]. Quanta are multiplied in float32: this is what kernels are held to, and slow."""
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.dense(), bias).to(x.dtype)


def optional(w: Weights, name: str) -> Tensor | None:
    """The tensor of that name, or None where the file has none."""
    if name not in w:
        return None
    return w[name]


def linear(w: Weights, *names: str, transposed: bool = False) -> Linear:
    """The linear layers of these names stacked into one product (q over k over v). `transposed`: stored [in, out]."""
    weights = [w.matrix(f"{n}.weight", transposed=transposed) for n in names]
    biases = [w[f"{n}.bias"] for n in names if f"{n}.bias" in w]
    if biases and len(biases) != len(names):
        raise ValueError(f"some but not all of {', '.join(names)} have a bias")
    return Linear(stack(weights), torch.cat(biases) if biases else None)


@dataclass(frozen=True, eq=False)
class Clip:
    """What a linear layer gives, held between -at and at."""

    linear: Linear
    at: float

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return self.linear(x).clamp(-self.at, self.at)


@dataclass(frozen=True, eq=False)
class Chain:
    """Parts one after another."""

    parts: tuple[Part, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in of the first] -> [T, out of the last]."""
        for part in self.parts:
            x = part(x)
        return x


@dataclass(frozen=True, eq=False)
class Embedding:
    """project(table[id]) * scale + places[pos + offset], each where it is there; only those rows are dequantised."""

    table: Matrix  # [V, E'], E' = E unless projected
    scale: float = 1.0
    places: Tensor | None = None  # learned positions [offset + context, E]
    offset: int = 0
    project: Linear | None = None  # [E, E']
    dtype: torch.dtype = torch.bfloat16  # of what comes out of a quantised table

    def __call__(self, ids: Tensor, pos: Tensor) -> Tensor:
        """Tokens and their positions, int64 [T] both -> [T, E]."""
        found = rows(self.table, ids)  # [T, E']
        x = found if isinstance(found, Tensor) else found.dense(self.dtype)
        x = self.project(x) if self.project else x
        x = x * self.scale if self.scale != 1 else x
        return x if self.places is None else x + F.embedding(pos + self.offset, self.places)


class RMSNorm:
    """x / rms(x) * weight, in float32 throughout (arXiv 1910.07467). weight [E], or one row a head: [H + G, D]."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps = weight.float(), eps

    def __call__(self, x: Tensor) -> Tensor:
        """Any shape ending in the weight's."""
        return F.rms_norm(x.float(), self.weight.shape[-1:], eps=self.eps).mul_(self.weight).to(x.dtype)


class LayerNorm:
    """(x - mean) / deviation * weight + bias (arXiv 1607.06450)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float):
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        """Any shape ending in the weight's."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def layer_norm(w: Weights, name: str, eps: float) -> LayerNorm:
    """The layer norm of that name, with a bias where the file has one."""
    return LayerNorm(w[f"{name}.weight"], optional(w, f"{name}.bias"), eps)


ACTIVATIONS: Mapping[str, Part] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
SYNONYMS = {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"}


def activation(name: str) -> str:
    """The one of ACTIVATIONS that a config names. Raises ValueError for one that is not known here."""
    known = SYNONYMS.get(name, name)
    if known not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported")
    return known


class MLP:
    """down(act(up(x))). `act` is one of ACTIVATIONS, whatever the config called it."""

    def __init__(self, up: Linear, down: Linear, act: str):
        self.up, self.down, self.act = up, down, activation(act)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        return self.down(ACTIVATIONS[self.act](self.up(x)))


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate over up in one product (Shazeer, GLU variants, arXiv 2002.05202)."""

    def __init__(self, gate_up: Linear, down: Linear, act: str):
        self.gate_up, self.down, self.act = gate_up, down, activation(act)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(ACTIVATIONS[self.act](gate) * up)


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


@dataclass(frozen=True, eq=False)
class Decoder:
    """A whole model: `forward` for all fresh tokens, `logits` for the few that are sampled from."""

    spec: Spec
    embed: Embedding
    layers: Sequence[Layer]
    norm: Part | None
    head: Part
    ropes: Sequence[Rope] = ()  # all that the layers turn by

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


def head(w: Weights, name: str, table: Matrix, tied: bool) -> Linear:
    """The output layer: where they are tied the embedding again, the same object, else the file's own."""
    weight = table if tied else w.matrix(f"{name}.weight", embedding=True)
    return Linear(weight, optional(w, f"{name}.bias"))


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
