"""Statistics of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from retain.engine.spec_decode.stats import SpecDecodeStats
from retain.kv.prefix.start import PrefixDiagnosis
from retain.kv.stats.request import LoadStats, RequestMemory


@dataclass
class RequestStats:
    """Times (seconds), counts and memory of one request."""

    arrival_time: float = field(default_factory=perf_counter)
    scheduled_time: float = 0.0  # when the request, or the one that it follows, was first admitted
    first_token_time: float = 0.0
    finish_time: float = 0.0
    num_cached_tokens: int = 0  # computed already when the request was first admitted
    num_preemptions: int = 0
    loads: list[LoadStats] = field(default_factory=list)  # of what the request began with, from tiers
    spec_decode: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    peak_slots: list[int] = field(default_factory=list)  # by layer: the most that one head owned
    prefix_diagnosis: PrefixDiagnosis | None = None  # where it was asked for
    final_slots: list[int] = field(default_factory=list)  # the same at the end
    num_final_pages: int = 0

    @property
    def memory(self) -> RequestMemory:
        """Slots and pages, for `KVCacheManager.request_stats`."""
        return RequestMemory(self.peak_slots, self.final_slots, self.num_final_pages)
