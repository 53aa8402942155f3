"""Block tables of tokens in fewer bits: pages that every row, layer and head owns beside its own pages.

Such tokens are demoted, or copies that a drafter attends to (quantized_copies.py).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels import api
from retain.kv.memory.device_rows import DeviceRows
from retain.kv.memory.page_store import PageStore
from retain.types import Ints


class DemotedBlockTables:
    """Tables of N rows, L layers and G kv heads."""

    def __init__(self, store: PageStore, num_rows: int, num_layers: int, kv_heads: int, max_tokens: int):
        self.store = store
        self.pages: Ints = np.zeros((num_rows, num_layers, kv_heads, -(-max_tokens // store.page_size)), np.int32)
        self.counts: Ints = np.zeros((num_rows, num_layers, kv_heads), np.int32)
        self.rows = DeviceRows([self.pages, self.counts], store.kv.device, self.counts)

    def build_tables(self, rows: Tensor) -> api.DemotedTables:
        """Return the tables of all layers for a step of these rows, int32 [B] on the host."""
        self.rows.upload()
        pages, counts = (x.transpose(0, 1) for x in self.rows.tensors)
        return api.DemotedTables(self.store.kv, pages, counts, int(self.counts[rows.numpy()].max(initial=0)))

    def allocate(self, row: int, layers: Ints, counts: Ints) -> None:
        """Own so many pages of each head, [M, G], in these layers of a row that has no more. Raises OutOfPagesError."""
        pages = self.store.allocate(int((counts - self.counts[row, layers]).sum()))
        before = self.owned(row)
        self.counts[row, layers] = counts
        self.pages[row][self.owned(row) & ~before] = pages
        self.rows.mark_dirty(row)

    def clear(self, row: int) -> None:
        """Forget the pages of a row, which the caller has freed."""
        self.counts[row] = 0
        self.rows.mark_dirty(row)

    def owned(self, row: int) -> NDArray[np.bool_]:
        """Mark the entries of a row's tables that are pages, [L, G, n]."""
        mask: NDArray[np.bool_] = np.arange(self.pages.shape[3]) < self.counts[row][..., None]
        return mask

    def page_list(self, row: int) -> Ints:
        """Return the pages that hold the demoted tokens of a row."""
        pages: Ints = self.pages[row][self.owned(row)]
        return pages

    def slots(self, row: int, layer: int, begin: int, end: int) -> Ints:
        """Return the slots from place `begin` to `end` of every head, [G, n]."""
        places = np.arange(begin, end, dtype=np.int32)
        S = np.int32(self.store.page_size)
        slots: Ints = self.pages[row, layer][:, places // S] * S + places % S
        return slots

    def layer_tables(self, row: int, layers: Ints) -> Ints:
        """Return the tables of these layers, [M, G, n]; entries beyond a head's pages are the trash page."""
        n = int(self.counts[row, layers].max(initial=0))
        pages: Ints = np.where(self.owned(row), self.pages[row], 0)[layers, :, :n]
        return pages
