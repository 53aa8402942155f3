"""How far an answer's distributions are from the full cache's, where each head keeps the tokens that scores say.

The answer is forced, its first token does not count, and no token of the answer is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from retain.fit.dense import EVERY, DenseModel, Past
from retain.kv.eviction.head_shares import BUDGETS, HeadShares
from retain.kv.eviction.operations import allocate_budgets
from retain.processing.examples import Example

Share = str | HeadShares


@dataclass(frozen=True)
class HeldOut:
    """A prompt that no gate was fitted on, with what the full cache answers."""

    example: Example
    past: Past
    log_probs: Tensor  # [answer tokens - 1, V]


def hold_out(model: DenseModel, example: Example) -> HeldOut:
    """Compute an example under the full cache."""
    _, past = model.forward(example.prompt)
    log_probs, _ = model.forward(example.answer[:-1], past=past, predicting=EVERY)
    return HeldOut(example, past, log_probs)


def kl_divergence(
    model: DenseModel, held: HeldOut, scores: Tensor, budget: float, recent: float, share: Share
) -> float:
    """Return the mean KL divergence in nats a token, where heads keep the best of `scores` [M, G, n].

    `budget` is a share of the prompt, `recent` the share of it for the newest tokens; see BudgetPolicy for `share`;
    where it is fitted, the shares of heads are given.
    """
    M, G, n = scores.shape
    size = max(int(budget * n), 1)
    rank = scores.clone()
    num_recent = max(int(recent * size), 1)
    rank[..., n - num_recent :] = torch.inf
    sizes = _divide(rank, size, num_recent, share)
    order = rank.argsort(-1, descending=True)
    kept = torch.zeros(M, G, n, dtype=torch.bool).scatter(-1, order, torch.arange(n) < sizes[..., None])
    masks = dict(zip(model.full_layers, kept, strict=True))
    found, _ = model.forward(held.example.answer[:-1], past=held.past, kept=masks, predicting=EVERY)
    divergence = held.log_probs.exp() * (held.log_probs - found)
    return float(divergence.sum(-1).mean())


def mean_divergences(
    model: DenseModel, held: Iterable[tuple[HeldOut, Tensor]], recent: float, share: Share
) -> list[float]:
    """Return the mean KL divergence of prompts with their scores [M, G, n] at each of BUDGETS."""
    found = [[kl_divergence(model, item, scores, b, recent, share) for b in BUDGETS] for item, scores in held]
    return [sum(column) / len(column) for column in zip(*found, strict=True)]


def _divide(rank: Tensor, size: int, recent: int, share: Share) -> Tensor:
    """Return the tokens of each head, int64 [M, G], where they keep `size` on average, the `recent` ones always."""
    if isinstance(share, HeadShares):
        return recent + share.divide(size - recent, rank.shape[-1] - recent)
    return torch.full(rank.shape[:2], size) if share == "none" else allocate_budgets(rank, size, share)
