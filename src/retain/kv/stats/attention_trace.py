"""What the tokens of one text receive, layer by layer and head by head, and which are forgotten: for people who look.

It is told when something may be about to be forgotten, and looks at the slots; what is gone keeps the mass that it had
when it was last seen. Pages that are shared show what everybody gave to them; layers that slide are not observed, for
what they forget is known. What is not known here: who looks, what the tokens say.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retain.kernels.api import KV, NO_WINDOW

if TYPE_CHECKING:
    from retain.kv.memory.cache import Cache

RECORD_EVERY = 0.2, 16  # seconds, and tokens, from one look to the next, where no budget is about to forget


class AttentionTrace:
    """Of a text in a cache of L layers and G kv heads. `mass` float32 and `held` bool are [L, G, T]."""

    def __init__(self, layers: int, kv_heads: int):
        self.mass = np.zeros((layers, kv_heads, 0), np.float32)
        self.is_kept = np.zeros((layers, kv_heads, 0), bool)
        self.is_observed = np.ones(layers, bool)  # layers
        self._next_record_at = 0.0

    def record_if_due(self, cache: Cache, row: int, num_computed_tokens: int) -> None:
        """So many tokens of this row are computed, and it is to settle."""
        keeper = cache.evictors.get(row)
        late = monotonic() >= self._next_record_at or num_computed_tokens - self.is_kept.shape[-1] >= RECORD_EVERY[1]
        if late or (keeper is not None and num_computed_tokens >= keeper.next_eviction):
            self.record(cache, row, num_computed_tokens)

    def record(self, cache: Cache, row: int, num_computed_tokens: int) -> None:
        """What is there now."""
        self._next_record_at = monotonic() + RECORD_EVERY[0]
        n = int(cache.counts[row].max())
        owned = np.arange(n) < cache.counts[row][..., None]  # [L, G, n]
        pages = cache.kv.to_index(cache.pages[row][..., :n][owned])
        pos = cache.kv.pos[pages].cpu().numpy()  # [pages, S]
        mass = cache.kv.mass[pages].sum(1).cpu().numpy()  # [pages, S]
        layer, head = (np.broadcast_to(x[:, None], pos.shape) for x in np.nonzero(owned)[:2])
        there = (pos >= 0) & (pos < num_computed_tokens)
        self._grow(num_computed_tokens)
        self.mass[layer[there], head[there], pos[there]] = mass[there]
        there &= num_computed_tokens - 1 - pos < cache.window[row][layer]
        self.is_observed = cache.window[row] == NO_WINDOW
        self.is_kept[:] = False
        self.is_kept[layer[there], head[there], pos[there]] = True

    def record_layer(self, kv: KV, layer: int, pages: NDArray[np.int32]) -> None:
        """What a prompt gave in pages [G, n] that one layer after the other uses; there it soon forgets."""
        pos = kv.pos[kv.to_index(pages)].flatten(1).cpu().numpy()  # [G, n S]
        mass = kv.mass[kv.to_index(pages)].sum(2).flatten(1).cpu().numpy()
        head, place = np.nonzero(pos >= 0)
        self._grow(int(pos.max(initial=-1)) + 1)
        self.mass[layer, head, pos[head, place]] = mass[head, place]

    def _grow(self, num_tokens: int) -> None:
        more = num_tokens - self.mass.shape[-1]
        if more > 0:
            room = [(0, 0), (0, 0), (0, more)]
            self.mass, self.is_kept = np.pad(self.mass, room), np.pad(self.is_kept, room)

    def scores(self, layer: int | None) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Of each token the mass that it received, and the share of heads that hold it, [T]: of a layer, or of all."""
        chosen = slice(None) if layer is None else slice(layer, layer + 1)
        seen = self.is_observed if layer is None and self.is_observed.any() else chosen
        mass: NDArray[np.float32] = self.mass[seen].mean((0, 1))
        held: NDArray[np.float32] = self.is_kept[chosen].mean((0, 1), dtype=np.float32)
        return mass, held
