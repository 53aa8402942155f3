"""A step as the operations of a program see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from retain.kernels.api import KV, Tables
from retain.kernels.triton.plan import AttentionPlan


@dataclass
class DeviceStep:
    """The inputs of a step, all on the device, and its buffers. See `StepInputs` for the fields not described here."""

    kv: KV
    tables: Tables  # of all layers
    plan: AttentionPlan
    input_ids: Tensor  # int64 or int32 [T]
    positions: Tensor  # int32 [T]
    slot_mapping: Tensor  # int32 [L, G, T]
    logits_indices: Tensor | None  # int64 [N]; None for all tokens
    before_attention: Callable[[int, Tensor], None] | None = None
    after_attention: Callable[[int], None] | None = None
    buffers: dict[int, Tensor] = field(default_factory=dict)  # the rows [T, width] of each buffer written until now
