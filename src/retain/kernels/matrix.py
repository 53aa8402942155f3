"""The matrix of a linear layer or an embedding: dense, or quantised in groups of 32 inputs that share a scale.

Weights are most of what decoding reads, so they stay as small as their file has them. `dense` defines what the quanta
mean; kernels pack them as they like. What is not known here: files, and who chooses which kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32  # neighbouring inputs that share a scale


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

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers [out, in], computed in float32."""
        numbers = _groups(self.q.float()).mul_(_each(self.scale)).add_(_each(self.shift))
        return numbers.flatten(-2).to(dtype)

    def rows(self, index: Tensor) -> Int4:
        """These rows, int64 [n], in this order: [n, in]. Raises IndexError."""
        return Int4(self.q[index], self.scale[index], self.shift[index])

    def scaled(self, by: Tensor) -> Int4:
        """Each row times its factor, float32 [out]; scales and shifts are rounded anew."""
        return Int4(self.q, *(_half(x.float() * by[:, None]) for x in (self.scale, self.shift)))


@dataclass(frozen=True, eq=False)
class Int8:
    """w = scale * q."""

    q: Tensor  # int8 [out, in], -127 to 127; a file may have a -128
    scale: Tensor  # float16 [out, in / 32]

    @property
    def shape(self) -> torch.Size:
        """(out, in)."""
        return self.q.shape

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers [out, in], computed in float32."""
        return _groups(self.q.float()).mul_(_each(self.scale)).flatten(-2).to(dtype)

    def rows(self, index: Tensor) -> Int8:
        """These rows, int64 [n], in this order: [n, in]. Raises IndexError."""
        return Int8(self.q[index], self.scale[index])

    def scaled(self, by: Tensor) -> Int8:
        """Each row times its factor, float32 [out]; scales are rounded anew."""
        return Int8(self.q, _half(self.scale.float() * by[:, None]))


Quanta = Int4 | Int8
Matrix = Tensor | Int4 | Int8  # a Tensor is dense, [out, in]


def int4(dense: Tensor) -> Int4:
    """The nearest Int4 of a dense matrix, each group from its least number to its largest in 15 steps.

    Raises ValueError where `in` is no multiple of 32, or where a number is not finite or too large for a float16.
    """
    x = _whole_groups(dense)  # [out, n, 32]
    least, most = x.aminmax(dim=-1)  # [out, n] both
    scale, shift = _half((most - least) / 15), _half(least)
    q = (x - _each(shift)).div_(_divisor(scale)).round_().clamp_(0, 15)
    return Int4(q.to(torch.uint8).flatten(-2), scale, shift)


def int8(dense: Tensor) -> Int8:
    """The nearest Int8 of a dense matrix, each group's largest number being 127 or -127 steps.

    Raises ValueError where `in` is no multiple of 32, or where a number is not finite or its scale no float16.
    """
    x = _whole_groups(dense)  # [out, n, 32]
    scale = _half(x.abs().amax(dim=-1) / 127)  # [out, n]
    q = (x / _divisor(scale)).round_().clamp_(-127, 127)
    return Int8(q.to(torch.int8).flatten(-2), scale)


def fits(matrix: Matrix) -> bool:
    """Whether its groups are whole, so that it can be quantised."""
    return matrix.shape[1] % GROUP == 0


def rows(matrix: Matrix, index: Tensor) -> Matrix:
    """These rows, int64 [n], of a matrix of any kind. Raises IndexError."""
    return matrix[index] if isinstance(matrix, Tensor) else matrix.rows(index)


def scale_rows(matrix: Matrix, by: Tensor) -> Matrix:
    """Each row of a matrix of any kind times its factor, float32 [out]."""
    return (matrix * by[:, None]).to(matrix.dtype) if isinstance(matrix, Tensor) else matrix.scaled(by)


def stack(matrices: Sequence[Matrix]) -> Matrix:
    """The rows of one over those of the next, [sum of out, in]. One alone is itself.

    Kinds stay as they are; where they differ, all become the widest of them: Int8 before Int4, a tensor's before both.
    """
    if len(matrices) == 1:
        return matrices[0]
    if dense := [m for m in matrices if isinstance(m, Tensor)]:
        return torch.cat([m if isinstance(m, Tensor) else m.dense(dense[0].dtype) for m in matrices])
    fours = [m for m in matrices if isinstance(m, Int4)]
    if len(fours) == len(matrices):
        return Int4(*(torch.cat([getattr(m, part) for m in fours]) for part in ("q", "scale", "shift")))
    eights = [int8(m.dense()) if isinstance(m, Int4) else m for m in matrices if not isinstance(m, Tensor)]
    return Int8(torch.cat([m.q for m in eights]), torch.cat([m.scale for m in eights]))


def finite(x: Tensor) -> Tensor:
    """The same scales or shifts. Raises ValueError where one is no number, as what is computed would be none either."""
    if not torch.isfinite(x).all():
        raise ValueError("a group of weights whose scale is not finite in float16")
    return x


def _half(x: Tensor) -> Tensor:
    """Rounded to float16. Raises ValueError where that is not finite."""
    return finite(x.half())


def _divisor(scale: Tensor) -> Tensor:
    """For each number of a group its scale, but 1 where that is 0, and any step is as near: [out, n, 1]."""
    return _each(scale.masked_fill(scale == 0, 1))


def _each(x: Tensor) -> Tensor:
    """One value a group for all of its numbers: float32 [out, n, 1]."""
    return x.float().unsqueeze(-1)


def _groups(x: Tensor) -> Tensor:
    """[out, in] -> [out, n, 32]."""
    return x.reshape(x.shape[0], x.shape[1] // GROUP, GROUP)


def _whole_groups(dense: Tensor) -> Tensor:
    """float32 [out, n, 32] of a dense matrix that can be quantised. Raises ValueError for another."""
    if not fits(dense):
        raise ValueError(f"a matrix of {dense.shape[1]} inputs has no whole groups of {GROUP}")
    return _groups(dense.float())
