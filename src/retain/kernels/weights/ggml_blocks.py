"""Unpack ggml's blocks, in which GGUF files hold matrices: the common types in one numpy pass, others by `gguf`.

This is the definition; the cpu backend unpacks most types in C++ (cpu/csrc/gemm/ggml_blocks.cpp), and tests require
equal results. The library knows every type, but works on sixteen rows at a time, which takes seconds for the 262144
rows of Gemma's embedding. Both give the same bits; a test checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.weights.quantized import (
    IQ4,
    MXFP4,
    NVFP4,
    Int4,
    Int5,
    Int6,
    Int8,
    Kind,
    QuantizedWeight,
    check_finite,
    to_kind,
    widen,
)

DENSE_DTYPES = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml types that torch has too
SIMPLE_BLOCKS = {  # 32 elements: a scale d, in some types a shift m, and values q of 8 bits, or of 4 in two halves
    2: np.dtype([("d", "<f2"), ("q", "u1", 16)]),  # Q4_0
    3: np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),  # Q4_1
    8: np.dtype([("d", "<f2"), ("q", "i1", 32)]),  # Q8_0
}
# `high`: the fifth bits.
Q5_0 = np.dtype([("d", "<f2"), ("high", "u1", 4), ("q", "u1", 16)])
Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("q", "u1", 16)])

# 256 elements. Q4_K and Q5_K have 8 groups of 32, with factors of 6 bits for scales and shifts. Q3_K and Q6_K have 16
# groups of 16. The higher bits are in `high`, or `top`.
Q3_K = np.dtype([("top", "u1", 32), ("q", "u1", (2, 32)), ("six", "u1", 12), ("d", "<f2")])
Q4_K = np.dtype([("d", "<f2"), ("m", "<f2"), ("six", "u1", 12), ("q", "u1", (4, 32))])
Q5_K = np.dtype([("d", "<f2"), ("m", "<f2"), ("six", "u1", 12), ("high", "u1", 32), ("q", "u1", (4, 32))])
Q6_K = np.dtype([("q", "u1", (2, 64)), ("high", "u1", (2, 32)), ("factors", "i1", 16), ("d", "<f2")])

IQ4_NL = np.dtype([("d", "<f2"), ("q", "u1", 16)])
# 256 elements in 8 groups, whose scales have 6 bits: four in `low`, two in `high`.
IQ4_XS = np.dtype([("d", "<f2"), ("high", "<u2"), ("low", "u1", 4), ("q", "u1", (8, 16))])
MXFP4_BLOCK = np.dtype([("e", "u1"), ("q", "u1", 16)])
NVFP4_BLOCK = np.dtype([("e", "u1", 4), ("q", "u1", (4, 8))])  # 64 elements in 4 groups

# The kinds that keep the numbers of a type. All other types become Int8.
KEPT_KINDS: dict[int, type[QuantizedWeight]] = {
    2: Int4,  # Q4_0
    3: Int4,  # Q4_1
    12: Int4,  # Q4_K
    6: Int5,  # Q5_0
    7: Int5,  # Q5_1
    13: Int5,  # Q5_K
    11: Int6,  # Q3_K
    14: Int6,  # Q6_K
    8: Int8,  # Q8_0
    20: IQ4,  # IQ4_NL
    23: IQ4,  # IQ4_XS
    39: MXFP4,
    40: NVFP4,
}
INT8_TYPES = (2, 6, 8, 20, 23, 39)  # that Int8 can hold too: groups of 32 without shifts


def convert_blocks(
    raw: NDArray[np.uint8], ggml_type: int, shape: tuple[int, int], kind: Kind
) -> Tensor | QuantizedWeight:
    """Convert a matrix's bytes to a kind. What the kind can hold keeps the file's own values.

    Raises ValueError for scales that are not finite in float16.
    """
    if not isinstance(kind, torch.dtype) and _keeps(kind, ggml_type):
        return widen(_unpack(raw, ggml_type, shape), kind)
    return to_kind(dequantize_blocks(raw, ggml_type, shape), kind)


def _keeps(kind: type[QuantizedWeight], ggml_type: int) -> bool:
    """Return whether a kind holds the numbers of a type of blocks."""
    kept = KEPT_KINDS.get(ggml_type)
    return kept is kind or (kept, kind) == (Int4, Int5) or (kind is Int8 and ggml_type in INT8_TYPES)


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
    return KEPT_KINDS.get(ggml_type, Int8)


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
    kind = KEPT_KINDS[ggml_type]
    with np.errstate(all="ignore"):  # an overflow is not finite, which check_finite refuses
        q, *groups = UNPACKERS[ggml_type](raw)
        numbers = torch.from_numpy(np.ascontiguousarray(q)).view(shape)
        return kind(numbers, *(_group_values(shape, x) for x in groups))


def _group_values(shape: tuple[int, ...], x: NDArray[Any]) -> Tensor:
    """Convert values of groups to float16 [out, in / group]. Raises ValueError where one is not finite."""
    return check_finite(torch.from_numpy(np.ascontiguousarray(x.astype(np.float16))).view(shape[0], -1))


# Each function below unpacks bytes to the numbers q, in the order of the file, and the scales and shifts of the groups.


def _unpack_q4_0(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(SIMPLE_BLOCKS[2])
    return _split_nibbles(blocks["q"]), blocks["d"], -8 * blocks["d"]


def _unpack_q4_1(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(SIMPLE_BLOCKS[3])
    return _split_nibbles(blocks["q"]), blocks["d"], blocks["m"]


def _unpack_q5_0(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(Q5_0)
    return _add_fifth_bits(blocks), blocks["d"], -16 * blocks["d"]


def _unpack_q5_1(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(Q5_1)
    return _add_fifth_bits(blocks), blocks["d"], blocks["m"]


def _unpack_q8_0(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(SIMPLE_BLOCKS[8])
    return blocks["q"], blocks["d"]


def _unpack_q3_k(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(Q3_K)
    low, mid, high = blocks["six"].reshape(-1, 3, 4).swapaxes(0, 1)  # [n, 4] each
    fours = np.concatenate((low & 15, mid & 15, low >> 4, mid >> 4), axis=1)  # [n, 16]
    twos = np.concatenate([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    factors = (fours | twos << 4).view(np.int8) - 32
    q = _split_fields(blocks["q"], 2)  # [n, 2, 4, 32]
    top = _split_fields(blocks["top"], 1).reshape(q.shape)
    return (q | top << 2).view(np.int8) - 4, blocks["d"].astype(np.float32)[:, None] * factors


def _unpack_q4_k(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(Q4_K)
    return _split_nibbles(blocks["q"].reshape(-1, 32)), *_unpack_factors(blocks)


def _unpack_q5_k(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(Q5_K)
    q = _split_nibbles(blocks["q"].reshape(-1, 32)).reshape(-1, 8, 32)
    return q | _split_fields(blocks["high"], 1) << 4, *_unpack_factors(blocks)


def _unpack_q6_k(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(Q6_K)
    q = _split_nibbles(blocks["q"].reshape(-1, 64)).reshape(-1, 2, 4, 32)
    q |= _split_fields(blocks["high"], 2) << 4
    return q.view(np.int8) - 32, blocks["d"].astype(np.float32)[:, None] * blocks["factors"]


def _unpack_iq4_nl(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(IQ4_NL)
    return _split_nibbles(blocks["q"]), blocks["d"]


def _unpack_iq4_xs(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(IQ4_XS)
    low = np.stack((blocks["low"] & 15, blocks["low"] >> 4), -1).reshape(-1, 8)
    high = blocks["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    factors = (low | high.astype(np.uint8) << 4).astype(np.int8) - 32
    return _split_nibbles(blocks["q"].reshape(-1, 16)), blocks["d"].astype(np.float32)[:, None] * factors


def _unpack_mxfp4(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    blocks = raw.view(MXFP4_BLOCK)
    return _split_nibbles(blocks["q"]), np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128)


def _unpack_nvfp4(raw: NDArray[np.uint8]) -> tuple[NDArray[Any], ...]:
    # Scales are floats of 8 bits without a sign: 4 of the exponent, 3 of the mantissa. Halved, as numbers are doubled.
    blocks = raw.view(NVFP4_BLOCK)
    exponent = (blocks["e"] >> 3 & 15).astype(np.int32)
    mantissa = (blocks["e"] & 7).astype(np.float32)
    scale = np.ldexp(mantissa + 8 * (exponent > 0), np.maximum(exponent, 1) - 11).astype(np.float32)
    scale[blocks["e"] == 127] = 0  # not a number
    return _split_nibbles(blocks["q"].reshape(-1, 8)), scale


UNPACKERS: dict[int, Callable[[NDArray[np.uint8]], tuple[NDArray[Any], ...]]] = {
    2: _unpack_q4_0,
    3: _unpack_q4_1,
    6: _unpack_q5_0,
    7: _unpack_q5_1,
    8: _unpack_q8_0,
    11: _unpack_q3_k,
    12: _unpack_q4_k,
    13: _unpack_q5_k,
    14: _unpack_q6_k,
    20: _unpack_iq4_nl,
    23: _unpack_iq4_xs,
    39: _unpack_mxfp4,
    40: _unpack_nvfp4,
}


def _split_nibbles(q: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Split bytes [n, m] to [n, 2, m]: the lower four bits of all, then the upper four."""
    out = np.empty((len(q), 2, q.shape[1]), np.uint8)
    np.bitwise_and(q, 15, out=out[:, 0])
    np.right_shift(q, 4, out=out[:, 1])
    return out


def _split_fields(x: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Split bytes [..., m] into their fields of so many bits, the lowest first: [..., 8 / bits, m]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return x[..., None, :] >> shifts & np.uint8(2**bits - 1)


def _add_fifth_bits(blocks: NDArray[Any]) -> NDArray[np.uint8]:
    """Unpack the numbers of blocks [n] of Q5_0 or Q5_1: uint8 [n, 32]."""
    q = np.unpackbits(blocks["high"], axis=1, bitorder="little")  # [n, 32]
    q <<= 4
    q |= _split_nibbles(blocks["q"]).reshape(-1, 32)
    return q


def _unpack_factors(blocks: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Unpack scales and shifts float32 [n, 8] of blocks [n] of Q4_K or Q5_K.

    A group's scale and shift are 6 bits times the block's scale and shift.
    """
    a, b, c = blocks["six"].reshape(-1, 3, 4).swapaxes(0, 1)  # [n, 4] each; groups 4 to 7 are split over two of them
    scale = np.concatenate((a & 63, c & 15 | a >> 6 << 4), axis=1)  # [n, 8]
    shift = np.concatenate((b & 63, c >> 4 | b >> 6 << 4), axis=1)
    d, m = (blocks[part].astype(np.float32)[:, None] for part in ("d", "m"))
    return d * scale, -m * shift
