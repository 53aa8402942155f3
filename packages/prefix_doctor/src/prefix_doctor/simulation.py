"""A cache that keeps every prompt and evicts nothing: what it would have of recorded prompts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AutoPolicy
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.prefix.start import NO_TOKENS, MissReason, PrefixDiagnosis
from retain.kv.text import common_prefix_length
from retain.types import Ints


@dataclass(frozen=True)
class RecordedPrompt:
    """A prompt of a recorded request. `source` names its file, and its line where the file has several."""

    source: str
    token_ids: list[int]
    kv_policy: str | None = None
    salt: str = ""


@dataclass(frozen=True)
class KeptText:
    """A prompt that was computed. Where its policy has a budget, other policies find nothing of it."""

    source: str
    salt: str
    policy: EvictionPolicy
    tokens: Ints


@dataclass
class CacheSimulation:
    """The prompts so far. `default_policy` is that of requests which name none."""

    default_policy: str
    texts: list[KeptText] = field(default_factory=list)

    def explain(self, prompt: RecordedPrompt) -> tuple[PrefixDiagnosis, str | None]:
        """Diagnose a prompt, then keep it. Returns the source of the nearest text, too. Raises ValueError."""
        if not prompt.token_ids:
            raise ValueError("the prompt is empty")
        tokens = np.asarray(prompt.token_ids, np.int32)
        # Whatever `auto` stands for has a budget, and that is all that matters here.
        spec = AutoPolicy().choose(prompt.kv_policy or self.default_policy)
        policy = policies.parse(spec).resolve(len(tokens))
        found = self._diagnose(KeptText(prompt.source, prompt.salt, policy, tokens))
        self.texts.append(KeptText(prompt.source, prompt.salt, policy, tokens))
        return found

    def _diagnose(self, asked: KeptText) -> tuple[PrefixDiagnosis, str | None]:
        policy = asked.policy
        shared = [(t, common_prefix_length(t.tokens, asked.tokens)) for t in self.texts if t.salt == asked.salt]
        usable = [(t, n) for t, n in shared if not t.policy.has_budget and t.policy.ring_window == policy.ring_window]
        text, common = _nearest(usable)
        max_length = len(asked.tokens) - 1
        reach = min(common, max_length)
        skippable = max_length if policy.max_skippable_tokens is None else policy.max_skippable_tokens
        num_cached = min(reach, skippable)
        source = text.source if text else None
        nearest = text.tokens if text else NO_TOKENS
        begun = PrefixDiagnosis(asked.tokens, num_cached, nearest=nearest, common_length=common, known_length=common)
        if num_cached >= max_length:
            return begun, source
        if num_cached < reach:
            return replace(begun, reason=MissReason.OWN_POLICY, detail=policies.to_spec(policy)), source
        other, known = _nearest(shared)
        if other and min(known, max_length) > reach:
            reason = MissReason.NOT_STORED if other.policy.has_budget else MissReason.OTHER_POLICY
            return replace(begun, reason=reason, known_length=known, detail=policies.to_spec(other.policy)), source
        if text is None:
            return replace(begun, reason=MissReason.FIRST_TEXT), source
        reason = MissReason.NEW_TEXT if common == len(nearest) else MissReason.DIVERGED
        return replace(begun, reason=reason), source


def _nearest(found: list[tuple[KeptText, int]]) -> tuple[KeptText | None, int]:
    """Return the text that shares the most tokens, the newest of equals, and their number."""
    return max(reversed(found), key=lambda x: x[1], default=(None, 0))
