"""A step as the engine asks for it, and as operations see it. What is not known here: operations, graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from retain.kernels import KV, Observe, Tables
from retain.kernels.triton.attention import Work


@dataclass(frozen=True)
class Call:
    """What `Program.run` is given; ids, pos, wanted and observe lie on the host."""

    kv: KV
    tables: Tables  # of all layers
    slots: Tensor  # int32 [L, G, T]
    ids: Tensor  # int64 [T]
    pos: Tensor  # int32 [T]
    wanted: Tensor  # int64 [N]
    observe: Observe | None


@dataclass
class Step:
    """Everything on the device. `rows`: what buffers hold."""

    kv: KV
    tables: Tables  # of all layers
    work: Work
    slots: Tensor  # int32 [L, G, T]
    ids: Tensor  # [T]
    pos: Tensor  # int32 [T]
    wanted: Tensor | None  # int64 [N]; None: all
    before: Callable[[int, Tensor], None] | None = None
    after: Callable[[int], None] | None = None
    rows: dict[int, Tensor] = field(default_factory=dict)
