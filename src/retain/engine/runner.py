"""Runners compute a batch: fresh tokens in, logits out, with K and V in the slots of a cache.

A step is one call of the backend's program of the model. Tests, benches and drafters wrap a runner in their own.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from retain.kernels.api import Batch, Program
from retain.models.heads import Restrict


class Runner(Protocol):
    """Compute a batch: every layer writes its keys and values into slots, then attends."""

    def forward(self, batch: Batch) -> Tensor:
        """Return float32 logits [N, V] of the tokens `batch.logits_indices`; good until the next step."""

    @property
    def hidden_states(self) -> Tensor | None:
        """The hidden states [N, E] of the same tokens, if the program gives them; good until the next step."""

    @property
    def state_size(self) -> int:
        """Numbers of the hidden state that each request brings into a batch; 0 where the program loads none."""


class ProgramRunner:
    """Run a model as one program of the backend."""

    def __init__(self, program: Program):
        self.program = program

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a batch, as the program computes them."""
        return self.program.run(batch)

    @property
    def hidden_states(self) -> Tensor | None:
        """The hidden states of the last batch, as the program computes them."""
        return self.program.hidden_states

    @property
    def state_size(self) -> int:
        """Numbers of the hidden state that each request brings into a batch, as the program loads it."""
        return self.program.state_size


class HeadRunner(ProgramRunner):
    """Run a draft head, whose program may restrict the tokens that have logits."""

    def __init__(self, program: Program, hidden_size: int, restrict: Restrict | None = None):
        """`hidden_size` and `restrict` as those of a `DraftHead`."""
        super().__init__(program)
        self.hidden_size = hidden_size
        self.restrict = restrict

    def forward(self, batch: Batch) -> Tensor:
        """Return the logits of a batch that has hidden states; -inf for tokens that the head leaves out."""
        logits = self.program.run(batch)
        states = self.program.hidden_states
        assert states is not None
        return self.restrict(logits, states[:, self.hidden_size :]) if self.restrict else logits

    @property
    def hidden_states(self) -> Tensor | None:
        """The hidden states for the next tokens, [N, E]."""
        states = self.program.hidden_states
        return None if states is None else states[:, : self.hidden_size]
