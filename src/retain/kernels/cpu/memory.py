"""Memory that starts on a cache line."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64
BLOCK_BYTES = 2**26  # allocated at a time; the system never provides the untouched tail of the last block


def allocate_aligned(size: int, zero: bool) -> Tensor:
    """Allocate uint8 [size] on a cache line. Bytes take no memory before the first write (torch.zeros writes them all).

    numpy asks for huge pages for a large array, so that streaming its weights needs fewer address translations.
    """
    raw = torch.from_numpy((np.zeros if zero else np.empty)(size + CACHE_LINE, np.uint8))
    return raw[-raw.data_ptr() % CACHE_LINE :][:size]


class Arena:
    """Allocates many small arrays, one behind the other, that are freed together."""

    def __init__(self) -> None:
        self._remaining = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """Return uint8 [size] on a cache line, not initialized."""
        if size > len(self._remaining):
            self._remaining = allocate_aligned(max(size, BLOCK_BYTES), zero=False)
        allocated = self._remaining[:size]
        self._remaining = self._remaining[-(-size // CACHE_LINE) * CACHE_LINE :]
        return allocated
