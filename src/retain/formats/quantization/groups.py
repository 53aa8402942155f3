"""Matrices of small integers whose groups of inputs share a scale and a zero: w = scale * (q - zero).

Where groups have a multiple of 32 inputs, Int4 holds them: each group of 32 repeats the scale s and the zero z as the
shift -z s. Its rounding to float16 moves a weight by at most 2^-11 of |z s|, which is less than a hundredth of s. It
moves nothing where z is a power of two, as the 8 of symmetric files. Scales that are not float16 are rounded to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from retain.kernels.weights.quantized import GROUP_SIZE, Int4, Int8, Kind, QuantizedWeight, check_finite, to_kind
from retain.kernels.weights.stored_weight import StoredWeight

DENSE = torch.bfloat16  # the kind of matrices that no quantized kind holds


@dataclass(frozen=True, eq=False)
class Groups:
    """The scales of a matrix, and which of them an input has."""

    bits: int
    scale: Tensor  # floating [out, groups]
    zero: Tensor  # int16 [out, groups], of unsigned numbers
    index: Tensor | None  # int64 [in]: the group of each input; None: groups of adjacent inputs, all of one size

    def kind_of(self, width: int) -> Kind:
        """Return the kind that holds a matrix with `width` inputs: Int4, Int8 where it is symmetric, or dense."""
        if self.index is not None or width % (GROUP_SIZE * self.scale.shape[1]):
            return DENSE
        if self.bits == 4:
            return Int4
        return Int8 if bool((self.zero == 128).all()) else DENSE

    def convert(self, q: Tensor, begin: int, own: Kind, kind: Kind) -> Tensor | QuantizedWeight:
        """Convert rows `begin` and following, q uint8 [rows, in], which are stored in the kind `own`."""
        scale, zero = (x[begin : begin + len(q)] for x in (self.scale, self.zero))
        if kind is own and kind in (Int4, Int8):
            repeats = q.shape[1] // GROUP_SIZE // scale.shape[1]
            half = _repeat(scale.half(), repeats)
            if kind is Int8:
                return Int8((q ^ 0x80).view(torch.int8), half)
            return Int4(q, half, _repeat((-zero * scale.float()).half(), repeats))
        index = self.index
        if index is None:
            index = torch.arange(q.shape[1]) // (q.shape[1] // scale.shape[1])
        dense = (q.float() - zero.float()[:, index]) * scale.float()[:, index]
        return to_kind(dense, kind)


def from_groups(label: str, shape: tuple[int, int], groups: Groups, read: Callable[[int, int], Tensor]) -> StoredWeight:
    """Return a matrix whose numbers `read` returns, uint8 [rows, in] of rows begin .. end - 1. Raises ValueError."""
    out, width = shape
    scale = groups.scale
    zero = groups.zero
    n = scale.shape[-1]
    if scale.shape != (out, n) or zero.shape != (out, n) or n == 0 or not scale.is_floating_point():
        shapes = f"{scale.dtype} {list(scale.shape)} and zeros of {list(zero.shape)}"
        raise ValueError(f"scales of {shapes} for a matrix of {list(shape)}")
    if groups.index is None and width % n:
        raise ValueError(f"{n} groups of {width} inputs")
    own = groups.kind_of(width)
    return StoredWeight(label, torch.Size(shape), own, lambda a, b, kind: groups.convert(read(a, b), a, own, kind))


def find_input_groups(index: Tensor | None, width: int, num_groups: int) -> Tensor | None:
    """Return the group of each input, int64 [in], or None where groups are of adjacent inputs. Raises ValueError."""
    if index is None:
        return None
    if index.shape != (width,) or index.is_floating_point():
        raise ValueError(f"groups of inputs of the shape {list(index.shape)} and {index.dtype} for {width} inputs")
    index = index.long()
    if width % num_groups == 0 and torch.equal(index, torch.arange(width) // (width // num_groups)):
        return None
    if not 0 <= int(index.min()) <= int(index.max()) < num_groups:
        raise ValueError(f"inputs of groups {int(index.min())} to {int(index.max())}, of {num_groups}")
    return index


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the numbers of 4 or 8 bits in words int32 [.., n], from the lowest bits on: uint8 [.., 32 n / bits]."""
    words = words.contiguous()
    if words.stride(-1) != 1:  # of a single column: torch calls any stride of it contiguous
        words = words.clone(memory_format=torch.contiguous_format)
    numbers = words.view(torch.uint8)
    return numbers if bits == 8 else torch.stack((numbers & 15, numbers >> 4), -1).flatten(-2)


def find_bits(numbers: int, words: int, expected: int) -> int:
    """Return the bits of numbers, 4 or 8, that fill so many words; `expected` where either do."""
    fitting = [bits for bits in (4, 8) if words == -(-numbers * bits // 32)]
    return expected if expected in fitting else next(iter(fitting), 8)


def check_words(words: Tensor, shape: tuple[int, int], what: str) -> None:
    """Raise ValueError unless a tensor is int32 of this shape."""
    if words.dtype != torch.int32 or tuple(words.shape) != shape:
        raise ValueError(f"{what} of {words.dtype} {list(words.shape)}, not int32 {list(shape)}")


def _repeat(x: Tensor, n: int) -> Tensor:
    return check_finite(x).repeat_interleave(n, dim=1)
