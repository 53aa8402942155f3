"""A step as the operations of a program of this backend see it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from retain.kernels.api import GroupInputs
from retain.kernels.reference.program import Step
from retain.kernels.triton.plan import AttentionPlan


@dataclass(frozen=True, kw_only=True)
class DeviceStep(Step):
    """The tensors of a batch on the device (see `Batch`), and what attention needs beside them."""

    groups: Sequence[GroupInputs]  # with slot mappings on the device
    layers: Sequence[tuple[int, int]]  # see Batch
    plans: Sequence[AttentionPlan]  # of each KV cache group
    before_attention: Callable[[int, Tensor], None] | None = None
    after_attention: Callable[[int], None] | None = None

    def layer(self, layer: int) -> GroupInputs:
        """Return the inputs of a layer of the model."""
        group, index = self.layers[layer]
        return self.groups[group].for_layer(index)
