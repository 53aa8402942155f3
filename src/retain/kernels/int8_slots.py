"""Slots of 8 bits: how K and V are rounded. Every backend stores these integers and scales, to the bit.

A slot's K, and its V, are D integers between -127 and 127 and one bfloat16 scale:

    scale = bfloat16(max |x| / 127)        integer = x / scale, to the nearest, ties to even

The division is a product with the float32 reciprocal of the scale. Numbers below about 1e-28 are stored as 0.

Keys are rotated before, and queries with them, so q . k stays (QuaRot, arXiv 2404.00456). A rotation spreads the few
large numbers of a key over all of them. Without it they take the range of the others: the KL divergence of Gemma 3
from exact slots is seven times as large.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
SCALE_BYTES = torch.bfloat16.itemsize
SMALLEST_SCALE = 2.0**-100


def rotate(x: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform, float32 [..., D], of x [..., D]: orthonormal, and its own inverse.

    Each block of 2^n numbers is transformed, where 2^n is the largest power of 2 that divides D.
    """
    D = x.shape[-1]
    block = D & -D
    y, h = x.float().unflatten(-1, (-1, block)), 1
    while h < block:
        a, b = y.unflatten(-1, (-1, 2, h)).unbind(-2)
        y, h = torch.stack((a + b, a - b), -2).flatten(-3), 2 * h
    return (y * block**-0.5).flatten(-2)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers int8 [..., D] and the scales bfloat16 [...] of x [..., D]."""
    x = x.float()
    scale = (x.abs().amax(-1) / LARGEST).bfloat16()
    factor = torch.where(scale > SMALLEST_SCALE, 1 / scale.float(), 0.0)
    integers = (x * factor[..., None]).round().clamp(-LARGEST, LARGEST)
    return integers.to(torch.int8), scale


def dequantize(integers: Tensor, scale: Tensor) -> Tensor:
    """Return the numbers that slots hold, float32 [..., D]."""
    return integers.float() * scale.float()[..., None]


def to_bytes(x: Tensor) -> Tensor:
    """Return slots as int8 [..., D + 2]: the integers, then the bytes of the scale."""
    integers, scale = quantize(x)
    return torch.cat((integers, scale[..., None].view(torch.int8)), -1)


def from_bytes(slots: Tensor) -> Tensor:
    """Return the numbers of what `to_bytes` returned, float32 [..., D]."""
    integers, scale = slots[..., :-SCALE_BYTES], slots[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16)
    return dequantize(integers, scale[..., 0])
