"""How a row carries out its policy: the options that say so, and what follows for one prompt, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Self

import numpy as np

from retain.kv.eviction.demotion import Demotion
from retain.options import Bounds, PositiveInt, check_bounds
from retain.plugins import Amount, check_choice
from retain.types import Ints

MIN_LOOKED_SLOTS = 64  # of a head, where a share is wanted
NEVER = 2**31 - 1  # tokens between two evictions of what never evicts
MAX_REFIT_BUDGET = 4096  # tokens of a head: all layers' new values are held in float32 while slots move
NumRefitQueries = Annotated[int, Bounds(0, 1024)]  # of tokens that are held together, in float32 and for all layers


@dataclass(frozen=True, kw_only=True)
class RowModes:
    """Options of every budget that change no priority, only how a row carries it out. Raises ValueError."""

    prefill: str = "exact"  # or stream: evict after every `chunk` of the prompt
    chunk: PositiveInt = 448  # of a streamed prompt; a step has room for it beside 64 answers
    protect: str = "none"  # or system: the system prompt is among the sinks
    shrink: Amount | None = None  # how far the budget may fall, by halves, before a request is preempted
    demote: Demotion | None = None  # tokens over the budget that stay in 4 bits: int4 (all), int4:50%
    resume: str = "on"  # or off: go on from what an earlier request kept of the same text, under this policy
    refit: NumRefitQueries = 0  # newest tokens of the prompt, whose queries fit the values of what is kept
    look: Amount | None = None  # slots that tokens of the answer attend to: 1024, or 25% of those that a head holds

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.prefill == "layers":
            raise ValueError("prefill=layers is gone: leave it out, or take prefill=stream, which bounds memory better")
        check_choice("prefill", self.prefill, "exact", "stream")
        check_choice("protect", self.protect, "none", "system")
        check_choice("resume", self.resume, "on", "off")
        if self.demote and self.shrink:
            raise ValueError("demote does not go with shrink")
        if self.demote and self.look:
            raise ValueError("demote does not go with look: demoted tokens have no sketches")
        if self.refit and (self.demote or self.is_streamed or self.resume == "on"):
            raise ValueError("refit goes with resume=off, and not with demote or prefill=stream: give refit=0 there")

    @property
    def is_streamed(self) -> bool:
        """Whether the budget holds after every chunk of the prompt."""
        return self.prefill == "stream"

    def check_starts_anew(self, reason: str) -> None:
        """Raise ValueError, which begins with a reason, for options that do not begin with a whole prompt."""
        if self.is_streamed or self.resume != "off":
            option = "prefill=stream" if self.is_streamed else f"resume={self.resume}"
            raise ValueError(f"{reason} go with {option}")

    def resolve(self, prompt_len: int, sinks: int) -> Self:
        """Return the options for a prompt, with amounts in tokens. The first `sinks` tokens always stay."""
        floor = self.shrink and Amount(tokens=max(self.shrink.resolve(prompt_len), sinks + 1))
        return replace(self, shrink=floor, demote=self.demote and self.demote.resolve(prompt_len))


def choose_looked_slots(wanted: Amount, least: int, num_held: Ints) -> Ints:
    """Return how many of `num_held` slots of a head [n] tokens attend to, a share to no fewer than `least`; 0: all."""
    share = np.maximum(np.ceil(wanted.fraction * num_held), least)
    counts = share if wanted.tokens is None else np.full_like(share, wanted.tokens)
    return np.where(counts < num_held, counts, 0).astype(np.int32)


STARTS_ANEW = RowModes(resume="off")
REFITS = replace(STARTS_ANEW, refit=256)


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """When a row evicts, and how many slots its heads own, for one prompt. By default it keeps every token.

    Where heads share their budgets, numbers of slots are means.
    """

    prompt_len: int = 0
    budget: int = NEVER  # tokens that a head keeps
    interval: int = 0  # slots that it fills beyond them before it evicts
    is_ragged: bool = False  # heads keep different numbers of tokens
    is_streamed: bool = False  # the budget holds after every `chunk` of the prompt, or else from its end on
    chunk: int = 0
    delay: int = 0  # tokens of the answer that are computed before the budget begins, in slots behind the prompt
    scoring_tokens: int = 0  # of a scoring pass, that are in the cache at a time
    demoted_tokens: int = 0  # tokens that a head keeps in fewer bits, at most
    refit: int = 0  # newest tokens of the prompt, whose queries fit the values of what is kept

    @property
    def begins_at(self) -> int:
        """Computed tokens when the budget begins."""
        return self.prompt_len + self.delay

    @property
    def decode_slots(self) -> int:
        """The most slots that a head fills between two evictions of decoding."""
        return self.budget + self.interval

    @property
    def prefill_slots(self) -> int:
        """Slots that a head owns while the prompt is computed.

        They include those of the answer's first tokens: when the prompt is computed a row only frees pages.
        """
        if self.prompt_len <= self.budget:
            return self.decode_slots
        whole = self.prompt_len + max(self.interval, self.scoring_tokens, self.delay)
        return min(whole, self.budget + max(self.chunk, self.interval)) if self.is_streamed else whole

    @property
    def refit_positions(self) -> range:
        """The positions of the prompt whose queries fit values; none where nothing is evicted, or too much is kept."""
        n = self.prompt_len
        fits = self.refit and self.budget < n and self.budget <= MAX_REFIT_BUDGET
        return range(max(n - self.refit, 0), n) if fits else range(NEVER, NEVER)

    def peak_slots(self, length: int) -> int:
        """Return the slots that a head of an unwindowed layer owns at most on the way to `length` tokens."""
        behind = max(self.scoring_tokens, self.delay) if length >= self.prompt_len else 0
        return min(length + max(self.interval, behind), self.prefill_slots)

    def demoted_slots(self, length: int) -> int:
        """Return the slots of fewer bits that such a head owns on the way to `length` tokens."""
        has_begun = length >= self.prompt_len or self.is_streamed
        return min(self.demoted_tokens, max(length - self.budget, 0)) if has_begun else 0

    def demoted_pages(self, length: int, page_size: int) -> int:
        """Return the pages of these slots, where a page has so many; 0: none demote."""
        return -(-self.demoted_slots(length) // page_size) if page_size else 0

    def pages_after_demotion(self, length: int, page_size: int, demoted_page_size: int) -> int:
        """Return the most pages that such a head owns at `length` tokens, once it demotes."""
        partial = 2 * self.is_ragged  # heads that share budgets may each have two pages that are not full
        return -(-self.decode_slots // page_size) + self.demoted_pages(length, demoted_page_size) + partial

    def fresh_tokens(self, num_uncomputed_tokens: int) -> int:
        """Return the tokens that may be computed at once, of a request that starts with as many."""
        return max(num_uncomputed_tokens, self.scoring_tokens)

    def next_eviction(self, num_computed_tokens: int) -> int:
        """Return the number of computed tokens at which the row evicts next."""
        if num_computed_tokens < self.prompt_len:
            streamed = max(num_computed_tokens, self.budget) + self.chunk
            return min(streamed, self.prompt_len) if self.is_streamed else self.prompt_len
        if num_computed_tokens < self.begins_at:
            return self.begins_at
        return max(num_computed_tokens, self.budget) + self.interval
