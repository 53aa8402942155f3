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
from retain.kv.census import collect_pool_stats, count_evicted_slots, count_ring_overwrites
from retain.llm import LLM

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768)
AGES = (1, 5, 15, 60, 300, 900, 3600, 14400, 86400)
TIER_COUNTS = ("read", "written", "evicted", "damaged", "failed", "skipped", "found", "missed")


class Metrics:
    """Of one engine. `prefix` goes before every name."""

    def __init__(self, llm: LLM, prefix: str = "retain_"):
        self.llm, self.prefix, self.registry = llm, prefix, CollectorRegistry()
        self._last: WeakKeyDictionary[Request, tuple[float, int]] = WeakKeyDictionary()  # when, and tokens by then
        self.preempted = self._counter("num_preemptions", "Requests that gave all their pages back, to begin again")
        self.asked = self._counter("prompt_tokens", "Tokens of prompts")
        self.said = self._counter("generation_tokens", "Tokens of answers")
        self.ends = self._counter("request_success", "Answers that ended, by why", "finished_reason")
        self.drafted = self._counter("spec_decode_num_draft_tokens", "Tokens that were drafted")
        self.accepted = self._counter("spec_decode_num_accepted_tokens", "Of them, those that were right")
        self.slid = 0  # slots that rings have written over
        self.steps = self._histogram("step_seconds", "A step of the engine", TOKEN_SECONDS)
        self.first = self._histogram("time_to_first_token_seconds", "From arrival to the first token", SECONDS)
        self.each = self._histogram("inter_token_latency_seconds", "From a token to the next", TOKEN_SECONDS)
        self.per = self._histogram("request_time_per_output_token_seconds", "Of an answer, on average", TOKEN_SECONDS)
        self.whole = self._histogram("e2e_request_latency_seconds", "From arrival to the end", SECONDS)
        self.lengths = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKENS)
        self.answers = self._histogram("request_generation_tokens", "Tokens of an answer", TOKENS)
        self.ages = self._histogram("prefix_evicted_age_seconds", "Of prefixes that had to go, since they came", AGES)
        self.idle = self._histogram("prefix_evicted_idle_seconds", "The same, since somebody used them", AGES)
        self.reuse = self._histogram("prefix_evicted_hits", "How often they had been used", (0, 1, 2, 5, 10, 50, 100))
        self.registry.register(self)

    def _counter(self, name: str, told: str, *labels: str) -> Counter:
        return Counter(self.prefix + name, told, labels, registry=self.registry)

    def _histogram(self, name: str, told: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(self.prefix + name, told, buckets=buckets, registry=self.registry)

    # ---- as it happens, in the engine's thread: see worker.Observer --------------------------------------------------

    def began(self, request: Request, owner: str) -> None:
        """Nothing is counted before it ends."""

    def stepped(self, took: float, ready: Sequence[Request]) -> None:
        """A step took so many seconds, and these requests got tokens."""
        self.steps.observe(took)
        now, tokens = perf_counter(), 0
        for request in ready:
            n = len(request.tokens) - len(request.prompt)
            last, had = self._last.get(request, (0.0, 0))
            if had:
                self.each.observe((now - last) / max(n - had, 1))
            else:
                self.first.observe(request.first_token_time - request.arrival_time)
            self._last[request] = now, n
            tokens += n - had
        self.said.inc(tokens)

    def ended(self, request: Request) -> None:
        """It has ended, in whatever way."""
        assert request.finish_reason
        self.ends.labels(request.finish_reason.value).inc()
        self.preempted.inc(request.num_preemptions)
        self.asked.inc(len(request.prompt) if request.first_token_time else request.num_computed_tokens)
        self.drafted.inc(sum(request.spec_decode_stats.num_drafted_per_position))
        self.accepted.inc(sum(request.spec_decode_stats.num_accepted_per_position))
        self.slid += count_ring_overwrites(self.llm.cache, request.policy, request.num_computed_tokens)
        self.lengths.observe(len(request.prompt))
        if request.first_token_time:
            answer = len(request.output_tokens)
            self.answers.observe(answer)
            self.whole.observe(request.finish_time - request.arrival_time)
            if answer > 1:
                self.per.observe((request.finish_time - request.first_token_time) / (answer - 1))

    # ---- when somebody asks ----------------------------------------------------------------------------------------

    def text(self) -> bytes:
        """All of it, in Prometheus' format. In the engine's thread."""
        reuse = self.llm.cache.prefix_cache
        while reuse and reuse.tree.evictions:
            life = reuse.tree.evictions.popleft()
            self.ages.observe(life.age)
            self.idle.observe(life.idle)
            self.reuse.observe(life.hits)
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """What there is now: see prometheus_client."""
        p, cache, scheduler = self.prefix, self.llm.cache, self.llm.engine.scheduler
        found = collect_pool_stats(cache)
        yield GaugeMetricFamily(p + "num_requests_running", "Requests that run", len(scheduler.running))
        yield GaugeMetricFamily(p + "num_requests_waiting", "Requests that wait", len(scheduler.waiting))
        used = 1 - cache.free_pages / max(cache.total_pages, 1)
        yield GaugeMetricFamily(p + "kv_cache_usage_perc", "Of the pool, what nobody else can have", used)
        yield _by(GaugeMetricFamily(p + "slots", "Slots that hold a token", labels=["state"]), found.slots_by_state)
        yield GaugeMetricFamily(p + "slot_holes", "Slots that are owned and hold none", found.num_holes)
        yield _by(GaugeMetricFamily(p + "pages", "Pages of the pool", labels=["state"]), found.pages_by_state)
        yield GaugeMetricFamily(p + "page_bytes", "Bytes of a page", found.page_bytes)
        tokens = CounterMetricFamily(p + "prefix_hit_tokens", "Tokens that were not computed again", labels=["tier"])
        yield _by(tokens, found.prefix_hit_tokens)
        gone = CounterMetricFamily(p + "evicted_slots", "Slots that were forgotten", labels=["policy"])
        yield _by(gone, {**count_evicted_slots(cache), "ring": self.slid})
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
            for what in TIER_COUNTS:
                if what in tier:
                    happened.add_metric([tier["tier"], what], tier[what])
        yield from (size, room, pages, happened)


def _by(family: Metric, values: dict[str, int]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)  # type: ignore[attr-defined]
    return family
