"""keyformer: keep the key tokens, by attention that is tempered and noised (arXiv 2403.09054, algorithm 1).

The score is softmax((x + noise) / tau), summed over all queries of prompt and answer, per layer and kv head. tau goes
from its first value, that of the prompt, to its second over the expected answer. The paper draws the noise once
(`redraw=once`), its code for every query (`redraw=step`), which did better in our probe. `redraw=16` draws it anew at
each 16th position, which costs prompts less. Without noise and with tau 1 it is h2o.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retain.kernels.slots.scoring import CONSTANT, GAUSSIAN, GUMBEL, NO_NOISE
from retain.kv.eviction.budget import AttentionScoredPolicy
from retain.kv.eviction.policy import QueryWeights
from retain.plugins import check_choice

NOISE_KINDS = {"gumbel": GUMBEL, "gaussian": GAUSSIAN, "constant": CONSTANT, "none": NO_NOISE}
# Positions of queries that share a draw. A kernel of a GPU is compiled for each number: only these.
REDRAWS = {"step": 1, "once": 0} | {str(2**i): 2**i for i in range(1, 9)}


@dataclass(frozen=True, kw_only=True)
class Policy(AttentionScoredPolicy):
    """Rank by accumulated attention, tempered and noised."""

    noise: str = "gumbel"
    redraw: str = "step"  # or once, or 2, 4, 8 ... 256 positions
    tau: str = "1..2"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("noise", self.noise, *NOISE_KINDS)
        check_choice("redraw", self.redraw, *REDRAWS)
        if not all(0 < tau < math.inf for tau in self.tau_range):
            raise ValueError(f"keyformer: tau must be above 0 and finite, not {self.tau}")

    @property
    def uses_noise(self) -> bool:
        """Whether the noise is random: `constant` shifts all scores alike."""
        return self.noise in ("gumbel", "gaussian")

    @property
    def tau_range(self) -> tuple[float, float]:
        """Temperatures at the first and the last token of the answer. Raises ValueError if `tau` is no number."""
        first, _, last = self.tau.partition("..")
        try:
            return float(first), float(last or first)
        except ValueError:
            raise ValueError(f"keyformer: tau is a number or two, such as 1..2, not {self.tau!r}") from None

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights:
        """Weigh every query alike, by the temperature of its place in the answer."""
        first, last = self.tau_range
        period = REDRAWS[self.redraw]
        step = np.maximum(pos - self.prompt_len + 1, 0)  # of the answer
        tau = (first + step * (last - first) / max(expected_tokens, 1)).astype(np.float32)
        return QueryWeights(np.ones(len(pos), np.float32), tau, noise=NOISE_KINDS[self.noise], noise_period=period)
