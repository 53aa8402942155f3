"""The noise of observed scores: a hash, made into a distribution. What is not known here: what it is added to."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from retain.kernels.api import CONSTANT, GAUSSIAN, GUMBEL, NO_NOISE

GUMBEL_MEAN, GUMBEL_STD = 0.5772157, 1.2825498  # of a standard Gumbel: Euler's constant, pi / sqrt 6
MASK_32, GOLDEN_RATIO = 0xFFFFFFFF, 0x9E3779B9


def mix_bits(x: Tensor) -> Tensor:
    """A permutation of 32 bits; the upper ones are the good ones. int64 that hold 32 bits.

    Two rounds of shift and multiply with the constants of Wellons' `lowbias32`. After one round alone, neighbouring
    positions were correlated by half a percent.
    """
    x = x & MASK_32
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK_32
    return ((x ^ (x >> 15)) * 0x846CA68B) & MASK_32


def noise_key(seed: Tensor, layer: int, head: int, query_pos: Tensor) -> Tensor:
    """What a row's noise hangs on; `step` is -1 where it is drawn once."""
    x = mix_bits(seed.long() + GOLDEN_RATIO)
    for part in (layer, head, query_pos.long()):
        x = mix_bits(x + GOLDEN_RATIO * (part + 1))
    return x


def sample_noise(kind: int, key: Tensor, pos: Tensor) -> Tensor:
    """float32 of the shape of key and pos together, or [1] where all are the same."""
    if kind in (NO_NOISE, CONSTANT):
        return torch.zeros(1) if kind == NO_NOISE else torch.full((1,), GUMBEL_MEAN)
    u = ((mix_bits(key + GOLDEN_RATIO * pos.long()) >> 9).float() + 0.5) * 2.0**-23  # exact, and neither 0 nor 1
    if kind == GUMBEL:
        return -torch.log(-torch.log(u))
    assert kind == GAUSSIAN
    return GUMBEL_MEAN + GUMBEL_STD * math.sqrt(2) * torch.erfinv(2 * u - 1)
