"""How a step changes the masses of slots."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

NO_NOISE, GUMBEL, GAUSSIAN, CONSTANT = range(4)  # the values of AttentionScoring.noise


@dataclass(frozen=True)
class AttentionScoring:
    """How a step's queries change the masses of the slots they see. All fields are on the host, and contiguous.

        mass = decay * mass + sum over the request's fresh queries of weight * softmax((x + noise) / temperature)

    x are a query's scores after scaling, bias and visibility mask. The attention output does not change. H2O has
    weight 1 (accumulated attention, arXiv 2306.14048); Keyformer adds noise and temperature (arXiv 2403.09054, eq. 9
    and algorithm 1). Requests with a window or without fresh tokens keep their masses. A scored request shares no page.

    The kinds of noise have the mean and deviation of Keyformer's Gumbel noise (table 4). Noise is a hash of seed,
    layer, kv head and slot position, so it is never stored and all backends draw the same; see reference/noise.py.
    The query heads of a kv head share their noise, and so do the queries at positions with one quotient by
    `noise_period`, which is part of the hash: draws depend on no chunk of a prompt.
    """

    weights: Tensor  # float32 [T]
    temperature: Tensor  # float32 [T], positive
    decay: Tensor  # float32 [B]
    noise: Tensor  # int32 [B]: NO_NOISE, GUMBEL, GAUSSIAN or CONSTANT
    seed: Tensor  # int32 [B]
    noise_period: Tensor  # int32 [B]: positions of queries that share a draw; 0: all queries do
