"""Runners compute a batch: fresh tokens in, logits out, with K and V in the slots of a cache.

A step is one call of the backend's program of the model. Tests, benches and drafters wrap a runner in their own.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from retain.kernels.api import Batch, Program


class Runner(Protocol):
    """Compute a batch: every layer writes its keys and values into slots, then attends."""

    def forward(self, batch: Batch) -> Tensor:
        """Return float32 logits [N, V] of the tokens `batch.logits_indices`; good until the next step."""


class ProgramRunner:
    """Run a model as one program of the backend."""

    def __init__(self, program: Program):
        self.program = program

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a batch, as the program computes them."""
        return self.program.run(batch)
