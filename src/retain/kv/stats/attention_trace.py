"""Attention traces: the mass that the tokens of one text receive, layer by layer and head by head, and which are kept.

The trace reads the slots whenever tokens may be about to be evicted; an evicted token keeps the mass that it had when
it was last read. Pages that are shared show the mass of all requests. Sliding layers are not traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from retain.kernels.api import KV, NO_WINDOW
from retain.kv.memory.block_tables import BlockTables
from retain.types import Floats, Ints

# At most, where no eviction is due.
RECORD_EVERY_S = 0.2
RECORD_EVERY_TOKENS = 16


class AttentionTrace:
    """A text in a cache of L layers and G kv heads. `mass` float32 and `is_kept` bool are [L, G, T].

    A layer of fewer heads has each of them several times, so that means over heads stay.
    """

    def __init__(self, num_layers: int, kv_heads: int):
        self.mass = np.zeros((num_layers, kv_heads, 0), np.float32)
        self.is_kept = np.zeros((num_layers, kv_heads, 0), bool)
        self.is_observed = np.ones(num_layers, bool)  # layers
        self.has_tokens = np.zeros(num_layers, bool)  # layers that attend to slots of their own
        self._next_record_at = 0.0

    def record_if_due(
        self, groups: Sequence[BlockTables], row: int, num_computed_tokens: int, evicts_now: bool
    ) -> None:
        """Record the row before a step is committed, if it evicts now or the last record is old."""
        num_new = num_computed_tokens - self.is_kept.shape[-1]
        if evicts_now or monotonic() >= self._next_record_at or num_new >= RECORD_EVERY_TOKENS:
            self.record(groups, row, num_computed_tokens)

    def record(self, groups: Sequence[BlockTables], row: int, num_computed_tokens: int) -> None:
        """Read mass and presence of every token of the row."""
        self._next_record_at = monotonic() + RECORD_EVERY_S
        self._grow(num_computed_tokens)
        self.is_observed[:] = False
        self.is_kept[:] = False
        for t in groups:
            if t.group.is_state or t.group.is_draft:
                continue
            self.has_tokens[t.layers] = True
            self.is_observed[t.layers] = t.window[row] == NO_WINDOW
            self._record_pages(t, t.kv, t.pages[row], t.owned(row), t.window[row], num_computed_tokens)
            if d := t.demoted:
                self._record_pages(t, d.store.kv, d.pages[row], d.owned(row), t.window[row], num_computed_tokens)

    def _record_pages(
        self, t: BlockTables, kv: KV, pages: Ints, owned: NDArray[np.bool_], windows: Ints, num_computed_tokens: int
    ) -> None:
        """Read the tokens of a group's tables [L, G, n], where they are `owned`."""
        index = kv.to_index(pages[owned])
        pos = kv.pos[index].cpu().numpy()  # [pages, S]
        mass = kv.mass[index].sum(1).cpu().numpy()  # [pages, S]
        layer, head = (np.broadcast_to(x[:, None], pos.shape) for x in np.nonzero(owned)[:2])
        present = (pos >= 0) & (pos < num_computed_tokens)
        visible = present & (num_computed_tokens - 1 - pos < windows[layer])
        for copy in self._copies(t):
            self.mass[t.layers[layer[present]], head[present] + copy, pos[present]] = mass[present]
            self.is_kept[t.layers[layer[visible]], head[visible] + copy, pos[visible]] = True

    def _copies(self, t: BlockTables) -> range:
        """Return the distances from a head of a group to the places that it takes."""
        return range(0, self.mass.shape[1], t.counts.shape[2])

    def scores(self, layer: int | None) -> tuple[Floats, Floats]:
        """Return for each token its mass and the share of heads that keep it, both [T]; of one layer, or the mean."""
        chosen = slice(None) if layer is None else slice(layer, layer + 1)
        observed = self.is_observed if layer is None and self.is_observed.any() else chosen
        mass: Floats = self.mass[observed].mean((0, 1))
        keeping = self.has_tokens if layer is None and self.has_tokens.any() else chosen
        kept: Floats = self.is_kept[keeping].mean((0, 1), dtype=np.float32)
        return mass, kept

    def _grow(self, num_tokens: int) -> None:
        more = num_tokens - self.mass.shape[-1]
        if more > 0:
            room = [(0, 0), (0, 0), (0, more)]
            self.mass = np.pad(self.mass, room)
            self.is_kept = np.pad(self.is_kept, room)
