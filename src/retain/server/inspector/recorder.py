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
from retain.kv.eviction import policies
from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.stats.pool import PAGE_STATES, classify_pages, collect_pool_stats
from retain.llm import LLM

MAX_LIVE, MAX_FINISHED = 16, 16  # requests that are watched at once, and that are remembered
MAP_CELLS = 1024  # of the map


@dataclass(eq=False)
class TrackedRequest:
    """A request, and who asked."""

    request: Request
    key_name: str
    attention_trace: AttentionTrace
    started_at: float = field(default_factory=time)
    token_texts: list[str] = field(default_factory=list)  # its tokens as text, as far as they were asked for


class Inspector:
    """Of one engine. All of it is for the engine's thread."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.live: dict[int, TrackedRequest] = {}
        self.finished: deque[TrackedRequest] = deque(maxlen=MAX_FINISHED)
        self.num_generated_tokens = 0  # of answers, since the start
        self._num_counted: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    # ---- as it happens: see worker.Observer ------------------------------------------------------------------------

    def on_request(self, request: Request, key_name: str) -> None:
        """Watch it, if not too many are watched."""
        if len(self.live) < MAX_LIVE:
            spec = self.llm.spec
            request.attention_trace = AttentionTrace(spec.num_layers, spec.num_kv_heads)
            self.live[request.id] = TrackedRequest(request, key_name, request.attention_trace)

    def on_step(self, step_s: float, sampled_requests: Sequence[Request]) -> None:
        """So many more tokens."""
        for request in sampled_requests:
            answered = len(request.tokens) - len(request.prompt)
            self.num_generated_tokens += answered - self._num_counted.get(request, 0)
            self._num_counted[request] = answered

    def on_finish(self, request: Request) -> None:
        """It is remembered."""
        if (watched := self.live.pop(request.id, None)) and request.num_computed_tokens:
            self.finished.append(watched)

    # ---- when somebody looks ---------------------------------------------------------------------------------------

    def get_state(self, key_name: str) -> dict[str, Any]:
        """Everything but texts and scores."""
        cache, scheduler = self.llm.cache, self.llm.engine.scheduler
        found, (state, holder) = collect_pool_stats(cache), classify_pages(cache)
        mine = self._requests_of_key(key_name)
        rows = {w.request.row: w.request.id for w in mine if w.request.row is not None}
        return {
            "time": time(),
            "tokens": self.num_generated_tokens,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "requests": [self._summarize(w) for w in mine],
            "states": PAGE_STATES,
            "pages": found.pages_by_state,
            "page_bytes": found.page_bytes,
            "slots": found.slots_by_state,
            "holes": found.num_holes,
            "map": _build_page_map(state[1:], holder[1:], rows),
            "tiers": found.tier_stats,
            "prefixes": found.prefix_hit_tokens,
            "layers": self.llm.spec.num_layers,
            "heads": self.llm.spec.num_kv_heads,
            "windows": [None if w > 2**30 else int(w) for w in cache.windows(self.llm.policy)],
        }

    def get_request_detail(self, request_id: int, key_name: str, layer: int | None) -> dict[str, Any] | None:
        """One request, its tokens as text, the mass that each received and the share of heads that hold it."""
        watched = self._find_request(request_id, key_name)
        if not watched:
            return None
        request, witness = watched.request, watched.attention_trace
        if request.row is not None and request.num_computed_tokens:
            witness.record(self.llm.cache, request.row, request.num_computed_tokens)
        tokenizer = self.llm.tokenizer
        for token in request.tokens[len(watched.token_texts) :]:
            watched.token_texts.append(tokenizer.token_bytes(token).decode(errors="replace"))
        mass, held = witness.scores(layer)
        return {
            **self._summarize(watched),
            "tokens": watched.token_texts,
            "mass": [round(float(x), 5) for x in mass],
            "held": [round(float(x), 4) for x in held],
        }

    def get_token_detail(self, request_id: int, key_name: str, position: int) -> dict[str, Any] | None:
        """One token of it: the mass in every layer and head, and where it is held, [L][G]."""
        watched = self._find_request(request_id, key_name)
        if not watched or not 0 <= position < watched.attention_trace.mass.shape[-1]:
            return None
        mass, held = watched.attention_trace.mass[..., position], watched.attention_trace.is_kept[..., position]
        return {"mass": np.round(mass.astype(float), 5).tolist(), "held": held.tolist()}

    def _requests_of_key(self, key_name: str) -> list[TrackedRequest]:
        """The newest first, live ones before those that ended."""
        everyone = [*reversed(self.live.values()), *reversed(self.finished)]
        return [w for w in everyone if w.key_name == key_name]

    def _find_request(self, request_id: int, key_name: str) -> TrackedRequest | None:
        return next((w for w in self._requests_of_key(key_name) if w.request.id == request_id), None)

    def _summarize(self, tracked: TrackedRequest) -> dict[str, Any]:
        request = tracked.request
        return {
            "id": request.id,
            "began": tracked.started_at,
            "policy": policies.to_spec(request.policy),
            "prompt": len(request.prompt),
            "length": len(request.tokens),
            "computed": request.num_computed_tokens,
            "cached": request.num_cached_tokens,
            "preempted": request.num_preemptions,
            "state": request.finish_reason.value
            if request.finish_reason
            else "running"
            if request.row is not None
            else "waiting",
            "pages": request.num_final_pages
            if request.finish_reason or request.row is None
            else self.llm.cache.num_pages(request.row),
            "system": request.num_system_tokens,
        }


def _build_page_map(
    page_states: np.ndarray[Any, Any], page_rows: np.ndarray[Any, Any], request_id_of_row: dict[int, int]
) -> dict[str, Any]:
    """Pages [P] in at most CELLS cells: of each the share of pages in every state, 0..255, and who holds most of it."""
    n = min(MAP_CELLS, len(page_states))
    cell = np.arange(len(page_states)) * n // len(page_states)
    counts = np.zeros((n, len(PAGE_STATES)), np.int64)
    np.add.at(counts, (cell, page_states), 1)
    shares = (255 * counts / counts.sum(1, keepdims=True)).round().astype(np.uint8)
    first = np.full(n, -1, np.int64)
    held = page_rows >= 0
    first[cell[held]] = page_rows[held]
    owners = [request_id_of_row.get(int(row), -1) if row >= 0 else -1 for row in first]
    return {"cells": n, "shares": b64encode(shares.tobytes()).decode(), "owners": owners}
