"""Layer-by-layer prefill: all layers of a row compute the prompt in the same scratch pages, one after the other.

Each layer moves the tokens that it keeps into pages of its own before the next layer writes over the scratch pages, so
only one layer ever holds the whole prompt. That happens in the middle of a forward pass, so rows are not evicted
together here: each has scratch pages of its own, which only the host knows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.operations import RowTables, compact
from retain.kv.memory.block_tables import BlockTables
from retain.types import Ints

OnLayerEvict = Callable[[int, Ints], None]  # (layer, scratch pages [G, n]) before a layer evicts


class LayerwisePrefill:
    """The prompt of one row, computed in one step; the `layers` [M] of `tables` share its scratch pages."""

    def __init__(self, policy: BudgetPolicy, tables: BlockTables, row: int, layers: Ints, key_factors: Tensor | None):
        self.policy = policy
        self.tables = tables
        self.row = row
        self.layers = layers
        self.key_factors = key_factors  # [M, G, 1, D]
        self.scratch: Ints | None = None  # pages [G, n], from `allocate` to the last layer
        self.holes: Tensor | None = None  # [M, G, interval] behind the kept tokens
        self.on_layer_evict: OnLayerEvict | None = None
        self._own: tuple[Ints, Ints] | None = None  # tables [M, G, n] and counts that scratch pages stand in for

    def allocate(self) -> bool:
        """Take the scratch pages if they are not there yet. False when the pool has too few."""
        t = self.tables
        G = t.counts.shape[2]
        n = -(-self.policy.prompt_len // t.page_size)
        if self.scratch is None and t.pool.ensure_free(G * n):
            self.scratch = t.store.allocate(G * n).reshape(G, n)
        return self.scratch is not None

    def slots(self, positions: Ints) -> Ints:
        """Return the slots [G, T] of fresh tokens at these positions [T], in the scratch pages."""
        assert self.scratch is not None
        S = self.tables.page_size
        return self.scratch[:, positions // S] * np.int32(S) + positions % S

    def begin_step(self, on_layer_evict: OnLayerEvict | None) -> None:
        """Put the scratch pages into the tables of every layer, for the step that computes the prompt."""
        assert self.scratch is not None
        t = self.tables
        row = self.row
        self.on_layer_evict = on_layer_evict
        self._own = t.pages[row, self.layers], t.counts[row, self.layers]
        shape = *self._own[1].shape, self.policy.interval
        self.holes = torch.zeros(shape, dtype=torch.int32, device=t.kv.device)
        t.pages[row, self.layers, :, : self.scratch.shape[1]] = self.scratch
        t.counts[row, self.layers] = self.scratch.shape[1]
        t.mark_dirty(row)

    def finish_layer(self, layer: int) -> bool:
        """Move what a layer of the model keeps into its own pages, after its attention. True after the last layer."""
        index = np.flatnonzero(self.tables.layers[self.layers] == layer)
        if not len(index):
            return False
        assert self._own and self.scratch is not None and self.holes is not None
        if self.on_layer_evict:
            self.on_layer_evict(layer, self.scratch)
        i = int(index[0])
        t = self.tables
        pages, counts = (x[i : i + 1] for x in self._own)
        own = t.kv.to_index(pages[..., : int(counts.max())])[None]
        scratch = t.kv.to_index(self.scratch)[None, None]
        factors = None if self.key_factors is None else self.key_factors[i : i + 1]
        last = self.policy.prompt_len - 1
        tables = RowTables(t.store, scratch, [scratch.shape[-1]], [self.policy], [last], [None], factors)
        done = compact(tables, [None], self.policy.interval, own)
        self.holes[i : i + 1] = done.holes[0]
        t.pages[self.row, self.layers[i]] = pages[0]
        t.counts[self.row, self.layers[i]] = counts[0]
        t.mark_dirty(self.row)
        if i < len(self.layers) - 1:
            return False
        t.pool.free(self.scratch.ravel())
        self.scratch = self._own = None
        return True
