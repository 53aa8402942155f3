"""Budget policies: what they share, and what those share that score slots by attention.

A head keeps `budget` tokens: the first `sinks`, the last `recent`, and of the rest those with the highest priority. It
fills `interval` more slots before it evicts as many at once (1 is the papers'; more costs less). The prompt is computed
exactly and the budget begins behind it. With prefill=stream the budget holds after every `chunk`, so that a prompt of
any length takes bounded memory.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from retain.kernels.ranks import ALL_HEADS, KVHeads
from retain.kernels.slots.eviction_order import sum_columns
from retain.kv.eviction.demotion import Demotion
from retain.kv.eviction.head_shares import HeadShares
from retain.kv.eviction.plan import RowModes, RowPlan
from retain.kv.eviction.policy import EvictionPolicy, GateLoader
from retain.kv.eviction.view import CacheView
from retain.options import OPTION_GROUP, RESOLVED, NonNegativeInt, PositiveInt, check_bounds
from retain.plugins import Amount, check_choice

DEFAULT_RECENT = Amount(fraction=0.3)
DEFAULT_MODES = RowModes()


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
    share: str = "none"  # or layer, all: heads divide one budget by priority; or fitted: as a model's file says
    modes: RowModes = field(default=DEFAULT_MODES, metadata=OPTION_GROUP)
    prompt_len: int = field(default=0, metadata=RESOLVED)
    instruction_ids: tuple[int, ...] = field(default=(), metadata=RESOLVED)
    special_ids: frozenset[int] = field(default=frozenset(), metadata=RESOLVED)
    resume_key: str = field(default="", repr=False, metadata=RESOLVED)
    streamed_key: str = field(default="", repr=False, metadata=RESOLVED)
    head_shares: HeadShares | None = field(default=None, repr=False, metadata=RESOLVED)  # where share=fitted
    kv_heads: KVHeads = field(default=ALL_HEADS, repr=False, compare=False, metadata=RESOLVED)  # that this rank has

    def __post_init__(self) -> None:
        check_bounds(self)
        check_choice("share", self.share, "none", "layer", "all", "fitted")
        if self.share != "none" and self.modes.is_streamed:
            raise ValueError("share divides a whole prompt's budget: it does not go with prefill=stream")

    # ---- resolving -----------------------------------------------------------------------------------------------

    def resolve(self, prompt_len: int, system_len: int = 0) -> Self:
        """Return the policy with its amounts in tokens, for a prompt of this length."""
        modes = self.modes
        system_len = system_len if modes.protect == "system" else 0
        sinks = max(self.sinks, system_len)
        budget = max(self.budget.resolve(prompt_len), sinks + 1)
        recent = min(max(self.recent.resolve(budget), 1), budget - sinks)
        whole = replace(self, modes=replace(modes, look=None))  # a prompt attends to everything
        key = f"{type(self).__module__} {whole!r} {system_len}" if modes.resume == "on" else ""
        # With amounts in tokens, what is kept inside a streamed prompt depends on the text up to there alone.
        is_alike = modes.is_streamed and modes.protect == "none" and "%" not in f"{self.budget} {modes.demote}"
        return replace(
            self,
            budget=Amount(tokens=budget),
            recent=Amount(tokens=recent),
            sinks=sinks,
            modes=modes.resolve(prompt_len, sinks),
            prompt_len=prompt_len,
            resume_key="" if self.looks else key,
            streamed_key=key if is_alike else "",
        )

    def fit(self, max_model_len: int, load_gate: GateLoader) -> Self:
        """Bound what no text can fill, and load the shares of heads. See EvictionPolicy.fit."""
        shares = load_gate(self.gate_file).shares if self.share == "fitted" else None
        if self.share == "fitted" and shares is None:
            raise ValueError("share=fitted: no file of this model has shares: `retain fit --budgets` adds them")
        behind_prompt, beyond_budget = (max(max_model_len - n, 1) for n in (self.prompt_len, self.budget_tokens))
        demoted = Demotion(Amount(tokens=min(self.plan.demoted_tokens, beyond_budget)))
        modes = replace(self.modes, demote=demoted) if self.modes.demote else self.modes
        return replace(self, interval=min(self.interval, behind_prompt), modes=modes, head_shares=shares)

    def with_instruction(self, token_ids: Sequence[int], special_ids: Set[int] = frozenset()) -> Self:
        """Return the policy with the ids of its instruction, and those that separate messages."""
        return replace(self, instruction_ids=tuple(token_ids), special_ids=frozenset(special_ids))

    def halved(self) -> Self | None:
        """Return the policy with half its budget, or None if `shrink` does not allow it; resolved."""
        floor = self.modes.shrink
        size = max(self.budget_tokens // 2, floor.resolve(self.prompt_len) if floor else self.budget_tokens)
        if size >= self.budget_tokens:
            return None
        smaller = self._resized(size, max(self.recent_tokens * size // self.budget_tokens, 1))
        return smaller if smaller.eviction_delay == self.eviction_delay else None  # a budget begins once

    def with_budget(self, num_tokens: int) -> Self:
        """Return the policy with a budget of at most so many tokens; resolved."""
        return self._resized(max(min(num_tokens, self.budget_tokens), self.sinks + 1), self.recent_tokens)

    def _resized(self, budget: int, recent: int) -> Self:
        recent = min(recent, budget - self.sinks)
        return replace(self, budget=Amount(tokens=budget), recent=Amount(tokens=recent))

    # ---- its plan, resolved -----------------------------------------------------------------------------------------

    @property
    def budget_tokens(self) -> int:
        """The number of tokens that a head keeps."""
        return self.budget.resolve(self.prompt_len)

    @property
    def recent_tokens(self) -> int:
        """The number of newest tokens that are always kept, as a part of the budget."""
        return self.recent.resolve(self.budget_tokens)

    @cached_property
    def plan(self) -> RowPlan:
        """How a row carries out the budget; resolved."""
        return RowPlan(
            prompt_len=self.prompt_len,
            budget=self.budget_tokens,
            interval=self.interval,
            is_ragged=self.ragged,
            is_streamed=self.modes.is_streamed,
            chunk=self.modes.chunk,
            delay=self.eviction_delay,
            scoring_tokens=min(self.scoring_chunk, len(self.instruction_ids) + self.prompt_len),
            demoted_tokens=self.modes.demote.num_tokens(self.prompt_len) if self.modes.demote else 0,
            refit=self.modes.refit,
        )

    # ---- what to evict, resolved ---------------------------------------------------------------------------------

    @property
    def eviction_delay(self) -> int:
        """Tokens of the answer that are computed before the budget begins. They fill slots behind the prompt."""
        return 0

    def evictable_range(self, query_position: int) -> tuple[int, int]:
        """Return the first and last position that may be evicted; sinks lie before, recent tokens behind."""
        return self.sinks, query_position - self.recent_tokens

    def protected_mask(self, pos: Tensor, query_position: int) -> Tensor:
        """Mark the positions that must stay, bool of the shape of `pos`."""
        first, last = self.evictable_range(query_position)
        return (pos < first) | (pos > last)

    @property
    def ranked_by(self) -> str | None:
        """Name what alone ranks the slots, so that a backend can do it: "mass", "position", or None.

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

    @property
    def gate_file(self) -> str:
        """The file that was fitted for the model; "" is its own."""
        return ""

    @property
    def weights_fingerprint(self) -> bytes:
        """Identify the shares of heads; empty without them."""
        return self.head_shares.fingerprint if self.head_shares else b""

    def head_budgets(self, view: CacheView, budget: int) -> Tensor:
        """Return the tokens that each head keeps, int64 [M, G], where priority does not divide their budgets.

        With share=fitted these are the protected ones, and of the others as many as the head's share says.
        """
        if self.head_shares is None:
            return torch.full(view.pos.shape[:2], budget)
        protected = self.sinks + self.recent_tokens
        others = self.head_shares.divide(budget - protected, view.query_position + 1 - protected)
        return (protected + others).minimum((view.pos >= 0).sum(-1).cpu())

    @property
    def ragged(self) -> bool:
        """Whether heads keep different numbers of tokens."""
        return self.share != "none"

    @property
    def compares_heads(self) -> bool:
        """Whether heads divide a budget, or their pages."""
        return self.ragged

    def budgets_of_all(self, own: Tensor) -> Tensor:
        """Return the tokens that heads keep on all ranks, where those of this one keep `own` [M, G], on the host."""
        if self.compares_heads:
            return self.kv_heads.gather(own)
        last = own.shape[1] - 1  # all heads keep as many
        return own[:, torch.arange(self.kv_heads.num_of_all(own.shape[1])).clamp(max=last)]

    def weighs_alike(self, other: BudgetPolicy, num_tokens: int) -> bool:
        """Return whether the queries of the first tokens of a text add the same masses under both; resolved."""
        pos = np.arange(num_tokens, dtype=np.int32)
        if self._blocks_before(num_tokens) != other._blocks_before(num_tokens):
            return False
        a, b = (policy.query_weights(pos, 1) for policy in (self, other))
        if a is None or b is None:
            return a is b
        return np.array_equal(a.weights, b.weights) and (
            a.tau is b.tau is None or (a.tau is not None and b.tau is not None and np.array_equal(a.tau, b.tau))
        )

    @property
    def max_skippable_tokens(self) -> int:
        """The tokens before the first query that adds mass: a prefix hit may supply them."""
        if self.modes.is_streamed:
            return 0
        weighed = self.query_weights(np.arange(self.prompt_len, dtype=np.int32), 1)
        needed = np.flatnonzero(weighed.weights).tolist() if weighed else []
        return int(min([*needed[:1], *[block.start for block in self.query_blocks[:1]], self.prompt_len - 1]))

    @property
    def last_block_start(self) -> int:
        """Where the last block of queries begins: masses up to there are those of any longer text. 0 if it is alone."""
        return self.query_blocks[-1].start if len(self.query_blocks) > 1 else 0

    def _blocks_before(self, num_tokens: int) -> list[range]:
        """Return the blocks of queries that begin in the first tokens; a mass needs all of a block."""
        return [block for block in self.query_blocks if block.start < num_tokens]


@dataclass(frozen=True, kw_only=True)
class PositionPolicy(BudgetPolicy):
    """Options of policies that keep the newest of the tokens that are not protected."""

    @property
    def ranked_by(self) -> str | None:
        """What ranks slots: "position", but None for a class with a `priority` of its own."""
        return "position" if type(self).priority is PositionPolicy.priority else None

    def priority(self, view: CacheView) -> Tensor:
        """Rank slots by the position of their token: the oldest are evicted first."""
        return view.pos


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
        if self.modes.demote and self.heads == "union":
            raise ValueError("demote wants heads of known sizes: not with heads=union")

    @property
    def score_key(self) -> tuple[object, ...]:
        """The policy, and the options that are not those of every scored policy."""
        common = {f.name for f in fields(AttentionScoredPolicy)}
        return type(self), *(getattr(self, f.name) for f in fields(self) if f.name not in common)

    @property
    def ragged(self) -> bool:
        """Whether heads keep different numbers of tokens, as they do where they are ranked in union."""
        return super().ragged or self.heads == "union"

    @property
    def per_query_head(self) -> bool:
        """Every reduction but the sum needs the mass of each query head."""
        return self.heads != "kv-sum"

    @property
    def ranked_by(self) -> str | None:
        """What ranks slots: "mass" where it is the plain sum of a head's masses; else None."""
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
            mass = sum_layers(mass, view.pos, view.query_position)
        if self.heads in ("kv-sum", "kv-max"):
            return sum_columns(mass) if self.heads == "kv-sum" else mass.amax(2)
        free = (view.pos >= 0) & ~self.protected_mask(view.pos, view.query_position)
        rank = mass.masked_fill(~free[:, :, None], -1).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        return -rank.amin(2)

    def head_budgets(self, view: CacheView, budget: int) -> Tensor:
        """With heads=union keep every slot that one of the query heads would keep, as far as holes fit behind them."""
        if self.heads != "union":
            return super().head_budgets(view, budget)
        protected = (view.pos >= 0) & self.protected_mask(view.pos, view.query_position)
        stay = protected.sum(-1, keepdim=True)  # [M, G, 1]
        kept = (-self.priority(view) < budget - stay).sum(-1) + stay[..., 0]
        return kept.clamp(max=view.pos.shape[-1] - self.interval)  # a streamed prompt has few slots to spare


def sum_layers(mass: Tensor, pos: Tensor, newest: int) -> Tensor:
    """Return for each slot the masses of its token in all layers [M, G, C, S], added in the order of layers.

    Layers may hold a token at different places, and not all of them hold it: heads may keep different numbers of
    tokens. So masses are added by position [M, G, S], and what an earlier owner left in a hole counts nowhere.
    """
    known = pos.clamp(0, newest)
    index = known.long()[:, :, None].expand_as(mass)
    total = mass.new_zeros(*mass.shape[1:3], newest + 1)
    for i, x in zip(index, mass.masked_fill((known != pos)[:, :, None], 0), strict=True):
        total.scatter_add_(-1, i, x)
    return total.expand(len(mass), -1, -1, -1).gather(-1, index)
