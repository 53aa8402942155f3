"""Another model with the same vocabulary and a cache of its own; or the same model with smaller weights.

The same model needs no cache: its keys and values are, but for rounding, those that are there (see self.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from retain.engine.batch import pack_tokens
from retain.engine.drafters import TargetModel
from retain.engine.drafters.self import Drafter as Same
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.engine.spec_decode.draft_loop import draft_autoregressive
from retain.kv.eviction import policies
from retain.kv.manager import KVCacheManager

MAX_CATCH_UP_TOKENS = (
    16  # tokens, no more than a page, that are computed with the first draft; more have to be read first
)


@dataclass
class DraftState:
    """What the draft has computed of a request."""

    row: int
    tokens: list[int] = field(default_factory=list)


@dataclass
class Drafter:
    """`model`: a name, as for --model (none: the target's); `weights`: bf16, int8, int4, or as the file has them."""

    k: str = "auto"
    model: str | None = None
    weights: str = "auto"
    _self_drafter: Same | None = field(default=None, init=False)
    _runner: Runner | None = field(default=None, init=False)
    _cache: KVCacheManager | None = field(default=None, init=False)
    _states: dict[Request, DraftState] = field(default_factory=dict, init=False)

    @property
    def max_draft_tokens(self) -> int:
        """See Drafter."""
        return 8

    def attach(self, target: TargetModel) -> None:
        """See Drafter."""
        if self.model is None and self.weights == "auto":
            raise ValueError("draft: which model=, or which weights= of the same one?")
        if self.model is None:
            self._self_drafter = Same(k=self.k, budget=target.cache.max_model_len, weights=self.weights)
            self._self_drafter.attach(target)
        else:
            self._runner, self._cache = target.load_draft_model(self.model, self.weights)

    def remove_request(self, request: Request) -> None:
        """See Drafter."""
        if self._self_drafter:
            self._self_drafter.remove_request(request)
        if (seen := self._states.pop(request, None)) and self._cache:
            self._cache.close_row(seen.row)

    def propose(self, draft_limits: Sequence[tuple[Request, int]]) -> None:
        """See Drafter. Whom there is no room for gets no drafts, nor who has a long text to be read first."""
        if self._self_drafter:
            return self._self_drafter.propose(draft_limits)
        able = [(r, n) for r, n in draft_limits if self._catch_up(r, n)]

        def forward(who: Sequence[int], tokens: Sequence[int], i: int) -> Tensor:
            whose = [self._states[able[j][0]] for j in who]
            if i:
                return self._forward(whose, [[t] for t in tokens])
            return self._forward(whose, [able[j][0].tokens[len(s.tokens) :] for j, s in zip(who, whose, strict=True)])

        draft_autoregressive(able, forward)

    def _catch_up(self, request: Request, num_drafts: int) -> bool:
        """Whether its last few tokens are all that is left to be computed; what was guessed wrong is written over."""
        assert self._cache
        cache, tokens = self._cache, request.tokens
        if len(tokens) + num_drafts > cache.max_model_len:
            return False
        if request not in self._states:
            if not cache.free_rows:
                return False
            self._states[request] = DraftState(cache.open_row(policies.parse("full"), len(tokens)))
        seen = self._states[request]
        same = min(len(seen.tokens), len(tokens) - 1)
        while seen.tokens[:same] != tokens[:same]:  # a few at the end at most
            same -= 1
        del seen.tokens[same:]
        if not cache.reserve(seen.row, len(tokens) + num_drafts):
            return False
        few = len(tokens) - len(seen.tokens) <= MAX_CATCH_UP_TOKENS
        while (owed := len(tokens) - 1 - len(seen.tokens)) > 0 and not few:
            begin, most = (
                len(seen.tokens),
                cache.page_size if cache.tables.rings_shrunk[seen.row] else cache.config.max_batched_tokens,
            )
            self._forward([seen], [tokens[begin : begin + min(owed, most)]])  # a ring that is settled spares a page
            cache.commit(seen.row, len(seen.tokens), owed - min(owed, most))
        return few

    def _forward(self, states: Sequence[DraftState], fresh: Sequence[Sequence[int]]) -> Tensor:
        """Logits behind the last of these tokens, [n, V]."""
        assert self._cache and self._runner
        batch = pack_tokens(
            self._cache, [s.row for s in states], [len(s.tokens) for s in states], fresh, [1] * len(states)
        )
        for s, f in zip(states, fresh, strict=True):
            s.tokens += f
        return self._runner.forward(batch)
