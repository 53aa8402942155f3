"""What requests would take of a cache: how far layers see, what a policy comes to, pages at most.

What is not known here: who has what.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from retain.kernels.api import NO_WINDOW
from retain.kv.eviction import policies
from retain.kv.eviction.budget import BudgetPolicy
from retain.kv.eviction.policies import Policy

UNBOUNDED = 2**30  # a capacity that no text reaches
Ints = NDArray[np.int32]


@dataclass(frozen=True)
class KVCacheSpec:
    """What the cache must know of a model: kv heads G, head dim D, and a window (or None) for each of the L layers."""

    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]


@dataclass(eq=False)
class CapacityPlanner:
    """Of `max_running_requests` requests at once, each up to `context` tokens long, of whose tokens `max_batched_tokens` a step are paid."""

    spec: KVCacheSpec
    page_size: int
    max_running_requests: int
    max_model_len: int
    max_batched_tokens: int

    def windows(self, policy: Policy) -> Ints:
        """How far each layer sees, [L]: the model's own window, or the policy's where that is shorter."""
        bound = policy.window or NO_WINDOW
        return np.array([min(w or NO_WINDOW, bound) for w in self.spec.windows], np.int32)

    def effective_policy(self, policy: Policy) -> Policy:
        """The policy as far as it means something here; resolved.

        Where every layer slides it is full, for those are rings whatever it says. No answer is longer than the context.
        Raises ValueError for positions=new where some layers slide: where a ring keeps a token depends on its position.
        """
        if None not in self.spec.windows:
            return policies.parse("full")
        if isinstance(policy, BudgetPolicy):
            if policy.positions == "new" and any(self.spec.windows):
                raise ValueError("positions=new: some layers of this model see a window, and need the original ones")
            policy = policy.with_options(interval=min(policy.interval, max(self.max_model_len - policy.prompt_len, 1)))
            if policy.prefill != "stream":
                exact, layers = (policy.with_options(prefill=how) for how in ("exact", "layers"))
                room = self.max_batched_tokens - self.max_running_requests  # in a step, whoever else is there
                prompt, able = (
                    policy.prompt_len,
                    policy.supports_layerwise and policy.budget_tokens < policy.prompt_len <= room,
                )
                cheaper = able and self.pages_needed(layers, prompt, prompt) < self.pages_needed(exact, prompt, prompt)
                return layers if cheaper else exact
        return policy

    def capacities(self, windows: Ints, num_fresh: int) -> Ints:
        """Slots that a head of each layer may own when `fresh` tokens are written at a time. [L]."""
        S = self.page_size
        slots = windows.astype(np.int64) + max(num_fresh, S) - 1
        return np.minimum(-(-slots // S) * S, UNBOUNDED).astype(np.int32)

    def pages_needed(self, policy: Policy, length: int, num_uncomputed_tokens: int) -> int:
        """Pages that a request owns at most on the way to `length` tokens when it starts owing `owed`."""
        windows, lent = self.windows(policy), 0
        slots = np.minimum(length, self.capacities(windows, min(num_uncomputed_tokens, self.max_batched_tokens)))
        if isinstance(policy, BudgetPolicy):  # the whole prompt for a moment
            sees_all, copies = windows == NO_WINDOW, 1 + (policy.rereads > 0)
            beyond = policy.interval if length < policy.prompt_len else max(policy.interval, policy.rereads)
            whole = -(-self.max_model_len // self.page_size) * self.page_size  # a table's slots
            most = np.minimum(length + beyond, min(policy.prefill_slots, whole))
            slots = np.where(sees_all, most, slots * copies)
            lent = min(length, policy.prompt_len) if policy.prefill == "layers" else 0
        return int((-(-slots // self.page_size)).sum() + -(-lent // self.page_size)) * self.spec.kv_heads
