"""Linear attention as slots that fold into a state at page ends: the gated delta rule, and Mamba-2.

Let S0 [k_dim, v_dim] be the state of a value head at the last page end, and L_t the sum of log decays since then. A
slot has the key k_j, its L_j, and what the token adds to the state. By the gated delta rule (arXiv 2412.06464) that is

    u_t = beta_t (v_t - e^{L_t} S0^T k_t - sum_{j < t} e^{L_t - L_j} (k_j . k_t) u_j)

and in Mamba-2 (arXiv 2405.21060), with the length dt_t of a token's step,

    u_t = dt_t v_t

so that the output is `o_t = e^{L_t} S0^T q_t + sum_{j <= t} e^{L_t - L_j} (k_j . q_t) u_j`, in Mamba-2 plus skip v_t.
At the page's end

    S0 <- e^{L_S} S0 + sum_j e^{L_S - L_j} k_j u_j^T.

So a state changes at page ends only, a rejected draft is a hole, and where a step cuts the text changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor


@dataclass(frozen=True)
class GatedDeltaRule:
    """A gate row is [a | b]: the log decay is `decay * softplus(a + time_bias)`, and beta is sigmoid(b)."""

    num_gates = 2  # of a value head


@dataclass(frozen=True, eq=False)
class Mamba2Rule:
    """How Mamba-2 computes the decay of its state from a gate row [a].

    dt is softplus(a + time_bias) between two limits, and the log decay is `decay * dt`.

    Mamba-2 calls q, k, v C, B, x. Key heads are its groups.
    """

    skip: Tensor  # float32 [num_value_heads]
    time_step_limits: tuple[float, float] = (0.0, math.inf)
    num_gates = 1


UpdateRule = GatedDeltaRule | Mamba2Rule


@dataclass(frozen=True, eq=False)
class LinearAttention:
    """The sizes of a layer, and its rule: value head h uses key head h // (num_value_heads / num_key_heads).

    Each gate of a row has `num_value_heads` numbers.
    """

    num_key_heads: int
    num_value_heads: int
    k_dim: int
    v_dim: int
    decay: Tensor  # float32 [num_value_heads], negative
    time_bias: Tensor  # float32 [num_value_heads]
    rule: UpdateRule = GatedDeltaRule()

    @property
    def qkv_width(self) -> int:
        """The numbers of a row [q | k | v]."""
        return 2 * self.num_key_heads * self.k_dim + self.num_value_heads * self.v_dim

    @property
    def gates_width(self) -> int:
        """The numbers of a row of gates."""
        return self.rule.num_gates * self.num_value_heads

    def map_tensors(self, convert: Callable[[Tensor], Tensor]) -> LinearAttention:
        """Return the parameters with each of their tensors converted."""
        rule = self.rule
        if isinstance(rule, Mamba2Rule):
            rule = replace(rule, skip=convert(rule.skip))
        return replace(self, decay=convert(self.decay), time_bias=convert(self.time_bias), rule=rule)
