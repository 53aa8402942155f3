"""What an engine does, for Prometheus. Names that vLLM has too are vLLM's, so that its dashboards can be used.

Counts of steps and answers are kept as they happen; what the cache holds is counted when somebody asks. What is not
known here: HTTP, whose requests these are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from retain.engine.request import Request
from retain.kv.stats.pool import collect_pool_stats, count_evicted_slots, count_ring_overwrites
from retain.llm import LLM

LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_LATENCY_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
TOKEN_COUNT_BUCKETS = (1, 8, 32, 128, 512, 2048, 8192, 32768)
AGE_BUCKETS = (1, 5, 15, 60, 300, 900, 3600, 14400, 86400)
TIER_EVENTS = ("read", "written", "evicted", "damaged", "failed", "skipped", "found", "missed")


class Metrics:
    """Of one engine. `prefix` goes before every name."""

    def __init__(self, llm: LLM, prefix: str = "retain_"):
        self.llm, self.prefix, self.registry = llm, prefix, CollectorRegistry()
        self._last_token: WeakKeyDictionary[Request, tuple[float, int]] = (
            WeakKeyDictionary()
        )  # when, and tokens by then
        self.preemptions = self._create_counter(
            "num_preemptions", "Requests that gave all their pages back, to begin again"
        )
        self.prompt_tokens = self._create_counter("prompt_tokens", "Tokens of prompts")
        self.generation_tokens = self._create_counter("generation_tokens", "Tokens of answers")
        self.finished_requests = self._create_counter(
            "request_success", "Answers that ended, by why", "finished_reason"
        )
        self.draft_tokens = self._create_counter("spec_decode_num_draft_tokens", "Tokens that were drafted")
        self.accepted_tokens = self._create_counter("spec_decode_num_accepted_tokens", "Of them, those that were right")
        self.num_ring_overwrites = 0  # slots that rings have written over
        self.step_time = self._create_histogram("step_seconds", "A step of the engine", TOKEN_LATENCY_BUCKETS)
        self.ttft = self._create_histogram(
            "time_to_first_token_seconds", "From arrival to the first token", LATENCY_BUCKETS
        )
        self.itl = self._create_histogram(
            "inter_token_latency_seconds", "From a token to the next", TOKEN_LATENCY_BUCKETS
        )
        self.tpot = self._create_histogram(
            "request_time_per_output_token_seconds", "Of an answer, on average", TOKEN_LATENCY_BUCKETS
        )
        self.e2e_latency = self._create_histogram(
            "e2e_request_latency_seconds", "From arrival to the end", LATENCY_BUCKETS
        )
        self.request_prompt_tokens = self._create_histogram(
            "request_prompt_tokens", "Tokens of a prompt", TOKEN_COUNT_BUCKETS
        )
        self.request_generation_tokens = self._create_histogram(
            "request_generation_tokens", "Tokens of an answer", TOKEN_COUNT_BUCKETS
        )
        self.eviction_age = self._create_histogram(
            "prefix_evicted_age_seconds", "Of prefixes that had to go, since they came", AGE_BUCKETS
        )
        self.eviction_idle = self._create_histogram(
            "prefix_evicted_idle_seconds", "The same, since somebody used them", AGE_BUCKETS
        )
        self.eviction_hits = self._create_histogram(
            "prefix_evicted_hits", "How often they had been used", (0, 1, 2, 5, 10, 50, 100)
        )
        self.registry.register(self)

    def _create_counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(self.prefix + name, documentation, labels, registry=self.registry)

    def _create_histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(self.prefix + name, documentation, buckets=buckets, registry=self.registry)

    # ---- as it happens, in the engine's thread: see worker.Observer --------------------------------------------------

    def on_request(self, request: Request, key_name: str) -> None:
        """Nothing is counted before it ends."""

    def on_step(self, step_s: float, sampled_requests: Sequence[Request]) -> None:
        """A step took so many seconds, and these requests got tokens."""
        self.step_time.observe(step_s)
        now, tokens = perf_counter(), 0
        for request in sampled_requests:
            n = len(request.tokens) - len(request.prompt)
            last, had = self._last_token.get(request, (0.0, 0))
            if had:
                self.itl.observe((now - last) / max(n - had, 1))
            else:
                self.ttft.observe(request.first_token_time - request.arrival_time)
            self._last_token[request] = now, n
            tokens += n - had
        self.generation_tokens.inc(tokens)

    def on_finish(self, request: Request) -> None:
        """It has ended, in whatever way."""
        assert request.finish_reason
        self.finished_requests.labels(request.finish_reason.value).inc()
        self.preemptions.inc(request.num_preemptions)
        self.prompt_tokens.inc(len(request.prompt) if request.first_token_time else request.num_computed_tokens)
        self.draft_tokens.inc(sum(request.spec_decode_stats.num_drafted_per_position))
        self.accepted_tokens.inc(sum(request.spec_decode_stats.num_accepted_per_position))
        self.num_ring_overwrites += count_ring_overwrites(self.llm.cache, request.policy, request.num_computed_tokens)
        self.request_prompt_tokens.observe(len(request.prompt))
        if request.first_token_time:
            answer = len(request.output_tokens)
            self.request_generation_tokens.observe(answer)
            self.e2e_latency.observe(request.finish_time - request.arrival_time)
            if answer > 1:
                self.tpot.observe((request.finish_time - request.first_token_time) / (answer - 1))

    # ---- when somebody asks ----------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """All of it, in Prometheus' format. In the engine's thread."""
        reuse = self.llm.cache.prefix_cache
        while reuse and reuse.tree.evictions:
            life = reuse.tree.evictions.popleft()
            self.eviction_age.observe(life.age)
            self.eviction_idle.observe(life.idle)
            self.eviction_hits.observe(life.hits)
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What there is now: see prometheus_client."""
        p, cache, scheduler = self.prefix, self.llm.cache, self.llm.engine.scheduler
        found = collect_pool_stats(cache)
        yield GaugeMetricFamily(p + "num_requests_running", "Requests that run", len(scheduler.running))
        yield GaugeMetricFamily(p + "num_requests_waiting", "Requests that wait", len(scheduler.waiting))
        used = 1 - cache.free_pages / max(cache.total_pages, 1)
        yield GaugeMetricFamily(p + "kv_cache_usage_perc", "Of the pool, what nobody else can have", used)
        yield _add_labelled_values(
            GaugeMetricFamily(p + "slots", "Slots that hold a token", labels=["state"]), found.slots_by_state
        )
        yield GaugeMetricFamily(p + "slot_holes", "Slots that are owned and hold none", found.num_holes)
        yield _add_labelled_values(
            GaugeMetricFamily(p + "pages", "Pages of the pool", labels=["state"]), found.pages_by_state
        )
        yield GaugeMetricFamily(p + "page_bytes", "Bytes of a page", found.page_bytes)
        tokens = CounterMetricFamily(p + "prefix_hit_tokens", "Tokens that were not computed again", labels=["tier"])
        yield _add_labelled_values(tokens, found.prefix_hit_tokens)
        gone = CounterMetricFamily(p + "evicted_slots", "Slots that were forgotten", labels=["policy"])
        yield _add_labelled_values(gone, {**count_evicted_slots(cache), "ring": self.num_ring_overwrites})
        size = GaugeMetricFamily(p + "tier_bytes", "Bytes that sleep", labels=["tier"])
        room = GaugeMetricFamily(p + "tier_capacity_bytes", "Bytes that may", labels=["tier"])
        pages = GaugeMetricFamily(p + "tier_pages", "Pages that sleep, as bytes of the pool", labels=["tier"])
        happened = CounterMetricFamily(
            p + "tier", "Bytes read and written; spans evicted, damaged, ...", labels=["tier", "what"]
        )
        for tier in found.tier_stats:
            size.add_metric([tier["tier"]], tier["bytes"])
            room.add_metric([tier["tier"]], tier["capacity"])
            pages.add_metric([tier["tier"]], tier["bytes"] / found.page_bytes)
            for what in TIER_EVENTS:
                if what in tier:
                    happened.add_metric([tier["tier"], what], tier[what])
        yield from (size, room, pages, happened)


def _add_labelled_values(family: Metric, values: dict[str, int]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)  # type: ignore[attr-defined]
    return family
