"""What a request costs under a policy, counted: steps, computed tokens, and evictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from torch import Tensor

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.kernels.api import Batch
from retain.kv.eviction.evictor import BudgetEvictor, Compact, Punch
from retain.kv.eviction.policy import EvictionPolicy
from tests.helpers.engines import make_request


@dataclass
class CountedCost:
    """Counts of requests that ran in one engine."""

    steps: int = 0
    tokens: int = 0  # computed, those of scoring passes included
    prompt_evictions: int = 0  # before the answer, or right behind the prompt
    answer_evictions: int = 0


def count_cost(engine: Engine, requests: Sequence[Request]) -> CountedCost:
    """Run requests to their ends, and count the work."""
    cost = CountedCost()
    forward = engine.runner.forward
    find_due = BudgetEvictor.find_due

    def count_forward(batch: Batch) -> Tensor:
        cost.steps += 1
        cost.tokens += len(batch.input_ids)
        return forward(batch)

    def count_due(evictor: BudgetEvictor, num_computed_tokens: int) -> list[Punch | Compact]:
        is_prompt = num_computed_tokens <= evictor.policy.prompt_len
        cost.prompt_evictions += is_prompt
        cost.answer_evictions += not is_prompt
        return find_due(evictor, num_computed_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.runner, "forward", count_forward)
        patch.setattr(BudgetEvictor, "find_due", count_due)
        engine.add(*requests)
        while engine.has_unfinished_requests:
            engine.step()
    return cost


def count_policy_cost(engine: Engine, prompt: Sequence[int], max_tokens: int, policy: EvictionPolicy) -> CountedCost:
    """Run one request alone, and count its work."""
    return count_cost(engine, [make_request(prompt, max_tokens, policy)])
