"""Mixtures of experts as a layer: the router's scores, then the experts that they choose."""

from __future__ import annotations

from dataclasses import dataclass

from retain.kernels.api import Program
from retain.kernels.experts import Experts, Router
from retain.kernels.weight import Weight, concat_rows
from retain.models.layers import Linear, resolve_activation
from retain.models.weights import Weights


@dataclass(frozen=True, eq=False)
class MixtureOfExperts:
    """Compute the sum of the experts that the scores of a linear layer choose, in place of an MLP."""

    gate: Linear  # [n, E]: the scores
    experts: Experts

    def emit(self, program: Program, x: int, out: int, add: bool = False) -> None:
        """See Layer."""
        n = self.experts.num_experts
        scores = program.buffer(f"scores {n}", n)
        self.gate.emit(program, x, scores)
        program.experts(x, scores, out, self.experts, add)


def load_experts(w: Weights, num_experts: int, router: Router, act: str) -> Experts:
    """Load experts without biases from experts.<e>, as published files have them.

    Files that transformers has converted stack all experts of a layer in one tensor.
    """
    if "experts.gate_up_proj" in w:
        gate_up: Weight = w.load_stack("experts.gate_up_proj")
        down: Weight = w.load_stack("experts.down_proj")
    else:
        own = [w.scope(f"experts.{e}.") for e in range(num_experts)]
        gate_up = concat_rows([x.load_matrix(f"{name}.weight") for x in own for name in ("gate_proj", "up_proj")])
        down = concat_rows([x.load_matrix("down_proj.weight") for x in own])
    return Experts(num_experts, gate_up, down, router, resolve_activation(act))
