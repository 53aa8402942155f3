"""draft: draft with another model of the same vocabulary, which has its own cache; or with a requantized target.

A requantized target needs no cache of its own: its keys and values equal the target's but for rounding (see self.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from retain.engine.batch_builder import pack_tokens
from retain.engine.cache_interface import RequestRow
from retain.engine.drafters import DrafterNeeds, TargetModel
from retain.engine.drafters.self import Drafter as SelfDrafter
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.engine.spec_decode.draft_loop import draft_autoregressive
from retain.kv.eviction.policy import EvictionPolicy
from retain.kv.manager import KVCacheManager
from retain.kv.row import Row

MAX_CATCH_UP_TOKENS = 16  # the first draft is computed together with at most these missed tokens; less than a page


@dataclass
class DraftState:
    """The row of a request in the draft model's cache, and the tokens that are computed there."""

    row: Row
    tokens: list[int] = field(default_factory=list)


@dataclass
class Drafter:
    """`model`: a name as for --model, or none for the target; `weights`: bf16, int8, int4, or auto as in its file."""

    needs: ClassVar[DrafterNeeds] = DrafterNeeds()
    max_draft_tokens: ClassVar[int] = 8
    k: str = "auto"
    model: str | None = None
    weights: str = "auto"
    _self_drafter: SelfDrafter | None = field(default=None, init=False)
    _runner: Runner | None = field(default=None, init=False)
    _cache: KVCacheManager | None = field(default=None, init=False)
    _states: dict[Request, DraftState] = field(default_factory=dict, init=False)

    def attach(self, target: TargetModel) -> None:
        """Load the draft model. Raises ValueError if neither `model` nor `weights` is given."""
        if self.model is None and self.weights == "auto":
            raise ValueError("draft: say which model= drafts, or which weights= (bf16, int8, int4) of the target")
        if self.model is None:
            self._self_drafter = SelfDrafter(k=self.k, budget=target.cache.max_model_len, weights=self.weights)
            self._self_drafter.attach_for(f"draft: weights={self.weights}", target)
        else:
            self._runner, self._cache = target.load_draft_model(self.model, self.weights)

    def remove_request(self, request: Request) -> None:
        """Free the request's row in the draft model's cache."""
        if self._self_drafter:
            self._self_drafter.remove_request(request)
        if state := self._states.pop(request, None):
            state.row.close()

    def propose(self, draft_limits: Sequence[tuple[Request, int]], rows: Mapping[Request, RequestRow]) -> None:
        """Set the drafts of requests that fit into the draft model's cache, and whose text is nearly computed there."""
        if self._self_drafter:
            return self._self_drafter.propose(draft_limits, rows)
        ready = [(r, n) for r, n in draft_limits if self._catch_up(r, n)]

        def forward(active: Sequence[int], latest: Sequence[int], step: int) -> Tensor:
            requests = [ready[j][0] for j in active]
            states = [self._states[r] for r in requests]
            if step:
                return self._forward(states, [[t] for t in latest])
            return self._forward(states, [r.tokens[len(s.tokens) :] for r, s in zip(requests, states, strict=True)])

        draft_autoregressive(ready, forward)

    def _catch_up(self, request: Request, num_drafts: int) -> bool:
        """Compute the text that the draft model missed, but for its end. Returns whether it can draft in this round.

        Slots of rejected drafts are written over.
        """
        assert self._cache
        cache = self._cache
        tokens = request.tokens
        if len(tokens) + num_drafts > cache.max_model_len:
            return False
        if request not in self._states:
            if not cache.free_rows:
                return False
            self._states[request] = DraftState(cache.open(EvictionPolicy(), len(tokens)))
        state = self._states[request]
        num_equal = min(len(state.tokens), len(tokens) - 1)
        while state.tokens[:num_equal] != tokens[:num_equal]:  # only rejected drafts at the end differ
            num_equal -= 1
        del state.tokens[num_equal:]
        if not state.row.reserve(len(tokens) + num_drafts):
            return False
        is_near = len(tokens) - len(state.tokens) <= MAX_CATCH_UP_TOKENS
        while (missing := len(tokens) - 1 - len(state.tokens)) > 0 and not is_near:
            begin = len(state.tokens)
            n = min(missing, state.row.next_stop(begin) - begin)
            self._forward([state], [tokens[begin : begin + n]])
            state.row.advance(len(state.tokens), missing - n)
            cache.evict()
        return is_near

    def _forward(self, states: Sequence[DraftState], fresh: Sequence[Sequence[int]]) -> Tensor:
        """Compute fresh tokens of rows. Returns the logits after the last token of each row, [n, V]."""
        assert self._cache and self._runner
        batch = pack_tokens(
            self._cache,
            rows=[s.row.index for s in states],
            first_positions=[len(s.tokens) for s in states],
            fresh=fresh,
            num_logits=[1] * len(states),
        )
        for state, tokens in zip(states, fresh, strict=True):
            state.tokens += tokens
        return self._runner.forward(batch)
