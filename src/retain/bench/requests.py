"""Requests of the benches: greedy, past the end of text, on random prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from retain.engine.request import Request, RequestInput
from retain.kv.eviction.policy import EvictionPolicy
from retain.sampling_params import SamplingParams

NUM_TOKENS = 40_000  # of a vocabulary, at most; the first hundred are often control tokens


def random_prompts(vocab_size: int, prompt_len: int, num_prompts: int, seed: int) -> list[list[int]]:
    """Return pseudo-random token ids."""
    rng = random.Random(seed)
    ids = plain_token_ids(vocab_size)
    return [[rng.randrange(ids.start, ids.stop) for _ in range(prompt_len)] for _ in range(num_prompts)]


def plain_token_ids(vocab_size: int) -> range:
    """Return the ids that prompts are made of."""
    end = min(NUM_TOKENS, vocab_size)
    return range(min(100, end - 1), end)


def greedy_request(prompt: Sequence[int], policy: EvictionPolicy, output_len: int, seed: int = 0) -> Request:
    """Return a request of exactly `output_len` tokens. `seed` is that of a policy's noise."""
    params = SamplingParams(temperature=0, ignore_eos=True, seed=seed)
    return Request(RequestInput(prompt=list(prompt), params=params, policy=policy, max_tokens=output_len))
