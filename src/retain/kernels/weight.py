"""The weight matrix of a linear layer or an embedding, in any form, and what models do with its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar
from weakref import ref

import torch
from torch import Tensor

from retain.kernels.quantized import QuantizedWeight, concat_matrices
from retain.kernels.stored_weight import StoredWeight, concat_stored

Weight = Tensor | QuantizedWeight | StoredWeight  # a Tensor is dense, [out, in]
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
        """Forget all weights."""
        self._converted.clear()


def unpack(weight: Weight) -> UnpackedWeight:
    """Convert blocks; return any other matrix as it is."""
    return weight.unpack() if isinstance(weight, StoredWeight) else weight


def dense_chunks(weight: Weight) -> Iterator[Tensor]:
    """Yield the rows of a matrix in float32, some at a time: all of them could exceed what loading may take."""
    if isinstance(weight, StoredWeight):
        chunks = weight.chunks(CHUNK_ELEMENTS)
    else:
        step = max(CHUNK_ELEMENTS // weight.shape[1], 1)
        indices = (torch.arange(i, min(i + step, weight.shape[0])) for i in range(0, weight.shape[0], step))
        chunks = (unpack(select_rows(weight, index)) for index in indices)
    for chunk in chunks:
        yield chunk.float() if isinstance(chunk, Tensor) else chunk.dequantize()


def select_rows(weight: Weight, index: Tensor) -> Weight:
    """Return the rows of index int64 [n]. Raises IndexError."""
    return weight[index] if isinstance(weight, Tensor) else weight.select_rows(index)


def scale_rows(weight: Weight, factors: Tensor) -> Weight:
    """Multiply each row by its factor, float32 [out]."""
    weight = unpack(weight)
    if isinstance(weight, Tensor):
        return (weight * factors[:, None]).to(weight.dtype).view(weight.shape)  # no other than a matrix
    return weight.scale_rows(factors)


def concat_rows(weights: Sequence[Weight]) -> Weight:
    """Stack matrices of equal `in` by rows: [sum of out, in]. See concat_matrices for matrices of several kinds."""
    blocks = [w for w in weights if isinstance(w, StoredWeight)]
    return concat_stored(blocks) if len(blocks) == len(weights) else concat_matrices([unpack(w) for w in weights])
