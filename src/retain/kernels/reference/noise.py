"""The noise of attention scoring: a hash of seed and positions, turned into a sample of a distribution."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from retain.kernels.slots.scoring import CONSTANT, GAUSSIAN, GUMBEL, NO_NOISE

# Of the standard Gumbel distribution: Euler's constant, and pi / sqrt 6.
GUMBEL_MEAN = 0.5772157
GUMBEL_STD = 1.2825498
MASK_32 = 0xFFFFFFFF
GOLDEN_RATIO = 0x9E3779B9


def mix_bits(x: Tensor) -> Tensor:
    """Permute 32-bit integers, held in int64. The upper bits of the result are the best mixed.

    Two rounds of shift and multiply with the constants of Wellons' `lowbias32`. One round alone left neighbouring
    positions correlated by half a percent.
    """
    x = x & MASK_32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK_32
    return ((x ^ (x >> 15)) * 0x846CA68B) & MASK_32


def noise_draw(query_pos: Tensor, period: Tensor) -> Tensor:
    """Return the number of the draw of noise that queries share: one for each `period` positions; -1 for period 0."""
    return torch.where(period > 0, query_pos // period.clamp(min=1), -1)


def noise_key(seed: Tensor, layer: int, head: int, draw: Tensor) -> Tensor:
    """Return the part of the hash that all slots of a query share; `draw` is that of `noise_draw`."""
    x = mix_bits(seed.long() + GOLDEN_RATIO)
    for part in (layer, head, draw.long()):
        x = mix_bits(x + GOLDEN_RATIO * (part + 1))
    return x


def sample_noise(kind: int, key: Tensor, pos: Tensor) -> Tensor:
    """Return a sample for each key and slot position: float32 of their broadcast shape, or [1] if all are equal."""
    if kind in (NO_NOISE, CONSTANT):
        return torch.zeros(1) if kind == NO_NOISE else torch.full((1,), GUMBEL_MEAN)
    bits = mix_bits(key + GOLDEN_RATIO * pos.long()) >> 9
    u = (bits.float() + 0.5) * 2.0**-23  # exact in float32, and strictly between 0 and 1
    if kind == GUMBEL:
        return -torch.log(-torch.log(u))
    assert kind == GAUSSIAN
    return GUMBEL_MEAN + GUMBEL_STD * math.sqrt(2) * torch.erfinv(2 * u - 1)
