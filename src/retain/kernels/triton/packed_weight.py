"""Quantized weights in their bits on the device, and products with them.

Tiles of 128 outputs and 64 inputs (two groups, or four halves of 16) follow one another along a row of tiles. Word i of
an output in a tile has number i of each half, from the lowest bits on: of the four halves as nibbles, or, of 8 bits, of
the two halves of a group as bytes; then the words of the first group of all 128 outputs are before those of the second.
So two words in a register have adjacent numbers at equal places, which one mask takes out. Behind the words, numbers of
6 bits have a byte for each of them, with the highest two bits of its four numbers. A word of 32 bits has a group's
scale and shift, or the scales of its halves, or, where a group has a single scale, those of both groups: loads of 2
bytes cannot be asynchronous.

The outputs of an expert begin with a row of tiles. What has a kernel is decided in `pack_weight` alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from retain.kernels.triton import unpack_kernels, weight_kernels
from retain.kernels.triton.kernel_args import KernelArgs
from retain.kernels.weights.quantized import (
    GROUP_SIZE,
    IQ4,
    Codebook4,
    Int4,
    Int5,
    Int6,
    QuantizedWeight,
    ShiftedWeight,
)
from retain.kernels.weights.weight import Weight, unpack

TILE_ROWS: int = unpack_kernels.TILE_ROWS.value
LEAST_BLOCK, LARGEST_BLOCK = 16, 64  # rows that a program multiplies
FEW_ROWS = LARGEST_BLOCK  # more are multiplied by torch, with the matrix made dense for the moment (log/gpu.md)
NUM_PROGRAMS = 512  # about as many fill a GPU
LEAST_K_TILES = 4  # of a program
DOT_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, eq=False)
class DeviceWeight:
    """A matrix [out, in] on the device, in tiles, or those of several experts, each in rows of tiles of its own."""

    shape: torch.Size  # (out, in) of one matrix
    format: str  # of a number: "int4" (of Int4, with shifts), "int6", "int8", "iq4" or "e2m1"
    group_extra: str  # what a group has beside its scale: "shift", "scale" (of its second half) or "nothing"
    words: Tensor  # int16 [rows of tiles, tiles of a row, words of a tile]
    scales: Tensor  # int32 [rows of tiles, tiles of a row, 128 or 256]

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes on the device."""
        return self.words.nbytes + self.scales.nbytes

    @property
    def rows_of_tiles(self) -> int:
        """Return those of one matrix."""
        return triton.cdiv(self.shape[0], TILE_ROWS)

    @property
    def num_k_tiles(self) -> int:
        """Return the tiles of a row of tiles."""
        return self.words.shape[1]

    def k_tiles_per_split(self, rows_of_tiles: int) -> int:
        """Return the tiles of a split, where one row needs so many rows of tiles.

        They depend on no other row, so neither does the order of a sum.
        """
        splits = max(NUM_PROGRAMS // rows_of_tiles, 1)
        return max(triton.cdiv(self.num_k_tiles, splits), LEAST_K_TILES)

    @property
    def kernel_args(self) -> KernelArgs:
        """Return the arguments of kernels."""
        arrays = {"words": self.words, "scales": self.scales, "num_k_tiles": self.num_k_tiles}
        sizes = {"WORDS": self.words.shape[2], "SCALES": self.scales.shape[2]}
        return {"FORMAT": self.format, "GROUP_EXTRA": self.group_extra, **arrays, **sizes}


def pack_weight(
    weight: Weight, dtype: torch.dtype, device: torch.device, num_experts: int = 1
) -> Tensor | DeviceWeight:
    """Copy a matrix to the device: quantized ones in their bits, or in 6 where they have 5, dense ones in `dtype`.

    Or those of several experts, one below the other. Raises ValueError for blocks of a file with scales that are not
    finite in float16.
    """
    matrix = unpack(weight)
    if isinstance(matrix, Tensor):
        dense = matrix.to(device, dtype).contiguous()
        return dense.clone() if dense.data_ptr() == matrix.data_ptr() else dense  # a mapped file can be closed
    n = matrix.shape[0] // num_experts
    own = [_pack_matrix(matrix[e * n : (e + 1) * n], device) for e in range(num_experts)]  # together: more memory
    if num_experts == 1:
        return own[0]
    return replace(own[0], words=torch.cat([w.words for w in own]), scales=torch.cat([w.scales for w in own]))


def _pack_matrix(matrix: QuantizedWeight, device: torch.device) -> DeviceWeight:
    """Copy a quantized matrix to the device."""
    format, words = _pack_numbers(matrix, device)
    group_extra, scales = _pack_scales(matrix, device)
    return DeviceWeight(matrix.shape, format, group_extra, words, scales)


def _pack_numbers(matrix: QuantizedWeight, device: torch.device) -> tuple[str, Tensor]:
    """Return the format of a matrix's numbers, and its words."""
    q = matrix.q.to(device)
    match matrix:
        case Int4():
            return "int4", _to_words(_to_tiles(q))
        case Codebook4():
            return "iq4" if isinstance(matrix, IQ4) else "e2m1", _to_words(_to_tiles(q))
        case Int5() | Int6():
            biased = _to_tiles(q.view(torch.uint8) + 32)  # of negative numbers the sum wraps around
            low, high = _join_halves(biased >> 4, 2).unbind(2)
            tops = (low | high << 4).view(torch.int16).flatten(2)
            return "int6", torch.cat((_to_words(biased & 15), tops), -1)
    halves = _to_tiles(q.view(torch.uint8)).unflatten(-1, (2, -1))
    return "int8", halves.transpose(-2, -1).contiguous().view(torch.int16).flatten(2)


def _to_words(nibbles: Tensor) -> Tensor:
    """Join numbers of 4 bits in tiles as words int16: [rows of tiles, tiles, 2048]."""
    return _join_halves(nibbles, 4).movedim(2, -1).contiguous().view(torch.int16).flatten(2)


def _join_halves(numbers: Tensor, bits: int) -> Tensor:
    """Join the two halves of a group, the first in the lowest bits: [rows of tiles, tiles, 2, 128, 16]."""
    first, second = numbers.unflatten(-1, (2, -1)).unbind(-2)
    return first | second << bits


def _pack_scales(matrix: QuantizedWeight, device: torch.device) -> tuple[str, Tensor]:
    """Return what a matrix's groups have beside their scales, and the words of both."""
    scale = matrix.scale.to(device)
    if isinstance(matrix, ShiftedWeight):
        return "shift", _join(_to_tiles(scale), _to_tiles(matrix.shift.to(device)))
    if matrix.GROUP < GROUP_SIZE:
        first, second = (_to_tiles(x) for x in scale.unflatten(-1, (-1, 2)).unbind(-1))
        return "scale", _join(first, second)
    first, second = _to_tiles(scale).unbind(2)
    return "nothing", _join(first, second)


def _to_tiles(x: Tensor) -> Tensor:
    """Fill a matrix of numbers or of values of groups up with zeros: [row of tiles, tile, 2, 128, in a group]."""
    out, n = x.shape
    per_group = GROUP_SIZE if x.dtype == torch.uint8 else 1
    x = F.pad(x, (0, -n % (2 * per_group), 0, -out % TILE_ROWS))
    return x.view(len(x) // TILE_ROWS, TILE_ROWS, -1, 2, per_group).permute(0, 2, 3, 1, 4)


def _join(low: Tensor, high: Tensor) -> Tensor:
    """Return two float16 [rows of tiles, tiles, ..., 1] as a word of 32 bits: [rows of tiles, tiles, words]."""
    return torch.cat((low, high), -1).contiguous().view(torch.int32).flatten(2)


def linear(x: Tensor, weight: DeviceWeight, bias: Tensor | None, add_to: Tensor | None = None) -> Tensor:
    """Return x W^T + b for rows x [T, in], plus the rows `add_to`, in which they are written.

    Up to FEW_ROWS rows read the packed matrix, and each row's sums have the same order for any T.
    """
    T = len(x)
    n, width = weight.shape
    if T > FEW_ROWS:
        dense = unpack_rows(weight, None, x.dtype)
        if add_to is None or bias is not None:
            y = F.linear(x, dense, bias)
            return y if add_to is None else add_to.add_(y)
        return add_to.addmm_(x, dense.T)
    out = x.new_empty(T, n) if add_to is None else add_to
    if not T:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    k_tiles_per_split = weight.k_tiles_per_split(len(weight.words))
    splits = triton.cdiv(weight.num_k_tiles, k_tiles_per_split)
    partial = torch.empty(splits, T, n, dtype=torch.float32, device=x.device)
    tokens = choose_block(T)
    weight_kernels.multiply_packed[(len(weight.words), splits)](
        x=x, x_row=x.stride(0), partial=partial, tokens=T, n=n, width=width, k_tiles_per_split=k_tiles_per_split,
        **weight.kernel_args, **product_options(x.dtype, tokens),
    )  # fmt: skip
    add_splits(partial, bias, out, add=add_to is not None)
    return out


def choose_block(rows: int) -> int:
    """Return how many rows a program multiplies, where there are so many."""
    return min(max(triton.next_power_of_2(rows), LEAST_BLOCK), LARGEST_BLOCK)


def product_options(dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """Return what kernels that multiply so many rows of a dtype are compiled for."""
    is_exact = dtype == torch.float32 or triton.knobs.runtime.interpret
    return {
        "TOKENS": tokens,
        "DOT": tl.float32 if is_exact else DOT_DTYPES[dtype],
        "PRECISION": "tf32x3" if is_exact else "tf32",
        "STAGES": 4,
        "num_warps": 4 if tokens == LEAST_BLOCK else 8,
    }


def add_splits(partial: Tensor, bias: Tensor | None, out: Tensor, add: bool = False) -> None:
    """Set out [T, n] to the sums of the splits float32 [splits, T, n], plus a bias [n]; with `add`, plus out itself."""
    splits, T, n = partial.shape
    block = 256
    weight_kernels.add_splits[(T, triton.cdiv(n, block))](
        partial=partial, bias=partial if bias is None else bias, out=out, out_row=out.stride(0), tokens=T, n=n,
        splits=splits, SPLITS=triton.next_power_of_2(splits), BLOCK=block, BIAS=bias is not None, ADD=add,
    )  # fmt: skip


def look_up(index: Tensor, weight: Tensor | DeviceWeight, dtype: torch.dtype) -> Tensor:
    """Return the rows of index int64 [T] in `dtype`: [T, in]."""
    return F.embedding(index, weight) if isinstance(weight, Tensor) else unpack_rows(weight, index, dtype)


def unpack_rows(weight: DeviceWeight, index: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the rows of index int64 [T], or all of them, as a dense matrix, with the bits of `dequantize`."""
    rows = weight.shape[0] if index is None else len(index)
    block = 64 if index is None else 8
    out = torch.empty(rows, weight.shape[1], dtype=dtype, device=weight.words.device)
    if rows:
        weight_kernels.unpack_rows[(triton.cdiv(rows, block), weight.num_k_tiles)](
            index=weight.words if index is None else index, out=out, rows=rows, width=weight.shape[1],
            **weight.kernel_args, INDEXED=index is not None, ROWS=block,
        )  # fmt: skip
    return out
