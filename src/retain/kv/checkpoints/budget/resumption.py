"""Going on from the checkpoint of a budget: how large it is, when it evicts first, and the slots of tokens until then.

A budget that is a share of the prompt grows with the text, but never beyond the tokens that are there: what an earlier
turn forgot does not come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from retain.kv.checkpoints.budget.checkpoint import BudgetCheckpoint
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.budget_state import EvictorState, Resumption
from retain.types import Ints


def plan_resumption(
    checkpoint: BudgetCheckpoint, policy: BudgetPolicy, own: Sequence[EvictorState]
) -> Resumption | None:
    """Plan how a row of this policy goes on; None where that would not be as if it had never paused.

    `own` are the states of the model's layers: those of a draft head decide nothing.
    """
    p = checkpoint.position
    is_dense = checkpoint.evictors[0].is_dense
    if p >= policy.prompt_len:  # the answer of a request that was preempted goes on
        if checkpoint.policy.prompt_len != policy.prompt_len:
            return None
        policy = checkpoint.policy
        slots = [e.num_tokens if is_dense else np.zeros_like(e.num_tokens) for e in checkpoint.evictors]
        return Resumption(policy, checkpoint.policy, p, checkpoint.evictors[0].next_eviction, tuple(slots))
    if is_dense:
        slots = [e.num_tokens for e in checkpoint.evictors]
        first = policy.plan.next_eviction(p)
        if policy.plan.is_streamed:  # an earlier answer may have filled slots that a chunk would need
            first = min(first, policy.plan.prefill_slots)
        return Resumption(policy, checkpoint.policy, p, first, tuple(slots)) if first > p else None
    rest = policy.prompt_len - p
    policy = policy.with_budget(min(_mean_tokens(e.num_tokens, policy) for e in own) + rest)
    limit = policy.plan.prefill_slots
    slots = [np.minimum(e.num_tokens + rest + policy.interval, limit) for e in checkpoint.evictors]
    num_fresh = rest
    if policy.plan.is_streamed:  # as many as fit beside what is kept
        largest = max(int(e.num_tokens.max()) for e in own)
        slots = [np.full_like(e.num_tokens, limit) for e in checkpoint.evictors]
        num_fresh = min(rest, limit - largest)
        if largest + policy.plan.chunk >= policy.budget_tokens:
            num_fresh = min(num_fresh, policy.plan.chunk)
        if num_fresh < 1:
            return None
    return Resumption(policy, checkpoint.policy, p, p + num_fresh, tuple(slots))


def _mean_tokens(num_tokens: Ints, policy: BudgetPolicy) -> int:
    """Return the tokens of each head that may be kept: of those that share budgets the mean, else the fewest."""
    if policy.share in ("all", "fitted"):
        return int(num_tokens.mean())
    return int(num_tokens.mean(axis=1).min()) if policy.share == "layer" else int(num_tokens.min())
