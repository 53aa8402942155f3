"""Copies of tokens in slots of fewer bits, for a drafter to attend to; the row's own tokens stay as they are.

Only full pages of layers without a window are copied: they never change. The pages of copies come from the pool of all
pages, and go back to it when others need them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from retain.kv.memory.block_tables import BlockTables
from retain.kv.memory.demoted_tables import DemotedBlockTables
from retain.types import Ints

MAX_COPIED_TOKENS = 2048  # of a row at once, so that a long text does not delay the others


class QuantizedCopies:
    """The tables of the copies of all rows, by dtype.

    `ensure_free(n)` returns whether n pages are free that no row uses, without taking a copy back.
    """

    def __init__(self, tables: BlockTables, ensure_free: Callable[[int], bool]):
        self.tables = tables
        self.ensure_free = ensure_free
        self.by_dtype: dict[torch.dtype, DemotedBlockTables] = {}

    def open_tables(self, dtype: torch.dtype) -> DemotedBlockTables:
        """Return the tables of copies in this dtype. Raises ValueError where the cache cannot have them."""
        if dtype not in self.by_dtype:
            N, L, G, _ = self.tables.pages.shape
            store = self.tables.store.in_dtype(dtype)
            num_slots = self.tables.max_pages * self.tables.page_size
            self.by_dtype[dtype] = DemotedBlockTables(store, N, L, G, num_slots)
        return self.by_dtype[dtype]

    @property
    def num_pages(self) -> int:
        """The number of pages that all quantized copies hold."""
        return sum(int(copies.counts.sum()) for copies in self.by_dtype.values())


class QuantizedCopy:
    """The copy of one row. Slot i of a head's copy holds the token at position i of the text."""

    def __init__(self, copies: QuantizedCopies, row: int, dtype: torch.dtype):
        self.tables = copies.tables
        self.copy_tables = copies.open_tables(dtype)
        self.ensure_free = copies.ensure_free
        self.row = row
        self.num_tokens = 0  # that are copied

    def extend(self, num_tokens: int) -> bool:
        """Copy more of the full pages of the row's first `num_tokens` tokens. Returns whether all are copied now.

        Nothing is copied when the pool has too few pages for all of them, and not all at once when the text is long.
        """
        t = self.tables
        S = t.page_size
        copies = self.copy_tables
        begin = self.num_tokens
        all_tokens = num_tokens // S * S
        layers = t.full_layers(self.row)
        end = min(all_tokens, begin + max(MAX_COPIED_TOKENS // S, 1) * S)
        if end <= begin:
            return True
        counts = np.full((len(layers), t.counts.shape[2]), -(-all_tokens // copies.store.page_size), np.int32)
        if not self.ensure_free(int((counts - copies.counts[self.row, layers]).sum())):
            return False
        copies.allocate(self.row, layers, counts)
        for layer in layers:
            pages = t.kv.to_index(t.pages[self.row, layer, :, begin // S : end // S].ravel())
            src = (pages[:, None] * S + torch.arange(S, device=t.kv.device)).flatten()  # [G n S]
            dst = t.kv.to_index(copies.slots(self.row, int(layer), begin, end).ravel())
            t.store.backend.requantize(t.kv, src, copies.store.kv, dst, t.kv.pos[pages].flatten())
        self.num_tokens = end
        return end == all_tokens

    @property
    def page_list(self) -> Ints:
        """The pages that the quantized copy of a row holds."""
        return self.copy_tables.page_list(self.row)

    def free(self) -> None:
        """Free the pages of the copy."""
        self.tables.pool.free(self.page_list)
        self.num_tokens = 0
        self.copy_tables.clear(self.row)
