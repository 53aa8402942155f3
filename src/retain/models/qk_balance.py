"""Factors that make keys and queries equally large, pair by pair, so that rounding keys costs scores the least.

A slot of few bits rounds all numbers of a key alike (kernels/quantized_slots.py), and a query multiplies the error of
each by its own number. Where k is large q is often small, by the weights of norms in Gemma 3 and by biases in Qwen2.
With factors (q^2 / k^2)^(1/4) on keys and their inverse on queries the error of q . k is the least. SmoothAttention
finds such factors from calibration data (QServe, arXiv 2405.04532); here weights alone say how large numbers are.

Factors are powers of two, so q . k keeps every bit where slots are not rounded. RoPE's pairs share a factor, so factors
and rotations commute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from retain.kernels.rope import Rope
from retain.kernels.weight import Weight, dense_chunks, row_energies
from retain.models.layers import ClippedLinear, Layer, LayerNorm, Linear, PartNorms, RMSNorm

Energies = Callable[[Weight, Tensor], Tensor]
LARGEST_EXPONENT = 8
SMALLEST_ENERGY = 1e-12


def find_qk_factors(
    input_norm: Layer | None,
    projection: Layer,
    qk_norm: Layer | None,
    rope: Rope | None,
    key_offset: Tensor | None,
    heads: tuple[int, int, int],
    energies: Energies = row_energies,
) -> Tensor | None:
    """Return factors of the heads of q and of k, float32 [H + G, D]; `heads` is (H, G, D).

    Keys are cached less `key_offset` [G, D], so that part of their bias does not count. Without an input norm all
    inputs are taken to be equally large. Returns None where all factors are 1, or for layers of unknown kinds.
    `energies` is a backend's row_energies.
    """
    H, G, D = heads
    linear = projection.linear if isinstance(projection, ClippedLinear) else projection
    if not isinstance(linear, Linear) or not isinstance(input_norm, RMSNorm | LayerNorm | None):
        return None
    variance, constant = (x[: (H + G) * D].view(H + G, D) for x in _output_moments(linear, input_norm, energies))
    if key_offset is not None and rope is None:
        constant[H:] -= key_offset
    energy = variance + constant.square()
    if isinstance(qk_norm, RMSNorm | PartNorms):
        energy = _normalize(energy, qk_norm)
    if key_offset is not None and rope is not None:  # the mean of a rotated constant
        energy[H:] -= key_offset.double().square()
    energy = _mean_of_pairs(energy, rope).clamp(min=SMALLEST_ENERGY)
    queries = energy[:H].view(G, -1, D).mean(1)  # [G, D]
    keys = energy[H:]  # [G, D]
    exponents = ((queries / keys).log2() / 4).round().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
    if not exponents.any():
        return None
    return torch.cat((-exponents.repeat_interleave(H // G, 0), exponents)).exp2().float()


def _normalize(energy: Tensor, norm: RMSNorm | PartNorms) -> Tensor:
    """Return the energy [heads, D] behind a norm of each head, or of parts that span heads."""
    row = energy.flatten()
    for part in norm.norms if isinstance(norm, PartNorms) else (norm,):
        end = part.first + part.weight.numel()
        before = row[part.first : end].view(part.weight.shape)
        after = before / before.mean(-1, keepdim=True).clamp(min=SMALLEST_ENERGY) * part.weight.double().square()
        row = torch.cat((row[: part.first], after.flatten(), row[end:]))
    return row.view(energy.shape)


def _output_moments(linear: Linear, norm: RMSNorm | LayerNorm | None, energies: Energies) -> tuple[Tensor, Tensor]:
    """Return variances and means of a linear layer's outputs behind a norm, if any, float64 [out].

    Inputs, normalized ones before their weights, are taken to be independent, with mean 0 and variance 1.
    """
    mean = torch.zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias.float()
    scale = torch.ones(linear.weight.shape[1]) if norm is None else norm.weight.float()
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        mean = mean + torch.cat([rows @ norm.bias.float() for rows in dense_chunks(linear.weight)])
    return energies(linear.weight, scale.square()).double(), mean.double()


def _mean_of_pairs(energy: Tensor, rope: Rope | None) -> Tensor:
    """Give the two numbers of each rotary pair their mean, [heads, D]. Numbers that are not rotated are no pairs."""
    if rope is None:
        return energy
    n = 2 * len(rope.freqs)
    rotated = energy[:, :n]
    pairs = rotated.reshape(len(energy), -1, 2).mT if rope.interleaved else rotated.reshape(len(energy), 2, -1)
    mean = pairs.mean(1, keepdim=True).expand_as(pairs)  # [heads, 2, n / 2]
    rotated = mean.mT.flatten(1) if rope.interleaved else mean.flatten(1)
    return torch.cat((rotated, energy[:, n:]), -1)
