"""Slots of 8 and of 4 bits: how K and V are rounded. Every backend stores these numbers and scales, to the bit.

See pool_dtypes.py for the dtypes of pools. Two numbers of 4 bits are in a byte.

    8 bits   one bfloat16 scale for D numbers: max |x| / 127; an integer is x / scale, between -127 and 127
    fp8      one bfloat16 scale for D numbers: max |x| / 448; a float of 8 bits (e4m3) is x / scale
    4 bits   one bfloat16 scale for each group of at most 32: x / -8 of the largest |x|; an integer is x / scale,
             between -8 and 7, stored 8 too high (Q4_0 of ggml)

Numbers are rounded to the nearest, ties to even. The division is a product with the float32 reciprocal of the scale.
Numbers below about 1e-28 are stored as 0.

Keys are rotated before, and queries with them, so q . k stays (QuaRot, arXiv 2404.00456). A rotation spreads the few
large numbers of a key over all of them. Without it they take the range of the others: the KL divergence of Gemma 3
from exact slots is seven times as large. Keys of 4 bits cost ten times what values of 4 bits cost.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
LARGEST_FP8 = 448
SCALE_BYTES = torch.bfloat16.itemsize
SMALLEST_SCALE = 2.0**-100


def largest_block(head_dim: int) -> int:
    """Return the largest power of 2 that divides D."""
    return head_dim & -head_dim


def group_size(head_dim: int) -> int:
    """Return how many numbers of 4 bits share a scale."""
    return min(32, largest_block(head_dim))


def rotate(x: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform, float32 [..., D], of x [..., D]: orthonormal, and its own inverse.

    Each block of 2^n numbers is transformed, where 2^n is the largest power of 2 that divides D.
    """
    block = largest_block(x.shape[-1])
    y = _split(x.float(), block)
    h = 1
    while h < block:
        a, b = y.reshape(*y.shape[:-1], block // (2 * h), 2, h).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        h = 2 * h
    return (y * block**-0.5).flatten(-2)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers int8 [..., D] and the scales bfloat16 [...] of x [..., D]."""
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST).bfloat16()
    integers = (x * _reciprocal(scale)[..., None]).round().clamp(-LARGEST, LARGEST)
    return integers.to(torch.int8), scale


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers float8_e4m3fn [..., D] and the scales bfloat16 [...] of x [..., D]."""
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST_FP8).bfloat16()
    numbers = (x * _reciprocal(scale)[..., None]).clamp(-LARGEST_FP8, LARGEST_FP8)
    return numbers.to(torch.float8_e4m3fn), scale


def dequantize(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers that slots of 8 bits hold, float32 [..., D]."""
    return numbers.float() * scale.float()[..., None]


def quantize_4bit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers uint8 [..., D], 8 too high, and the scales bfloat16 [..., D / group] of x [..., D]."""
    y = _split(x.float(), group_size(x.shape[-1]))
    largest = y.gather(-1, y.abs().argmax(-1, keepdim=True))[..., 0]
    scale = (largest / -8).bfloat16()
    integers = (y * _reciprocal(scale)[..., None]).round().clamp(-8, 7) + 8
    return integers.to(torch.uint8).flatten(-2), scale


def dequantize_4bit(integers: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers that slots hold, float32 [..., D]."""
    y = _split(integers.float(), integers.shape[-1] // scale.shape[-1]) - 8
    return (y * scale.float()[..., None]).flatten(-2)


def pack_nibbles(integers: Tensor) -> Tensor:
    """Return uint8 [..., D / 2]: each group's first half in low nibbles, its second half in high ones."""
    half = group_size(integers.shape[-1]) // 2
    halves = _split(integers, half)
    low = halves[..., ::2, :]
    high = halves[..., 1::2, :]
    return (low | high << 4).flatten(-2)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return the integers uint8 [..., D] of what `pack_nibbles` returned."""
    half = group_size(2 * packed.shape[-1]) // 2
    y = _split(packed, half)
    return torch.stack((y & 15, y >> 4), -2).flatten(-3)


def to_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return slots of x [..., D] as bytes of the dtype: the numbers, then the bytes of the scales."""
    if dtype != torch.uint8:
        numbers, scale = quantize(x) if dtype == torch.int8 else quantize_fp8(x)
        return torch.cat((numbers, scale[..., None].view(dtype)), -1)
    integers, scale = quantize_4bit(x)
    return torch.cat((pack_nibbles(integers), scale.view(dtype)), -1)


def from_bytes(slots: Tensor, head_dim: int) -> Tensor:
    """Return the numbers of what `to_bytes` returned, float32 [..., D]."""
    width = head_dim // 2 if slots.dtype == torch.uint8 else head_dim
    numbers = slots[..., :width]
    scale = slots[..., width:].contiguous().view(torch.bfloat16)
    if slots.dtype == torch.uint8:
        return dequantize_4bit(unpack_nibbles(numbers), scale)
    return dequantize(numbers, scale[..., 0])


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale.abs() > SMALLEST_SCALE, 1 / scale.float(), 0.0)


def _split(x: Tensor, n: int) -> Tensor:
    """Return x [..., D] as [..., D / n, n]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // n, n)
