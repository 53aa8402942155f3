"""A pass that makes keys and queries equally large, pair by pair, so that rounding keys costs scores the least.

A slot of few bits rounds all numbers of a key alike (kernels/slots/quantized_slots.py), and a query multiplies the
error of each by its own number. Where k is large q is often small, by the weights of norms in Gemma 3 and by biases in
Qwen2. With factors (q^2 / k^2)^(1/4) on keys and their inverse on queries the error of q . k is the least.
SmoothAttention finds such factors from calibration data (QServe, arXiv 2405.04532); here weights alone say how large
numbers are.

Factors are powers of two, so q . k keeps every bit where slots are not rounded. RoPE's pairs share a factor, so factors
and rotations commute.

Keys are cached less an offset: the mean of their rotated bias over the first positions. Biases are far larger than the
rest of a key in some layers of Qwen2, where rotation is slow. They would take the range of the few bits that a slot
has. An offset changes all scores of a query by the same number, so its weights stay. With a softcap or sink logits they
would not: then there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from retain.kernels.ops import Attend, Buffer, Clip, MatMul, Norm, Operation, Scale
from retain.kernels.rope import Rope
from retain.kernels.slots.kv_cache_spec import KVCacheSpec
from retain.kernels.weights.weight import Weight, dense_chunks, row_energies

Energies = Callable[[Weight, Tensor], Tensor]  # a backend's row_energies
LARGEST_EXPONENT = 8
SMALLEST_ENERGY = 1e-12


def balance(
    operations: Iterable[Operation],
    caches: KVCacheSpec,
    key_factors: dict[int, Tensor],
    energies: Energies = row_energies,
) -> Iterator[Operation]:
    """Scale queries and keys before each attention that alone reads its cache, and give it a key offset.

    The factors of keys, [G, D], are noted in `key_factors` by cache. Attention whose q, k and v are no linear layer's
    output passes as it is.
    """
    norms: dict[Buffer, Norm] = {}  # of whole rows, by the buffer that still holds their output
    held: list[Operation] = []  # a linear layer, and what changes its output in place
    for op in operations:
        if isinstance(op, MatMul) and not op.add:
            yield from held
            held = [op]
        elif isinstance(op, Attend):
            projection = Projection.find(held, op, norms)
            if projection and not _is_shared(caches, op.cache):
                factors = projection.find_factors(energies)
                offset = projection.key_offset(factors)
                if factors is not None:
                    key_factors[op.cache] = factors[op.heads[0] :]
                    held.append(Scale(op.qkv, factors.flatten()))
                held.append(replace(op, params=replace(op.params, key_offset=offset)))
            else:
                held.append(op)
            yield from held
            held = []
            projection = None
        elif held and op.out == held[0].out:
            held.append(op)
        else:
            yield from held
            yield op
            held = []
        norms.pop(op.out, None)
        if isinstance(op, Norm) and not op.is_by_head and not op.add:
            norms[op.out] = op
        del op  # its weights may be freed before the next ones are read
    yield from held


def _is_shared(caches: KVCacheSpec, cache: int) -> bool:
    """Return whether more than one layer attends to a cache, so that keys must stay as they are."""
    own = caches.source_cache(cache)
    return sum(caches.source_cache(i) == own for i in range(len(caches.caches))) > 1


@dataclass(frozen=True)
class Projection:
    """The linear layer that gives an attention its q, k and v, and what is around it."""

    linear: MatMul
    input_norm: Norm | None  # without one all inputs are taken to be equally large
    between: list[Operation]  # what changes its output in place, up to the attention
    attention: Attend

    @classmethod
    def find(cls, held: list[Operation], attention: Attend, norms: dict[Buffer, Norm]) -> Projection | None:
        """Return the projection; None if q, k and v come from elsewhere."""
        if not held or not isinstance(held[0], MatMul) or held[0].out != attention.qkv:
            return None
        return cls(held[0], norms.get(held[0].x), held[1:], attention)

    @property
    def qk_norms(self) -> list[Norm]:
        """The norms of heads of q and k."""
        H, G, D = self.attention.heads
        return [op for op in self.between if isinstance(op, Norm) and op.first < (H + G) * D]

    def key_offset(self, factors: Tensor | None) -> Tensor | None:
        """Return the mean of keys' rotated bias, times their factors, over the first positions: float32 [G, D]."""
        bias = self.linear.bias
        has_bias_alone = not self.qk_norms and not any(isinstance(op, Clip) for op in self.between)
        if bias is None or not has_bias_alone or not self.attention.params.is_shift_invariant:
            return None
        H, G, D = self.attention.heads
        keys = bias[H * D : (H + G) * D].float().view(G, D)
        keys = keys if factors is None else keys * factors[H:]
        rope = self.attention.rope
        return keys if rope is None else rope.apply(keys[None], rope.mean_angles)[0]

    def find_factors(self, energies: Energies = row_energies) -> Tensor | None:
        """Return factors of the heads of q and of k, float32 [H + G, D]; None where all are 1.

        Keys are cached less an offset, so that part of their bias does not count.
        """
        H, G, D = self.attention.heads
        rope = self.attention.rope
        key_offset = self.key_offset(None)
        moments = _output_moments(self.linear, self.input_norm, energies)
        variance, constant = (x[: (H + G) * D].view(H + G, D) for x in moments)
        if key_offset is not None and rope is None:
            constant[H:] -= key_offset
        energy = variance + constant.square()
        for norm in self.qk_norms:
            energy = energy if norm.subtract_mean else _normalize(energy, norm)
        if key_offset is not None and rope is not None:  # the mean of a rotated constant
            energy[H:] -= key_offset.double().square()
        energy = _mean_of_pairs(energy, rope).clamp(min=SMALLEST_ENERGY)
        queries = energy[:H].view(G, -1, D).mean(1)  # [G, D]
        keys = energy[H:]  # [G, D]
        exponents = ((queries / keys).log2() / 4).round().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT)
        if not exponents.any():
            return None
        return torch.cat((-exponents.repeat_interleave(H // G, 0), exponents)).exp2().float()


def _normalize(energy: Tensor, norm: Norm) -> Tensor:
    """Return the energy [heads, D] behind a norm of each head, or of parts that span heads."""
    row = energy.flatten()
    end = norm.first + norm.weight.numel()
    before = row[norm.first : end].view(norm.weight.shape)
    after = before / before.mean(-1, keepdim=True).clamp(min=SMALLEST_ENERGY) * norm.weight.double().square()
    return torch.cat((row[: norm.first], after.flatten(), row[end:])).view(energy.shape)


def _output_moments(linear: MatMul, norm: Norm | None, energies: Energies) -> tuple[Tensor, Tensor]:
    """Return variances and means of a linear layer's outputs behind a norm, if any, float64 [out].

    Inputs, normalized ones before their weights, are taken to be independent, with mean 0 and variance 1.
    """
    mean = torch.zeros(linear.weight.shape[0]) if linear.bias is None else linear.bias.float()
    scale = torch.ones(linear.weight.shape[1]) if norm is None else norm.weight.float()
    if norm is not None and norm.bias is not None:
        bias = norm.bias.float()
        mean = mean + torch.cat([rows @ bias for rows in dense_chunks(linear.weight)])
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
