"""A request: the tokens it has, how many of them are computed, and how its next ones shall be drawn.

What is not known here: text (a `Watcher` may end a request for reasons of its own, such as a stop string),
scheduling, slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.engine.grammar import Grammar
from retain.engine.spec_decode.stats import SpecDecodeStats
from retain.kv.eviction.budget import BudgetPolicy, QueryWeights
from retain.kv.eviction.policies import Policy
from retain.kv.stats.attention_trace import AttentionTrace
from retain.sampling_params import SamplingParams

TokenCallback = Callable[[int], bool]  # told every new token; True ends the request
LogitsCallback = Callable[[Tensor], None]  # told logits [n, V] as they are computed; good until it returns


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"  # a stop token, a stop string, the end of text
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"  # at following its form


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities (nats, before temperature and penalties) of a drawn token and of the likeliest ones."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class Request:
    """One answer in the making.

    `tokens` is prompt and answer; the first `computed` of them have their K and V in slots. The answer begins with
    `given`, whatever the model thinks (teacher forcing). A `reader` sees the logits before every token of the answer.
    """

    prompt: list[int]
    params: SamplingParams
    policy: Policy
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    token_callback: TokenCallback | None = None
    forced_tokens: list[int] = field(default_factory=list)
    max_model_len: int = 2**30  # positions that there are
    num_system_tokens: int = 0  # tokens of the prompt, the first ones, that are a system prompt
    logits_callback: LogitsCallback | None = None
    salt: str = ""  # whose texts it may share prefixes with
    drafter_name: str = ""  # who drafts for it, of those that the engine knows by name; "" is its own
    grammar: Grammar | None = None  # what its answer may be
    attention_trace: AttentionTrace | None = None  # for people who look at what it keeps
    needs_prompt_logits: bool = (
        False  # its reader sees the logits before every token of the prompt too, but for the first
    )

    id: int = field(default_factory=itertools.count().__next__)
    tokens: list[int] = field(default_factory=list)
    prompt_sharers: list[Request] = field(default_factory=list)  # who begin with its prompt's slots, shared or copied
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # tokens that were computed already when it began
    branch_point: int = 0  # where others could go on if it left something there
    drafts: list[int] = field(default_factory=list)  # guesses of its next tokens, to be verified in the next step
    draft_probs: Tensor | None = None  # p [K, V] that they were drawn from; None: they were certain
    score_decay: float | None = None  # of masses that somebody wants who drafts or looks, where the policy wants none
    spec_decode_stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    num_logits_read: int = field(
        default=0, init=False
    )  # tokens whose logits its reader has seen; below 0: of the prompt
    num_reread_tokens: int = 0  # tokens of the prompt that were read again; their slots are forgotten
    row: int | None = None  # of the cache, while it runs
    finish_reason: FinishReason | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    num_preemptions: int = 0  # times
    peak_slots: list[int] = field(default_factory=list)  # slots, one a layer: the most that one head of it owned
    final_slots: list[int] = field(
        default_factory=list
    )  # the same at its end: a budget holds from the end of the prompt on
    num_final_pages: int = 0  # pages at its end
    arrival_time: float = field(default_factory=perf_counter)  # seconds
    first_token_time: float = 0.0
    finish_time: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = [*self.prompt, *self.forced_tokens]
        self.num_logits_read = 1 - len(self.prompt) if self.needs_prompt_logits else 0
        self.policy = self.policy.resolve(len(self.prompt), self.num_system_tokens)
        self.generator = torch.Generator()
        self.generator.seed() if self.params.seed is None else self.generator.manual_seed(self.params.seed)

    @property
    def prefix_query(self) -> tuple[Policy, list[int], int, str]:
        """What it could begin with: as much as leaves a token to be computed, and logits that its reader wants."""
        limit = len(self.prompt) + self.num_logits_read if self.logits_callback else len(self.tokens)
        return self.policy, self.tokens, limit - 1, self.salt

    @property
    def prefix_entry(self) -> tuple[Policy, list[int], int, str]:
        """What it leaves to others."""
        return self.policy, self.tokens[: self.num_computed_tokens], len(self.prompt), self.salt

    def start_from_prefix(self, num_computed_tokens: int, branch_point: int) -> None:
        """So much of it is there already."""
        self.num_computed_tokens, self.branch_point = num_computed_tokens, branch_point
        if not self.num_preemptions:
            self.num_cached_tokens = num_computed_tokens

    def will_sample(self, num_tokens: int) -> bool:
        """Whether its next token can be drawn when n are computed."""
        return num_tokens >= self.num_uncomputed_tokens and not self.reread_chunk

    @property
    def max_drafts(self) -> int:
        """How many tokens may be drafted for it: 0 while it owes more than one, or where its answer is given."""
        if (
            self.reread_chunk
            or self.logits_callback
            or self.num_uncomputed_tokens != 1
            or self.num_computed_tokens < len(self.prompt)
            or self.finish_reason
        ):
            return 0
        return self.max_tokens - len(self.tokens) + len(self.prompt) - 1

    def set_drafts(self, tokens: list[int], draft_probs: Tensor | None = None) -> None:
        """What its next tokens may be; `guess` [K, V]: the distributions that they were drawn from."""
        self.drafts, self.draft_probs = tokens, draft_probs

    def trim_drafts(self, num_tokens: int) -> None:
        """There is room for n fresh tokens only, drafts among them."""
        self.set_drafts(self.drafts[: max(num_tokens - self.num_uncomputed_tokens, 0)], self.draft_probs)

    def with_prompt_sharers(self, num_tokens: int) -> list[Request]:
        """Itself; and its followers, if n more tokens are the rest of its prompt, for the first time."""
        ends = self.num_computed_tokens + num_tokens == len(self.prompt) and not self.reread_chunk
        return [self, *(f for f in self.prompt_sharers if ends and not f.num_computed_tokens)]

    def next_uniform(self) -> float:
        """The next number in [0, 1) of its own generator."""
        return self.peek_uniforms(1, consume=True)[0]

    def peek_uniforms(self, n: int, consume: bool = False) -> list[float]:
        """The next n of them, which will come again unless they are taken."""
        before = None if consume else self.generator.get_state()
        found: list[float] = [float(torch.rand(1, generator=self.generator, dtype=torch.float64)) for _ in range(n)]
        if before is not None:
            self.generator.set_state(before)
        return found

    def compute_query_weights(self, positions: NDArray[np.int32]) -> QueryWeights | None:
        """What its fresh tokens leave on slots, certain ones at these places in the text."""
        watch = self.policy.query_weights(positions, self.max_tokens) if isinstance(self.policy, BudgetPolicy) else None
        if watch or (self.score_decay is None and not self.attention_trace):
            return watch
        return QueryWeights(np.ones(len(positions), np.float32), decay=self.score_decay or 1.0)

    @property
    def noise_seed(self) -> int:
        """What a policy's noise is drawn from, 31 bits."""
        return self.generator.initial_seed() & 0x7FFFFFFF

    def can_share_prompt(self, other: Request) -> bool:
        """Whether the prompt of another, computed under its policy, is as good as one computed under its own."""
        mine, theirs = self.policy, other.policy
        if self.prompt != other.prompt or mine.window is not None or theirs.window is not None:
            return False
        if self.needs_prompt_logits or other.needs_prompt_logits:
            return False  # what one reads the others do not
        if any(isinstance(p, BudgetPolicy) and p.prefill == "stream" for p in (mine, theirs)):
            return False
        return not self.score_key or self.score_key == other.score_key

    def require_full_prefill(self) -> None:
        """Its prompt is to be copied: there must be a moment at which all of it is there."""
        if isinstance(self.policy, BudgetPolicy) and self.policy.prefill == "layers":
            self.policy = self.policy.with_options(prefill="exact")

    @property
    def score_key(self) -> tuple[object, ...]:
        """All that masses at the end of its prompt depend on, but for the prompt; empty: there are none."""
        if not isinstance(self.policy, BudgetPolicy):
            return ()
        return (*self.policy.score_key, self.noise_seed) if self.policy.uses_noise else self.policy.score_key

    @property
    def reread_chunk(self) -> int:
        """How many tokens of the prompt are read again at a time; 0 where none are, or no more."""
        policy, P = self.policy, len(self.prompt)
        if (
            not isinstance(policy, BudgetPolicy)
            or self.num_computed_tokens != P
            or self.num_reread_tokens == P
            or P <= policy.budget_tokens
        ):
            return 0
        return min(policy.rereads, self.max_model_len - P)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to be computed before the next one can be drawn."""
        return (
            len(self.prompt) - self.num_reread_tokens
            if self.reread_chunk
            else len(self.tokens) - self.num_computed_tokens
        )

    @property
    def next_position(self) -> int:
        """Of the next fresh token."""
        return self.num_computed_tokens + (self.num_reread_tokens % self.reread_chunk if self.reread_chunk else 0)

    def next_tokens(self, num_tokens: int) -> list[int]:
        """The next n tokens to compute."""
        if self.reread_chunk:
            return self.prompt[self.num_reread_tokens : self.num_reread_tokens + num_tokens]
        return (
            self.tokens[self.num_computed_tokens : self.num_computed_tokens + num_tokens]
            + self.drafts[: max(num_tokens - self.num_uncomputed_tokens, 0)]
        )

    def advance(self, num_tokens: int) -> None:
        """So many are computed."""
        if self.reread_chunk:
            self.num_reread_tokens += num_tokens
        else:
            self.num_computed_tokens += num_tokens

    def num_logits(self, num_tokens: int) -> int:
        """Of how many of its next n fresh tokens, the last ones, logits are wanted."""
        if self.reread_chunk:
            return 0
        if self.logits_callback:
            return min(
                num_tokens, max(self.num_computed_tokens + num_tokens - len(self.prompt) + 1 - self.num_logits_read, 0)
            )
        return 1 + len(self.drafts) if self.will_sample(num_tokens) else 0

    @property
    def output_tokens(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    def accept_drafts(self, num_sampled: int) -> int:
        """Its drafts gave so many tokens, the last of which is the target's own. How many drafts were wrong."""
        wrong = len(self.drafts) + 1 - num_sampled
        if self.drafts:
            self.spec_decode_stats.record_round(len(self.drafts), num_sampled - 1)
        self.set_drafts([])
        return wrong

    def append_tokens(self, tokens: Sequence[tuple[int, Logprob | None]]) -> None:
        """More tokens, up to the last one; decides which that is."""
        if not self.first_token_time:
            self.first_token_time = perf_counter()
        for token, logprob in tokens:
            self.tokens.append(token)
            if logprob:
                self.logprobs.append(logprob)
            if token in self.stop_ids or (self.token_callback is not None and self.token_callback(token)):
                self.finish_reason = FinishReason.STOP
            elif self.grammar and self.grammar.accept_token(token):
                self.finish_reason = FinishReason.FAILED if self.grammar.failed else FinishReason.STOP
            elif len(self.tokens) - len(self.prompt) >= self.max_tokens:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason:
                break
