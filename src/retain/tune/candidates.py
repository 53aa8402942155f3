"""The policies that `retain tune` tries, each with the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retain.bench.quality import FULL, expand_policies
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.manager import KVCacheManager
from retain.llm import LLM
from retain.processing.examples import Example
from retain.tune.config import TuneConfig


@dataclass(frozen=True)
class Candidate:
    """A policy's spec, and the mean bytes of KV cache that a request owns while it decodes."""

    spec: str
    kv_bytes: float


def make_candidates(llm: LLM, config: TuneConfig, examples: Sequence[Example]) -> list[Candidate]:
    """Return the policies at their budgets that need less memory than the full cache, the least memory first.

    A policy `gate` without options is left out where no gate is fitted for the model. Raises ValueError.
    """
    names = list(config.policies)
    if "gate" in names and not llm.cache.has_gate:
        names.remove("gate")
    specs = expand_policies(names, config.budgets)
    found = [Candidate(spec, mean_bytes(llm.cache, spec, examples)) for spec in specs]
    full = mean_bytes(llm.cache, FULL, examples)
    return sorted((c for c in found if c.kv_bytes < full), key=lambda c: c.kv_bytes)


def mean_bytes(cache: KVCacheManager, spec: str, examples: Sequence[Example]) -> float:
    """Return the mean bytes of KV cache of a request with such a prompt, at the end of its answer."""
    parsed = policies.parse(spec)
    return sum(_request_bytes(cache, parsed, len(e.prompt), len(e.answer)) for e in examples) / len(examples)


def _request_bytes(cache: KVCacheManager, policy: EvictionPolicy, prompt_len: int, answer_len: int) -> int:
    policy = cache.plan_policy(policy, prompt_len)
    length = prompt_len + answer_len
    held = min(length, policy.decode_slots) if isinstance(policy, BudgetPolicy) else length
    return cache.pages_held(policy, held, length) * cache.page_bytes
