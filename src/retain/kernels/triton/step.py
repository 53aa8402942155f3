"""A step as the engine asks for it, and as operations see it. What is not known here: operations, graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from retain.kernels.api import KV, AttentionScoring, Tables
from retain.kernels.triton.attention import AttentionPlan


@dataclass(frozen=True)
class HostStep:
    """What `Program.run` is given; ids, pos, wanted and observe lie on the host."""

    kv: KV
    tables: Tables  # of all layers
    slot_mapping: Tensor  # int32 [L, G, T]
    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int32 [T]
    logits_indices: Tensor  # int64 [N]
    scoring: AttentionScoring | None


@dataclass
class DeviceStep:
    """Everything on the device. `rows`: what buffers hold."""

    kv: KV
    tables: Tables  # of all layers
    plan: AttentionPlan
    slot_mapping: Tensor  # int32 [L, G, T]
    input_ids: Tensor  # [T]
    positions: Tensor  # int32 [T]
    logits_indices: Tensor | None  # int64 [N]; None: all
    before_attention: Callable[[int, Tensor], None] | None = None
    after_attention: Callable[[int], None] | None = None
    buffers: dict[int, Tensor] = field(default_factory=dict)
