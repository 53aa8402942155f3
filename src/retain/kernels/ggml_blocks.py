"""Unpack ggml's blocks, in which GGUF files hold matrices: the common types in one numpy pass, others by `gguf`.

This is the definition; the cpu backend unpacks most types in C++ (cpu/csrc/ggml_blocks.cpp), and tests require equal
results. The library knows every type, but works on sixteen rows at a time, which takes seconds for the 262144 rows of
Gemma's embedding. Both give the same bits; a test checks it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.quantized import IQ4, MXFP4, Codebook4, Int4, Int8, Kind, QuantizedWeight, check_finite, to_kind

DENSE_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml types that torch has too
SIMPLE_BLOCKS = {  # 32 elements: a scale d, in some types a shift m, and values q of 8 bits, or of 4 in two halves
    2: np.dtype([("d", "<f2"), ("q", "u1", 16)]),  # Q4_0
    3: np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),  # Q4_1
    8: np.dtype([("d", "<f2"), ("q", "i1", 32)]),  # Q8_0
}
Q5_0 = np.dtype([("d", "<f2"), ("high", "u1", 4), ("q", "u1", 16)])  # `high`: the fifth bits
Q4_K = np.dtype([("d", "<f2"), ("m", "<f2"), ("six", "u1", 12), ("q", "u1", (4, 32))])  # 256 elements in 8 groups


IQ4_NL = np.dtype([("d", "<f2"), ("q", "u1", 16)])
# 256 elements in 8 groups, whose scales have 6 bits: four in `low`, two in `high`.
IQ4_XS = np.dtype([("d", "<f2"), ("high", "<u2"), ("low", "u1", 4), ("q", "u1", (8, 16))])
MXFP4_BLOCK = np.dtype([("e", "u1"), ("q", "u1", 16)])

# Types with the groups of Int4 (Q4_0, Q4_1, Q4_K), of Int8 (Q5_0, Q8_0), and of codebooks.
INT4_TYPES = (2, 3, 12)
INT8_TYPES = (6, 8)
CODEBOOK_TYPES: dict[int, type[Codebook4]] = {20: IQ4, 23: IQ4, 39: MXFP4}
KEPT_TYPES = (*INT4_TYPES, *INT8_TYPES, *CODEBOOK_TYPES)


def convert_blocks(
    raw: NDArray[np.uint8], ggml_type: int, shape: tuple[int, int], kind: Kind
) -> Tensor | QuantizedWeight:
    """Convert a matrix's bytes to a kind. What has the groups of that kind keeps the file's own values.

    Raises ValueError for scales that are not finite in float16.
    """
    if kind is stored_kind(ggml_type) and ggml_type in KEPT_TYPES:
        return _unpack(raw, ggml_type, shape)
    return to_kind(dequantize_blocks(raw, ggml_type, shape), kind)


def is_supported(ggml_type: int) -> bool:
    """Return whether tensors of a type can be dequantized."""
    if ggml_type in DENSE_DTYPES:
        return True
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    try:
        dequantize_blocks(np.zeros(block_bytes, np.uint8), ggml_type, (1, block_size))
    except NotImplementedError:
        return False
    return True


def stored_kind(ggml_type: int) -> Kind:
    """Return the kind that is nearest to a type of blocks."""
    return CODEBOOK_TYPES.get(ggml_type) or (Int4 if ggml_type in INT4_TYPES else Int8)


def dequantize_blocks(raw: NDArray[np.uint8], ggml_type: int, shape: tuple[int, ...]) -> Tensor:
    """Convert a tensor's bytes: float16 and bfloat16 stay, every other type becomes float32.

    Raises NotImplementedError for a type that has no definition.
    """
    if ggml_type in DENSE_DTYPES:
        return torch.from_numpy(raw).view(DENSE_DTYPES[ggml_type]).view(shape)
    with np.errstate(all="ignore"):  # damaged scales may overflow; callers check the result
        if ggml_type in SIMPLE_BLOCKS:
            return torch.from_numpy(_dequantize_simple(raw.view(SIMPLE_BLOCKS[ggml_type]))).view(shape)
        return torch.from_numpy(dequantize(raw.reshape(*shape[:-1], -1), GGMLQuantizationType(ggml_type)))


def _dequantize_simple(blocks: NDArray[Any]) -> NDArray[np.float32]:
    """Dequantize blocks [n] to float32 [n, 32]."""
    d = blocks["d"].astype(np.float32)[:, None]
    q = blocks["q"]
    if q.dtype == np.int8:
        return q * d
    out = np.empty((len(blocks), 32), np.float32)
    for half, nibbles in ((out[:, :16], q & 15), (out[:, 16:], q >> 4)):
        if "m" in (blocks.dtype.names or ()):
            np.multiply(nibbles, d, out=half)
            half += blocks["m"].astype(np.float32)[:, None]
        else:
            np.multiply(nibbles.view(np.int8) - 8, d, out=half)
    return out


def _unpack(raw: NDArray[np.uint8], ggml_type: int, shape: tuple[int, int]) -> QuantizedWeight:
    """Convert a matrix's bytes with the file's own values."""
    with np.errstate(all="ignore"):  # an overflow is not finite, which check_finite refuses
        if codebook := CODEBOOK_TYPES.get(ggml_type):
            q, scale = _unpack_codebook(raw, ggml_type)
            return codebook(torch.from_numpy(q).view(shape), _group_values(shape, scale))
        if ggml_type == 12:
            return _make_int4(shape, *_unpack_q4_k(raw.view(Q4_K)))
        if ggml_type == 6:
            blocks = raw.view(Q5_0)
            return _make_int8(shape, _unpack_q5_0(blocks), blocks["d"])
        blocks = raw.view(SIMPLE_BLOCKS[ggml_type])
        d = blocks["d"]
        q = blocks["q"]
        if q.dtype == np.int8:
            return _make_int8(shape, q, d)
        return _make_int4(shape, _unpack_nibbles(q), d, blocks["m"] if "m" in (blocks.dtype.names or ()) else -8 * d)


def _make_int4(shape: tuple[int, ...], q: NDArray[Any], scale: NDArray[Any], shift: NDArray[Any]) -> Int4:
    """Build an Int4 from values, and scales and shifts of its groups, all in the file's order."""
    return Int4(torch.from_numpy(q).view(shape), _group_values(shape, scale), _group_values(shape, shift))


def _make_int8(shape: tuple[int, ...], q: NDArray[Any], scale: NDArray[Any]) -> Int8:
    """Build an Int8 from values and scales of its groups, both in the file's order."""
    return Int8(torch.from_numpy(np.ascontiguousarray(q)).view(shape), _group_values(shape, scale))


def _group_values(shape: tuple[int, ...], x: NDArray[Any]) -> Tensor:
    """Convert values of groups to float16 [out, in / 32]. Raises ValueError where one is not finite."""
    return check_finite(torch.from_numpy(x.astype(np.float16)).view(shape[0], -1))


def _unpack_nibbles(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Split bytes [n, m] to [n, 2, m]: the lower four bits of all, then the upper four."""
    out = np.empty((len(q), 2, q.shape[1]), np.uint8)
    np.bitwise_and(q, 15, out=out[:, 0])
    np.right_shift(q, 4, out=out[:, 1])
    return out


def _unpack_codebook(raw: NDArray[np.uint8], ggml_type: int) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Unpack places in a codebook uint8 [n, 2, 16], and the scales of groups [n]."""
    if ggml_type == 39:
        mxfp4 = raw.view(MXFP4_BLOCK)
        return _unpack_nibbles(mxfp4["q"]), np.ldexp(np.float32(1), mxfp4["e"].astype(np.int32) - 128)
    if ggml_type == 20:
        blocks = raw.view(IQ4_NL)
        return _unpack_nibbles(blocks["q"]), blocks["d"]
    blocks = raw.view(IQ4_XS)
    low = np.stack((blocks["low"] & 15, blocks["low"] >> 4), -1).reshape(-1, 8)
    high = blocks["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    factors = (low | high.astype(np.uint8) << 4).astype(np.int8) - 32
    return _unpack_nibbles(blocks["q"].reshape(-1, 16)), blocks["d"].astype(np.float32)[:, None] * factors


def _unpack_q5_0(blocks: NDArray[Any]) -> NDArray[np.int8]:
    """Unpack blocks [n] to int8 [n, 32], -16 to 15."""
    q = np.unpackbits(blocks["high"], axis=1, bitorder="little")  # [n, 32]
    q <<= 4
    q |= _unpack_nibbles(blocks["q"]).reshape(-1, 32)
    q -= 16
    return q.view(np.int8)


def _unpack_q4_k(blocks: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.float32], NDArray[np.float32]]:
    """Unpack blocks [n] to values uint8 [4 n, 2, 32], and scales and shifts float32 [n, 8].

    A group's scale and shift are 6 bits times the block's scale and shift.
    """
    a, b, c = blocks["six"].reshape(-1, 3, 4).swapaxes(0, 1)  # [n, 4] each; groups 4 to 7 are split over two of them
    scale = np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=1)  # [n, 8]
    shift = np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=1)
    d, m = (blocks[part].astype(np.float32)[:, None] for part in ("d", "m"))
    return _unpack_nibbles(blocks["q"].reshape(-1, 32)), d * scale, -m * shift
