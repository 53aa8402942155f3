"""Another model with the same vocabulary and a cache of its own; or the same model with smaller weights.

The same model needs no cache: its keys and values are, but for rounding, those that are there (see self.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from retain.engine.ahead import guess
from retain.engine.batch import flat
from retain.engine.drafters import Target
from retain.engine.drafters.self import Drafter as Same
from retain.engine.request import Request
from retain.engine.runner import Runner
from retain.kv import policies
from retain.kv.cache import Cache

FEW = 16  # tokens, no more than a page, that are computed with the first draft; more have to be read first


@dataclass
class Seen:
    """What the draft has computed of a request."""

    row: int
    tokens: list[int] = field(default_factory=list)


@dataclass
class Drafter:
    """`model`: a name, as for --model (none: the target's); `weights`: bf16, int8, int4, or as the file has them."""

    k: str = "auto"
    model: str | None = None
    weights: str = "auto"
    _self: Same | None = field(default=None, init=False)
    _runner: Runner | None = field(default=None, init=False)
    _cache: Cache | None = field(default=None, init=False)
    _seen: dict[Request, Seen] = field(default_factory=dict, init=False)

    @property
    def most(self) -> int:
        """See Drafter."""
        return 8

    def join(self, target: Target) -> None:
        """See Drafter."""
        if self.model is None and self.weights == "auto":
            raise ValueError("draft: which model=, or which weights= of the same one?")
        if self.model is None:
            self._self = Same(k=self.k, budget=target.cache.context, weights=self.weights)
            self._self.join(target)
        else:
            self._runner, self._cache = target.another(self.model, self.weights)

    def drop(self, request: Request) -> None:
        """See Drafter."""
        if self._self:
            self._self.drop(request)
        if (seen := self._seen.pop(request, None)) and self._cache:
            self._cache.close(seen.row)

    def propose(self, asked: Sequence[tuple[Request, int]]) -> None:
        """See Drafter. Whom there is no room for gets no drafts, nor who has a long text to be read first."""
        if self._self:
            return self._self.propose(asked)
        able = [(r, n) for r, n in asked if self._ready(r, n)]

        def forward(who: Sequence[int], tokens: Sequence[int], i: int) -> Tensor:
            whose = [self._seen[able[j][0]] for j in who]
            if i:
                return self._forward(whose, [[t] for t in tokens])
            return self._forward(whose, [able[j][0].tokens[len(s.tokens) :] for j, s in zip(who, whose, strict=True)])

        guess(able, forward)

    def _ready(self, request: Request, n: int) -> bool:
        """Whether its last few tokens are all that is left to be computed; what was guessed wrong is written over."""
        assert self._cache
        cache, tokens = self._cache, request.tokens
        if len(tokens) + n > cache.context:
            return False
        if request not in self._seen:
            if not cache.free_rows:
                return False
            self._seen[request] = Seen(cache.open(policies.parse("full"), len(tokens)))
        seen = self._seen[request]
        same = min(len(seen.tokens), len(tokens) - 1)
        while seen.tokens[:same] != tokens[:same]:  # a few at the end at most
            same -= 1
        del seen.tokens[same:]
        if not cache.grow(seen.row, len(tokens) + n):
            return False
        few = len(tokens) - len(seen.tokens) <= FEW
        while (owed := len(tokens) - 1 - len(seen.tokens)) > 0 and not few:
            begin, most = len(seen.tokens), cache.page_size if cache.settled[seen.row] else cache.step_tokens
            self._forward([seen], [tokens[begin : begin + min(owed, most)]])  # a ring that is settled spares a page
            cache.settle(seen.row, len(seen.tokens), owed - min(owed, most))
        return few

    def _forward(self, whose: Sequence[Seen], fresh: Sequence[Sequence[int]]) -> Tensor:
        """Logits behind the last of these tokens, [n, V]."""
        assert self._cache and self._runner
        batch = flat(self._cache, [s.row for s in whose], [len(s.tokens) for s in whose], fresh, [1] * len(whose))
        for s, f in zip(whose, fresh, strict=True):
            s.tokens += f
        return self._runner.forward(batch)
