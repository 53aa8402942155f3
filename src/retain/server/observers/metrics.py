"""Prometheus metrics of one engine. What means the same in vLLM has its name, `vllm:...`; the rest is `retain_...`.

So dashboards and gateways for vLLM find what they read. Every metric has vLLM's labels `model_name` and `engine`.
Counters and histograms are updated as requests and steps finish; the state of the pool and of the tiers is read at each
scrape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric

from retain.engine.request import Request
from retain.engine.spec_decode.stats import SpecDecodeStats
from retain.kv.stats.pool import PoolStats
from retain.llm import LLM
from retain.server.config import ServerConfig
from retain.server.metric_families import MetricFamilies
from retain.server.observers import CreateObserver, Observer
from retain.server.request_group import REPORTED_REASONS, RequestGroup

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_LATENCY_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
TOKEN_COUNT_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768)
AGE_BUCKETS = (1, 5, 15, 60, 300, 900, 3600, 14400, 86400)
HIT_BUCKETS = (0, 1, 2, 5, 10, 50, 100)
TIER_DIRECTIONS = ("read", "written")
TIER_SIZES = ("tier", "bytes", "capacity", "spans")  # of a tier's statistics, what is no count of events


def open_observer(config: ServerConfig, stack: ExitStack) -> CreateObserver:
    """Return what counts: every server does."""
    return lambda llm: Metrics(llm, config.served_model_name[0])


class Metrics(Observer):
    """An engine's metrics. Everything runs in the engine thread (see Observer)."""

    def __init__(self, llm: LLM, model_name: str):
        self.llm = llm
        self.registry = CollectorRegistry()
        self.families = MetricFamilies(model_name)
        self.labels = self.families.labels
        # Time and number of output tokens at the last step that sampled for a request.
        self._last_sample: WeakKeyDictionary[Request, tuple[float, int]] = WeakKeyDictionary()
        self.num_ring_overwrites = 0
        self._create_token_metrics()
        self._create_time_metrics()
        self._create_eviction_metrics()

    def _create_token_metrics(self) -> None:
        counter = self._counter
        size_histogram = partial(self._histogram, TOKEN_COUNT_BUCKETS)
        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens processed")
        self.generation_tokens = counter("vllm:generation_tokens", "Generated tokens")
        self.finished_requests = counter("vllm:request_success", "Finished requests", "finished_reason")
        for reason in REPORTED_REASONS.values():
            self.finished_requests.labels(**self.labels, finished_reason=reason)
        self.draft_rounds = counter("vllm:spec_decode_num_drafts", "Rounds of drafts")
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens")
        self.accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens")
        self.accepted_by_position = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by their position in a round",
            "position",
        )
        self.request_prompt_tokens = size_histogram("vllm:request_prompt_tokens", "Prompt tokens of a request")
        self.request_output_tokens = size_histogram("vllm:request_generation_tokens", "Generated tokens of a request")
        self.request_max_tokens = size_histogram("vllm:request_params_max_tokens", "Tokens that a request allows")

    def _create_time_metrics(self) -> None:
        histogram = partial(self._histogram, LATENCY_BUCKETS)
        token_histogram = partial(self._histogram, TOKEN_LATENCY_BUCKETS)
        self.step_time = token_histogram("retain_engine_step_seconds", "Engine step time")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token")
        self.itl = token_histogram("vllm:inter_token_latency_seconds", "Inter-token latency")
        self.tpot = token_histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per output token of a request"
        )
        self.e2e_latency = histogram("vllm:e2e_request_latency_seconds", "End-to-end request latency")
        self.queue_time = histogram("vllm:request_queue_time_seconds", "Time until a request begins to be computed")
        self.prefill_time = histogram("vllm:request_prefill_time_seconds", "Time from then until its first token")
        self.decode_time = histogram("vllm:request_decode_time_seconds", "Time from its first token until its last")
        self.inference_time = histogram(
            "vllm:request_inference_time_seconds", "Time in which a request was computed: prefill and decode"
        )

    def _create_eviction_metrics(self) -> None:
        age_histogram = partial(self._histogram, AGE_BUCKETS)
        hit_histogram = partial(self._histogram, HIT_BUCKETS)
        self.eviction_age = age_histogram("retain_prefix_eviction_age_seconds", "Age of cached prefixes at eviction")
        self.eviction_idle = age_histogram(
            "retain_prefix_eviction_idle_seconds", "Time since last hit of cached prefixes at eviction"
        )
        self.eviction_hits = hit_histogram("retain_prefix_eviction_hits", "Hits of cached prefixes before eviction")

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        """Return a counter of this engine, or with own labels what makes the counters of their values."""
        counter = Counter(name, documentation, [*self.labels, *labels], registry=self.registry)
        return counter if labels else counter.labels(**self.labels)

    def _histogram(self, buckets: Sequence[float], name: str, documentation: str) -> Histogram:
        metric = Histogram(name, documentation, [*self.labels], buckets=buckets, registry=self.registry)
        return metric.labels(**self.labels)

    # ---- as requests and steps finish ----------------------------------------------------------------------------

    def on_step(self, step_s: float, sampled_requests: Sequence[Request]) -> None:
        """Record the time of a step and the latencies of the tokens that it sampled."""
        self.step_time.observe(step_s)
        now = perf_counter()
        num_new = 0
        for request in sampled_requests:
            if request.input.pools:
                self.prompt_tokens.inc(len(request.prompt))
                continue
            num_output = len(request.tokens) - len(request.prompt)
            last_time, last_output = self._last_sample.get(request, (0.0, 0))
            if last_output:
                self.itl.observe((now - last_time) / max(num_output - last_output, 1))
            else:
                self.ttft.observe(request.stats.first_token_time - request.stats.arrival_time)
                self.prompt_tokens.inc(len(request.prompt))
            self._last_sample[request] = now, num_output
            num_new += num_output - last_output
        self.generation_tokens.inc(num_new)

    def on_finish(self, request: Request, group: RequestGroup) -> None:
        """Record the totals of a request that finished, failed or was cancelled."""
        assert request.finish_reason
        reason = REPORTED_REASONS[request.finish_reason]
        self.finished_requests.labels(**self.labels, finished_reason=reason).inc()
        self._count_drafts(request.stats.spec_decode)
        self.num_ring_overwrites += self.llm.cache.planner.ring_overwrites(request.policy, request.num_computed_tokens)
        self.request_prompt_tokens.observe(len(request.prompt))
        if not request.input.pools:
            self.request_max_tokens.observe(request.input.max_tokens)
        if request.stats.first_token_time:
            self._observe_times(request)
        else:
            self.prompt_tokens.inc(request.num_computed_tokens)

    def _count_drafts(self, stats: SpecDecodeStats) -> None:
        self.draft_rounds.inc(stats.num_rounds)
        self.draft_tokens.inc(sum(stats.num_drafted_per_position))
        self.accepted_tokens.inc(sum(stats.num_accepted_per_position))
        for position, num_accepted in enumerate(stats.num_accepted_per_position):
            self.accepted_by_position.labels(**self.labels, position=str(position)).inc(num_accepted)

    def _observe_times(self, request: Request) -> None:
        """Record the times of a request whose prompt is computed. One that is pooled has no answer."""
        stats = request.stats
        self.e2e_latency.observe(stats.finish_time - stats.arrival_time)
        self.queue_time.observe(stats.scheduled_time - stats.arrival_time)
        self.prefill_time.observe(stats.first_token_time - stats.scheduled_time)
        self.inference_time.observe(stats.finish_time - stats.scheduled_time)
        if request.input.pools:
            return
        num_output = request.num_output_tokens
        self.request_output_tokens.observe(num_output)
        self.decode_time.observe(stats.finish_time - stats.first_token_time)
        if num_output > 1:
            self.tpot.observe((stats.finish_time - stats.first_token_time) / (num_output - 1))

    # ---- at each scrape ------------------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Yield what was counted, and the state of the scheduler, the pool and the tiers."""
        for record in self.llm.cache.prefix_cache.take_evictions():
            self.eviction_age.observe(record.age)
            self.eviction_idle.observe(record.idle)
            self.eviction_hits.observe(record.hits)
        yield from self.registry.collect()
        gauge = self.families.gauge
        counter = self.families.counter
        cache = self.llm.cache
        scheduler = self.llm.engine.scheduler
        stats = cache.pool_stats()
        yield gauge("vllm:num_requests_running", "Running requests", len(scheduler.running))
        yield gauge("vllm:num_requests_waiting", "Waiting requests", len(scheduler.waiting))
        usage = 1 - cache.free_pages / max(cache.total_pages, 1)
        yield gauge("vllm:kv_cache_usage_perc", "Fraction of the page pool in use", usage)
        yield self._cache_config()
        yield counter("vllm:num_preemptions", "Preempted requests", scheduler.num_preemptions)
        yield gauge("retain_slots", "Occupied slots", stats.slots_by_state, "state")
        yield gauge("retain_slot_holes", "Empty slots in allocated pages", stats.num_holes)
        yield gauge("retain_pages", "Pages of the pool", stats.pages_by_state, "state")
        yield gauge("retain_page_bytes", "Bytes of a page", stats.page_bytes)
        yield gauge("retain_snapshots", "Positions of cached texts that others go on from", stats.num_checkpoints)
        size = stats.num_checkpoint_pages * stats.page_bytes
        yield gauge("retain_snapshot_bytes", "Bytes that checkpoints hold beside the pages of their texts", size)
        evicted = {**cache.evicted_slots(), "ring": self.num_ring_overwrites}
        yield counter("retain_evicted_slots", "Evicted slots", evicted, "policy")
        if looked := stats.looked_slots:
            yield counter("retain_looked_slots", "Slots that looks read, by where they were", looked, "source")
        yield from self._collect_prefixes(stats)
        yield from self._collect_tiers(stats.tier_stats)

    def _cache_config(self) -> Metric:
        """Describe the cache as labels: gateways multiply the blocks of a server by their tokens."""
        cache = self.llm.cache
        values = {
            "block_size": str(cache.planner.block_size),
            "cache_dtype": self.llm.config.slot_dtype,
            "num_gpu_blocks": str(cache.total_pages // cache.planner.pages_of_text(cache.planner.block_size)),
            "enable_prefix_caching": str(cache.prefix_cache.enabled),
        }
        return self.families.gauge(
            "vllm:cache_config_info", "The cache, as labels of the value 1", {tuple(values.values()): 1}, *values
        )

    def _collect_prefixes(self, stats: PoolStats) -> Iterator[Metric]:
        """Yield how many tokens were asked for, and where they were: in vLLM's terms a tier is external."""
        counter = self.families.counter
        in_pool = stats.prefix_hit_tokens["pool"]
        queried = stats.num_queried_tokens
        yield counter("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache", queried)
        yield counter("vllm:prefix_cache_hits", "Tokens found in the pool", in_pool)
        if stats.tier_stats:
            in_tiers = {tier: n for tier, n in stats.prefix_hit_tokens.items() if tier != "pool"}
            missed = queried - in_pool
            yield counter("vllm:external_prefix_cache_queries", "Tokens looked up in tiers", missed)
            yield counter("vllm:external_prefix_cache_hits", "Tokens loaded from tiers", sum(in_tiers.values()))
            yield counter("retain_tier_loaded_tokens", "The same by tier", in_tiers, "tier")

    def _collect_tiers(self, tiers: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
        gauge = self.families.gauge
        counter = self.families.counter
        used = {tier["tier"]: tier["bytes"] for tier in tiers}
        yield gauge("retain_tier_used_bytes", "Bytes stored in the tier", used, "tier")
        capacity = {tier["tier"]: tier["capacity"] for tier in tiers}
        yield gauge("retain_tier_capacity_bytes", "Capacity of the tier in bytes", capacity, "tier")
        counts = {(t["tier"], name): value for t in tiers for name, value in t.items() if name not in TIER_SIZES}
        transferred = {key: value for key, value in counts.items() if key[1] in TIER_DIRECTIONS}
        events = {key: value for key, value in counts.items() if key not in transferred}
        yield counter(
            "retain_tier_transferred_bytes", "Bytes read from and written to the tier", transferred, "tier", "direction"
        )
        yield counter(
            "retain_tier_events",
            "Spans evicted, damaged, failed or skipped, and block cache hits and misses",
            events,
            "tier",
            "event",
        )
