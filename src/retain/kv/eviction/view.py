"""What a policy sees of a row when it ranks slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class ShiftKeys:
    """Moves cached keys to other positions, for models with rotary positions."""

    rotate: Callable[[Tensor, Tensor], Tensor]  # keys [n, D], by how many positions [n] -> keys [n, D]
    key_offsets: Mapping[int, Tensor]  # by layer, float32 [G, D]: what cached keys lack (see models/decoder.py)

    def __call__(self, keys: Tensor, positions: Tensor, layers: Tensor, heads: Tensor) -> Tensor:
        """Rotate keys [n, D] of these layers [n] and kv heads [n] by these numbers of positions [n]."""
        if not self.key_offsets:
            return self.rotate(keys, positions)
        offsets = torch.stack([offset for _, offset in sorted(self.key_offsets.items())]).to(keys.device)[layers, heads]
        return self.rotate(keys + offsets, positions) - offsets


@dataclass(frozen=True)
class CacheView:
    """Slots of M layers and G kv heads. `mass` has a column for each query head of a kv head, or one for all."""

    pos: Tensor  # int32 [M, G, S]; -1 is a hole
    mass: Tensor  # float32 [M, G, C, S]
    query_position: int  # the newest position
    read_kv: Callable[[], tuple[Tensor, Tensor]]
    layers: slice = field(default_factory=lambda: slice(None))  # which of the row's unwindowed layers these are
    slot_scores: Tensor | None = None  # float32 [M, G, S], what `score_slots` returned for each slot
    shift_keys: ShiftKeys | None = None  # of models with rotary positions

    @cached_property
    def _kv(self) -> tuple[Tensor, Tensor]:
        return self.read_kv()

    @property
    def keys(self) -> Tensor:
        """Keys as they are cached, rotated: float32 [M, G, S, D]. Those of holes mean nothing."""
        return self._kv[0]

    @property
    def values(self) -> Tensor:
        """Values, float32 [M, G, S, D]. Those of holes mean nothing."""
        return self._kv[1]

    @property
    def unrotated_keys(self) -> Tensor:
        """Keys as they were before they were rotated by their position, float32 [M, G, S, D]."""
        if self.shift_keys is None:
            return self.keys
        return self.shift_keys.rotate(self.keys.flatten(0, 2), -self.pos.flatten()).view_as(self.keys)
