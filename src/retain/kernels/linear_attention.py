"""Linear attention with a gated delta rule (arXiv 2412.06464), as slots that fold into a state at page ends.

Let S0 [k_dim, v_dim] be the state of a value head at the last page end, and L_t the sum of log decays since then. A
slot has the key k_j, its L_j, and

    u_t = beta_t (v_t - e^{L_t} S0^T k_t - sum_{j < t} e^{L_t - L_j} (k_j . k_t) u_j)

so that the output is `o_t = e^{L_t} S0^T q_t + sum_{j <= t} e^{L_t - L_j} (k_j . q_t) u_j`. At the page's end

    S0 <- e^{L_S} S0 + sum_j e^{L_S - L_j} k_j u_j^T.

So a state changes at page ends only, a rejected draft is a hole, and where a step cuts the text changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LinearAttention:
    """The sizes and gates of a layer: value head h uses key head h // (num_value_heads / num_key_heads).

    A gate row is [a | b], each of `num_value_heads` numbers: the log decay is `decay * softplus(a + time_bias)`, and
    beta is sigmoid(b).
    """

    num_key_heads: int
    num_value_heads: int
    k_dim: int
    v_dim: int
    decay: Tensor  # float32 [num_value_heads], negative
    time_bias: Tensor  # float32 [num_value_heads]

    @property
    def qkv_width(self) -> int:
        """The numbers of a row [q | k | v]."""
        return 2 * self.num_key_heads * self.k_dim + self.num_value_heads * self.v_dim
