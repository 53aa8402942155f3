"""What a policy costs, counted in tokens and steps, and how much of it a request may choose.

A step computes many tokens because that costs little more than one, and an eviction ranks all slots of a row. So a
policy that evicts after every token, or reads the prompt again in small parts, takes many times the work of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from retain.kv.eviction.policy import EvictionPolicy

MAX_PROMPT_PASSES = 3  # times that a token of the prompt is computed: the prompt, a second reading, its instructions
MIN_PROMPT_INTERVAL = 32  # tokens of the prompt between two evictions, and tokens of a step that reads it again
MIN_ANSWER_INTERVAL = 8  # tokens of the answer between two evictions
SHORT_PROMPT = 64  # tokens; a shorter prompt may cost as much as one of these


@dataclass(frozen=True)
class PolicyCost:
    """The work that a policy makes of one prompt and of its answer, at most."""

    prompt_len: int
    scoring_tokens: int  # computed behind the prompt, by scoring passes
    scoring_steps: int  # that these tokens take
    prompt_interval: int  # tokens of the prompt between two evictions
    answer_interval: int  # tokens of the answer between two evictions

    @classmethod
    def of(cls, policy: EvictionPolicy, prompt: Sequence[int], room: int) -> Self:
        """Return the cost of a resolved policy for this prompt, where `room` tokens may follow it."""
        passes = policy.scoring_passes(prompt, room)
        scoring_tokens = sum(len(p.tokens) for p in passes)
        return cls(
            len(prompt), scoring_tokens, sum(-(-len(p.tokens) // p.chunk_size) for p in passes), *policy.plan.intervals
        )

    def find_excess(self) -> str | None:
        """Say what is more than a client's request may choose; None where nothing is."""
        computed = self.prompt_len + self.scoring_tokens
        if self.prompt_interval < MIN_PROMPT_INTERVAL:
            return (
                f"evicts every {self.prompt_interval} tokens of the prompt: choose chunk={MIN_PROMPT_INTERVAL} or more"
            )
        if self.answer_interval < MIN_ANSWER_INTERVAL:
            least = f"choose interval={MIN_ANSWER_INTERVAL} or more"
            return f"evicts every {self.answer_interval} tokens of the answer: {least}"
        if computed > MAX_PROMPT_PASSES * max(self.prompt_len, SHORT_PROMPT):
            return f"computes the prompt {computed / self.prompt_len:.1f} times: {MAX_PROMPT_PASSES} times are allowed"
        if self.scoring_steps > self.scoring_tokens // MIN_PROMPT_INTERVAL + 1:
            size = self.scoring_tokens // self.scoring_steps
            return f"reads the prompt again {size} tokens at a time: choose {MIN_PROMPT_INTERVAL} or more"
        return None


def evicting_lengths(policy: EvictionPolicy, limit: int) -> tuple[int, int]:
    """Return the lengths of a prompt and of an answer from which tokens are evicted; 0 where none ever is.

    The policy need not be resolved. No prompt is longer than `limit`.
    """
    if not policy.has_budget:
        return 0, 0
    plans = [policy.resolve(2**i).plan for i in range(limit.bit_length())]
    kept = (plan.budget + plan.demoted_tokens for plan in plans if plan.budget + plan.demoted_tokens < plan.prompt_len)
    return next(kept, limit - 1) + 1, plans[0].interval + 2
