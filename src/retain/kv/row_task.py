"""What a row is told of its request when it starts: the text, and what falls due in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retain.kv.checkpoints import Demand
from retain.kv.eviction.policy import EvictionPolicy, ScoringPass
from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.text import Text


@dataclass(eq=False)
class ScoringProgress:
    """How far a scoring pass is computed. Its tokens follow the prompt, a chunk at a time."""

    scoring: ScoringPass
    num_done: int = 0

    @property
    def num_left(self) -> int:
        """The number of tokens that the scoring pass has still to compute."""
        return len(self.scoring.tokens) - self.num_done

    @property
    def chunk_offset(self) -> int:
        """Tokens of the present chunk that are computed."""
        return self.num_done % self.scoring.chunk_size

    @property
    def chunk_left(self) -> int:
        """Tokens of the present chunk to be computed."""
        return self.scoring.chunk_size - self.chunk_offset


@dataclass(frozen=True)
class RowTask:
    """The text that a row computes for a request, and what is wanted of it.

    `begun_at`: the cached tokens that an earlier row of the request began with; None where there was none. `explain`:
    find out why there are no more of them now. Later turns of a conversation begin with the first `turn_end` tokens (0:
    unknown), and part from this one where its generation prompt begins.
    """

    text: Text
    prompt_len: int
    max_cached_tokens: int  # first tokens that the row may begin with
    seed: int = 0  # of a policy's noise
    scoring_passes: Sequence[ScoringProgress] = ()  # the request counts them
    stops_at_prompt_end: bool = False  # others fork the row there
    begun_at: int | None = None
    explain: bool = False
    trace: AttentionTrace | None = None
    turn_end: int = 0

    def demand(self, policy: EvictionPolicy) -> Demand:
        """Return what a row under this policy asks the prefix cache for."""
        return Demand(policy, self.seed, min(self.max_cached_tokens, policy.plan.refit_positions.start))

    def find_scoring(self, num_computed_tokens: int) -> ScoringProgress | None:
        """Return the scoring pass that is due: the prompt is computed, and the answer waits for it."""
        if num_computed_tokens != self.prompt_len:
            return None
        return next((p for p in self.scoring_passes if p.num_left), None)
