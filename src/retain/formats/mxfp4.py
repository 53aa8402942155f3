"""MXFP4 as published checkpoints of gpt-oss have it (OCP Microscaling Formats 1.0): 4-bit floats, a scale for each 32.

A byte has two neighbours of a row, the first in its low bits. A byte of ggml's blocks has numbers i and i + 16 of a
group. Scales are powers of two, biased by 127, in both.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GGML_TYPE = 39
GROUP = 32


def to_ggml_blocks(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return rows of ggml's blocks, uint8 [rows, 17 n], of blocks [rows, n, 16] and their scales [rows, n]."""
    numbers = np.stack((blocks & 15, blocks >> 4), -1).reshape(*blocks.shape[:2], 2, GROUP // 2)
    packed = numbers[:, :, 0] | numbers[:, :, 1] << 4
    return np.concatenate((scales[..., None], packed), -1).reshape(len(blocks), -1)
