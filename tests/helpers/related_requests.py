"""Requests whose prompts begin alike, for the laws of prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.sampling_params import SamplingParams
from tests.helpers.engines import iter_steps, make_request, random_prompts

POLICIES = [
    "full",
    "ring:window=24",
    "sinks:budget=40,interval=3",
    "snapkv:budget=40%",
    "h2o:budget=30%",
    "reread:budget=50%",
    "window:budget=30,prefill=stream,chunk=20",
    "keyformer:budget=40",
    "knorm:budget=30%",
]


def related_prompts(seed: int, num_prompts: int = 14) -> list[list[int]]:
    """Return prompts of which some begin alike, some are beginnings of others, and some are equal."""
    rng = random.Random(seed)
    stems = random_prompts(3, seed, 120)
    found: list[list[int]] = []
    for _ in range(num_prompts):
        stem = rng.choice(stems + found[-3:])
        cut = rng.choice([len(stem), rng.randint(1, len(stem)), len(stem) // 16 * 16 or 1])
        found.append(stem[:cut] + [rng.randrange(128) for _ in range(rng.choice([0, 1, 5, 16, 40]))])
    return found


def related_requests(family: str, seed: int, only_full: bool = False) -> list[Request]:
    """Return greedy and sampled requests: every second one full, or all of them, the others of all policies."""
    requests = []
    for i, prompt in enumerate(related_prompts(seed)):
        params = SamplingParams(temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        n = i + seed
        policy = "full" if only_full or n % 2 == 0 else POLICIES[n // 2 % len(POLICIES)]
        requests.append(make_request(prompt, 5 + i, policy, params))
    return requests


def run_disturbed(engine: Engine, requests: Sequence[Request], rng: random.Random) -> list[Request]:
    """Run requests together, preempt two of them and cancel the fifth. Returns the others."""
    engine.add(*requests)
    for step in iter_steps(engine):
        if step in (3, 9) and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice([*engine.scheduler.running]))
        if step == 6:
            engine.cancel(requests[4])
    return [r for i, r in enumerate(requests) if i != 4]
