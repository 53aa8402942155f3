"""Requests: what a caller asked for, how far it is computed, and statistics about it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from time import perf_counter
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retain.engine.grammar import Grammar
from retain.engine.penalties import LogitPenalties
from retain.engine.request_stats import RequestStats
from retain.kv.eviction.policy import EvictionPolicy, QueryWeights
from retain.kv.row_task import RowTask, ScoringProgress
from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.text import Text
from retain.sampling_params import SamplingParams


class FinishReason(Enum):
    """The reasons for which a request ends."""

    STOP = "stop"  # a stop token, a stop string, the end of a grammar
    LENGTH = "length"
    CANCELLED = "cancelled"
    FAILED = "failed"  # its grammar allows no further token
    OUT_OF_MEMORY = "out_of_memory"  # alone in the pool it got fewer pages than were planned


@dataclass(frozen=True)
class Logprob:
    """Log-probabilities (nats, before temperature and penalties) of a sampled token and of the likeliest ones."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


SampledTokens = list[tuple[int, Logprob | None]]


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter of the engine's program: its number there, and a digest of its content, which keys cached texts.

    The number stays its own as long as a request refers to this object. With `invocation_tokens` it is activated where
    a prompt has them last: tokens before are computed without it, and shared with other texts.
    """

    number: int
    digest: bytes
    invocation_tokens: tuple[int, ...] = ()

    def find_activation(self, prompt: Sequence[int]) -> int:
        """Return the position of the first token that is computed with the adapter. Raises ValueError for none."""
        n = len(self.invocation_tokens)
        for begin in range(len(prompt) - n, -1, -1) if n else ():
            if tuple(prompt[begin : begin + n]) == self.invocation_tokens:
                return begin
        if n:
            tokens = ", ".join(map(str, self.invocation_tokens[:16]))
            raise ValueError(
                f"the prompt lacks the tokens that activate the adapter (alora_invocation_tokens): {tokens}"
            )
        return 0


@dataclass(frozen=True)
class RequestInput:
    """What the caller asked for. The answer begins with `forced_tokens`, whatever the model predicts.

    `policy` is as the cache carries it out for this prompt, see `KVCacheManager.plan_policy`.
    """

    prompt: list[int]
    params: SamplingParams
    policy: EvictionPolicy
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    forced_tokens: list[int] = field(default_factory=list)
    num_system_tokens: int = 0  # first tokens of the prompt that are a system prompt
    turn_end: int = 0  # tokens that later turns begin with: the generation prompt is behind them. 0: unknown
    salt: str = ""  # prefixes are shared only with requests of the same salt
    owner: str = ""  # who asks: requests of different owners take turns
    adapter: Adapter | None = None
    drafter_name: str = ""  # one of the engine's named drafters, or "" for its default
    needs_logits: bool = False  # steps return the logits before every token of the answer
    needs_prompt_logits: bool = False  # those before every token of the prompt but the first, too
    explain_prefix: bool = False  # find out why the prompt begins with no more cached tokens
    pools: bool = False  # only what the prompt computes is read: the token that ends the request is no answer


class Request:
    """A request in the engine: its prompt, the tokens of its answer, and how far they are computed.

    `text` is prompt and answer; the first `num_computed_tokens` of its tokens have their K and V in slots. `drafts` are
    guesses of the next tokens, which the next step verifies; `draft_probs` [K, V] the distributions that they were
    sampled from, or None if they were certain. `hidden_state` [E] is that of the last computed token, where a drafter
    reads it. `id`s ascend with the order of creation.
    """

    _ids: ClassVar = itertools.count()

    def __init__(self, input: RequestInput, grammar: Grammar | None = None, max_model_len: int = 2**30):
        self.input = input
        self.grammar = grammar
        self.max_model_len = max_model_len
        self.id = next(self._ids)
        self.policy = input.policy
        extra = input.adapter.digest if input.adapter else b""
        extra_from = input.adapter.find_activation(input.prompt) if input.adapter else 0
        self.text = Text([*input.prompt, *input.forced_tokens], input.salt, extra, extra_from)
        self.num_computed_tokens = 0
        self.num_pending_tokens = 0  # behind `tokens`, of launched steps: their values are not known yet
        self.needs_token_values = False  # set by the engine: nothing is computed behind a pending token
        self.scoring_passes: list[ScoringProgress] = []
        self.drafts: list[int] = []
        self.draft_probs: Tensor | None = None
        self.hidden_state: Tensor | None = None
        self.score_decay: float | None = None  # of masses that a drafter needs, where the policy needs none
        self.num_logits_read = self._first_logits_read()  # below 0: of the prompt
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[Logprob] = []
        self.penalties: LogitPenalties | None = None  # set by the sampler, where the params have some
        self.stats = RequestStats()
        self.attention_trace: AttentionTrace | None = None  # set by the inspector
        self.explains_prefix = input.explain_prefix  # set for logs and the inspector, too
        self.generator = torch.Generator()
        self.generator.seed() if self.params.seed is None else self.generator.manual_seed(self.params.seed)

    @property
    def tokens(self) -> list[int]:
        """Token ids of prompt and answer."""
        return self.text.ids

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return self.input.prompt

    @property
    def params(self) -> SamplingParams:
        """How the request's tokens are sampled, and when it stops."""
        return self.input.params

    @property
    def output_tokens(self) -> list[int]:
        """The tokens generated so far, which follow the prompt."""
        return self.tokens[len(self.prompt) :]

    @property
    def num_output_tokens(self) -> int:
        """How many tokens are generated."""
        return len(self.tokens) - len(self.prompt)

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of the answer that were sampled, pending ones included."""
        return self.num_output_tokens + self.num_pending_tokens - len(self.input.forced_tokens)

    # ---- progress ------------------------------------------------------------------------------------------------

    def plan_scoring(self) -> None:
        """Ask the policy for its scoring passes; the policy must be the one that the cache carries out."""
        room = self.max_model_len - len(self.prompt)
        self.scoring_passes = [ScoringProgress(p) for p in self.policy.scoring_passes(self.prompt, room)]

    def reset(self) -> None:
        """Forget all progress: the request waits, and everything is computed again."""
        self.num_computed_tokens = 0
        self.hidden_state = None
        for scoring in self.scoring_passes:
            scoring.num_done = 0
        self.set_drafts([])

    def restart(self) -> None:
        """Forget all of a step that gave the request no token: its random numbers and logits come again."""
        self.reset()
        self.num_logits_read = self._first_logits_read()
        self.generator.manual_seed(self.generator.initial_seed())

    def _first_logits_read(self) -> int:
        return 1 - len(self.prompt) if self.input.needs_prompt_logits else 0

    def skip_scoring(self) -> None:
        """Count the scoring passes as done."""
        for scoring in self.scoring_passes:
            scoring.num_done = len(scoring.scoring.tokens)

    @property
    def scoring(self) -> ScoringProgress | None:
        """The scoring pass that is due: the prompt is computed, and the answer waits for it."""
        if not self.scoring_passes or self.num_computed_tokens != len(self.prompt):
            return None
        return next((p for p in self.scoring_passes if p.num_left), None)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to be computed before the next step towards the answer can be taken."""
        if s := self.scoring:
            return s.num_left
        return len(self.tokens) + self.num_pending_tokens - self.num_computed_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer, pending ones included."""
        return len(self.tokens) + self.num_pending_tokens

    @property
    def awaits_tokens(self) -> bool:
        """Whether nothing can be computed before pending tokens are known; the last one is never computed."""
        if not self.num_pending_tokens:
            return False
        num_tokens = self.num_output_tokens + self.num_pending_tokens
        return self.needs_token_values or num_tokens >= self.input.max_tokens

    @property
    def next_position(self) -> int:
        """Position of the next fresh token."""
        return self.num_computed_tokens + (s.chunk_offset if (s := self.scoring) else 0)

    def next_tokens(self, num_tokens: int) -> Sequence[int]:
        """Return the next tokens to compute, drafts at their end; 0 for pending ones."""
        if s := self.scoring:
            return s.scoring.tokens[s.num_done : s.num_done + num_tokens]
        uncomputed = self.tokens[self.num_computed_tokens : self.num_computed_tokens + num_tokens]
        following = self.drafts or [0] * self.num_pending_tokens  # never both
        return uncomputed + following[: num_tokens - len(uncomputed)]

    def advance(self, num_tokens: int) -> None:
        """Count the tokens that a step has computed: of the scoring pass if one is due, else of the text."""
        if s := self.scoring:
            s.num_done += num_tokens
        else:
            self.num_computed_tokens += num_tokens

    def start_from_prefix(self, num_computed_tokens: int) -> None:
        """Begin with tokens that the prefix cache has."""
        self.num_computed_tokens = num_computed_tokens
        if not self.stats.num_preemptions:
            self.stats.num_cached_tokens = num_computed_tokens

    @property
    def reads_first_logits(self) -> bool:
        """Whether the logits behind the prompt are read: to sample the first token, or by who asked for logits."""
        return not self.input.forced_tokens or self.input.needs_logits

    def will_sample(self, num_tokens: int) -> bool:
        """Return whether the next token can be sampled when `num_tokens` more are computed."""
        return num_tokens >= self.num_uncomputed_tokens and not self.scoring

    def num_logits(self, num_tokens: int) -> int:
        """Return how many of the next fresh tokens, the last ones, need logits."""
        if self.scoring:
            return 0
        if self.input.needs_logits or self.input.needs_prompt_logits:
            first = len(self.prompt) - 1 + self.num_logits_read
            return min(num_tokens, max(self.num_computed_tokens + num_tokens - first, 0))
        return 1 + len(self.drafts) if self.will_sample(num_tokens) else 0

    def row_task(self, stops_at_prompt_end: bool = False) -> RowTask:
        """Return what a row is to compute.

        It begins with as much as leaves one token to compute, and the logits that are needed; where tokens of the
        answer look at few slots, with none of these: others computed them in another way. `stops_at_prompt_end`:
        others fork it there.
        """
        reads = self.input.needs_logits or self.input.needs_prompt_logits
        limit = len(self.prompt) + self.num_logits_read if reads else len(self.tokens)
        if self.policy.looks:
            limit = min(limit, self.first_look + 1)
        return RowTask(
            self.text,
            len(self.prompt),
            max_cached_tokens=limit - 1,
            seed=self.noise_seed,
            scoring_passes=self.scoring_passes,
            stops_at_prompt_end=stops_at_prompt_end,
            begun_at=self.stats.num_cached_tokens if self.stats.num_preemptions else None,
            explain=self.explains_prefix and self.stats.prefix_diagnosis is None,
            trace=self.attention_trace,
            turn_end=self.input.turn_end,
        )

    @property
    def first_look(self) -> int:
        """The position of the first token that looks, if the policy does: of the answer, and under its budget."""
        return max(len(self.prompt), self.policy.plan.begins_at)

    # ---- drafts --------------------------------------------------------------------------------------------------

    @property
    def max_drafts(self) -> int:
        """Tokens that may be drafted: none with more than one uncomputed token, or where the answer is forced."""
        reads = self.input.needs_logits or self.input.needs_prompt_logits
        if self.scoring or reads or self.finish_reason or self.num_computed_tokens < len(self.prompt):
            return 0
        if self.num_uncomputed_tokens != 1 or self.num_pending_tokens:
            return 0
        return self.input.max_tokens - self.num_output_tokens - 1

    def set_drafts(self, tokens: list[int], draft_probs: Tensor | None = None) -> None:
        """Propose the next tokens; `draft_probs` [K, V] are the distributions that they were sampled from."""
        self.drafts = tokens
        self.draft_probs = draft_probs

    def trim_drafts(self, num_tokens: int) -> None:
        """Keep the drafts that fit into a step of `num_tokens` fresh tokens."""
        self.set_drafts(self.drafts[: max(num_tokens - self.num_uncomputed_tokens, 0)], self.draft_probs)

    def accept_drafts(self, num_sampled: int) -> int:
        """Record that the drafts gave `num_sampled` tokens, the last of them the target's own.

        Returns the number of rejected drafts.
        """
        num_rejected = len(self.drafts) + 1 - num_sampled
        if self.drafts:
            self.stats.spec_decode.record_round(len(self.drafts), num_sampled - 1)
        self.set_drafts([])
        return num_rejected

    # ---- sampling and the answer -------------------------------------------------------------------------------------

    def next_uniform(self) -> float:
        """Draw the next number in [0, 1) from the request's own generator."""
        return self.peek_uniforms(1, consume=True)[0]

    def peek_uniforms(self, n: int, consume: bool = False) -> list[float]:
        """Return the next n numbers; they come again unless they are consumed."""
        before = None if consume else self.generator.get_state()
        found: list[float] = [float(torch.rand(1, generator=self.generator, dtype=torch.float64)) for _ in range(n)]
        if before is not None:
            self.generator.set_state(before)
        return found

    @property
    def noise_seed(self) -> int:
        """Seed of a policy's noise, 31 bits."""
        return self.generator.initial_seed() & 0x7FFFFFFF

    def query_weights(self, positions: NDArray[np.int32]) -> QueryWeights | None:
        """Weigh the queries of fresh tokens at these positions: for the policy, a drafter or a trace.

        None where some of them look at few slots: such a step changes no masses.
        """
        if self.policy.looks and not self.scoring and len(positions) and positions[-1] >= self.first_look:
            return None
        weights = self.policy.query_weights(positions, self.input.max_tokens)
        if weights or (self.score_decay is None and not self.attention_trace):
            return weights
        return QueryWeights(np.ones(len(positions), np.float32), decay=self.score_decay or 1.0)

    def append_token(self, token: int, logprob: Logprob | None) -> None:
        """Add a sampled token to the answer."""
        if not self.stats.first_token_time:
            self.stats.first_token_time = perf_counter()
        self.text.ids.append(token)
        if logprob:
            self.logprobs.append(logprob)

    def drop_tokens(self, num_tokens: int) -> None:
        """Remove the last sampled tokens: the answer ended before them."""
        self.text.drop(num_tokens)
        del self.logprobs[max(len(self.logprobs) - num_tokens, 0) :]

    def check_stop(self) -> FinishReason | None:
        """Return why the request ends with its last token: it is a stop token, or the answer is long enough."""
        if self.input.pools or self.tokens[-1] in self.input.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_output_tokens >= self.input.max_tokens else None
