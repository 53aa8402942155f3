"""Mixtures of experts: the weights of a layer's experts, and how a token chooses among them (arXiv 2101.03961).

    y = sum over the chosen experts e of weight_e * down_e(act(gate_e(x)) * up_e(x))

Without gates it is `act(up_e(x))` that an expert projects down.

What a backend computes is defined in reference/experts.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from retain.kernels.weights.weight import Weight

TILE_ROWS = 16  # of a packed weight. Outputs of an expert come in multiples, so no tile has rows of two experts


@dataclass(frozen=True, eq=False)
class Router:
    """Choose `top_k` experts of a token, and weigh them, by its n scores.

    Scores become probabilities p: their softmax, or the sigmoid of each (`is_sigmoid`). The experts with the highest
    p + bias are chosen, of equal ones the first. Their weights are p alone, divided by their sum + `sum_epsilon` if
    `normalize`, times `scale`, times the `expert_scale` of each.

    With groups, only the best `top_groups` of `num_groups` take part. A group counts as much as its `group_best` best
    experts: two in DeepSeek-V3 (arXiv 2412.19437), one in DeepSeek-V2 (arXiv 2405.04434).
    """

    top_k: int
    is_sigmoid: bool = False
    normalize: bool = True
    scale: float = 1.0
    bias: Tensor | None = None  # float32 [n]
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2  # or 1
    expert_scale: Tensor | None = None  # float32 [n]
    sum_epsilon: float = 1e-20  # counts where all chosen sigmoids are tiny

    def map_tensors(self, convert: Callable[[Tensor], Tensor]) -> Router:
        """Return the router with each of its tensors converted."""
        bias, expert_scale = (None if x is None else convert(x) for x in (self.bias, self.expert_scale))
        return replace(self, bias=bias, expert_scale=expert_scale)


@dataclass(frozen=True, eq=False)
class Experts:
    """Experts of a layer, one below the other: gates and up projections, down projections, their router.

    They are all n that the router chooses among, or those from number `first` on: the others then add nothing.

    I is the intermediate size of an expert, and `act` one of ACTIVATIONS. Without gates experts have I rows in place of
    2 I each.
    """

    num_experts: int
    gate_up: Weight  # [n 2 I, E]: of each expert the rows of its gate, then those of its up projection
    down: Weight  # [n E, I]
    router: Router
    act: str
    gate_up_bias: Tensor | None = None  # [n 2 I]
    down_bias: Tensor | None = None  # [n E]
    is_gated: bool = True
    first: int = 0

    @property
    def intermediate_size(self) -> int:
        """Return I, the number of values between the two products of an expert."""
        return self.down.shape[1]

    @property
    def inner_size(self) -> int:
        """Return the numbers that an expert computes first: 2 I, or I without gates."""
        return 2 * self.intermediate_size if self.is_gated else self.intermediate_size

    @property
    def hidden_size(self) -> int:
        """Return E, the number of values in a row that the experts read and write."""
        return self.gate_up.shape[1]
