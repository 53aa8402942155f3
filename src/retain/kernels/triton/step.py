"""A step as the operations of a program see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from retain.kernels.api import KV, Batch
from retain.kernels.triton.plan import AttentionPlan


@dataclass(frozen=True, kw_only=True)
class DeviceStep(Batch):
    """A batch with all of its tensors on the device, and what a program needs and computes beside it."""

    kv: KV
    plan: AttentionPlan
    buffers: dict[int, Tensor] = field(default_factory=dict)  # the rows [T, width] of each buffer written until now
