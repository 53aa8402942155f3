"""The parts of a decoder: products, norms, embeddings, MLPs, each said twice.

`__call__` computes with torch and defines the part; `emit` writes the same into a program (kernels/__init__.py), which
a backend runs much faster. Tests hold the two equal. Letters: T tokens of the step, E hidden size, V vocabulary.
What is not known here: layers and how they are strung together, attention, files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from retain.kernels.api import Program
from retain.kernels.quantized import Weight, concat_rows, select_rows
from retain.models.weights import Weights


class Layer(Protocol):
    """Something between rows and rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        ...

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """The same from buffer `x` into buffer `out`, or added to what that holds."""
        ...


class Linear:
    """y = x W^T + b; weight [out, in], dense or quantised."""

    def __init__(self, weight: Weight, bias: Tensor | None = None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]. Quanta are multiplied in float32: this is what kernels are held to, and slow."""
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.dequantize(), bias).to(x.dtype)

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Part."""
        program.linear(x, out, self.weight, self.bias, add)


def load_optional(w: Weights, name: str) -> Tensor | None:
    """The tensor of that name, or None where the file has none."""
    if name not in w:
        return None
    return w[name]


def load_linear(w: Weights, *names: str, transposed: bool = False) -> Linear:
    """The linear layers of these names stacked into one product (q over k over v). `transposed`: stored [in, out]."""
    weights = [w.load_matrix(f"{n}.weight", transposed=transposed) for n in names]
    biases = [w[f"{n}.bias"] for n in names if f"{n}.bias" in w]
    if biases and len(biases) != len(names):
        raise ValueError(f"some but not all of {', '.join(names)} have a bias")
    return Linear(concat_rows(weights), torch.cat(biases) if biases else None)


@dataclass(frozen=True, eq=False)
class ClippedLinear:
    """What a linear layer gives, held between -at and at."""

    linear: Linear
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        return self.linear(x).clamp(-self.limit, self.limit)

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Part."""
        if add:
            raise ValueError("a clipped product cannot be added")
        self.linear.emit(program, x, out)
        program.clip(out, self.limit)


@dataclass(frozen=True, eq=False)
class Sequential:
    """Products one after another."""

    layers: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, in of the first] -> [T, out of the last]."""
        for part in self.layers:
            x = part(x)
        return x

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Part."""
        *before, last = self.layers
        for i, part in enumerate(before):
            part.emit(program, x, middle := program.buffer(f"chain {i}", part.weight.shape[0]))
            x = middle
        last.emit(program, x, out, add)


@dataclass(frozen=True, eq=False)
class Embedding:
    """project(table[id]) * scale + places[pos + offset], each where it is there; only those rows are dequantised."""

    table: Weight  # [V, E'], E' = E unless projected
    scale: float = 1.0
    position_table: Tensor | None = None  # learned positions [offset + context, E]
    position_offset: int = 0
    projection: Linear | None = None  # [E, E']
    dtype: torch.dtype = torch.bfloat16  # of what comes out of a quantised table

    def __call__(self, ids: Tensor, pos: Tensor) -> Tensor:
        """Tokens and their positions, int64 [T] both -> [T, E]."""
        found = select_rows(self.table, ids)  # [T, E']
        x = found if isinstance(found, Tensor) else found.dequantize(self.dtype)
        x = self.projection(x) if self.projection else x
        x = x * self.scale if self.scale != 1 else x
        return x if self.position_table is None else x + F.embedding(pos + self.position_offset, self.position_table)

    def emit(self, program: Program, out: int) -> None:
        """The same for the ids and positions of a step, into buffer `out`."""
        if self.projection:
            narrow = program.buffer("narrow", self.table.shape[1])
            program.embedding(narrow, self.table, self.scale)
            self.projection.emit(program, narrow, out)
        else:
            program.embedding(out, self.table, self.scale)
        if self.position_table is not None:
            program.position_embedding(out, self.position_table, self.position_offset)


class RMSNorm:
    """x / rms(x) * weight, in float32 throughout (arXiv 1910.07467). weight [E], or one row a head: [H + G, D]."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight, self.eps = weight.float(), eps

    def __call__(self, x: Tensor) -> Tensor:
        """Any shape ending in the weight's."""
        return F.rms_norm(x.float(), self.weight.shape[-1:], eps=self.eps).mul_(self.weight).to(x.dtype)

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Part. With a row of weights a head, only the numbers of those heads are read and written."""
        program.norm(x, out, self.weight, None, self.eps, subtract_mean=False, add=add)


class LayerNorm:
    """(x - mean) / deviation * weight + bias (arXiv 1607.06450)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float):
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        """Any shape ending in the weight's."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Part."""
        program.norm(x, out, self.weight, self.bias, self.eps, subtract_mean=True, add=add)


def load_layer_norm(w: Weights, name: str, eps: float) -> LayerNorm:
    """The layer norm of that name, with a bias where the file has one."""
    return LayerNorm(w[f"{name}.weight"], load_optional(w, f"{name}.bias"), eps)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
ACTIVATION_ALIASES = {
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def resolve_activation(name: str) -> str:
    """The one of ACTIVATIONS that a config names. Raises ValueError for one that is not known here."""
    known = ACTIVATION_ALIASES.get(name, name)
    if known not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not supported")
    return known


class MLP:
    """down(act(up(x))). `act` is one of ACTIVATIONS, whatever the config called it."""

    def __init__(self, up_proj: Linear, down_proj: Linear, act: str):
        self.up_proj, self.down_proj, self.act = up_proj, down_proj, resolve_activation(act)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        return self.down_proj(ACTIVATIONS[self.act](self.up_proj(x)))

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Part."""
        wide = program.buffer("wide", n := self.up_proj.weight.shape[0])
        self.up_proj.emit(program, x, wide)
        program.activation(wide, wide, self.act, n)
        self.down_proj.emit(program, wide, out, add)


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate over up in one product (Shazeer, GLU variants, arXiv 2002.05202)."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear, act: str):
        self.gate_up_proj, self.down_proj, self.act = gate_up_proj, down_proj, resolve_activation(act)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, E] -> [T, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(ACTIVATIONS[self.act](gate) * up)

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Part."""
        n = self.gate_up_proj.weight.shape[0] // 2
        both, wide = program.buffer("gate, up", 2 * n), program.buffer("wide", n)
        self.gate_up_proj.emit(program, x, both)
        program.activation(both, wide, self.act, n, gated=True)
        self.down_proj.emit(program, wide, out, add)


def load_lm_head(w: Weights, name: str, table: Weight, tied: bool) -> Linear:
    """The output layer: where they are tied the embedding again, the same object, else the file's own."""
    weight = table if tied else w.load_matrix(f"{name}.weight", embedding=True)
    return Linear(weight, load_optional(w, f"{name}.bias"))
