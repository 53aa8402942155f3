"""The inspector's data: tokens that each request keeps, a map of the pool's pages, tiers, throughput, prefix misses.

It traces up to MAX_LIVE running requests and remembers the last MAX_FINISHED of them. A client sees the requests of its
own API key only, and sums over these, unless it is an operator; the page map contains no text.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from time import time
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from retain.engine.request import Request
from retain.kernels.slots.kv_cache_spec import StateSpec
from retain.kv.eviction import policies
from retain.kv.prefix.start import PrefixDiagnosis
from retain.kv.stats.attention_trace import AttentionTrace
from retain.kv.stats.pool import PAGE_STATES, PoolStats
from retain.llm import LLM
from retain.processing.output import describe_prefix
from retain.processing.tokenizer import Tokenizer
from retain.server.observers import Observer
from retain.server.request_group import RequestGroup

MAX_LIVE = 16
MAX_FINISHED = 16
MAX_MISSES = 32
MAP_CELLS = 1024  # of the page map


@dataclass(eq=False)
class TrackedRequest:
    """A request with its attention trace and the name of its API key."""

    request: Request
    key_name: str
    attention_trace: AttentionTrace
    started_at: float = field(default_factory=time)
    token_texts: list[str] = field(default_factory=list)  # decoded on demand


@dataclass
class PrefixMiss:
    """A prompt that was computed in part although more of it could have been cached."""

    request_id: int
    key_name: str
    diagnosis: PrefixDiagnosis
    tokenizer: Tokenizer
    time: float = field(default_factory=time)  # seconds since 1970

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The diagnosis with texts, built when somebody looks."""
        return {
            "id": self.request_id,
            "time": self.time,
            **describe_prefix(self.diagnosis, self.tokenizer),
        }


class Recorder(Observer):
    """Records the requests of one engine. Every method runs in the engine thread (see Observer)."""

    def __init__(self, llm: LLM):
        self.llm = llm
        layers = llm.spec.kv_cache
        attends = [not isinstance(layer, StateSpec) for layer in layers.caches]
        self.caches = {n: i for i, n in enumerate(layers.layer_numbers) if attends[i]}  # by the numbers of layers
        self.live: dict[int, TrackedRequest] = {}
        self.finished: deque[TrackedRequest] = deque(maxlen=MAX_FINISHED)
        self.num_generated_tokens: Counter[str] = Counter()  # since the start, by the name of the key
        self.prefix_misses: deque[PrefixMiss] = deque(maxlen=MAX_MISSES)  # of all keys
        self._key_names: WeakKeyDictionary[Request, str] = WeakKeyDictionary()
        self._num_counted: WeakKeyDictionary[Request, int] = WeakKeyDictionary()

    # ---- as requests and steps finish ----------------------------------------------------------------------------

    def on_request(self, request: Request, group: RequestGroup) -> None:
        """Trace the request, unless MAX_LIVE are traced already, and have its prefix explained."""
        request.explains_prefix = True
        self._key_names[request] = group.key_name
        if len(self.live) < MAX_LIVE:
            spec = self.llm.spec
            request.attention_trace = AttentionTrace(spec.num_caches, spec.kv_cache.num_traced_heads)
            self.live[request.id] = TrackedRequest(request, group.key_name, request.attention_trace)

    def on_step(self, step_s: float, sampled_requests: Sequence[Request]) -> None:
        """Count the tokens that a step generated, by API key."""
        for request in sampled_requests:
            if request.input.pools:
                continue
            num_output = len(request.tokens) - len(request.prompt)
            key_name = self._key_names.get(request, "")
            self.num_generated_tokens[key_name] += num_output - self._num_counted.get(request, 0)
            self._num_counted[request] = num_output

    def on_finish(self, request: Request, group: RequestGroup) -> None:
        """Remember the request, if it is traced and was ever computed, and what it missed of its prefix."""
        if key_name := self._key_names.get(request):  # kept, because `on_step` counts the last token afterwards
            diagnosis = request.stats.prefix_diagnosis
            if diagnosis and diagnosis.reason.is_miss:
                self.prefix_misses.append(PrefixMiss(request.id, key_name, diagnosis, self.llm.tokenizer))
        if (tracked := self.live.pop(request.id, None)) and request.num_computed_tokens:
            self.finished.append(tracked)

    # ---- for the inspector's page --------------------------------------------------------------------------------

    def get_state(self, key_name: str, is_operator: bool) -> dict[str, Any]:
        """Return the state of the engine and a summary of this key's requests.

        An operator sees everybody's pages, tokens and tiers; to others all that is not their own looks free.
        """
        cache = self.llm.cache
        scheduler = self.llm.engine.scheduler
        stats = cache.pool_stats()
        page_states, page_rows = cache.classify_pages()
        windows = cache.planner.windows(self.llm.policy)
        tracked = self._requests_of_key(key_name)
        running, waiting = (
            [r for r in requests if is_operator or self._key_names.get(r) == key_name]
            for requests in (scheduler.running, scheduler.waiting)
        )
        if not is_operator:
            own = np.isin(page_rows, [scheduler.running[r].index for r in running])
            page_states = np.where(own, page_states, PAGE_STATES.index("free")).astype(np.int8)
            pages = np.bincount(page_states[1:], minlength=len(PAGE_STATES)).tolist()
            stats = PoolStats({}, 0, stats.page_bytes, dict(zip(PAGE_STATES, pages, strict=True)), {}, [])
        ids = {t.request.id for t in tracked}
        request_id_of_row = {row.index: r.id for r, row in scheduler.running.items() if r.id in ids}
        tokens = self.num_generated_tokens
        return {
            "time": time(),
            "generated_tokens": sum(tokens.values()) if is_operator else tokens[key_name],
            "running": len(running),
            "waiting": len(waiting),
            "requests": [self._summarize(t) for t in tracked],
            "page_states": PAGE_STATES,
            "pages": stats.pages_by_state,
            "page_bytes": stats.page_bytes,
            "slots": stats.slots_by_state,
            "holes": stats.num_holes,
            "map": _build_page_map(page_states[1:], page_rows[1:], request_id_of_row),  # page 0 is never allocated
            "tiers": stats.tier_stats,
            "prefix_hits": stats.prefix_hit_tokens,
            "snapshots": stats.num_checkpoints,
            "snapshot_pages": stats.num_checkpoint_pages,
            "prefix_misses": [m.summary for m in reversed(self.prefix_misses) if m.key_name == key_name],
            "layers": list(self.caches),
            "heads": self.llm.spec.kv_cache.num_traced_heads,
            "windows": [None if windows[i] > 2**30 else int(windows[i]) for i in self.caches.values()],
        }

    def get_request_detail(self, request_id: int, key_name: str, layer: int | None) -> dict[str, Any] | None:
        """Return a request with its tokens as text, the mass of each, and the fraction of heads that keep it.

        Masses are those of one layer, of `caches`, or the mean over all. None if the key has no such request.
        """
        tracked = self._find_request(request_id, key_name)
        if not tracked:
            return None
        request = tracked.request
        trace = tracked.attention_trace
        row = self.llm.engine.scheduler.running.get(request)
        if row and request.num_computed_tokens:
            self.llm.cache.rows[row.index].record_attention(trace)
        for token in request.tokens[len(tracked.token_texts) :]:
            tracked.token_texts.append(self.llm.tokenizer.token_bytes(token).decode(errors="replace"))
        mass, kept = trace.scores(None if layer is None else self.caches[layer])
        return {
            **self._summarize(tracked),
            "token_texts": tracked.token_texts,
            "mass": [round(float(x), 5) for x in mass],
            "kept": [round(float(x), 4) for x in kept],
        }

    def get_token_detail(self, request_id: int, key_name: str, position: int) -> dict[str, Any] | None:
        """Return the mass of one token in every layer that attends and head, and where it is kept, both [L][G]."""
        tracked = self._find_request(request_id, key_name)
        if not tracked or not 0 <= position < tracked.attention_trace.mass.shape[-1]:
            return None
        trace = tracked.attention_trace
        attending = list(self.caches.values())
        mass = trace.mass[attending, :, position]
        kept = trace.is_kept[attending, :, position]
        return {"mass": np.round(mass.astype(float), 5).tolist(), "kept": kept.tolist()}

    def _requests_of_key(self, key_name: str) -> list[TrackedRequest]:
        """Return the requests of a key, newest first, running before finished ones."""
        tracked = [*reversed(self.live.values()), *reversed(self.finished)]
        return [t for t in tracked if t.key_name == key_name]

    def _find_request(self, request_id: int, key_name: str) -> TrackedRequest | None:
        return next((t for t in self._requests_of_key(key_name) if t.request.id == request_id), None)

    def _summarize(self, tracked: TrackedRequest) -> dict[str, Any]:
        request = tracked.request
        row = self.llm.engine.scheduler.running.get(request)
        state = "running" if row else "waiting"
        num_pages = row.num_pages if row else request.stats.num_final_pages
        if request.finish_reason:
            state = request.finish_reason.value
        return {
            "id": request.id,
            "started_at": tracked.started_at,
            "policy": policies.to_spec(request.policy),
            "num_prompt_tokens": len(request.prompt),
            "num_tokens": len(request.tokens),
            "num_computed_tokens": request.num_computed_tokens,
            "num_cached_tokens": request.stats.num_cached_tokens,
            "num_preemptions": request.stats.num_preemptions,
            "state": state,
            "num_pages": num_pages,
            "num_system_tokens": request.input.num_system_tokens,
        }


def _build_page_map(
    page_states: NDArray[np.int8], page_rows: NDArray[np.int32], request_id_of_row: dict[int, int]
) -> dict[str, Any]:
    """Summarize pages [P] in at most MAP_CELLS cells.

    `shares` are base64 bytes [cells, states]: the share of a cell's pages in each state, 0 to 255. `request_ids` names
    a request that owns pages of the cell, or -1.
    """
    num_cells = min(MAP_CELLS, len(page_states))
    cell = np.arange(len(page_states)) * num_cells // len(page_states)
    counts = np.zeros((num_cells, len(PAGE_STATES)), np.int64)
    np.add.at(counts, (cell, page_states), 1)
    shares = (255 * counts / counts.sum(1, keepdims=True)).round().astype(np.uint8)
    row_of_cell = np.full(num_cells, -1, np.int64)
    owned = page_rows >= 0
    row_of_cell[cell[owned]] = page_rows[owned]
    request_ids = [request_id_of_row.get(int(row), -1) for row in row_of_cell]
    return {"cells": num_cells, "shares": b64encode(shares.tobytes()).decode(), "request_ids": request_ids}
