"""The layers that decoders are made of: linear layers, norms, embeddings, MLPs.

Each has two forms. `__call__` computes in torch and is the definition. `emit` writes the same computation into a
program (kernels/api.py), which a backend runs faster; tests require equal results.
Letters: T fresh tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from retain.files import quote
from retain.kernels.api import Program
from retain.kernels.weight import Weight, concat_rows, select_rows
from retain.models.weights import Weights


class Layer(Protocol):
    """A function of one hidden state to another, applied to each token."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, in] -> [T, out]."""
        ...

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """Write the layer into a program: read buffer `x`, write buffer `out`, or add to it."""
        ...


class Linear:
    """Compute y = x W^T + b. The weight [out, in] is dense or quantized."""

    def __init__(self, weight: Weight, bias: Tensor | None = None):
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, in] -> [T, out].

        A quantized weight is multiplied in float32. This is slow, and the definition that kernels must match.
        """
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self.weight.dequantize(), bias).to(x.dtype)

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        program.linear(x, out, self.weight, self.bias, add)


def load_linear(w: Weights, *names: str, bias: bool, transposed: bool = False) -> Linear:
    """Load linear layers, stacked into one (for example q over k over v). `transposed`: the file stores [in, out].

    Whether they have biases is the family's word, or its config's, not the file's.
    """
    weights = [w.load_matrix(f"{n}.weight", transposed=transposed) for n in names]
    return Linear(concat_rows(weights), torch.cat([w[f"{n}.bias"] for n in names]) if bias else None)


@dataclass(frozen=True, eq=False)
class ClippedLinear:
    """Compute a linear layer and clip the result to [-limit, limit]."""

    linear: Linear
    limit: float

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, in] -> [T, out]."""
        return self.linear(x).clamp(-self.limit, self.limit)

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        if add:
            raise ValueError("the output of a clipped linear layer cannot be added to a buffer")
        self.linear.emit(program, x, out)
        program.clip(out, self.limit)


@dataclass(frozen=True, eq=False)
class Sequential:
    """Apply linear layers one after another."""

    layers: tuple[Linear, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, in of the first] -> [T, out of the last]."""
        for layer in self.layers:
            x = layer(x)
        return x

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        *first, last = self.layers
        for i, layer in enumerate(first):
            hidden = program.buffer(f"chain {i}", layer.weight.shape[0])
            layer.emit(program, x, hidden)
            x = hidden
        last.emit(program, x, out, add)


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
    dtype: torch.dtype = torch.bfloat16  # of embeddings read from a quantized table

    def __call__(self, ids: Tensor, pos: Tensor) -> Tensor:
        """Compute embeddings [T, E]. `ids` and `pos` are int64 [T]."""
        rows = select_rows(self.table, ids)  # [T, E']
        x = rows if isinstance(rows, Tensor) else rows.dequantize(self.dtype)
        x = self.projection(x) if self.projection else x
        x = x * self.scale if self.scale != 1 else x
        return x if self.position_table is None else x + F.embedding(pos + self.position_offset, self.position_table)

    def emit(self, program: Program, out: int) -> None:
        """Write the layer into a program; it fills buffer `out` for the ids and positions of a step."""
        if self.projection:
            narrow = program.buffer("narrow", self.table.shape[1])
            program.embedding(narrow, self.table, self.scale)
            self.projection.emit(program, narrow, out)
        else:
            program.embedding(out, self.table, self.scale)
        if self.position_table is not None:
            program.position_embedding(out, self.position_table, self.position_offset)


class RMSNorm:
    """Compute x / rms(x) * weight in float32 (arXiv 1910.07467). weight [E], or [H + G, D] with a row for each head."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight = weight.float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize a tensor whose shape ends in that of the weight."""
        return F.rms_norm(x.float(), self.weight.shape[-1:], eps=self.eps).mul_(self.weight).to(x.dtype)

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer. A weight with a row for each head reads and writes only those heads."""
        program.norm(x, out, self.weight, None, self.eps, subtract_mean=False, add=add)


class LayerNorm:
    """Compute (x - mean) / deviation * weight + bias (arXiv 1607.06450)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float):
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize a tensor whose shape ends in that of the weight."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        program.norm(x, out, self.weight, self.bias, self.eps, subtract_mean=True, add=add)


def load_layer_norm(w: Weights, name: str, eps: float, bias: bool = True) -> LayerNorm:
    """Load a layer norm."""
    return LayerNorm(w[f"{name}.weight"], w[f"{name}.bias"] if bias else None, eps)


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
    """Return the key of ACTIVATIONS for the name in a config. Raises ValueError for an unknown name."""
    resolved = ACTIVATION_ALIASES.get(name, name)
    if resolved not in ACTIVATIONS:
        raise ValueError(f"activation {quote(name)} is not supported")
    return resolved


class MLP:
    """Compute down(act(up(x))). `act` is the activation's name in the config."""

    def __init__(self, up_proj: Linear, down_proj: Linear, act: str):
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.act = resolve_activation(act)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, E] -> [T, E]."""
        return self.down_proj(ACTIVATIONS[self.act](self.up_proj(x)))

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        n = self.up_proj.weight.shape[0]
        wide = program.buffer("wide", n)
        self.up_proj.emit(program, x, wide)
        program.activation(wide, wide, self.act, n)
        self.down_proj.emit(program, wide, out, add)


class GatedMLP:
    """Compute down(act(gate(x)) * up(x)), with gate stacked over up in one linear layer (arXiv 2002.05202)."""

    def __init__(self, gate_up_proj: Linear, down_proj: Linear, act: str):
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self.act = resolve_activation(act)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute [T, E] -> [T, E]."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(ACTIVATIONS[self.act](gate) * up)

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        n = self.gate_up_proj.weight.shape[0] // 2
        gate_up = program.buffer("gate, up", 2 * n)
        wide = program.buffer("wide", n)
        self.gate_up_proj.emit(program, x, gate_up)
        program.activation(gate_up, wide, self.act, n, gated=True)
        self.down_proj.emit(program, wide, out, add)


def load_lm_head(w: Weights, name: str, table: Weight, tied_to: str | None, bias: bool = False) -> Linear:
    """Load the output layer. `tied_to` is the full name of the embedding `table` that a tied one uses.

    As in transformers, a head that is in the file and differs from the embedding counts, even where they are tied.
    """
    is_tied = tied_to is not None and (f"{name}.weight" not in w or w.equal(f"{name}.weight", tied_to))
    weight = table if is_tied else w.load_matrix(f"{name}.weight", embedding=True)
    return Linear(weight, w[f"{name}.bias"] if bias else None)
