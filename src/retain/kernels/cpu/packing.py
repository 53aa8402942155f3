"""Pack weight matrices into the tiles that C++ multiplies (csrc/gemm/packed_gemm.h draws them)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels.cpu.memory import Arena
from retain.kernels.experts import TILE_ROWS
from retain.kernels.ops import WidthError
from retain.kernels.weights.quantized import IQ4, MXFP4, NOT_FINITE, NVFP4, Int4, Int5, Int6, Int8, Kind, ShiftedWeight
from retain.kernels.weights.stored_weight import BlockRows, FileRows, StoredRows, StoredWeight
from retain.kernels.weights.weight import StackedWeight, UnpackedWeight, Weight, row_energies, unpack

KINDS: tuple[Kind, ...] = (torch.float32, torch.bfloat16, Int8, Int4, IQ4, MXFP4, Int5, Int6, NVFP4)
DTYPE_CODES = {kind: code for code, kind in enumerate(KINDS)}
# That C++ unpacks: Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4.
GGML_TYPES = frozenset((2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39, 40))
RELEASE_BYTES = 2**25  # of a mapped file, after which its memory is given back


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
    if isinstance(weight, StoredWeight) and _fits_tiles(weight):
        packed = _allocate_packed(rows, columns, DTYPE_CODES[weight.kind], arena)
        packed.data[-_C.packed_bytes(1, columns, packed.dtype_code) :] = 0  # rows of the last tile beyond the matrix
        first = 0
        for part in weight.parts:
            if isinstance(part, BlockRows) and part.ggml_type in GGML_TYPES:
                _pack_blocks(part, first, packed)
            else:
                _pack_rows(part, weight.kind, first, packed)
            first += part.shape[0]
        return packed
    weight = unpack(weight)
    code = DTYPE_CODES[weight.dtype if isinstance(weight, Tensor) else type(weight)]
    packed = _allocate_packed(rows, columns, code, arena)
    _pack_unpacked(weight, 0, packed)
    return packed


def _fits_tiles(weight: StoredWeight) -> bool:
    """Return whether rows that C++ does not unpack begin a tile."""
    first = 0
    for part in weight.parts:
        if first % TILE_ROWS and not (isinstance(part, BlockRows) and part.ggml_type in GGML_TYPES):
            return False
        first += part.shape[0]
    return True


def _allocate_packed(rows: int, columns: int, dtype_code: int, arena: Arena) -> PackedWeight:
    return PackedWeight(rows, columns, dtype_code, arena.allocate(_C.packed_bytes(rows, columns, dtype_code)))


def _pack_blocks(part: BlockRows, first: int, packed: PackedWeight) -> None:
    """Convert rows of blocks into rows `first` and following of a packed matrix. Raises ValueError."""
    for begin, raw in _chunks(part):
        blocks = raw.ctypes.data, raw.shape[1], part.ggml_type, len(raw)
        is_finite = _C.pack_blocks(*blocks, first + begin, *packed.c_args)
        part.release(begin, begin + len(raw))
        if not is_finite:
            raise ValueError(f"{part.name} cannot be loaded: {NOT_FINITE}")


def block_row_energies(weight: Weight, factors: Tensor) -> Tensor:
    """Return the sum of factors[i] * w[i]^2 over each row w of a weight, unpacking blocks tile by tile."""
    if isinstance(weight, StackedWeight):
        return torch.cat([block_row_energies(part, factors) for part in weight.parts])
    if not isinstance(weight, StoredWeight):
        return row_energies(weight, factors)
    if factors.shape != (weight.shape[1],):  # C++ would read behind the rows
        raise WidthError(f"factors {list(factors.shape)} for rows of {weight.shape[1]} numbers")
    return torch.cat([_energies_of_part(part, factors.float().contiguous()) for part in weight.parts])


def _energies_of_part(part: StoredRows, factors: Tensor) -> Tensor:
    if not (isinstance(part, BlockRows) and part.ggml_type in GGML_TYPES):
        return row_energies(StoredWeight.from_rows(part), factors)
    energies = torch.empty(part.shape[0])
    for begin, raw in _chunks(part):
        blocks = raw.ctypes.data, raw.shape[1], part.ggml_type, len(raw)
        _C.row_energies(*blocks, len(factors), factors.data_ptr(), energies[begin:].data_ptr())
        part.release(begin, begin + len(raw))
    return energies


def _chunks(part: BlockRows) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield the rows some at a time, behind the number of the first."""
    chunk = -(-RELEASE_BYTES // (part.raw.shape[1] * TILE_ROWS)) * TILE_ROWS
    for begin in range(0, part.shape[0], chunk):
        yield begin, part.raw[begin : begin + chunk]


def _pack_rows(part: StoredRows, kind: Kind, first: int, packed: PackedWeight) -> None:
    """Convert rows of any form into rows `first` and following of a packed matrix. Raises ValueError."""
    rows, columns = part.shape
    chunk = -(-RELEASE_BYTES // (4 * columns * TILE_ROWS)) * TILE_ROWS
    for begin in range(0, rows, chunk):
        end = min(begin + chunk, rows)
        if isinstance(part, FileRows) and part.blocks is not None:
            _pack_blocks(part.blocks(begin, end), first + begin, packed)
        else:
            _pack_unpacked(part.convert(begin, end, kind), first + begin, packed)
        part.release(begin, end)


def _pack_unpacked(weight: UnpackedWeight, first: int, packed: PackedWeight) -> None:
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
