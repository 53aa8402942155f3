"""Slots of 8 bits: how K and V are rounded. Every backend stores these integers and scales, to the bit.

A slot's K, and its V, are D integers between -127 and 127 and one bfloat16 scale:

    scale = bfloat16(max |x| / 127)        integer = x / scale, to the nearest, ties to even

The division is a product with the float32 reciprocal of the scale. Numbers below about 1e-28 are stored as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
SCALE_BYTES = torch.bfloat16.itemsize
SMALLEST_SCALE = 2.0**-100


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
