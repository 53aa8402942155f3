"""The inspector: what live and finished requests keep, token by token; the pool as a map; tiers; tokens a second.

It watches some requests from their beginning on, and remembers those that ended last. Whoever has a key sees that key's
requests only; the map tells nothing of texts. What is not known here: HTTP, how it looks (page/).
"""

from __future__ import annotations

from base64 import b64encode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from retain.engine.request import Request
from retain.kv import policies
from retain.kv.census import PAGE_STATES, collect_pool_stats, classify_pages
from retain.kv.witness import AttentionTrace
from retain.llm import LLM

LIVE, ENDED = 16, 16  # requests that are watched at once, and that are remembered
CELLS = 1024  # of the map


@dataclass(eq=False)
class Watched:
    """A request, and who asked."""

    request: Request
    owner: str
    witness: AttentionTrace
    began: float = field(default_factory=time)
    pieces: list[str] = field(default_factory=list)  # its tokens as text, as far as they were asked for


class Inspector:
    """Of one engine. All of it is for the engine's thread."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.live: dict[int, Watched] = {}
        self.ended_: deque[Watched] = deque(maxlen=ENDED)
        self.tokens = 0  # of answers, since the start
        self._counted: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    # ---- as it happens: see worker.Observer ------------------------------------------------------------------------

    def began(self, request: Request, owner: str) -> None:
        """Watch it, if not too many are watched."""
        if len(self.live) < LIVE:
            spec = self.llm.spec
            request.attention_trace = AttentionTrace(spec.num_layers, spec.num_kv_heads)
            self.live[request.id] = Watched(request, owner, request.attention_trace)

    def stepped(self, took: float, ready: Sequence[Request]) -> None:
        """So many more tokens."""
        for request in ready:
            answered = len(request.tokens) - len(request.prompt)
            self.tokens += answered - self._counted.get(request, 0)
            self._counted[request] = answered

    def ended(self, request: Request) -> None:
        """It is remembered."""
        if (watched := self.live.pop(request.id, None)) and request.num_computed_tokens:
            self.ended_.append(watched)

    # ---- when somebody looks ---------------------------------------------------------------------------------------

    def state(self, owner: str) -> dict[str, Any]:
        """Everything but texts and scores."""
        cache, scheduler = self.llm.cache, self.llm.engine.scheduler
        found, (state, holder) = collect_pool_stats(cache), classify_pages(cache)
        mine = self._mine(owner)
        rows = {w.request.row: w.request.id for w in mine if w.request.row is not None}
        return {
            "time": time(),
            "tokens": self.tokens,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "requests": [self._line(w) for w in mine],
            "states": PAGE_STATES,
            "pages": found.pages_by_state,
            "page_bytes": found.page_bytes,
            "slots": found.slots_by_state,
            "holes": found.num_holes,
            "map": _map(state[1:], holder[1:], rows),
            "tiers": found.tier_stats,
            "prefixes": found.prefix_hit_tokens,
            "layers": self.llm.spec.num_layers,
            "heads": self.llm.spec.num_kv_heads,
            "windows": [None if w > 2**30 else int(w) for w in cache.windows(self.llm.policy)],
        }

    def look(self, number: int, owner: str, layer: int | None) -> dict[str, Any] | None:
        """One request, its tokens as text, the mass that each received and the share of heads that hold it."""
        watched = self._find(number, owner)
        if not watched:
            return None
        request, witness = watched.request, watched.witness
        if request.row is not None and request.num_computed_tokens:
            witness.record(self.llm.cache, request.row, request.num_computed_tokens)
        tokenizer = self.llm.tokenizer
        for token in request.tokens[len(watched.pieces) :]:
            watched.pieces.append(tokenizer.token_bytes(token).decode(errors="replace"))
        mass, held = witness.scores(layer)
        return {
            **self._line(watched),
            "tokens": watched.pieces,
            "mass": [round(float(x), 5) for x in mass],
            "held": [round(float(x), 4) for x in held],
        }

    def token(self, number: int, owner: str, place: int) -> dict[str, Any] | None:
        """One token of it: the mass in every layer and head, and where it is held, [L][G]."""
        watched = self._find(number, owner)
        if not watched or not 0 <= place < watched.witness.mass.shape[-1]:
            return None
        mass, held = watched.witness.mass[..., place], watched.witness.is_kept[..., place]
        return {"mass": np.round(mass.astype(float), 5).tolist(), "held": held.tolist()}

    def _mine(self, owner: str) -> list[Watched]:
        """The newest first, live ones before those that ended."""
        everyone = [*reversed(self.live.values()), *reversed(self.ended_)]
        return [w for w in everyone if w.owner == owner]

    def _find(self, number: int, owner: str) -> Watched | None:
        return next((w for w in self._mine(owner) if w.request.id == number), None)

    def _line(self, watched: Watched) -> dict[str, Any]:
        request = watched.request
        return {
            "id": request.id,
            "began": watched.began,
            "policy": policies.to_spec(request.policy),
            "prompt": len(request.prompt),
            "length": len(request.tokens),
            "computed": request.num_computed_tokens,
            "cached": request.num_cached_tokens,
            "preempted": request.num_preemptions,
            "state": request.finish_reason.value if request.finish_reason else "running" if request.row is not None else "waiting",
            "pages": request.num_final_pages if request.finish_reason or request.row is None else self.llm.cache.num_pages(request.row),
            "system": request.num_system_tokens,
        }


def _map(state: np.ndarray[Any, Any], holder: np.ndarray[Any, Any], rows: dict[int, int]) -> dict[str, Any]:
    """Pages [P] in at most CELLS cells: of each the share of pages in every state, 0..255, and who holds most of it."""
    n = min(CELLS, len(state))
    cell = np.arange(len(state)) * n // len(state)
    counts = np.zeros((n, len(PAGE_STATES)), np.int64)
    np.add.at(counts, (cell, state), 1)
    shares = (255 * counts / counts.sum(1, keepdims=True)).round().astype(np.uint8)
    first = np.full(n, -1, np.int64)
    held = holder >= 0
    first[cell[held]] = holder[held]
    owners = [rows.get(int(row), -1) if row >= 0 else -1 for row in first]
    return {"cells": n, "shares": b64encode(shares.tobytes()).decode(), "owners": owners}
