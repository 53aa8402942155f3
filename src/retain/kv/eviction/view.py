"""What a policy sees of a row when it ranks slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class CacheView:
    """All slots of M layers and G kv heads. `mass` has a column for each query head of a kv head, or one for all."""

    pos: Tensor  # int32 [M, G, S]; -1 is a hole
    mass: Tensor  # float32 [M, G, C, S]
    query_position: int  # the newest position
    read_kv: Callable[[], tuple[Tensor, Tensor]]

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
