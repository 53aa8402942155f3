"""Tables of the slots that drafts attend to, for a model that drafts on the pages of the rows themselves.

By layer and head they name the newest pages of a row, and of the rest those with the highest mass, or a copy in slots
of fewer bits. Sliding layers, and rows that evict, are attended to in full: they are small.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import Tables
from retain.kernels.slots.pool_dtypes import slots_in_page
from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.device_tables import DeviceTables
from retain.kv.memory.quantized_copies import QuantizedCopies
from retain.kv.row import Row
from retain.types import Ints

PageIndices = NDArray[np.int64]  # [M, G, n], of pages in the tables of the unwindowed layers [M]


class DraftTables:
    """Tables [N, L, G, n] of all rows. `rows` are the open ones, by index.

    `dtype`: that of the copies; None where pages are selected by mass. Raises ValueError where the cache cannot have
    such copies.
    """

    def __init__(
        self, tables: BlockTables, copies: QuantizedCopies, rows: Mapping[int, Row], dtype: torch.dtype | None = None
    ):
        N, L, G, n = tables.pages.shape
        self.tables = tables
        self.rows = rows
        self.dtype = dtype
        self.pages: Ints = np.zeros((N, L, G, n), np.int32)
        self.counts: Ints = np.zeros((N, L, G), np.int32)
        if dtype:
            kv = tables.kv
            if slots_in_page(kv.page_size, kv.k_dim, kv.dtype, dtype, v_dim=kv.v_dim) <= kv.page_size:
                raise ValueError("saves no memory: a page of this cache has as many slots")
        copy_tables = copies.open_tables(dtype) if dtype else None
        self.on_device = DeviceTables([self.pages, self.counts, tables.window], tables.kv.device, copy_tables)

    @property
    def max_pages(self) -> int:
        """Pages of a head's table, at most."""
        return self.pages.shape[3]

    def extend_copy(self, index: int, num_computed_tokens: int) -> bool:
        """Copy more of a row's tokens, but for the newest page. Returns whether all of them are copied now."""
        assert self.dtype
        row = self.rows[index]
        in_full = self._attends_in_full(row)
        return row.extend_copy(self.dtype, 0 if in_full else max(num_computed_tokens - self.tables.page_size, 0))

    def rank_pages(self, index: int, num_candidates: int, num_pages: int) -> PageIndices | None:
        """Return the pages with the highest mass of a row's first `num_candidates`, ascending; the first one is always
        among them. None where the row is attended to in full.
        """
        if self._attends_in_full(self.rows[index]):
            return None
        t = self.tables
        table = t.kv.to_index(t.pages[index, t.full_layers(index), :, :num_candidates])  # [M, G, n]
        mass = t.kv.mass.index_select(0, table.flatten()).sum((1, 2)).view(table.shape)
        mass[..., 0] = torch.inf
        ranked: PageIndices = mass.topk(num_pages).indices.sort().values.cpu().numpy()
        return ranked

    def fill(self, index: int, first_page: int, end_page: int, older: PageIndices | None = None) -> None:
        """Name a row's pages from `first_page` to `end_page`, and `older` ones or those that are copied, for a round.

        Pages that are copied, and not the row's own, are named by the tables of copies.
        """
        t = self.tables
        row = self.rows[index]
        counts = self.counts[index] = t.counts[index]
        self.on_device.mark_dirty(index)
        self.pages[index, :, :, : counts.max()] = t.pages[index, :, :, : counts.max()]
        if self._attends_in_full(row):
            return
        layers = t.full_layers(index)
        first_page = row.copy.num_tokens // t.page_size if row.copy else first_page
        newest = np.arange(first_page, end_page)
        selected = np.broadcast_to(newest, (len(layers), counts.shape[1], len(newest)))
        if older is not None:
            selected = np.concatenate((older, selected), -1)
        n = selected.shape[-1]
        self.pages[index, layers, :, :n] = np.take_along_axis(t.pages[index, layers], selected, -1)
        self.counts[index, layers] = n

    def build_tables(self, rows: Tensor, query_start_loc: Tensor) -> list[Tables]:
        """Return the tables of these rows for a batch: one, as there is one group."""
        return [self.on_device.build_tables(rows, query_start_loc)]

    def _attends_in_full(self, row: Row) -> bool:
        return row.found.is_sparse or bool(row.evictors) or not len(self.tables.full_layers(row.index))
