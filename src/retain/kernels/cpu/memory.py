"""Memory on cache lines. What is not known here: what lies in it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64
BLOCK_BYTES = 2**26  # taken at a time: the tail of the last one is never touched, and so costs nothing


def allocate_aligned(size: int, zero: bool) -> Tensor:
    """uint8 [size] on a cache line. What is not written takes no memory (torch.zeros would touch it all).

    numpy asks for huge pages where an array is large, which lets streams of weights cross fewer borders.
    """
    raw = torch.from_numpy((np.zeros if zero else np.empty)(size + CACHE_LINE, np.uint8))
    return raw[-raw.data_ptr() % CACHE_LINE :][:size]


class Arena:
    """Many small arrays that live as long as each other, one behind the other."""

    def __init__(self) -> None:
        self._remaining = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """uint8 [size] on a cache line, not initialised."""
        if size > len(self._remaining):
            self._remaining = allocate_aligned(max(size, BLOCK_BYTES), zero=False)
        taken, rest = self._remaining[:size], -(-size // CACHE_LINE) * CACHE_LINE
        self._remaining = self._remaining[rest:]
        return taken
