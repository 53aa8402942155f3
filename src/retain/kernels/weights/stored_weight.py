"""A weight matrix as it lies in a file. A backend converts it when it packs the matrix.

So a loader holds neither the unpacked numbers of a matrix nor more of the file than it is working on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.weights.ggml_blocks import convert_blocks, stored_kind
from retain.kernels.weights.quantized import (
    Kind,
    QuantizedWeight,
    concat_matrices,
    keeps_groups,
    select_columns,
    widest_kind,
)


def keep_rows(begin: int, end: int) -> None:
    """Release nothing: the rows are not in a file."""


class StoredRows(Protocol):
    """Rows of a matrix as a file stores them. `kind` is the one that is nearest to that."""

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and columns: (out, in)."""

    @property
    def kind(self) -> Kind:
        """Return the kind that is nearest to what is stored."""

    def convert(self, begin: int, end: int, kind: Kind) -> Tensor | QuantizedWeight:
        """Convert rows begin .. end - 1. Raises ValueError for scales that are not finite in float16."""

    def select(self, index: Tensor) -> StoredRows:
        """Return the rows of index int64 [n], in this order. Raises IndexError."""

    @property
    def release(self) -> Callable[[int, int], None]:
        """Return what frees the memory of rows begin .. end - 1 of a mapped file. The next access reads them again."""


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows of a matrix in ggml's blocks of one type."""

    name: str  # of the file and the tensor, for errors
    ggml_type: int
    shape: tuple[int, int]  # (out, in)
    raw: NDArray[np.uint8]  # [out, bytes of a row]
    release: Callable[[int, int], None] = keep_rows

    @property
    def kind(self) -> Kind:
        """Return the kind of numbers that is nearest to the type of the blocks."""
        return stored_kind(self.ggml_type)

    def convert(self, begin: int, end: int, kind: Kind) -> Tensor | QuantizedWeight:
        """Convert the blocks of rows begin .. end - 1. Raises ValueError for scales that are not finite in float16."""
        raw = self.raw[begin:end]
        try:
            return convert_blocks(raw.reshape(-1), self.ggml_type, (len(raw), self.shape[1]), kind)
        except ValueError as e:
            raise ValueError(f"{self.name} cannot be loaded: {e}") from e

    def select(self, index: Tensor) -> BlockRows:
        """Copy the rows of index int64 [n] out of the file, in this order."""
        raw = self.raw[index.numpy()]
        self.release(0, self.shape[0])
        return replace(self, shape=(len(raw), self.shape[1]), raw=raw, release=keep_rows)


@dataclass(frozen=True, eq=False)
class FileRows:
    """Rows of a matrix in a form that a function reads, rows begin .. end - 1 in a kind."""

    name: str  # of the file and the tensor, for errors
    shape: tuple[int, int]  # (out, in)
    kind: Kind
    load: Callable[[int, int, Kind], Tensor | QuantizedWeight]
    release: Callable[[int, int], None] = keep_rows
    blocks: Callable[[int, int], BlockRows] | None = (
        None  # the same in ggml's blocks, which a backend may unpack faster
    )

    def convert(self, begin: int, end: int, kind: Kind) -> Tensor | QuantizedWeight:
        """Read rows begin .. end - 1 of the file in a kind. Raises ValueError for scales not finite in float16."""
        try:
            return self.load(begin, end, kind)
        except ValueError as e:
            raise ValueError(f"{self.name} cannot be loaded: {e}") from e

    def select(self, index: Tensor) -> FileRows:
        """Return the rows of index int64 [n], in this order, still unread. Raises IndexError.

        Rows of an order that is far from the file's are read several times.
        """
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.shape[0]:
            raise IndexError(f"{self.name} has {self.shape[0]} rows")

        def bounds(begin: int, end: int) -> tuple[int, int]:
            own = index[begin:end]
            return (int(own.min()), int(own.max()) + 1) if len(own) else (0, 0)

        def load(begin: int, end: int, kind: Kind) -> Tensor | QuantizedWeight:
            first, last = bounds(begin, end)
            rows = self.load(first, last, kind)
            own = index[begin:end] - first
            return rows[own] if isinstance(rows, Tensor) else rows.select_rows(own)

        def release(begin: int, end: int) -> None:
            self.release(*bounds(begin, end))

        def blocks(begin: int, end: int) -> BlockRows:
            assert self.blocks is not None
            first, last = bounds(begin, end)
            return self.blocks(first, last).select(index[begin:end] - first)

        shape = (len(index), self.shape[1])
        return FileRows(self.name, shape, self.kind, load, release, blocks if self.blocks else None)


@dataclass(frozen=True, eq=False)
class OrderedColumns:
    """Rows of a matrix whose columns are put in another order, in whole groups."""

    rows: StoredRows
    columns: Tensor  # int64 [in]: the place in `rows` of each column

    @property
    def shape(self) -> tuple[int, int]:
        """Return (out, in), which the order of the columns does not change."""
        return self.rows.shape

    @property
    def kind(self) -> Kind:
        """Return the kind that is nearest to what is stored."""
        return self.rows.kind

    @property
    def release(self) -> Callable[[int, int], None]:
        """Return what frees the memory of rows begin .. end - 1 of a mapped file."""
        return self.rows.release

    def convert(self, begin: int, end: int, kind: Kind) -> Tensor | QuantizedWeight:
        """Convert rows begin .. end - 1 to a kind, and put their columns in the new order."""
        return select_columns(self.rows.convert(begin, end, kind), self.columns)

    def select(self, index: Tensor) -> OrderedColumns:
        """Return the rows of index int64 [n], in this order, with their columns in the new order."""
        return OrderedColumns(self.rows.select(index), self.columns)


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A matrix [out, in] of a file, and the kind that it is to be converted to. `unpack` defines the values."""

    parts: tuple[StoredRows, ...]
    kind: Kind

    @classmethod
    def from_rows(cls, rows: StoredRows) -> StoredWeight:
        """Return a matrix of the kind that is nearest to what is stored."""
        return cls((rows,), rows.kind)

    @property
    def shape(self) -> torch.Size:
        """Return the numbers of rows and columns: (out, in)."""
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    def unpack(self) -> Tensor | QuantizedWeight:
        """Convert the matrix. Raises ValueError for scales that are not finite in float16."""
        converted = []
        for part in self.parts:
            converted.append(part.convert(0, part.shape[0], self.kind))
            part.release(0, part.shape[0])
        return concat_matrices(converted)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dense matrix [out, in] of the converted one, rounded to `dtype`."""
        matrix = self.unpack()
        return matrix.to(dtype) if isinstance(matrix, Tensor) else matrix.dequantize(dtype)

    def chunks(self, num_elements: int) -> Iterator[Tensor | QuantizedWeight]:
        """Convert about so many elements at a time, and give back what was read. Yields the rows in their order."""
        step = max(num_elements // self.shape[1], 1)
        for part in self.parts:
            for begin in range(0, part.shape[0], step):
                end = min(begin + step, part.shape[0])
                yield part.convert(begin, end, self.kind)
                part.release(begin, end)

    def select_rows(self, index: Tensor) -> StoredWeight:
        """Return the rows of index int64 [n] of a matrix of one part: [n, in]. Raises IndexError."""
        (part,) = self.parts
        return StoredWeight((part.select(index),), self.kind)

    def select_columns(self, index: Tensor) -> StoredWeight | None:
        """Return a matrix of one part with its columns in the order of index int64 [in].

        None where that would split groups that share a scale.
        """
        (part,) = self.parts
        return StoredWeight((OrderedColumns(part, index),), self.kind) if keeps_groups(index) else None


def concat_stored(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Stack matrices by rows. Of several kinds the result has the widest, see widest_kind.

    Raises ValueError for matrices that differ in `in`: a backend would read beyond the rows of the narrower one.
    """
    check_equal_inputs(weights)
    kind = widest_kind([w.kind for w in weights])
    return StoredWeight(tuple(part for w in weights for part in w.parts), kind)


def check_equal_inputs(weights: Sequence[Tensor | QuantizedWeight | StoredWeight]) -> None:
    """Raise ValueError unless all matrices have the same `in`."""
    if len({w.shape[1] for w in weights}) > 1:
        raise ValueError(f"matrices of the shapes {', '.join(str(tuple(w.shape)) for w in weights)} cannot be stacked")
