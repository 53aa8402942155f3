"""What a policy costs, counted in tokens and steps, and how much of it a request may choose.

A step computes many tokens because that costs little more than one, and an eviction ranks all slots of a row. So a
policy that evicts after every token, or reads the prompt again in small parts, takes many times the work of others.
"""

from __future__ import annotations

from collections.abc import Sequence

from retain.kv.eviction.policy import EvictionPolicy

MAX_PROMPT_PASSES = 3  # times that a token of the prompt is computed: the prompt, a second reading, its instructions
MIN_PROMPT_INTERVAL = 32  # tokens of the prompt between two evictions or scores, or of a step that reads it again
MIN_ANSWER_INTERVAL = 8  # tokens of the answer between two evictions
MAX_REFIT_QUERIES = 256  # tokens whose queries fit values: products grow by the number of queries, and more
SHORT_PROMPT = 64  # tokens; a shorter prompt may cost as much as one of these


def find_excess(policy: EvictionPolicy, prompt: Sequence[int], room: int) -> str | None:
    """Say what of a resolved policy is more than a client's request may choose for a prompt; None where nothing is.

    `room`: the tokens that may follow the prompt.
    """
    plan = policy.plan
    passes = policy.scoring_passes(prompt, room)
    num_scoring = sum(len(p.tokens) for p in passes)  # tokens that are computed behind the prompt
    num_steps = sum(-(-len(p.tokens) // p.chunk_size) for p in passes)  # that these take
    computed = len(prompt) + num_scoring
    if plan.is_streamed and plan.chunk < MIN_PROMPT_INTERVAL:
        return f"evicts every {plan.chunk} tokens of the prompt: choose chunk={MIN_PROMPT_INTERVAL} or more"
    if 0 < plan.interval < MIN_ANSWER_INTERVAL:
        return f"evicts every {plan.interval} tokens of the answer: choose interval={MIN_ANSWER_INTERVAL} or more"
    if computed > MAX_PROMPT_PASSES * max(len(prompt), SHORT_PROMPT):
        return f"computes the prompt {computed / len(prompt):.1f} times: {MAX_PROMPT_PASSES} times are allowed"
    if num_steps > num_scoring // MIN_PROMPT_INTERVAL + 1:
        size = num_scoring // num_steps
        return f"reads the prompt again {size} tokens at a time: choose {MIN_PROMPT_INTERVAL} or more"
    if plan.refit > MAX_REFIT_QUERIES:
        return f"fits values to {plan.refit} queries: choose refit={MAX_REFIT_QUERIES} or less"
    if len(policy.query_blocks) > len(prompt) // MIN_PROMPT_INTERVAL + 1:
        size = len(policy.query_blocks[0])
        return f"scores the queries of {size} tokens of the prompt at a time: choose {MIN_PROMPT_INTERVAL} or more"
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
