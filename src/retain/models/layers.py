"""The layers that decoders are made of: linear layers, norms, embeddings, MLPs.

`emit` yields what a layer computes as operations (kernels/ops.py), which a backend runs. What an operation computes is
defined once, by the reference backend.
Letters: T fresh tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from retain.files import quote
from retain.kernels import ops
from retain.kernels.head_columns import HeadColumns
from retain.kernels.ops import ACTIVATIONS, Buffer, NamedRows, Operation
from retain.kernels.weights.weight import Weight, select_rows, stack_rows
from retain.models.weights import Weights


class Layer(Protocol):
    """A function of one hidden state to another, applied to each token."""

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""


def copy_row(x: Buffer, out: Buffer, first: int = 0) -> Operation:
    """Return the operation that copies rows of `x` to the columns of `out` from `first` on."""
    return copy_run(x, out, 0, first, x.width)


def copy_run(x: Buffer, out: Buffer, source: int, target: int, width: int) -> Operation:
    """Return the operation that copies adjacent columns of `x`, from `source` on, to those from `target` on."""
    return ops.CopyColumns(x, out, HeadColumns(1, width, width, source), HeadColumns(1, width, width, target))


class Linear:
    """Compute y = x W^T + b. The weight [out, in] is dense, quantized, or a stack of several kinds.

    `rows`: what the checkpoint calls its rows, where they are as it has them, and adapters may add to them.
    """

    def __init__(self, weight: Weight, bias: Tensor | None = None, rows: tuple[NamedRows, ...] = ()):
        self.weight = weight
        self.bias = bias
        self.rows = rows

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        yield ops.MatMul(x, out, self.weight, self.bias, add, self.rows)

    def select(self, index: Tensor) -> Linear:
        """Return the layer that computes these outputs alone, int64 [n]. Raises IndexError."""
        rows = (self.rows[0].select(index),) if len(self.rows) == 1 else ()
        return Linear(select_rows(self.weight, index), None if self.bias is None else self.bias[index], rows)


def load_linear(w: Weights, *names: str, bias: bool, transposed: bool = False) -> Linear:
    """Load linear layers, stacked into one (for example q over k over v). `transposed`: the file stores [in, out].

    Whether they have biases is the family's word, or its config's, not the file's.
    """
    weights = [w.load_matrix(f"{n}.weight", transposed=transposed) for n in names]
    rows = tuple(NamedRows(w.prefix + n, x.shape[0]) for n, x in zip(names, weights, strict=True))
    return Linear(stack_rows(weights), torch.cat([w[f"{n}.bias"] for n in names]) if bias else None, rows)


@dataclass(frozen=True, eq=False)
class HeadLinear:
    """Multiply each head with a matrix of its own: [T, H in] -> [T, H out]. The matrices lie one below the other."""

    weight: Weight  # [H out, in]
    num_heads: int  # H

    @property
    def width(self) -> int:
        """Return the number of values in an output row: those of all heads."""
        return self.weight.shape[0]

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which writes `out`. Raises ValueError if the output is to be added."""
        if add:
            raise ValueError("the output of a linear layer of each head cannot be added to a buffer")
        H = self.num_heads
        source, target = (HeadColumns(H, n, n) for n in (self.weight.shape[1], self.width // H))
        yield ops.HeadMatMul(x, out, self.weight, source, target)


@dataclass(frozen=True, eq=False)
class ClippedLinear:
    """Compute a linear layer and clip the result to [-limit, limit]."""

    linear: Linear
    limit: float

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        if add:
            raise ValueError("the output of a clipped linear layer cannot be added to a buffer")
        yield from self.linear.emit(x, out)
        yield ops.Clip(out, self.limit)


@dataclass(frozen=True, eq=False)
class CappedHead:
    """Compute a head whose logits are bounded: limit tanh(x / limit)."""

    linear: Linear
    limit: float

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        yield from self.linear.emit(x, out, add)
        yield ops.Softcap(out, self.limit)


@dataclass(frozen=True, eq=False)
class Sequential:
    """Apply linear layers one after another."""

    layers: tuple[Linear, ...]

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        *first, last = self.layers
        for i, layer in enumerate(first):
            hidden = Buffer(f"chain {i}", layer.weight.shape[0])
            yield from layer.emit(x, hidden)
            x = hidden
        yield from last.emit(x, out, add)


@dataclass(frozen=True, eq=False)
class Embedding:
    """Compute projection(table[id]) * scale + position_table[pos + position_offset].

    Without a projection or a position table, that term is left out. Only the rows of the given ids are dequantized.
    """

    table: Weight  # [V, E'], E' = E unless projected
    scale: float = 1.0
    position_table: Tensor | None = None  # learned positions [offset + context, E]
    position_offset: int = 0
    projection: Linear | None = None  # [E, E']

    def emit(self, out: Buffer) -> Iterator[Operation]:
        """Yield the operations of the layer, which fills buffer `out` for the ids and positions of a step."""
        if self.projection:
            narrow = Buffer("narrow", self.table.shape[1])
            yield ops.Embed(narrow, self.table, self.scale)
            yield from self.projection.emit(narrow, out)
        else:
            yield ops.Embed(out, self.table, self.scale)
        if self.position_table is not None:
            yield ops.EmbedPosition(out, self.position_table, self.position_offset)


class RMSNorm:
    """Compute x / rms(x) * weight in float32 (arXiv 1910.07467). weight [E], or [heads, D] with a row for each head.

    Heads begin at number `first` of a row.
    """

    def __init__(self, weight: Tensor, eps: float, first: int = 0):
        self.weight = weight.float()
        self.eps = eps
        self.first = first

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the norm. A weight with a row for each head reads and writes only those heads."""
        yield ops.Norm(x, out, self.weight, None, self.eps, subtract_mean=False, add=add, first=self.first)


@dataclass(frozen=True, eq=False)
class PartNorms:
    """Apply RMS norms to parts of a row, which may differ in width. Each weight is [heads, D], as in RMSNorm."""

    norms: tuple[RMSNorm, ...]

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        for norm in self.norms:
            yield from norm.emit(x, out, add)


def load_norm(w: Weights, name: str, eps: float, offset: float = 0.0) -> RMSNorm:
    """Load a norm that multiplies by w + `offset`. The sum is float32: near 1, bfloat16 has only two digits."""
    return RMSNorm(w[f"{name}.weight"].float() + offset, eps)


class LayerNorm:
    """Compute (x - mean) / deviation * weight + bias (arXiv 1607.06450)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float):
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        yield ops.Norm(x, out, self.weight, self.bias, self.eps, subtract_mean=True, add=add)


def load_layer_norm(w: Weights, name: str, eps: float, bias: bool = True) -> LayerNorm:
    """Load a layer norm: its weight, and its bias unless it has none."""
    return LayerNorm(w[f"{name}.weight"], w[f"{name}.bias"] if bias else None, eps)


ACTIVATION_ALIASES = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def resolve_activation(name: str) -> str:
    """Return the name of an operation's activation for the name in a config. Raises ValueError for an unknown name."""
    resolved = ACTIVATION_ALIASES.get(name, name)
    if resolved not in ACTIVATIONS or resolved == "swiglu_oai":  # which is a family's own
        raise ValueError(f"activation {quote(name)} is not supported")
    return resolved


class MLP:
    """Compute down(act(up(x))). `act` is the activation's name in the config."""

    def __init__(self, up_proj: Linear, down_proj: Linear, act: str):
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.act = resolve_activation(act)

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        n = self.up_proj.weight.shape[0]
        wide = Buffer(f"wide {n}", n)
        yield from self.up_proj.emit(x, wide)
        yield ops.Activate(wide, wide, self.act)
        yield from self.down_proj.emit(wide, out, add)


class GatedMLP:
    """Compute down(act(gate(x)) * up(x)), with gate stacked over up in one linear layer (arXiv 2002.05202)."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear, act: str):
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.act = resolve_activation(act)

    def emit(self, x: Buffer, out: Buffer, add: bool = False) -> Iterator[Operation]:
        """Yield the operations of the layer, which reads buffer `x` and writes `out`, or adds to it."""
        n = self.gate_up_proj.weight.shape[0] // 2
        gate_up = Buffer(f"gate, up {n}", 2 * n)
        wide = Buffer(f"wide {n}", n)
        yield from self.gate_up_proj.emit(x, gate_up)
        yield ops.Activate(gate_up, wide, self.act, gated=True)
        yield from self.down_proj.emit(wide, out, add)


def load_lm_head(w: Weights, name: str, table: Weight, tied_to: str | None, bias: bool = False) -> Linear:
    """Load the output layer. `tied_to` is the full name of the embedding `table` that a tied one uses.

    As in transformers, a head that is in the file and differs from the embedding counts, even where they are tied. A
    model that embeds may have none: its file is then as good as one with any.
    """
    if not w.has_head and f"{name}.weight" not in w:
        return Linear(table)
    is_tied = tied_to is not None and (f"{name}.weight" not in w or w.equal(f"{name}.weight", tied_to))
    weight = table if is_tied else w.load_matrix(f"{name}.weight", embedding=True)
    return Linear(weight, w[f"{name}.bias"] if bias else None)
