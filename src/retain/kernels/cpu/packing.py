"""Pack weight matrices into the tiles that C++ multiplies (csrc/packed_gemm.h draws them)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import retain.kernels.cpu._C as _C
from retain.kernels.block_weight import BlockRows, BlockWeight
from retain.kernels.cpu.memory import Arena
from retain.kernels.experts import TILE_ROWS
from retain.kernels.quantized import IQ4, MXFP4, NOT_FINITE, Int4, Int8, Kind
from retain.kernels.weight import Weight, unpack

DTYPE_CODES: dict[Kind, int] = {torch.float32: 0, torch.bfloat16: 1, Int8: 2, Int4: 3, IQ4: 4, MXFP4: 5}
# That C++ unpacks: Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4.
GGML_TYPES = frozenset((2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39))
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
    """Pack a matrix into tiles. Blocks of a file are converted on the way, without a copy of the whole matrix.

    Raises ValueError for blocks with scales that are not finite in float16.
    """
    rows, columns = weight.shape
    if isinstance(weight, BlockWeight) and all(part.ggml_type in GGML_TYPES for part in weight.parts):
        packed = _allocate_packed(rows, columns, DTYPE_CODES[weight.kind], arena)
        first = 0
        for part in weight.parts:
            _pack_blocks(part, first, packed)
            first += part.shape[0]
        return packed
    weight = unpack(weight)
    if isinstance(weight, Tensor):
        dtype_code = DTYPE_CODES[weight.dtype]
        numbers = weight.contiguous()
        scale = None
        shift = None
    else:
        dtype_code = DTYPE_CODES[type(weight)]
        numbers = weight.q.contiguous()
        scale = weight.scale.contiguous()
        shift = weight.shift.contiguous() if isinstance(weight, Int4) else None
    packed = _allocate_packed(rows, columns, dtype_code, arena)
    _C.pack(numbers.data_ptr(), _data_ptr(scale), _data_ptr(shift), *packed.c_args)
    return packed


def _allocate_packed(rows: int, columns: int, dtype_code: int, arena: Arena) -> PackedWeight:
    return PackedWeight(rows, columns, dtype_code, arena.allocate(_C.packed_bytes(rows, columns, dtype_code)))


def _pack_blocks(part: BlockRows, first: int, packed: PackedWeight) -> None:
    """Convert rows of blocks into rows `first` and following of a packed matrix. Raises ValueError."""
    tile_bytes = _C.packed_bytes(1, packed.in_features, packed.dtype_code)
    if first == 0:
        packed.data[-tile_bytes:] = 0  # the last tile may have more rows than the matrix
    row_bytes = part.raw.shape[1]
    chunk = -(-RELEASE_BYTES // (row_bytes * TILE_ROWS)) * TILE_ROWS
    for begin in range(0, part.shape[0], chunk):
        raw = part.raw[begin : begin + chunk]
        is_finite = _C.pack_blocks(raw.ctypes.data, row_bytes, part.ggml_type, len(raw), first + begin, *packed.c_args)
        part.release(begin, begin + len(raw))
        if not is_finite:
            raise ValueError(f"{part.name} cannot be loaded: {NOT_FINITE}")


def _data_ptr(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
