"""AWQ, version gemm (arXiv 2306.00978): 4 bits, groups of adjacent inputs, each with a scale and a zero.

`qweight` is int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out]. A word has eight adjacent
outputs, whose order is that of the registers of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from retain.formats.quantization.groups import Groups, check_words, from_groups, unpack_words
from retain.kernels.weights.stored_weight import StoredWeight

PARTS = {"qweight": True, "qzeros": True, "scales": True}  # whether a matrix must have it
NIBBLES = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7))  # of a word, from the lowest bits on, by output


def read_matrix(label: str, tensors: Mapping[str, Tensor]) -> StoredWeight:
    """Return a matrix. Raises ValueError for shapes and types that do not fit."""
    words, zeros, scales = (tensors[part] for part in PARTS)
    if words.ndim != 2 or scales.ndim != 2:
        raise ValueError(f"qweight and scales of the shapes {list(words.shape)} and {list(scales.shape)}")
    width = len(words)
    num_groups, out = scales.shape
    check_words(words, (width, -(-out // 8)), "qweight")
    check_words(zeros, (num_groups, -(-out // 8)), "qzeros")
    groups = Groups(4, scales.T, _unpack(zeros).T[:out].short(), None)

    def read(begin: int, end: int) -> Tensor:
        first = begin // 8
        numbers = _unpack(words[:, first : -(-end // 8)])
        return numbers.T[begin - 8 * first : end - 8 * first].contiguous()

    return from_groups(label, (out, width), groups, read)


def _unpack(words: Tensor) -> Tensor:
    """Return the numbers of words [n, m] by output: uint8 [n, 8 m]."""
    return unpack_words(words, 4).view(*words.shape, 8)[..., NIBBLES].flatten(-2)
