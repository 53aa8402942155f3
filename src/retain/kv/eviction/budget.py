"""Budget policies: what they share, and what those share that score slots by attention.

A head keeps `budget` tokens: the first `sinks`, the last `recent`, and of the rest those with the highest priority. It
fills `interval` more slots before it evicts as many at once (1 is the papers'; more costs less). The prompt is computed
exactly and the budget begins behind it. With prefill=stream the budget holds after every `chunk`, so that a prompt of
any length takes bounded memory.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from retain.kernels.eviction_order import sum_columns
from retain.kv.eviction.demotion import Demotion
from retain.kv.eviction.policy import NEVER, CacheLimits, EvictionPolicy
from retain.kv.eviction.view import CacheView
from retain.options import NonNegativeInt, PositiveInt, check_bounds
from retain.plugins import Amount, check_choice

DEFAULT_RECENT = Amount(fraction=0.3)


@dataclass(frozen=True, kw_only=True)
class BudgetPolicy(EvictionPolicy):
    """Options of every policy with a budget. Raises ValueError.

    After `resolve`, amounts are in tokens and `prompt_len` is known; methods marked "resolved" need that.
    """

    has_budget = True
    budget: Amount  # tokens that a head keeps, or a percentage of the prompt
    recent: Amount = DEFAULT_RECENT  # of them the newest, in tokens or as a percentage of the budget
    sinks: NonNegativeInt = 0  # of them the first of the text
    interval: PositiveInt = 16
    prefill: str = "exact"  # or stream: evict after every `chunk` of the prompt
    chunk: PositiveInt = 448  # of a streamed prompt: evict after as many; a step has room for it beside 64 answers
    share: str = "none"  # or layer, or all: heads that divide the sum of their budgets, by priority
    protect: str = "none"  # or system: the system prompt is among the sinks
    shrink: Amount | None = None  # how far the budget may fall, by halves, before a request is preempted
    demote: Demotion | None = None  # tokens over the budget that stay in 4 bits: int4 (all), int4:50%
    resume: str = "on"  # or off: go on from what an earlier request kept of the same text, under this policy
    prompt_len: int = field(default=0, init=False)
    instruction_ids: tuple[int, ...] = field(default=(), init=False)
    special_ids: frozenset[int] = field(default=frozenset(), init=False)
    resume_key: str = field(default="", init=False, repr=False, compare=False)
    streamed_key: str = field(default="", init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.prefill == "layers":
            raise ValueError("prefill=layers is gone: leave it out, or take prefill=stream, which bounds memory better")
        check_choice("prefill", self.prefill, "exact", "stream")
        check_choice("share", self.share, "none", "layer", "all")
        check_choice("protect", self.protect, "none", "system")
        check_choice("resume", self.resume, "on", "off")
        if self.share != "none" and self.prefill == "stream":
            raise ValueError("share divides a whole prompt's budget: it does not go with prefill=stream")
        if self.demote and self.shrink:
            raise ValueError("demote does not go with shrink")

    # ---- resolving -----------------------------------------------------------------------------------------------

    def resolve(self, prompt_len: int, system_len: int = 0) -> Self:
        """See EvictionPolicy.resolve."""
        sinks = max(self.sinks, system_len if self.protects_system else 0)
        budget = max(self.budget.resolve(prompt_len), sinks + 1)
        recent = min(max(self.recent.resolve(budget), 1), budget - sinks)
        floor = self.shrink and Amount(tokens=max(self.shrink.resolve(prompt_len), sinks + 1))
        demote = self.demote and self.demote.resolve(prompt_len)
        found = replace(
            self, budget=Amount(tokens=budget), recent=Amount(tokens=recent), sinks=sinks, shrink=floor, demote=demote
        )
        self._copy_state(found)
        object.__setattr__(found, "prompt_len", prompt_len)
        key = f"{type(self).__module__} {self!r} {system_len if self.protects_system else 0}"
        shares = [self.budget, self.demote.amount if self.demote else None]
        in_tokens = all(amount is None or amount.tokens is not None for amount in shares)
        is_streamed = self.prefill == "stream" and in_tokens and not self.protects_system
        object.__setattr__(found, "resume_key", key if self.resume == "on" else "")
        object.__setattr__(found, "streamed_key", key if self.resume == "on" and is_streamed else "")
        return found

    def with_options(self, **changes: Any) -> Self:
        """Return the policy with other options, resolved for the same prompt."""
        found = replace(self, **changes)
        self._copy_state(found)
        return found

    def _copy_state(self, other: Self) -> None:
        """Give another policy what is no option: the length of its prompt, and what its file was given."""
        for f in fields(self):
            if not f.init:
                object.__setattr__(other, f.name, getattr(self, f.name))

    def fit(self, limits: CacheLimits) -> Self:
        """Bound what no text can fill. See EvictionPolicy.fit."""
        policy = self.with_options(interval=min(self.interval, max(limits.max_model_len - self.prompt_len, 1)))
        if self.demote:  # no head has more tokens than a text
            most = max(limits.max_model_len - self.budget_tokens, 1)
            policy = policy.with_options(demote=Demotion(Amount(tokens=min(self.demoted_tokens, most))))
        return policy

    def with_instruction(self, token_ids: Sequence[int], special_ids: Set[int] = frozenset()) -> Self:
        """See EvictionPolicy.with_instruction."""
        found = self.with_options()
        object.__setattr__(found, "instruction_ids", tuple(token_ids))
        object.__setattr__(found, "special_ids", frozenset(special_ids))
        return found

    def halved(self) -> Self | None:
        """Return the policy with half its budget, or None if `shrink` does not allow it; resolved."""
        size = max(self.budget_tokens // 2, self.shrink.resolve(self.prompt_len) if self.shrink else self.budget_tokens)
        if size >= self.budget_tokens:
            return None
        recent = max(self.recent.resolve(self.budget_tokens) * size // self.budget_tokens, 1)
        recent = min(recent, size - self.sinks)
        return self.with_options(budget=Amount(tokens=size), recent=Amount(tokens=recent))

    def with_budget(self, num_tokens: int) -> Self:
        """Return the policy with a budget of at most so many tokens; resolved."""
        size = max(min(num_tokens, self.budget_tokens), self.sinks + 1)
        recent = min(self.recent.resolve(self.budget_tokens), size - self.sinks)
        return self.with_options(budget=Amount(tokens=size), recent=Amount(tokens=recent))

    # ---- sizes, resolved -----------------------------------------------------------------------------------------

    @property
    def budget_tokens(self) -> int:
        """The budget in tokens."""
        return self.budget.resolve(self.prompt_len)

    @property
    def protects_system(self) -> bool:
        """See EvictionPolicy.protects_system."""
        return self.protect == "system"

    @property
    def demotes(self) -> bool:
        """See EvictionPolicy.demotes."""
        return self.demote is not None

    @property
    def demoted_tokens(self) -> int:
        """Tokens that a head keeps in 4 bits at most."""
        return self.demote.num_tokens(self.prompt_len) if self.demote else 0

    def demoted_slots(self, length: int) -> int:
        """See EvictionPolicy.demoted_slots."""
        has_begun = length >= self.prompt_len or self.prefill == "stream"
        return min(self.demoted_tokens, max(length - self.budget_tokens, 0)) if has_begun else 0

    def evicting_lengths(self, limit: int) -> tuple[int, int]:
        """See EvictionPolicy.evicting_lengths."""
        for length in (2**i for i in range(limit.bit_length())):
            policy = self.resolve(length)
            num_kept = policy.budget_tokens + policy.demoted_tokens
            if num_kept < length:
                return num_kept + 1, self.interval + 2
        return limit, self.interval + 2

    @property
    def decode_slots(self) -> int:
        """Slots that a head fills at most while it decodes. (On average, where heads share budgets.)"""
        return self.budget_tokens + self.interval

    @property
    def prefill_slots(self) -> int:
        """Slots that a head owns while the prompt is computed.

        They include those of the answer's first tokens: when the prompt is computed a row only frees pages.
        """
        if self.prompt_len <= self.budget_tokens:
            return self.decode_slots
        behind = max(self.interval, self.scoring_tokens, self.eviction_delay)
        whole = self.prompt_len + behind
        return whole if self.prefill == "exact" else min(whole, self.budget_tokens + max(self.chunk, self.interval))

    def peak_slots(self, length: int) -> int:
        """See EvictionPolicy.peak_slots."""
        beyond = (
            self.interval if length < self.prompt_len else max(self.interval, self.scoring_chunk, self.eviction_delay)
        )
        return min(length + beyond, self.prefill_slots)

    @property
    def scoring_tokens(self) -> int:
        """See EvictionPolicy.scoring_tokens."""
        return min(self.scoring_chunk, len(self.instruction_ids) + self.prompt_len)

    @property
    def intervals(self) -> tuple[int, int]:
        """See EvictionPolicy.intervals."""
        return self.chunk if self.prefill == "stream" else NEVER, self.interval

    def fresh_tokens(self, num_uncomputed_tokens: int) -> int:
        """See EvictionPolicy.fresh_tokens."""
        return max(num_uncomputed_tokens, self.scoring_tokens)

    # ---- when and what to evict, resolved ------------------------------------------------------------------------

    def next_eviction(self, num_computed_tokens: int) -> int:
        """Return the number of computed tokens at which the row evicts next."""
        if num_computed_tokens < self.prompt_len:
            streamed = max(num_computed_tokens, self.budget_tokens) + self.chunk
            return min(streamed, self.prompt_len) if self.prefill == "stream" else self.prompt_len
        begin = self.prompt_len + self.eviction_delay
        return begin if num_computed_tokens < begin else max(num_computed_tokens, self.budget_tokens) + self.interval

    @property
    def eviction_delay(self) -> int:
        """Tokens of the answer that are computed before the budget begins. They fill slots behind the prompt."""
        return 0

    def evictable_range(self, query_position: int) -> tuple[int, int]:
        """Return the first and last position that may be evicted; sinks lie before, recent tokens behind."""
        return self.sinks, query_position - self.recent.resolve(self.budget_tokens)

    def protected_mask(self, pos: Tensor, query_position: int) -> Tensor:
        """Mark the positions that must stay, bool of the shape of `pos`."""
        first, last = self.evictable_range(query_position)
        return (pos < first) | (pos > last)

    @property
    def ranked_by(self) -> str | None:
        """What `priority` is, where a backend can rank slots by that alone: "mass" or "position"; else None.

        A class with a `priority` of its own has its own answer, too.
        """
        return None

    @property
    def scores_slots(self) -> bool:
        """Whether `score_slots` gives each slot a number that stays with it."""
        return False

    def score_slots(self, slots: CacheView) -> Tensor:
        """Return a number for each of these slots, float32 [M, G, S], where `scores_slots`.

        A slot is asked for once, when it is first ranked. `priority` finds the numbers in its view.
        """
        raise NotImplementedError

    def head_budgets(self, view: CacheView) -> Tensor:
        """Return the tokens that each head keeps when the budget begins, int64 [M, G], where share=none."""
        return torch.full(view.pos.shape[:2], self.budget_tokens)

    @property
    def ragged(self) -> bool:
        """Whether heads keep different numbers of tokens."""
        return self.share != "none"

    def weighs_alike(self, other: BudgetPolicy, num_tokens: int) -> bool:
        """Return whether the queries of the first tokens of a text add the same masses under both; resolved."""
        pos = np.arange(num_tokens, dtype=np.int32)
        a, b = (policy.query_weights(pos, 1) for policy in (self, other))
        if a is None or b is None:
            return a is b
        return np.array_equal(a.weights, b.weights) and (
            a.tau is b.tau is None or (a.tau is not None and b.tau is not None and np.array_equal(a.tau, b.tau))
        )

    @property
    def max_skippable_tokens(self) -> int:
        """See EvictionPolicy: the tokens before the first query that adds mass."""
        if self.prefill != "exact":
            return 0
        weighed = self.query_weights(np.arange(self.prompt_len, dtype=np.int32), 1)
        needed = np.flatnonzero(weighed.weights).tolist() if weighed else []
        return int(min([*needed[:1], self.prompt_len - 1]))


@dataclass(frozen=True, kw_only=True)
class AttentionScoredPolicy(BudgetPolicy):
    """Options of policies whose priority is the mass of a slot, the attention that it received."""

    heads: str = "kv-sum"  # kv-max, query, union: what query heads that share a kv head come to
    scope: str = "layer"  # or shared: one score for all layers, the sum
    value: str = "none"  # or norm: mass times the norm of the value, what the slot gave

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("heads", self.heads, "kv-sum", "kv-max", "query", "union")
        check_choice("scope", self.scope, "layer", "shared")
        check_choice("value", self.value, "none", "norm")
        if self.share != "none" and (self.heads == "union" or (self.share == "all" and self.scope == "shared")):
            raise ValueError("share has nothing to divide: heads=union has sizes of its own, scope=shared is one layer")
        if self.demote and self.heads == "union":
            raise ValueError("demote wants heads of known sizes: not with heads=union")

    @property
    def score_key(self) -> tuple[object, ...]:
        """The policy, and the options that are not those of every scored policy."""
        common = {f.name for f in fields(AttentionScoredPolicy)}
        return type(self), *(getattr(self, f.name) for f in fields(self) if f.name not in common)

    @property
    def ragged(self) -> bool:
        """See BudgetPolicy.ragged."""
        return super().ragged or self.heads == "union"

    @property
    def per_query_head(self) -> bool:
        """Every reduction but the sum needs the mass of each query head."""
        return self.heads != "kv-sum"

    @property
    def ranked_by(self) -> str | None:
        """See BudgetPolicy.ranked_by."""
        is_sum = (self.heads, self.scope, self.value) == ("kv-sum", "layer", "none") and not self.scores_slots
        own = (type(self).priority, type(self).reduce_heads)
        is_plain = own == (AttentionScoredPolicy.priority, AttentionScoredPolicy.reduce_heads)
        return "mass" if is_sum and is_plain else None

    def priority(self, view: CacheView) -> Tensor:
        """Return the mass, or what `scored_priority` makes of it."""
        mass = self.reduce_heads(view)
        return mass if view.slot_scores is None else self.scored_priority(view, mass, view.slot_scores)

    def scored_priority(self, view: CacheView, mass: Tensor, scores: Tensor) -> Tensor:
        """Return the priority of slots with this mass and these scores, all [M, G, S], where `scores_slots`."""
        raise NotImplementedError

    def reduce_heads(self, view: CacheView) -> Tensor:
        """Return the mass [M, G, S]; for heads=query and union minus the best rank that a query head gives the slot."""
        mass = view.mass  # [M, G, C, S]
        if self.value == "norm":
            mass = mass * view.values.norm(dim=-1)[:, :, None]
        if self.scope == "shared":
            mass = mass.sum(0, keepdim=True).expand_as(mass)
        if self.heads in ("kv-sum", "kv-max"):
            return sum_columns(mass) if self.heads == "kv-sum" else mass.amax(2)
        free = (view.pos >= 0) & ~self.protected_mask(view.pos, view.query_position)
        rank = mass.masked_fill(~free[:, :, None], -1).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return -rank.amin(2)

    def head_budgets(self, view: CacheView) -> Tensor:
        """With heads=union keep every slot that one of the query heads would keep, as far as holes fit behind them."""
        if self.heads != "union":
            return super().head_budgets(view)
        protected = (view.pos >= 0) & self.protected_mask(view.pos, view.query_position)
        stay = protected.sum(-1, keepdim=True)  # [M, G, 1]
        kept = (-self.priority(view) < self.budget_tokens - stay).sum(-1) + stay[..., 0]
        return kept.clamp(max=view.pos.shape[-1] - self.interval)  # a streamed prompt has few slots to spare
