"""The weight matrix of a linear layer or an embedding, in any form, and what models do with its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from retain.kernels.weights.quantized import Kind, QuantizedWeight, concat_matrices, widest_kind
from retain.kernels.weights.stored_weight import StoredWeight


@dataclass(frozen=True, eq=False)
class StackedWeight:
    """Matrices one below the other: [sum of out, in]. None is a stack. In a linear layer each keeps its kind."""

    parts: tuple[Weight, ...]

    @property
    def shape(self) -> torch.Size:
        """Return (out, in)."""
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))


Weight = Tensor | QuantizedWeight | StoredWeight | StackedWeight  # a Tensor is dense, [out, in]
CHUNK_ELEMENTS = 2**23  # 32 MiB in float32
T = TypeVar("T")


class ConvertedWeights(Generic[T]):
    """What weights are converted to: one that several operations use, as tied embeddings, is converted once.

    The caller may free a weight, which is forgotten then. `others` are those of another program: none is converted
    again.
    """

    def __init__(self, convert: Callable[[Weight], T], others: ConvertedWeights[T] | None = None):
        self._convert = convert
        self._converted: MutableMapping[Weight, T] = WeakIdKeyDictionary()
        self._others = others

    def __call__(self, weight: Weight) -> T:
        """Return what a weight is converted to."""
        if self._others is not None and weight in self._others._converted:
            return self._others._converted[weight]
        if weight not in self._converted:
            self._converted[weight] = self._convert(weight)
        return self._converted[weight]


def kind_of(weight: Weight) -> Kind:
    """Return the kind that a weight has where it is unpacked."""
    if isinstance(weight, StackedWeight):
        return widest_kind([kind_of(part) for part in weight.parts])
    if isinstance(weight, StoredWeight):
        return weight.kind
    return weight.dtype if isinstance(weight, Tensor) else type(weight)


def parts_of(weight: Weight) -> tuple[Weight, ...]:
    """Return the parts of a stack, or the one matrix."""
    return weight.parts if isinstance(weight, StackedWeight) else (weight,)


def unpack(weight: Weight) -> Tensor | QuantizedWeight:
    """Convert blocks, and stacks to the widest kind of their parts; return any other matrix as it is."""
    if isinstance(weight, StackedWeight):
        return concat_matrices([unpack(part) for part in parts_of(concat_rows(weight.parts))])
    return weight.unpack() if isinstance(weight, StoredWeight) else weight


def dequantize(weight: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the dense matrix [out, in] of an unpacked one, rounded to `dtype`."""
    matrix = unpack(weight)
    return matrix.to(dtype) if isinstance(matrix, Tensor) else matrix.dequantize(dtype)


def dense_chunks(weight: Weight) -> Iterator[Tensor]:
    """Yield the rows of a matrix in float32, some at a time: all of them could exceed what loading may take."""
    for part in parts_of(weight):
        if isinstance(part, StoredWeight):
            chunks = part.chunks(CHUNK_ELEMENTS)
        else:
            step = max(CHUNK_ELEMENTS // part.shape[1], 1)
            matrix = unpack(part)
            chunks = (matrix[begin : begin + step] for begin in range(0, part.shape[0], step))
        yield from map(dequantize, chunks)


def row_energies(weight: Weight, factors: Tensor) -> Tensor:
    """Return the sum of factors[i] * w[i]^2 over each row w, float32 [out]; of a stored matrix before any rounding."""
    parts = parts_of(weight)
    exact = (replace(part, kind=torch.float32) if isinstance(part, StoredWeight) else part for part in parts)
    return torch.cat([rows.square() @ factors for part in exact for rows in dense_chunks(part)])


def select_rows(weight: Weight, index: Tensor) -> Weight:
    """Return the rows of index int64 [n]; those of a stack in its widest kind. Raises IndexError."""
    return unpack(weight)[index] if isinstance(weight, StackedWeight) else weight[index]


def scale_rows(weight: Weight, factors: Tensor) -> Weight:
    """Multiply each row by its factor, float32 [out]."""
    if isinstance(weight, StackedWeight):
        own = torch.split(factors, [part.shape[0] for part in weight.parts])
        return stack_rows([scale_rows(*part) for part in zip(weight.parts, own, strict=True)])
    weight = unpack(weight)
    if isinstance(weight, Tensor):
        return (weight * factors[:, None]).to(weight.dtype).view(weight.shape)  # no other than a matrix
    return weight.scale_rows(factors)


def concat_rows(weights: Sequence[Weight]) -> Weight:
    """Stack matrices of equal `in` by rows, in their widest kind: [sum of out, in]. Those of a file stay there.

    Raises ValueError for matrices of a file that differ in `in`: a backend would read beyond the narrower ones' rows.
    """
    parts = [part for w in weights for part in parts_of(w)]
    stored = [part for part in parts if isinstance(part, StoredWeight)]
    if len(stored) < len(parts):
        return concat_matrices([unpack(w) for w in weights])
    kind = widest_kind([w.kind for w in stored])
    return _join([replace(w, kind=kind) for w in stored])


def stack_rows(weights: Sequence[Weight]) -> Weight:
    """Stack matrices of equal `in` for a linear layer. Each keeps its kind; adjacent ones of a kind become one.

    Raises ValueError for matrices that differ in `in`.
    """
    parts = [part for w in weights for part in parts_of(w)]
    groups = [concat_rows(list(group)) for _, group in groupby(parts, kind_of)]
    return _join([part for group in groups for part in parts_of(group)])


def split_kinds(weight: Weight, bias: Tensor | None) -> Iterator[tuple[Weight, int, Tensor | None]]:
    """Yield the adjacent parts of each kind as one; the first output of each; and its numbers of `bias` [out]."""
    first = 0
    for _, group in groupby(parts_of(weight), kind_of):
        part = _join(list(group))
        end = first + part.shape[0]
        yield part, first, None if bias is None else bias[first:end]
        first = end


def _join(parts: Sequence[Weight]) -> Weight:
    if len({w.shape[1] for w in parts}) > 1:
        raise ValueError(f"matrices of the shapes {', '.join(str(tuple(w.shape)) for w in parts)} cannot be stacked")
    return parts[0] if len(parts) == 1 else StackedWeight(tuple(parts))
