"""Folders of the library compressed-tensors (vLLM's LLM Compressor): integers in words, integers of 8 bits, and FP8.

`pack-quantized`: `weight_packed` int32 [out, in / 8], a word of eight adjacent inputs, each plus 8; `weight_shape`;
`weight_scale` [out, groups]; `weight_zero_point` int32 [out / 8, groups] in the same words, or absent where it is 0;
`weight_g_idx` [in] is the group of each input; with a -1 in it groups are of adjacent inputs. With 8 bits a word has
four, each plus 128.
`int-quantized`: `weight` int8 [out, in]. `float-quantized`: `weight` float8_e4m3fn (fp8.py). Both with `weight_scale`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from retain.formats.quantization import fp8
from retain.formats.quantization.groups import (
    Groups,
    check_words,
    find_bits,
    find_input_groups,
    from_groups,
    unpack_words,
)
from retain.kernels.weights.stored_weight import StoredWeight

PARTS = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")


def read_matrix(label: str, tensors: Mapping[str, Tensor], bits: int, block: fp8.Block | None = None) -> StoredWeight:
    """Return a matrix in the form that its tensors have. Raises ValueError where they do not fit.

    `bits` are those of words that may have either number.
    """
    scale = tensors["weight_scale"]
    weight = tensors.get("weight")
    if weight is None:
        return _read_packed(label, tensors, bits)
    if weight.is_floating_point():
        return fp8.read_matrix(label, {"weight": weight, "scale": scale}, block)
    if weight.ndim != 2 or weight.dtype != torch.int8:
        raise ValueError(f"a weight of {weight.dtype} {list(weight.shape)}, not a matrix of int8")
    out, width = weight.shape
    scale = _to_matrix(scale, out)
    zero = tensors.get("weight_zero_point")
    zero = torch.full(scale.shape, 128, dtype=torch.int16) if zero is None else _to_matrix(zero, out).short() + 128

    def read(begin: int, end: int) -> Tensor:
        return weight[begin:end].view(torch.uint8) ^ 0x80

    return from_groups(label, (out, width), Groups(8, scale, zero, None), read)


def _read_packed(label: str, tensors: Mapping[str, Tensor], bits: int) -> StoredWeight:
    words = tensors["weight_packed"]
    shape = tensors["weight_shape"]
    if words.ndim != 2 or shape.numel() != 2 or shape.is_floating_point():
        raise ValueError(f"weight_packed and weight_shape of the shapes {list(words.shape)} and {list(shape.shape)}")
    out, width = (int(x) for x in shape.flatten())
    bits = find_bits(width, words.shape[1], bits)
    check_words(words, (out, -(-width * bits // 32)), "weight_packed")
    if width < 1:
        raise ValueError(f"a weight_shape of {[out, width]}")
    scale = _to_matrix(tensors["weight_scale"], out)
    half = 1 << bits - 1
    zero = torch.full(scale.shape, half, dtype=torch.int16)
    if (stored := tensors.get("weight_zero_point")) is not None:
        if stored.dtype == torch.int32:
            check_words(stored, (-(-out * bits // 32), scale.shape[1]), "weight_zero_point")
            zero = unpack_words(stored.T, bits)[:, :out].T.short()
        else:
            zero = _to_matrix(stored, out).short() + half
    index = tensors.get("weight_g_idx")
    index = None if index is not None and bool((index == -1).any()) else index
    groups = Groups(bits, scale, zero, find_input_groups(index, width, scale.shape[1]))

    def read(begin: int, end: int) -> Tensor:
        return unpack_words(words[begin:end], bits)[:, :width]

    return from_groups(label, (out, width), groups, read)


def _to_matrix(x: Tensor, out: int) -> Tensor:
    """Return values of groups [out, groups]; of outputs [out], or one of the matrix, become those of one group."""
    if x.numel() == 1:
        return x.reshape(1, 1).expand(out, 1)
    return x[:, None] if x.ndim == 1 else x
