"""FP8 (arXiv 2209.05433): matrices of float8_e4m3fn, times a scale of each block, output, or matrix.

`<name>_scale_inv`, or `<name>_scale`, is [.., ceil(out / rows), ceil(in / columns)] for blocks of `weight_block_size`,
[out, 1] for outputs, or one number. Despite its name the first is a factor, too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from retain.formats.quantization.groups import DENSE
from retain.kernels.weights.quantized import Kind, QuantizedWeight, to_kind
from retain.kernels.weights.stored_weight import StoredWeight

Block = tuple[int, int]


def read_matrix(label: str, tensors: Mapping[str, Tensor], block: Block | None = None) -> StoredWeight:
    """Return a matrix, or n stacked ones. Raises ValueError for shapes and types that do not fit."""
    weight = tensors["weight"]
    if weight.dtype != torch.float8_e4m3fn or weight.ndim not in (2, 3):
        raise ValueError(f"a weight of {weight.dtype} {list(weight.shape)}, not a matrix of float8_e4m3fn")
    stacked = weight if weight.ndim == 3 else weight[None]
    n, out, width = stacked.shape
    scale, (rows, columns) = _fit_scale(tensors["scale"].float(), (n, out, width), block)
    flat = stacked.flatten(0, 1)

    def load(begin: int, end: int, kind: Kind) -> Tensor | QuantizedWeight:
        index = torch.arange(begin, end)
        own = scale[index // out, index % out // rows]  # [rows, blocks of a row]
        expanded = own if columns >= width else own.repeat_interleave(columns, dim=1)[:, :width]
        return to_kind(flat[begin:end].float() * expanded, kind)

    return StoredWeight(label, torch.Size((n * out, width)), DENSE, load)


def _fit_scale(scale: Tensor, shape: tuple[int, int, int], block: Block | None) -> tuple[Tensor, Block]:
    """Return scales [n, rows of blocks, blocks of a row], and the shape of a block. Raises ValueError."""
    n, out, width = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1, 1).expand(n, 1, 1), (max(out, 1), max(width, 1))
    for rows, columns in [*([block] if block else []), (1, max(width, 1)), (max(out, 1), max(width, 1))]:
        expected = (n, -(-out // rows), -(-width // columns))
        if [x for x in scale.shape if x > 1] == [x for x in expected if x > 1]:
            return scale.reshape(expected), (rows, columns)
    raise ValueError(f"scales of the shape {list(scale.shape)} for a weight of {list(shape[n == 1 :])}")
