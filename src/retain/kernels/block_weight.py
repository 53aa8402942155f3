"""A weight matrix as it lies in a GGUF file, in ggml's blocks. A backend converts it when it packs the matrix.

So a loader holds neither the unpacked numbers of a matrix nor more of the file than it is working on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.ggml_blocks import convert_blocks, stored_kind
from retain.kernels.quantized import Kind, QuantizedWeight, concat_matrices, widest_kind


def keep_rows(begin: int, end: int) -> None:
    """Release nothing: the rows are not in a file."""


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows of a matrix in blocks of one type. `release` frees the memory of rows begin .. end - 1 of a mapped file."""

    name: str  # of the file and the tensor, for errors
    ggml_type: int
    shape: tuple[int, int]  # (out, in)
    raw: NDArray[np.uint8]  # [out, bytes of a row]
    release: Callable[[int, int], None] = keep_rows

    def convert(self, kind: Kind) -> Tensor | QuantizedWeight:
        """Convert all rows. Raises ValueError for scales that are not finite in float16."""
        try:
            return convert_blocks(self.raw.reshape(-1), self.ggml_type, self.shape, kind)
        except ValueError as e:
            raise ValueError(f"{self.name} cannot be loaded: {e}") from e
        finally:
            self.release(0, self.shape[0])


@dataclass(frozen=True, eq=False)
class BlockWeight:
    """A matrix [out, in] in blocks, and the kind that it is to be converted to. `unpack` defines the values."""

    parts: tuple[BlockRows, ...]
    kind: Kind

    @classmethod
    def from_rows(cls, rows: BlockRows) -> BlockWeight:
        """Return a matrix of the kind that is nearest to its blocks."""
        return cls((rows,), stored_kind(rows.ggml_type))

    @property
    def shape(self) -> torch.Size:
        """Return (out, in)."""
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    def unpack(self) -> Tensor | QuantizedWeight:
        """Convert the matrix. Raises ValueError for scales that are not finite in float16."""
        return concat_matrices([part.convert(self.kind) for part in self.parts])

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dense matrix [out, in] of the converted one, rounded to `dtype`."""
        matrix = self.unpack()
        return matrix.to(dtype) if isinstance(matrix, Tensor) else matrix.dequantize(dtype)

    def select_rows(self, index: Tensor) -> BlockWeight:
        """Copy the rows of index int64 [n] out of a matrix of one part: [n, in]. Raises IndexError."""
        (part,) = self.parts
        raw = part.raw[index.numpy()]
        part.release(0, part.shape[0])
        return BlockWeight((replace(part, shape=(len(raw), part.shape[1]), raw=raw, release=keep_rows),), self.kind)


def concat_blocks(weights: Sequence[BlockWeight]) -> BlockWeight:
    """Stack matrices by rows. Of several kinds the result has the widest, see widest_kind.

    Raises ValueError for matrices that differ in `in`: a backend would read beyond the rows of the narrower one.
    """
    if len({w.shape[1] for w in weights}) > 1:
        raise ValueError(f"matrices of the shapes {', '.join(str(tuple(w.shape)) for w in weights)} cannot be stacked")
    kind = widest_kind([w.kind for w in weights])
    return BlockWeight(tuple(part for w in weights for part in w.parts), kind)
