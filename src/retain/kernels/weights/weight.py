"""The weight matrix of a linear layer or an embedding, in any form, and what models do with its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor

from retain.kernels.weights.quantized import Kind, QuantizedWeight, concat_matrices
from retain.kernels.weights.stored_weight import StoredWeight, check_equal_inputs, concat_stored

SingleWeight = Tensor | QuantizedWeight | StoredWeight  # a Tensor is dense, [out, in]


@dataclass(frozen=True, eq=False)
class StackedWeight:
    """Matrices of several kinds, one below the other: [sum of out, in]. Each keeps its kind in a linear layer."""

    parts: tuple[SingleWeight, ...]

    @property
    def shape(self) -> torch.Size:
        """Return the numbers of rows and columns: (out, in)."""
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))


Weight = SingleWeight | StackedWeight
UnpackedWeight = Tensor | QuantizedWeight
CHUNK_ELEMENTS = 2**23  # 32 MiB in float32
T = TypeVar("T")


class ConvertedWeights(Generic[T]):
    """The weights of a program in its own form. One that several operations use, as tied embeddings, is converted once.

    Weak references let the caller free a weight, and tell a new one with the same id.
    """

    def __init__(self, convert: Callable[[Weight], T]):
        self._convert = convert
        self._converted: dict[int, tuple[ref[Weight], T]] = {}  # by id of the weight

    def get(self, weight: Weight) -> T:
        """Convert a weight, or return what it was converted to."""
        source, converted = self._converted.get(id(weight), (None, None))
        if converted is None or source is None or source() is not weight:
            converted = self._convert(weight)
            self._converted[id(weight)] = ref(weight), converted
        return converted

    def clear(self) -> None:
        """Forget all converted weights, so that their memory is freed."""
        self._converted.clear()


def unpack(weight: Weight) -> UnpackedWeight:
    """Convert blocks, and stacks to the widest kind of their parts; return any other matrix as it is."""
    if isinstance(weight, StackedWeight):
        return unpack(concat_rows(weight.parts))
    return weight.unpack() if isinstance(weight, StoredWeight) else weight


def dense_chunks(weight: Weight) -> Iterator[Tensor]:
    """Yield the rows of a matrix in float32, some at a time: all of them could exceed what loading may take."""
    if isinstance(weight, StackedWeight):
        for part in weight.parts:
            yield from dense_chunks(part)
        return
    if isinstance(weight, StoredWeight):
        chunks = weight.chunks(CHUNK_ELEMENTS)
    else:
        step = max(CHUNK_ELEMENTS // weight.shape[1], 1)
        indices = (torch.arange(i, min(i + step, weight.shape[0])) for i in range(0, weight.shape[0], step))
        chunks = (unpack(select_rows(weight, index)) for index in indices)
    for chunk in chunks:
        yield chunk.float() if isinstance(chunk, Tensor) else chunk.dequantize()


def row_energies(weight: Weight, factors: Tensor) -> Tensor:
    """Return the sum of factors[i] * w[i]^2 over each row w, float32 [out]; of a stored matrix before any rounding."""
    if isinstance(weight, StackedWeight):
        return torch.cat([row_energies(part, factors) for part in weight.parts])
    exact = replace(weight, kind=torch.float32) if isinstance(weight, StoredWeight) else weight
    return torch.cat([rows.square() @ factors for rows in dense_chunks(exact)])


def select_rows(weight: Weight, index: Tensor) -> Weight:
    """Return the rows of index int64 [n]; those of a stack in its widest kind. Raises IndexError."""
    weight = unpack(weight) if isinstance(weight, StackedWeight) else weight
    return weight[index] if isinstance(weight, Tensor) else weight.select_rows(index)


def scale_rows(weight: Weight, factors: Tensor) -> Weight:
    """Multiply each row by its factor, float32 [out]."""
    if isinstance(weight, StackedWeight):
        own = torch.split(factors, [part.shape[0] for part in weight.parts])
        return stack_rows([scale_rows(*part) for part in zip(weight.parts, own, strict=True)])
    weight = unpack(weight)
    if isinstance(weight, Tensor):
        return (weight * factors[:, None]).to(weight.dtype).view(weight.shape)  # no other than a matrix
    return weight.scale_rows(factors)


def concat_rows(weights: Sequence[Weight]) -> SingleWeight:
    """Stack matrices of equal `in` by rows: [sum of out, in]. See concat_matrices for matrices of several kinds."""
    blocks = [w for w in weights if isinstance(w, StoredWeight)]
    return concat_stored(blocks) if len(blocks) == len(weights) else concat_matrices([unpack(w) for w in weights])


def stack_rows(weights: Sequence[Weight]) -> Weight:
    """Stack matrices of equal `in` for a linear layer. Each keeps its kind; adjacent ones of a kind become one.

    Raises ValueError for matrices that differ in `in`.
    """
    parts = [part for w in weights for part in (w.parts if isinstance(w, StackedWeight) else (w,))]
    groups = [list(group) for _, group in groupby(parts, _kind)]
    if len(groups) == 1:
        return concat_rows(groups[0])
    check_equal_inputs(parts)
    return StackedWeight(tuple(concat_rows(group) for group in groups))


def split_stack(weight: Weight, bias: Tensor | None) -> Iterator[tuple[SingleWeight, int, Tensor | None]]:
    """Yield the parts of a stack, or the one matrix; the first output of each; and its numbers of `bias` [out]."""
    parts: tuple[SingleWeight, ...] = weight.parts if isinstance(weight, StackedWeight) else (weight,)
    first = 0
    for part in parts:
        end = first + part.shape[0]
        yield part, first, None if bias is None else bias[first:end]
        first = end


def _kind(weight: SingleWeight) -> Kind:
    if isinstance(weight, StoredWeight):
        return weight.kind
    return weight.dtype if isinstance(weight, Tensor) else type(weight)
