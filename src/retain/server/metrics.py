"""Prometheus metrics of one engine. Metrics that vLLM has too carry vLLM's names, so that its dashboards fit.

Counters and histograms are updated as requests and steps finish; the state of the pool and of the tiers is read at each
scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from retain.engine.request import Request
from retain.llm import LLM

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_LATENCY_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
TOKEN_COUNT_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768)
AGE_BUCKETS = (1, 5, 15, 60, 300, 900, 3600, 14400, 86400)
HIT_BUCKETS = (0, 1, 2, 5, 10, 50, 100)
TIER_DIRECTIONS = ("read", "written")
TIER_SIZES = ("tier", "bytes", "capacity", "spans")  # of a tier's statistics, what is no count of events


class Metrics:
    """An engine's metrics. `prefix` precedes every name. Everything runs in the engine thread (see Observer)."""

    def __init__(self, llm: LLM, prefix: str = "retain_"):
        self.llm = llm
        self.prefix = prefix
        self.registry = CollectorRegistry()
        # Time and number of output tokens at the last step that sampled for a request.
        self._last_sample: WeakKeyDictionary[Request, tuple[float, int]] = WeakKeyDictionary()
        self.num_ring_overwrites = 0
        self.count_kv_events: Callable[[], Mapping[str, int]] | None = None  # by what became of them
        counter = self._create_counter
        histogram = self._create_histogram
        self.preemptions = counter("num_preemptions", "Preempted requests")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens processed")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.finished_requests = counter("request_success", "Finished requests by finish reason", "finished_reason")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens")
        self.accepted_tokens = counter("spec_decode_num_accepted_tokens", "Accepted draft tokens")
        self.step_time = histogram("engine_step_seconds", "Engine step time", TOKEN_LATENCY_BUCKETS)
        self.ttft = histogram("time_to_first_token_seconds", "Time to first token", LATENCY_BUCKETS)
        self.itl = histogram("inter_token_latency_seconds", "Inter-token latency", TOKEN_LATENCY_BUCKETS)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Mean time per output token of a request", TOKEN_LATENCY_BUCKETS
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "End-to-end request latency", LATENCY_BUCKETS)
        self.request_prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens per request", TOKEN_COUNT_BUCKETS
        )
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Generated tokens per request", TOKEN_COUNT_BUCKETS
        )
        self.eviction_age = histogram("prefix_eviction_age_seconds", "Age of cached prefixes at eviction", AGE_BUCKETS)
        self.eviction_idle = histogram(
            "prefix_eviction_idle_seconds", "Time since last hit of cached prefixes at eviction", AGE_BUCKETS
        )
        self.eviction_hits = histogram("prefix_eviction_hits", "Hits of cached prefixes before eviction", HIT_BUCKETS)
        self.registry.register(self)

    def _create_counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(self.prefix + name, documentation, labels, registry=self.registry)

    def _create_histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(self.prefix + name, documentation, buckets=buckets, registry=self.registry)

    # ---- as requests and steps finish ----------------------------------------------------------------------------

    def on_request(self, request: Request, key_name: str) -> None:
        """Count nothing: a request is counted when it finishes."""

    def on_step(self, step_s: float, sampled_requests: Sequence[Request]) -> None:
        """Record the time of a step and the latencies of the tokens that it sampled."""
        self.step_time.observe(step_s)
        now = perf_counter()
        num_new = 0
        for request in sampled_requests:
            num_output = len(request.tokens) - len(request.prompt)
            last_time, last_output = self._last_sample.get(request, (0.0, 0))
            if last_output:
                self.itl.observe((now - last_time) / max(num_output - last_output, 1))
            else:
                self.ttft.observe(request.stats.first_token_time - request.stats.arrival_time)
            self._last_sample[request] = now, num_output
            num_new += num_output - last_output
        self.generation_tokens.inc(num_new)

    def on_finish(self, request: Request) -> None:
        """Record the totals of a request that finished, failed or was cancelled."""
        assert request.finish_reason
        self.finished_requests.labels(request.finish_reason.value).inc()
        self.preemptions.inc(request.stats.num_preemptions)
        self.prompt_tokens.inc(len(request.prompt) if request.stats.first_token_time else request.num_computed_tokens)
        self.draft_tokens.inc(sum(request.stats.spec_decode.num_drafted_per_position))
        self.accepted_tokens.inc(sum(request.stats.spec_decode.num_accepted_per_position))
        self.num_ring_overwrites += self.llm.cache.ring_overwrites(request.policy, request.num_computed_tokens)
        self.request_prompt_tokens.observe(len(request.prompt))
        if request.stats.first_token_time:
            num_output = request.num_output_tokens
            self.request_generation_tokens.observe(num_output)
            self.e2e_latency.observe(request.stats.finish_time - request.stats.arrival_time)
            if num_output > 1:
                self.tpot.observe((request.stats.finish_time - request.stats.first_token_time) / (num_output - 1))

    # ---- at each scrape ------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        for record in self.llm.cache.take_evictions():
            self.eviction_age.observe(record.age)
            self.eviction_idle.observe(record.idle)
            self.eviction_hits.observe(record.hits)
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the state of the scheduler, the pool and the tiers (a prometheus_client collector)."""
        cache = self.llm.cache
        scheduler = self.llm.engine.scheduler
        stats = self.llm.cache.pool_stats()
        yield self._gauge("num_requests_running", "Running requests", len(scheduler.running))
        yield self._gauge("num_requests_waiting", "Waiting requests", len(scheduler.waiting))
        usage = 1 - cache.free_pages / max(cache.total_pages, 1)
        yield self._gauge("kv_cache_usage_perc", "Fraction of the page pool in use", usage)
        yield self._gauge("slots", "Occupied slots", stats.slots_by_state, "state")
        yield self._gauge("slot_holes", "Empty slots in allocated pages", stats.num_holes)
        yield self._gauge("pages", "Pages of the pool", stats.pages_by_state, "state")
        yield self._gauge("page_bytes", "Bytes of a page", stats.page_bytes)
        yield self._gauge("snapshots", "Positions of cached texts that others go on from", stats.num_snapshots)
        size = stats.num_snapshot_pages * stats.page_bytes
        yield self._gauge("snapshot_bytes", "Bytes that snapshots hold beside the pages of their texts", size)
        yield self._counter(
            "prefix_cache_hits", "Prompt tokens served from the prefix cache", stats.prefix_hit_tokens, "tier"
        )
        evicted = {**cache.evicted_slots(), "ring": self.num_ring_overwrites}
        yield self._counter("evicted_slots", "Evicted slots", evicted, "policy")
        if self.count_kv_events:
            yield self._counter("kv_events", "Events about cached pages", self.count_kv_events(), "outcome")
        yield from self._collect_tiers(stats.tier_stats, stats.page_bytes)

    def _collect_tiers(self, tiers: Sequence[Mapping[str, Any]], page_bytes: int) -> Iterator[Metric]:
        used = {tier["tier"]: tier["bytes"] for tier in tiers}
        yield self._gauge("tier_used_bytes", "Bytes stored in the tier", used, "tier")
        capacity = {tier["tier"]: tier["capacity"] for tier in tiers}
        yield self._gauge("tier_capacity_bytes", "Capacity of the tier in bytes", capacity, "tier")
        pages = {name: size / page_bytes for name, size in used.items()}
        yield self._gauge("tier_pages", "Pages stored in the tier, in pool pages", pages, "tier")
        transferred = CounterMetricFamily(
            self.prefix + "tier_transferred_bytes",
            "Bytes read from and written to the tier",
            labels=["tier", "direction"],
        )
        events = CounterMetricFamily(
            self.prefix + "tier_events",
            "Spans evicted, damaged, failed or skipped, and block cache hits and misses",
            labels=["tier", "event"],
        )
        for tier in tiers:
            for name, value in tier.items():
                if name not in TIER_SIZES:
                    family = transferred if name in TIER_DIRECTIONS else events
                    family.add_metric([tier["tier"], name], value)
        yield from (transferred, events)

    def _gauge(self, name: str, documentation: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        if not isinstance(value, Mapping):
            return GaugeMetricFamily(self.prefix + name, documentation, value)
        return _with_values(GaugeMetricFamily(self.prefix + name, documentation, labels=[label]), value)

    def _counter(self, name: str, documentation: str, values: Mapping[str, float], label: str) -> Metric:
        return _with_values(CounterMetricFamily(self.prefix + name, documentation, labels=[label]), values)


def _with_values(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
