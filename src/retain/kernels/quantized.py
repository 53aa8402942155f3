"""The matrix of a linear layer or an embedding: dense, or quantised in groups of 32 inputs that share a scale.

Weights are most of what decoding reads, so they stay as small as their file has them. `dense` defines what the quanta
mean; kernels pack them as they like. What is not known here: files, and who chooses which kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_SIZE = 32  # neighbouring inputs that share a scale


@dataclass(frozen=True, eq=False)
class Int4:
    """w = scale * q + shift. One byte a number."""

    q: Tensor  # uint8 [out, in], 0 to 15
    scale: Tensor  # float16 [out, in / 32]
    shift: Tensor  # float16 [out, in / 32]

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.q.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers [out, in], computed in float32."""
        numbers = _split_groups(self.q.float()).mul_(_expand_groups(self.scale)).add_(_expand_groups(self.shift))
        return numbers.flatten(-2).to(dtype)

    def select_rows(self, index: Tensor) -> Int4:
        """These rows, int64 [n], in this order: [n, in]. Raises IndexError."""
        return Int4(self.q[index], self.scale[index], self.shift[index])

    def scale_rows(self, factors: Tensor) -> Int4:
        """Each row times its factor, float32 [out]; scales and shifts are rounded anew."""
        return Int4(self.q, *(_to_float16(x.float() * factors[:, None]) for x in (self.scale, self.shift)))


@dataclass(frozen=True, eq=False)
class Int8:
    """w = scale * q."""

    q: Tensor  # int8 [out, in], -127 to 127; a file may have a -128
    scale: Tensor  # float16 [out, in / 32]

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.q.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers [out, in], computed in float32."""
        return _split_groups(self.q.float()).mul_(_expand_groups(self.scale)).flatten(-2).to(dtype)

    def select_rows(self, index: Tensor) -> Int8:
        """These rows, int64 [n], in this order: [n, in]. Raises IndexError."""
        return Int8(self.q[index], self.scale[index])

    def scale_rows(self, factors: Tensor) -> Int8:
        """Each row times its factor, float32 [out]; scales are rounded anew."""
        return Int8(self.q, _to_float16(self.scale.float() * factors[:, None]))


QuantizedWeight = Int4 | Int8
Weight = Tensor | Int4 | Int8  # a Tensor is dense, [out, in]


def quantize_int4(weight: Tensor) -> Int4:
    """The nearest Int4 of a dense matrix, each group from its least number to its largest in 15 steps.

    Raises ValueError where `in` is no multiple of 32, or where a number is not finite or too large for a float16.
    """
    x = _to_groups(weight)  # [out, n, 32]
    least, most = x.aminmax(dim=-1)  # [out, n] both
    scale, shift = _to_float16((most - least) / 15), _to_float16(least)
    q = (x - _expand_groups(shift)).div_(_nonzero_scale(scale)).round_().clamp_(0, 15)
    return Int4(q.to(torch.uint8).flatten(-2), scale, shift)


def quantize_int8(weight: Tensor) -> Int8:
    """The nearest Int8 of a dense matrix, each group's largest number being 127 or -127 steps.

    Raises ValueError where `in` is no multiple of 32, or where a number is not finite or its scale no float16.
    """
    x = _to_groups(weight)  # [out, n, 32]
    scale = _to_float16(x.abs().amax(dim=-1) / 127)  # [out, n]
    q = (x / _nonzero_scale(scale)).round_().clamp_(-127, 127)
    return Int8(q.to(torch.int8).flatten(-2), scale)


def is_quantizable(weight: Weight) -> bool:
    """Whether its groups are whole, so that it can be quantised."""
    return weight.shape[1] % GROUP_SIZE == 0


def select_rows(weight: Weight, index: Tensor) -> Weight:
    """These rows, int64 [n], of a matrix of any kind. Raises IndexError."""
    return weight[index] if isinstance(weight, Tensor) else weight.select_rows(index)


def scale_rows(weight: Weight, factors: Tensor) -> Weight:
    """Each row of a matrix of any kind times its factor, float32 [out]."""
    return (weight * factors[:, None]).to(weight.dtype) if isinstance(weight, Tensor) else weight.scale_rows(factors)


def concat_rows(weights: Sequence[Weight]) -> Weight:
    """The rows of one over those of the next, [sum of out, in]. One alone is itself.

    Kinds stay as they are; where they differ, all become the widest of them: Int8 before Int4, a tensor's before both.
    """
    if len(weights) == 1:
        return weights[0]
    if dense := [m for m in weights if isinstance(m, Tensor)]:
        return torch.cat([m if isinstance(m, Tensor) else m.dequantize(dense[0].dtype) for m in weights])
    fours = [m for m in weights if isinstance(m, Int4)]
    if len(fours) == len(weights):
        return Int4(*(torch.cat([getattr(m, part) for m in fours]) for part in ("q", "scale", "shift")))
    eights = [quantize_int8(m.dequantize()) if isinstance(m, Int4) else m for m in weights if not isinstance(m, Tensor)]
    return Int8(torch.cat([m.q for m in eights]), torch.cat([m.scale for m in eights]))


def check_finite(x: Tensor) -> Tensor:
    """The same scales or shifts. Raises ValueError where one is no number, as what is computed would be none either."""
    if not torch.isfinite(x).all():
        raise ValueError("a group of weights whose scale is not finite in float16")
    return x


def _to_float16(x: Tensor) -> Tensor:
    """Rounded to float16. Raises ValueError where that is not finite."""
    return check_finite(x.half())


def _nonzero_scale(scale: Tensor) -> Tensor:
    """For each number of a group its scale, but 1 where that is 0, and any step is as near: [out, n, 1]."""
    return _expand_groups(scale.masked_fill(scale == 0, 1))


def _expand_groups(x: Tensor) -> Tensor:
    """One value a group for all of its numbers: float32 [out, n, 1]."""
    return x.float().unsqueeze(-1)


def _split_groups(x: Tensor) -> Tensor:
    """[out, in] -> [out, n, 32]."""
    return x.reshape(x.shape[0], x.shape[1] // GROUP_SIZE, GROUP_SIZE)


def _to_groups(weight: Tensor) -> Tensor:
    """float32 [out, n, 32] of a dense matrix that can be quantised. Raises ValueError for another."""
    if not is_quantizable(weight):
        raise ValueError(f"a matrix of {weight.shape[1]} inputs has no whole groups of {GROUP_SIZE}")
    return _split_groups(weight.float())
