"""A step as the operations of a program of this backend see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from retain.kernels.api import KV, Tables
from retain.kernels.reference.program import Step
from retain.kernels.triton.plan import AttentionPlan


@dataclass(frozen=True, kw_only=True)
class DeviceStep(Step):
    """The tensors of a batch on the device (see `Batch`), and what attention needs beside them."""

    kv: KV
    tables: Tables
    slot_mapping: Tensor  # int32 [L, G, T]
    plan: AttentionPlan
    before_attention: Callable[[int, Tensor], None] | None = None
    after_attention: Callable[[int], None] | None = None
