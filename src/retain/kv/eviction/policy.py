"""The interface of an eviction policy, with the defaults of one that keeps every token.

A policy is one file in policies/, which defines `class Policy`: a frozen dataclass whose fields are its options. Most
are `BudgetPolicy`s (budget.py). The cache calls these methods on every policy and never asks which one it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from retain.kernels.slots.scoring import NO_NOISE
from retain.kv.eviction.gate_weights import Gate
from retain.kv.eviction.plan import MIN_LOOKED_SLOTS, RowModes, RowPlan, choose_looked_slots
from retain.kv.eviction.view import CacheView
from retain.types import Floats, Ints

# Returns the gate in a file of this name; "" is the model's own. Raises ValueError.
GateLoader = Callable[[str], Gate]


@dataclass(frozen=True)
class QueryWeights:
    """How much mass the fresh queries of one request add to its slots, as in `AttentionScoring`."""

    weights: Floats  # [n], one for each fresh token
    tau: Floats | None = None  # [n]; None is 1
    decay: float = 1.0
    noise: int = NO_NOISE
    noise_period: int = 1  # positions of queries that share a draw; 0: all do


@dataclass(frozen=True)
class ScoringPass:
    """Tokens that are computed behind the prompt only for the mass that they add to its slots.

    At most `chunk_size` of them are in the cache at a time; after each chunk its slots are holes again.
    """

    tokens: Sequence[int]
    chunk_size: int


class EvictionPolicy:
    """Keep every token. Higher `priority` stays."""

    has_budget = False  # whether slots are evicted by `priority`, rather than by position in closed form
    resume_key = ""  # what requests have in common that may go on from each other's evicted states; "": from none
    streamed_key = ""  # the same of states inside a prompt; "" where what is kept there depends on more than the text
    modes = RowModes()  # the other options of its spec: how a row carries it out

    @property
    def ring_window(self) -> int | None:
        """Newest tokens that a head keeps, where that has a closed form: slot = pos mod capacity."""
        return None

    @property
    def looks(self) -> bool:
        """Whether tokens of the answer attend to few of the slots that they see. These leave no mass."""
        return self.modes.look is not None

    @property
    def per_query_head(self) -> bool:
        """Whether the mass of every query head is needed, not only the sum over those of a kv head."""
        return False

    @property
    def compares_heads(self) -> bool:
        """Whether what a head keeps depends on other kv heads: ranks exchange what they know of theirs."""
        return False

    @property
    def score_key(self) -> tuple[object, ...]:
        """Everything that masses at the end of a prompt depend on, but for the prompt and the seed; () for none."""
        return ()

    @property
    def weights_fingerprint(self) -> bytes:
        """Identify the fitted numbers that priorities depend on; empty where there are none."""
        return b""

    @property
    def uses_noise(self) -> bool:
        """Whether masses depend on the request's seed."""
        return False

    @property
    def scoring_chunk(self) -> int:
        """Tokens of a scoring pass that are in the cache at a time; 0 without such passes."""
        return 0

    @property
    def scoring_room(self) -> int:
        """The number of tokens of scoring passes that must fit into the context behind the prompt."""
        return 0

    @property
    def max_skippable_tokens(self) -> int | None:
        """First tokens of the prompt that a prefix hit may supply, because no mass of their queries is needed.

        None: any number.
        """
        return None

    def resolve(self, prompt_len: int, system_len: int = 0) -> Self:
        """Return the policy for a prompt of `prompt_len` tokens, the first `system_len` of them a system prompt."""
        return self

    def fit(self, max_model_len: int, load_gate: GateLoader) -> Self:
        """Return the resolved policy as it is carried out in a cache of these limits. Raises ValueError."""
        return self

    @property
    def plan(self) -> RowPlan:
        """How a row carries out the policy; resolved."""
        return RowPlan()

    @property
    def instruction(self) -> str:
        """A user's message that scoring passes begin with, as token ids given to `with_instruction`; "" for none."""
        return ""

    def with_instruction(self, token_ids: Sequence[int], special_ids: Set[int] = frozenset()) -> Self:
        """Return the policy with the ids of its instruction, and those that separate the messages of a prompt."""
        return self

    def scoring_passes(self, prompt: Sequence[int], max_chunk: int) -> list[ScoringPass]:
        """Return the passes that follow the prompt, of at most `max_chunk` tokens at a time; resolved."""
        return []

    @property
    def query_blocks(self) -> Sequence[range]:
        """The positions of the prompt whose queries `score_queries` sees, block by block, ascending; resolved."""
        return ()

    def score_queries(self, view: CacheView) -> Tensor:
        """Return what the queries of a block add to the masses of slots, float32 [G, R, S], of one layer.

        The slots have all tokens up to the end of the block. Raises NotImplementedError where there are no blocks.
        """
        raise NotImplementedError

    def query_weights(self, pos: NDArray[np.int32], expected_tokens: int) -> QueryWeights | None:
        """Weigh the queries of fresh tokens at these positions; None if the policy needs no masses.

        `expected_tokens`: length of the answer.
        """
        return None

    def looked_slots(self, num_held: Ints) -> Ints:
        """Return how many of `num_held` [n] slots of a head a token attends to; 0 for all. Resolved."""
        look = self.modes.look
        return np.zeros_like(num_held) if look is None else choose_looked_slots(look, MIN_LOOKED_SLOTS, num_held)

    def priority(self, view: CacheView) -> Tensor:
        """Return a number for each slot, [M, G, S]; the lowest are evicted first. Those of holes mean nothing."""
        raise NotImplementedError
