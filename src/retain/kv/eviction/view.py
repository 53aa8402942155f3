"""What a policy sees of a row when it ranks slots, or scores them by the queries of its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from retain.kernels.attention_params import AttentionParams
from retain.kernels.reference.softmax import adjust_scores, softmax
from retain.kernels.rope import Rope
from retain.types import Ints

LOWEST = -1e30  # of a query that sees no slot, all of whose weights are 0
SMALLEST = 1e-30
Rotate = Callable[[Tensor, Tensor], Tensor]  # (keys [n, D], by how many positions [n]) -> keys [n, D]


@dataclass(frozen=True)
class KeyTransform:
    """How cached keys differ from those without positions: rotated(key) * factors - offset (models/decoder.py).

    Layers are numbers of caches. `attention` has the parameters and the rotation of the layer that writes into each.
    """

    rotate: Rotate | None = None  # None for models without rotary positions
    factors: Mapping[int, Tensor] = field(default_factory=dict)  # by layer, float32 [G, D]
    attention: Mapping[int, tuple[AttentionParams, Rope | None]] = field(default_factory=dict)  # by layer

    def factors_of(self, layers: Ints, device: torch.device) -> Tensor | None:
        """Return the factors of these layers [M], float32 [M, G, 1, D]; None where all are 1."""
        known = [factors for layer in layers if (factors := self.factors.get(int(layer))) is not None]
        if not known:
            return None
        ones = torch.ones_like(known[0])
        factors = torch.stack([self.factors.get(int(layer), ones) for layer in layers])
        return factors[:, :, None].to(device, non_blocking=True)


@dataclass(frozen=True)
class BlockQueries:
    """The queries of n tokens of a prompt in one layer, of G kv heads with R query heads each."""

    rotated: Tensor  # float32 [G, R, n, D]
    pos: Tensor  # int64 [n]
    params: AttentionParams
    rope: Rope | None  # None for models without rotary positions
    layer: int = 0  # the number of the cache
    num_kv_heads: int = 0  # of all ranks; 0: G

    @property
    def num_heads(self) -> int:
        """Query heads of all ranks. Numbers that divide sums follow from them, so that bits are those of one rank."""
        G, R, _, _ = self.rotated.shape
        return R * (self.num_kv_heads or G)

    @property
    def unrotated(self) -> Tensor:
        """Queries as they were before they were rotated by their position."""
        return self._rotate_by(-self.pos)

    def at(self, position: int) -> Tensor:
        """Return the queries as if all tokens were at this position."""
        return self._rotate_by(position - self.pos)

    def _rotate_by(self, offsets: Tensor) -> Tensor:
        q = self.rotated
        if self.rope is None:
            return q
        return self.rope.shift(q.flatten(0, 2), offsets.expand(q.shape[:3]).flatten()).view_as(q)


@dataclass(frozen=True)
class CacheView:
    """Slots of M layers and G kv heads. `mass` has a column for each query head of a kv head, or one for all."""

    pos: Tensor  # int32 [M, G, S]; -1 is a hole
    mass: Tensor  # float32 [M, G, C, S]
    query_position: int  # the newest position
    read_kv: Callable[[], tuple[Tensor, Tensor]]
    layers: slice = field(default_factory=lambda: slice(None))  # which of the row's unwindowed layers these are
    slot_scores: Tensor | None = None  # float32 [M, G, S], what `score_slots` returned for each slot
    transform: KeyTransform | None = None  # where `score_slots` gets the view
    key_factors: Tensor | None = None  # float32 [M, G, 1, D], that cached keys were multiplied by
    queries: BlockQueries | None = None  # in `score_queries`, whose views are of one layer

    @cached_property
    def _kv(self) -> tuple[Tensor, Tensor]:
        return self.read_kv()

    @property
    def keys(self) -> Tensor:
        """Keys, rotated and less their offset: float32 [M, G, S, D]. Those of holes mean nothing."""
        return self._kv[0] if self.key_factors is None else self._kv[0] / self.key_factors

    @cached_property
    def _transposed_keys(self) -> Tensor:
        """The keys of the first layer, [G, D, S]; 0 in holes, so that their products are numbers."""
        return self.keys[0].where(self.pos[0, :, :, None] >= 0, 0).transpose(1, 2)

    @property
    def values(self) -> Tensor:
        """Values, float32 [M, G, S, v_dim]. Those of holes mean nothing."""
        return self._kv[1]

    @property
    def unrotated_keys(self) -> Tensor:
        """Keys before they were rotated, float32 [M, G, S, D]; in `score_slots` as the first layer rotates.

        Raises ValueError in `priority`.
        """
        rotate: Rotate | None
        if self.queries:
            rotate = self.queries.rope.shift if self.queries.rope else None
        elif self.transform:
            rotate = self.transform.rotate
        else:
            raise ValueError("a policy reads unrotated keys in score_slots: priority is called with rotated ones")
        return rotate(self.keys.flatten(0, 2), -self.pos.flatten()).view_as(self.keys) if rotate else self.keys

    @property
    def queries_behind(self) -> tuple[Tensor, Tensor]:
        """The queries [G, R, n, D] as if all were at the position behind the newest one, and that position [1]."""
        assert self.queries
        behind = self.query_position + 1
        return self.queries.at(behind), torch.tensor([behind], device=self.pos.device)

    def attention_weights(self, q: Tensor, pos: Tensor) -> Tensor:
        """Return the weights [G, R, n, S] of queries [G, R, n, D] at positions [n], or all at one [1].

        It is called in `score_queries`. A query sees the slots of its own position and of earlier ones.
        """
        assert self.queries
        params = self.queries.params
        G, R, _, _ = q.shape
        slots = self.pos[0, :, None, None]  # [G, 1, 1, S]
        distance = slots - pos[:, None]  # [G, 1, n or 1, S]
        hidden = torch.where((slots < 0) | (distance > 0), -torch.inf, 0.0)
        x = (params.scale * q.flatten(1, 2)) @ self._transposed_keys
        x = adjust_scores(x.view(G * R, *q.shape[2:3], -1), distance.expand(-1, R, -1, -1).flatten(0, 1), params)
        x = x.view(G, R, *x.shape[1:]).add_(hidden)
        if params.sink_logits is not None:
            return softmax(x, params.sink_logits.view(G, R, 1, 1))
        x -= x.amax(-1, keepdim=True).clamp_(min=LOWEST)  # in place: this takes as long as it passes over memory
        x.exp_()
        return x.div_(x.sum(-1, keepdim=True).clamp_(min=SMALLEST))
