"""The weight matrix of a linear layer or an embedding: dense, or quantized in groups of inputs that share a scale.

Decoding reads mostly weights, so they stay as small as in their file. `dequantize` defines the values; each backend
packs them in a layout of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

GROUP_SIZE = 32  # adjacent inputs whose activations share a scale; of most kinds the weights do, too
NOT_FINITE = "the scale of a group of weights is not finite in float16; use wider weights"


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix w = scale * number(q), of a kind. q takes one byte a number here."""

    GROUP: ClassVar[int] = GROUP_SIZE  # adjacent inputs that share a scale
    BITS: ClassVar[int] = 8  # of q where it is packed

    q: Tensor  # int8 or uint8 [out, in]
    scale: Tensor  # float16 [out, in / GROUP]

    @property
    def shape(self) -> torch.Size:
        """Return the numbers of rows and columns: (out, in)."""
        return self.q.shape

    def numbers(self) -> Tensor:
        """Return the numbers that q stands for: float32 [out, in]."""
        return self.q.float()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dense matrix [out, in], computed in float32 and rounded to `dtype`."""
        return self._scale_numbers().flatten(-2).to(dtype)

    def __getitem__(self, index: Tensor | slice) -> Self:
        """Return the rows of index int64 [n], in this order, or of a slice: [n, in]. Raises IndexError."""
        return replace(self, **{name: x[index] for name, x in vars(self).items()})

    def scale_rows(self, factors: Tensor) -> Self:
        """Multiply each row by its factor, float32 [out]; round scales again."""
        return replace(self, scale=_to_float16(self.scale.float() * factors[:, None]))

    def _scale_numbers(self) -> Tensor:
        return _split_groups(self.numbers(), self.GROUP).mul_(_expand_groups(self.scale))


@dataclass(frozen=True, eq=False)
class ShiftedWeight(QuantizedWeight):
    """A matrix w = scale * q + shift."""

    shift: Tensor  # float16 [out, in / GROUP]

    def scale_rows(self, factors: Tensor) -> Self:
        """Multiply each row by its factor, float32 [out]; round scales and shifts again."""
        return replace(super().scale_rows(factors), shift=_to_float16(self.shift.float() * factors[:, None]))

    def _scale_numbers(self) -> Tensor:
        return super()._scale_numbers().add_(_expand_groups(self.shift))


class Int4(ShiftedWeight):
    """A matrix w = scale * q + shift; q is uint8, 0 to 15."""

    BITS = 4


class Int5(ShiftedWeight):
    """A matrix w = scale * q + shift of a file; q is uint8, 0 to 31. Nothing is quantized to it here."""

    BITS = 5


class Int6(QuantizedWeight):
    """A matrix w = scale * q of a file; q is int8, -32 to 31. Nothing is quantized to it here."""

    GROUP = 16
    BITS = 6


class Int8(QuantizedWeight):
    """A matrix w = scale * q; q is int8, -127 to 127. A file may contain -128."""


class Codebook4(QuantizedWeight):
    """A matrix w = scale * CODEBOOK[q] of a file; q is uint8, 0 to 15. Nothing is quantized to it here."""

    BITS = 4
    CODEBOOK: ClassVar[tuple[int, ...]]

    def numbers(self) -> Tensor:
        """Return the numbers that q stands for: float32 [out, in]."""
        return torch.tensor(self.CODEBOOK, dtype=torch.float32, device=self.q.device)[self.q.long()]


class IQ4(Codebook4):
    """The numbers of IQ4_NL and IQ4_XS: closer together around 0."""

    CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


class MXFP4(Codebook4):
    """The numbers of MXFP4, floats of four bits, doubled (OCP Microscaling Formats 1.0)."""

    CODEBOOK = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


class NVFP4(Codebook4):
    """The numbers of MXFP4 in groups of 16."""

    GROUP = 16
    CODEBOOK = MXFP4.CODEBOOK


Kind = torch.dtype | type[QuantizedWeight]  # of a matrix; a dtype is that of a dense one


def quantize_int4(weight: Tensor) -> Int4:
    """Return the nearest Int4 of a dense matrix; 15 steps lead from a group's smallest number to its largest.

    Raises ValueError if `in` is not a multiple of 32, or if a number is not finite or too large for float16.
    """
    x = _to_groups(weight)  # [out, n, 32]
    smallest, largest = x.aminmax(dim=-1)  # [out, n] both
    # Which of -0 and 0 is found depends on their order; now it is 0.
    smallest = smallest + 0.0
    largest = largest + 0.0
    scale = _to_float16((largest - smallest) / 15)
    shift = _to_float16(smallest)
    q = (x - _expand_groups(shift)).div_(_nonzero_scale(scale)).round_().clamp_(0, 15)
    return Int4(q.to(torch.uint8).flatten(-2), scale, shift)


def quantize_int8(weight: Tensor) -> Int8:
    """Return the nearest Int8 of a dense matrix; 127 steps lead from 0 to a group's largest absolute value.

    Raises ValueError if `in` is not a multiple of 32, or if a scale is not finite in float16.
    """
    x = _to_groups(weight)  # [out, n, 32]
    scale = _to_float16(x.abs().amax(dim=-1) / 127)  # [out, n]
    q = (x / _nonzero_scale(scale)).round_().clamp_(-127, 127)
    return Int8(q.to(torch.int8).flatten(-2), scale)


def to_kind(dense: Tensor, kind: Kind) -> Tensor | QuantizedWeight:
    """Convert a dense matrix; to int8 where a kind is asked for to which nothing is quantized.

    Raises ValueError as quantize_int8 does.
    """
    if isinstance(kind, torch.dtype):
        return dense.to(kind)
    return quantize_int4(dense) if kind is Int4 else quantize_int8(dense)


def widest_kind(kinds: Sequence[Kind]) -> Kind:
    """Return the kind of stacked matrices: their own, Int5 for it and Int4, the dtype of a dense one, or else Int8."""
    if len(set(kinds)) == 1:
        return kinds[0]
    if {*kinds} == {Int4, Int5}:
        return Int5
    return next((kind for kind in kinds if isinstance(kind, torch.dtype)), Int8)


def widen(weight: QuantizedWeight, kind: type[QuantizedWeight]) -> QuantizedWeight:
    """Convert a matrix to its own kind, to Int5 or to Int8; with the same values where the kind has them.

    Int5 has those of Int4. Int8 has those of groups of 32 without shifts, as of a codebook or Q5_0.
    """
    if isinstance(weight, kind):
        return weight
    if isinstance(weight, Int4) and kind is Int5:
        return Int5(weight.q, weight.scale, weight.shift)
    if isinstance(weight, ShiftedWeight):
        middle = 8 if isinstance(weight, Int4) else 16
        if torch.equal(weight.shift, -middle * weight.scale):
            return Int8(weight.q.to(torch.int8) - middle, weight.scale)
    elif isinstance(weight, Codebook4) and weight.GROUP == GROUP_SIZE:
        return Int8(weight.numbers().to(torch.int8), weight.scale)
    return quantize_int8(weight.dequantize())


def is_quantizable(weight: Tensor) -> bool:
    """Return whether `in` is a multiple of the group size."""
    return weight.shape[1] % GROUP_SIZE == 0


def concat_matrices(weights: Sequence[Tensor | QuantizedWeight]) -> Tensor | QuantizedWeight:
    """Stack matrices of equal `in` by rows: [sum of out, in]. A single matrix is returned as it is.

    Matrices of one kind keep it; of several kinds the result has the widest, see widest_kind.
    """
    if len(weights) == 1:
        return weights[0]
    kind = widest_kind([w.dtype if isinstance(w, Tensor) else type(w) for w in weights])
    if isinstance(kind, torch.dtype):
        return torch.cat([w if isinstance(w, Tensor) else w.dequantize(kind) for w in weights])
    parts = [widen(w, kind) for w in weights if not isinstance(w, Tensor)]
    return kind(**{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})


def keeps_groups(index: Tensor) -> bool:
    """Return whether an order of columns, int64 [in], moves whole groups."""
    if len(index) % GROUP_SIZE:
        return False
    groups = index.view(-1, GROUP_SIZE)
    is_run = torch.equal(groups, groups[:, :1] + torch.arange(GROUP_SIZE))
    return is_run and not (groups[:, 0] % GROUP_SIZE).any()


def select_columns(weight: Tensor | QuantizedWeight, index: Tensor) -> Tensor | QuantizedWeight:
    """Return the columns of index int64 [in], in this order. A quantized matrix needs an order that keeps_groups."""
    if isinstance(weight, Tensor):
        return weight[:, index]
    groups = index[:: weight.GROUP] // weight.GROUP
    return replace(weight, **{name: x[:, index if name == "q" else groups] for name, x in vars(weight).items()})


def check_finite(x: Tensor) -> Tensor:
    """Return scales or shifts unchanged. Raises ValueError if one is infinite or NaN, as all its products would be."""
    if not torch.isfinite(x).all():
        raise ValueError(NOT_FINITE)
    return x


def _to_float16(x: Tensor) -> Tensor:
    """Round to float16. Raises ValueError if the result is not finite."""
    return check_finite(x.half())


def _nonzero_scale(scale: Tensor) -> Tensor:
    """Return each group's scale, [out, n, 1], with 1 in place of 0: every q is equally near if the scale is 0."""
    return _expand_groups(scale.masked_fill(scale == 0, 1))


def _expand_groups(x: Tensor) -> Tensor:
    """Reshape one value a group, [out, n], to broadcast over the group's numbers: float32 [out, n, 1]."""
    return x.float().unsqueeze(-1)


def _split_groups(x: Tensor, size: int = GROUP_SIZE) -> Tensor:
    """Reshape [out, in] to [out, n, size]."""
    return x.reshape(x.shape[0], x.shape[1] // size, size)


def _to_groups(weight: Tensor) -> Tensor:
    """Return a dense matrix as float32 [out, n, 32]. Raises ValueError if `in` is not a multiple of 32."""
    if not is_quantizable(weight):
        raise ValueError(f"a matrix with {weight.shape[1]} inputs has no whole groups of {GROUP_SIZE}; keep it dense")
    return _split_groups(weight.float())
