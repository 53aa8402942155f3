"""What policies with a budget have in common: their sizes, who is never forgotten, and what they want to see.

A head keeps `budget` tokens: the first `sinks`, the last `recent`, and of the rest those with the highest priority. It
fills `interval` more slots before it forgets as many at once (1 is the papers'; more costs less). The prompt is
computed exactly and the budget begins behind it: in all layers at once, or, where it is paid in one step (`layers`),
in one after the other, so that only one is whole at a time. Or, with `prefill=stream`, it holds after every `chunk`, so
that a prompt of any length takes bounded memory. What is not known here: pages, slots, who carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.api import NO_NOISE
from retain.kv.eviction.view import CacheView
from retain.plugins import Amount, check_choice

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class QueryWeights:
    """What fresh queries of one request leave on its slots; see `Observe` in kernels/__init__.py."""

    weights: Floats  # [n], one a fresh token
    tau: Floats | None = None  # [n]; None is 1
    decay: float = 1.0
    noise: int = NO_NOISE
    redraw_noise: bool = True


DEFAULT_RECENT = Amount(fraction=0.3)


@dataclass(frozen=True, kw_only=True)
class BudgetPolicy:
    """Options of every policy that is carried out by looking. Raises ValueError."""

    budget: Amount  # tokens that a head keeps, or a percentage of the prompt
    recent: Amount = DEFAULT_RECENT  # of them the newest, in tokens or as a percentage of the budget
    sinks: int = 0  # of them the first of the text
    interval: int = 16
    prefill: str = "exact"  # or stream; the cache makes layers of exact where that takes less
    chunk: int = 448  # of a streamed prompt: forget after so many; a step has room for it beside 64 answers
    share: str = "none"  # or layer, or all: whose heads divide the sum of their budgets, by priority
    positions: str = "original"  # or new: what stays is numbered from 0 and turned along (an ablation, and slow)
    protect: str = "none"  # or system: the system prompt is among the sinks
    shrink: Amount | None = None  # how far the budget may fall, by halves, before somebody has to be preempted
    prompt_len: int = field(default=0, init=False)  # tokens, once it is known

    window = None  # nothing is known in closed form
    uses_noise = False  # whether masses depend on the request's seed
    per_query_head = False  # whether query heads must be told apart
    rereads = 0  # tokens of the prompt that are read again at a time, before the budget begins

    def __post_init__(self) -> None:
        if self.interval < 1 or self.sinks < 0 or self.chunk < 1:
            raise ValueError("interval and chunk must be at least 1, sinks 0")
        check_choice("prefill", self.prefill, "exact", "stream", "layers")
        check_choice("share", self.share, "none", "layer", "all")
        check_choice("protect", self.protect, "none", "system")
        check_choice("positions", self.positions, "original", "new")
        if self.share != "none" and self.prefill == "stream":
            raise ValueError("share divides a whole prompt's budget: it does not go with prefill=stream")
        if self.positions == "new" and self.ragged:
            raise ValueError("positions=new wants heads that keep equally many tokens: not with share or heads=union")

    def resolve(self, prompt_len: int, system_len: int = 0) -> Self:
        """The same for a prompt of so many tokens, the first `system` a system prompt; its amounts in tokens."""
        sinks = max(self.sinks, system_len if self.protect == "system" else 0)
        budget = max(self.budget.resolve(prompt_len), sinks + 1)
        recent = min(max(self.recent.resolve(budget), 1), budget - sinks)
        floor = self.shrink and Amount(tokens=max(self.shrink.resolve(prompt_len), sinks + 1))
        found = replace(self, budget=Amount(tokens=budget), recent=Amount(tokens=recent), sinks=sinks, shrink=floor)
        object.__setattr__(found, "prompt", prompt_len)
        return found

    def with_options(self, **changes: Any) -> Self:
        """The same, resolved for the same prompt, with other options."""
        found = replace(self, **changes)
        object.__setattr__(found, "prompt", self.prompt_len)
        return found

    def halved(self) -> Self | None:
        """The same with half its budget, if it may be so small; resolved."""
        size = max(self.budget_tokens // 2, self.shrink.resolve(self.prompt_len) if self.shrink else self.budget_tokens)
        if size >= self.budget_tokens:
            return None
        recent = max(self.recent.resolve(self.budget_tokens) * size // self.budget_tokens, 1)
        return self.with_options(budget=Amount(tokens=size), recent=Amount(tokens=min(recent, size - self.sinks)))

    @property
    def budget_tokens(self) -> int:
        """The budget in tokens; resolved."""
        return self.budget.resolve(self.prompt_len)

    @property
    def decode_slots(self) -> int:
        """That a head fills at most while it generates; resolved. (Where budgets are shared, on average.)"""
        return self.budget_tokens + self.interval

    @property
    def prefill_slots(self) -> int:
        """That a head owns while the prompt is computed; resolved.

        Room for the answer's first tokens is there already: when the prompt is paid a row only gives pages back.
        """
        if self.prompt_len <= self.budget_tokens or self.prefill == "layers":
            return self.decode_slots
        whole = self.prompt_len + max(self.interval, min(self.rereads, self.prompt_len))
        return whole if self.prefill == "exact" else min(whole, self.budget_tokens + max(self.chunk, self.interval))

    def next_eviction(self, num_computed_tokens: int) -> int:
        """How many tokens are computed when the row next forgets, if `computed` are; resolved."""
        if num_computed_tokens < self.prompt_len:
            streamed = max(num_computed_tokens, self.budget_tokens) + self.chunk
            return min(streamed, self.prompt_len) if self.prefill == "stream" else self.prompt_len
        return max(num_computed_tokens, self.budget_tokens) + self.interval

    def evictable_range(self, query_position: int) -> tuple[int, int]:
        """Who is before the first of these positions, or behind the second, must stay."""
        return self.sinks, query_position - self.recent.resolve(self.budget_tokens)

    def protected_mask(self, pos: Tensor, query_position: int) -> Tensor:
        """Who must stay, bool of the shape of `pos`."""
        sinks, after = self.evictable_range(query_position)
        return (pos < sinks) | (pos > after)

    @property
    def ragged(self) -> bool:
        """Whether heads keep different numbers of tokens."""
        return self.share != "none"

    @property
    def supports_layerwise(self) -> bool:
        """Whether a layer can forget as soon as it has seen the prompt."""
        return not (self.ragged or self.rereads or self.positions == "new")

    @property
    def score_key(self) -> tuple[object, ...]:
        """All that masses at the end of a prompt depend on, but for the prompt and the seed; empty: nothing is seen."""
        return ()

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights | None:
        """What fresh tokens leave, of whom this is the place in the text; None: nothing. `expected` are generated."""
        return None

    def priority(self, view: CacheView) -> Tensor:
        """See Policy."""
        raise NotImplementedError

    def head_budgets(self, view: CacheView) -> Tensor:
        """Tokens that each head keeps when the budget begins, int64 [M, G], where nothing is shared."""
        return torch.full(view.pos.shape[:2], self.budget_tokens)


@dataclass(frozen=True, kw_only=True)
class AttentionScoredPolicy(BudgetPolicy):
    """Options of policies whose priority is the attention that slots received, their mass."""

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

    @property
    def score_key(self) -> tuple[object, ...]:
        """The policy, and the options of its own."""
        common = {f.name for f in fields(AttentionScoredPolicy)}
        return type(self), *(getattr(self, f.name) for f in fields(self) if f.name not in common)

    @property
    def ragged(self) -> bool:
        """See Budget."""
        return super().ragged or self.heads == "union"

    @property
    def supports_layerwise(self) -> bool:
        """See Budget."""
        return super().supports_layerwise and self.scope == "layer"

    @property
    def per_query_head(self) -> bool:  # type: ignore[override]
        """All but the sum need every query head's mass."""
        return self.heads != "kv-sum"

    def priority(self, view: CacheView) -> Tensor:
        """The mass; or, where every query head has a say of its own, minus the place in its order of likes."""
        mass = view.mass  # [M, G, C, S]
        if self.value == "norm":
            mass = mass * view.values.norm(dim=-1)[:, :, None]
        if self.scope == "shared":
            mass = mass.sum(0, keepdim=True).expand_as(mass)
        if self.heads in ("kv-sum", "kv-max"):
            return mass.sum(2) if self.heads == "kv-sum" else mass.amax(2)
        free = (view.pos >= 0) & ~self.protected_mask(view.pos, view.query_position)
        liked = mass.masked_fill(~free[:, :, None], -1).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return -liked.amin(2)  # in turn, each its best that is left

    def head_budgets(self, view: CacheView) -> Tensor:
        """A union has whatever one of its query heads would keep."""
        if self.heads != "union":
            return super().head_budgets(view)
        stay = ((view.pos >= 0) & self.protected_mask(view.pos, view.query_position)).sum(-1, keepdim=True)  # [M, G, 1]
        return ((-self.priority(view) < self.budget_tokens - stay).sum(-1) + stay[..., 0]).clamp(max=view.pos.shape[-1])
