"""Pack weight matrices into the tiles that C++ multiplies (csrc/gemm/packed_gemm.h draws them)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels.cpu.memory import Arena
from retain.kernels.experts import TILE_ROWS
from retain.kernels.ops import WidthError
from retain.kernels.weights.quantized import (
    IQ4,
    MXFP4,
    NOT_FINITE,
    NVFP4,
    Int4,
    Int5,
    Int6,
    Int8,
    Kind,
    QuantizedWeight,
    ShiftedWeight,
)
from retain.kernels.weights.stored_weight import StoredWeight
from retain.kernels.weights.weight import Weight, kind_of, parts_of, row_energies, unpack

KINDS: tuple[Kind, ...] = (torch.float32, torch.bfloat16, Int8, Int4, IQ4, MXFP4, Int5, Int6, NVFP4)
DTYPE_CODES = {kind: code for code, kind in enumerate(KINDS)}
# That C++ unpacks: Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4.
GGML_TYPES = frozenset((2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39, 40))
RELEASE_BYTES = 2**22  # of a mapped file, after which its memory is given back


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A matrix [out, in], packed in the tiles of its dtype."""

    out_features: int
    in_features: int
    dtype_code: int
    data: Tensor  # uint8 [bytes]

    @property
    def c_args(self) -> tuple[int, int, int, int]:
        """Return the arguments that describe the matrix to C++."""
        return self.data.data_ptr(), self.out_features, self.in_features, self.dtype_code


def pack_weight(weight: Weight, arena: Arena) -> PackedWeight:
    """Pack a matrix into tiles. One of a file is converted in chunks of rows, without a copy of the whole matrix.

    Raises ValueError for scales that are not finite in float16.
    """
    rows, columns = weight.shape
    stored = [part for part in parts_of(weight) if isinstance(part, StoredWeight)]
    if len(stored) < len(parts_of(weight)) or len({part.kind for part in stored}) > 1 or not _fit_tiles(stored):
        matrix = unpack(weight)
        packed = _allocate_packed(rows, columns, kind_of(matrix), arena)
        _pack_unpacked(matrix, 0, packed)
        return packed
    packed = _allocate_packed(rows, columns, stored[0].kind, arena)
    packed.data[-_C.packed_bytes(1, columns, packed.dtype_code) :] = 0  # rows of the last tile beyond the matrix
    first = 0
    for part in stored:
        _pack_stored(part, first, packed)
        first += part.shape[0]
    return packed


def _fit_tiles(parts: Sequence[StoredWeight]) -> bool:
    """Return whether rows that C++ does not unpack begin a tile."""
    firsts = accumulate((part.shape[0] for part in parts), initial=0)
    return all(
        part.ggml_type in GGML_TYPES or first % TILE_ROWS == 0 for part, first in zip(parts, firsts, strict=False)
    )


def _allocate_packed(rows: int, columns: int, kind: Kind, arena: Arena) -> PackedWeight:
    code = DTYPE_CODES[kind]
    return PackedWeight(rows, columns, code, arena.allocate(_C.packed_bytes(rows, columns, code)))


def _pack_stored(part: StoredWeight, first: int, packed: PackedWeight) -> None:
    """Convert a matrix of a file into rows `first` and following of a packed one. Raises ValueError."""
    for begin, end in _chunks(part):
        is_finite = True
        if part.ggml_type in GGML_TYPES:
            raw = part.read_blocks(begin, end)
            is_finite = _C.pack_blocks(*_block_args(part, raw), first + begin, *packed.c_args)
        else:
            _pack_unpacked(part.convert(begin, end), first + begin, packed)
        part.release(begin, end)
        if not is_finite:
            raise ValueError(f"{part.name} cannot be loaded: {NOT_FINITE}")


def block_row_energies(weight: Weight, factors: Tensor) -> Tensor:
    """Return row_energies of kernels/weights/weight.py. Blocks are unpacked tile by tile."""
    if factors.shape != (weight.shape[1],):  # C++ would read behind the rows
        raise WidthError(f"factors {list(factors.shape)} for rows of {weight.shape[1]} numbers")
    return torch.cat([_energies_of_part(part, factors) for part in parts_of(weight)])


def _energies_of_part(part: Weight, factors: Tensor) -> Tensor:
    if not (isinstance(part, StoredWeight) and part.ggml_type in GGML_TYPES):
        return row_energies(part, factors)
    factors = factors.float().contiguous()
    energies = torch.empty(part.shape[0])
    for begin, end in _chunks(part):
        raw = part.read_blocks(begin, end)
        _C.row_energies(*_block_args(part, raw), len(factors), factors.data_ptr(), energies[begin:].data_ptr())
        part.release(begin, end)
    return energies


def _block_args(part: StoredWeight, raw: NDArray[np.uint8]) -> tuple[Any, ...]:
    """Return the arguments that describe blocks to C++, which must be kept for as long."""
    return raw.ctypes.data, raw.shape[1], part.ggml_type, len(raw)


def _chunks(part: StoredWeight) -> Iterator[tuple[int, int]]:
    """Divide the rows into ranges of whole tiles, so that few bytes are read or converted at a time."""
    row_bytes = part.row_bytes if part.ggml_type in GGML_TYPES else 4 * part.shape[1]
    return part.ranges(-(-RELEASE_BYTES // (row_bytes * TILE_ROWS)) * TILE_ROWS)


def _pack_unpacked(weight: Tensor | QuantizedWeight, first: int, packed: PackedWeight) -> None:
    """Pack a matrix into rows `first` and following of a larger one. The first of them begins a tile."""
    rows, columns = weight.shape
    code = packed.dtype_code
    if isinstance(weight, Tensor):
        numbers = weight.contiguous()
        scale = None
        shift = None
    else:
        numbers = weight.q.contiguous()
        scale = weight.scale.contiguous()
        shift = weight.shift.contiguous() if isinstance(weight, ShiftedWeight) else None
    offset = first // TILE_ROWS * _C.packed_bytes(1, columns, code)
    data = packed.data.data_ptr() + offset
    _C.pack(numbers.data_ptr(), _data_ptr(scale), _data_ptr(shift), data, rows, columns, code)


def _data_ptr(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
