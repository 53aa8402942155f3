"""MXFP4 as published checkpoints of gpt-oss have it (OCP Microscaling Formats 1.0): 4-bit floats, a scale for each 32.

A byte has two neighbours of a row, the first in its low bits. A byte of ggml's blocks has numbers i and i + 16 of a
group. Scales are powers of two, biased by 127, in both.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.weights.stored_weight import StoredWeight

GGML_TYPE = 39
GROUP = 32


def to_ggml_blocks(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows of ggml's blocks, uint8 [rows, 17 n], of blocks [rows, n, 16] and their scales [rows, n]."""
    numbers = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:2], 2, GROUP // 2)
    packed = numbers[:, :, 0] | numbers[:, :, 1] << 4
    return np.concatenate((scales[..., None], packed), -1).reshape(len(blocks), -1)


def read_matrix(label: str, tensors: Mapping[str, Tensor]) -> StoredWeight:
    """Return the matrices of all experts, one below the other. Raises ValueError for shapes and types."""
    blocks = tensors["blocks"]
    scales = tensors["scales"]
    is_mxfp4 = blocks.dtype == scales.dtype == torch.uint8 and blocks.shape == (*scales.shape, GROUP // 2)
    if not is_mxfp4 or blocks.ndim < 3:
        raise ValueError(f"blocks and scales of the shapes {list(blocks.shape)} and {list(scales.shape)}")
    n = scales.shape[-1]
    flat_blocks = blocks.reshape(-1, n, GROUP // 2)
    flat_scales = scales.reshape(-1, n)
    width = n * GROUP

    def read_blocks(begin: int, end: int) -> NDArray[np.uint8]:
        return to_ggml_blocks(flat_blocks[begin:end].numpy(), flat_scales[begin:end].numpy())

    return StoredWeight.from_blocks(label, (len(flat_scales), width), GGML_TYPE, read_blocks, 4 * width)
