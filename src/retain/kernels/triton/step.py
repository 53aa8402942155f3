"""A step as the operations of a program see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from retain.kernels.api import Batch
from retain.kernels.triton.plan import AttentionPlan


@dataclass(frozen=True, kw_only=True)
class DeviceStep(Batch):
    """A batch with all of its tensors on the device, and what a program needs and computes beside it."""

    plans: Sequence[AttentionPlan]  # of each KV cache group
    buffers: dict[int, Tensor] = field(default_factory=dict)  # the rows [T, width] of each buffer written until now
