"""A weight matrix as it lies in a file. A backend converts it when it packs the matrix.

So a loader holds neither the unpacked numbers of a matrix nor more of the file than it is working on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.weights.ggml_blocks import convert_blocks, stored_kind
from retain.kernels.weights.quantized import Kind, QuantizedWeight, keeps_groups, select_columns


def keep_rows(begin: int, end: int) -> None:
    """Release nothing: the rows are not in a file."""


def no_blocks(begin: int, end: int) -> NDArray[np.uint8]:
    """Raise TypeError: the rows are in no blocks."""
    raise TypeError("the matrix has no blocks")


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """A matrix [out, in] of a file, and the kind that it is to be converted to. `unpack` defines the values.

    The functions of a format read rows begin .. end - 1. Where these are in ggml's blocks, a backend may unpack them.
    """

    name: str  # of the file and the tensor, for errors
    shape: torch.Size  # (out, in)
    kind: Kind  # at first the one that is nearest to what is stored
    load: Callable[[int, int, Kind], Tensor | QuantizedWeight]  # ValueError: scales that float16 does not hold
    release: Callable[[int, int], None] = keep_rows  # frees memory of a mapped file; the next access reads it again
    ggml_type: int | None = None  # of the blocks
    read_blocks: Callable[[int, int], NDArray[np.uint8]] = no_blocks  # [rows, bytes of a row]
    row_bytes: int = 0  # that a row of blocks takes while it is read

    @classmethod
    def from_blocks(
        cls,
        name: str,
        shape: tuple[int, int],
        ggml_type: int,
        read_blocks: Callable[[int, int], NDArray[np.uint8]],
        row_bytes: int,
        release: Callable[[int, int], None] = keep_rows,
    ) -> StoredWeight:
        """Return a matrix in ggml's blocks of one type, of the kind that is nearest to them."""

        def load(begin: int, end: int, kind: Kind) -> Tensor | QuantizedWeight:
            raw = read_blocks(begin, end)
            return convert_blocks(raw.reshape(-1), ggml_type, (len(raw), shape[1]), kind)

        kind = stored_kind(ggml_type)
        return cls(name, torch.Size(shape), kind, load, release, ggml_type, read_blocks, row_bytes)

    def convert(self, begin: int, end: int) -> Tensor | QuantizedWeight:
        """Convert rows begin .. end - 1. Raises ValueError for scales that are not finite in float16."""
        try:
            return self.load(begin, end, self.kind)
        except ValueError as e:
            raise ValueError(f"{self.name} cannot be loaded: {e}") from e

    def unpack(self) -> Tensor | QuantizedWeight:
        """Convert the matrix. Raises ValueError for scales that are not finite in float16."""
        matrix = self.convert(0, self.shape[0])
        self.release(0, self.shape[0])
        return matrix

    def chunks(self, num_elements: int) -> Iterator[Tensor | QuantizedWeight]:
        """Convert about so many elements at a time, and give back what was read. Yields the rows in their order."""
        for begin, end in self.ranges(max(num_elements // self.shape[1], 1)):
            yield self.convert(begin, end)
            self.release(begin, end)

    def ranges(self, step: int) -> Iterator[tuple[int, int]]:
        """Divide the rows into ranges of `step` rows."""
        for begin in range(0, self.shape[0], step):
            yield begin, min(begin + step, self.shape[0])

    def __getitem__(self, index: Tensor) -> StoredWeight:
        """Return the rows of index int64 [n], in this order: [n, in]. Raises IndexError.

        Rows of an order that is far from the file's are read several times.
        """
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.shape[0]:
            raise IndexError(f"{self.name} has {self.shape[0]} rows")

        def bounds(begin: int, end: int) -> tuple[int, int]:
            own = index[begin:end]
            return (int(own.min()), int(own.max()) + 1) if len(own) else (0, 0)

        def select(read: Callable[..., Any]) -> Callable[..., Any]:
            def read_selected(begin: int, end: int, *kind: Kind) -> Any:
                first, last = bounds(begin, end)
                own = index[begin:end] - first
                rows = read(first, last, *kind)
                return rows if torch.equal(own, torch.arange(last - first)) else rows[own.numpy()]

            return read_selected

        def release(begin: int, end: int) -> None:
            self.release(*bounds(begin, end))

        shape = (len(index), self.shape[1])
        if self.ggml_type is None:
            return replace(self, shape=torch.Size(shape), load=select(self.load), release=release)
        blocks = select(self.read_blocks)
        rows = StoredWeight.from_blocks(self.name, shape, self.ggml_type, blocks, self.row_bytes, release)
        return replace(rows, kind=self.kind)

    def select_columns(self, index: Tensor) -> StoredWeight | None:
        """Return the matrix with its columns in the order of index int64 [in].

        None where that would split groups that share a scale.
        """

        def load(begin: int, end: int, kind: Kind) -> Tensor | QuantizedWeight:
            return select_columns(self.load(begin, end, kind), index)

        return StoredWeight(self.name, self.shape, self.kind, load, self.release) if keeps_groups(index) else None
