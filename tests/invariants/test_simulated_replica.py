"""A simulated replica computes in every step what the engine computes, and finds every prefix that the engine finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from retain.bench.simulation.cache import SimulatedCache
from retain.bench.simulation.replica import SimulatedReplica
from retain.bench.simulation.tiers import SimulatedTier, TierConfig
from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.engine.scheduler import ScheduledRequest, Scheduler
from retain.kv.prefix.cache import PrefixCache
from tests.helpers.calibrations import make_calibration
from tests.helpers.engines import AlwaysLoad, make_engine, make_request
from tests.helpers.marks import slow
from tests.helpers.related_requests import related_prompts
from tests.helpers.tiers import disk_spec
from tests.helpers.tiny_models import LLAMA

Schedule = list[list[tuple[int, int, int]]]  # of each step: (number of a request, tokens before, fresh tokens)
PAGE_SIZE, MAX_RUNNING, MAX_BATCHED = 16, 8, 40
PAGES_PER_PAGE = LLAMA["num_hidden_layers"] * LLAMA["num_key_value_heads"]  # of the engine, for one of tokens


def simulated_replica(num_pages: int, tier_kinds: Sequence[str], replica: type[SimulatedReplica]) -> SimulatedReplica:
    sizes = {"num_pages": num_pages, "max_running_requests": MAX_RUNNING, "max_batched_tokens": MAX_BATCHED}
    calibration = make_calibration(page_size=PAGE_SIZE, **sizes)
    tiers = [SimulatedTier(kind, TierConfig(read=1000), page_bytes=1) for kind in tier_kinds]
    cache = SimulatedCache(calibration, tiers)
    cache.cost_model = AlwaysLoad()
    return replica(calibration, cache)


def real_engine(num_pages: int, tiers: Sequence[str]) -> Engine:
    """An engine whose pool holds `num_pages` pages of tokens, in all layers and heads."""
    return make_engine(
        "llama",
        backend="cpu",
        num_pages=num_pages * PAGES_PER_PAGE,
        page_size=PAGE_SIZE,
        max_running_requests=MAX_RUNNING,
        max_batched_tokens=MAX_BATCHED,
        prefix_cache="exact",
        tiers=tiers,
    )


def record_schedule(scheduler: Scheduler, requests: Sequence[Request]) -> Schedule:
    """Return a list that every step of the scheduler is added to."""
    recorded: Schedule = []
    choose, numbers = scheduler.schedule, {r: i for i, r in enumerate(requests)}

    def schedule() -> list[ScheduledRequest]:
        scheduled = choose()
        if scheduled:
            recorded.append([(numbers[s.request], s.request.num_computed_tokens, s.num_tokens) for s in scheduled])
        return scheduled

    scheduler.schedule = schedule  # type: ignore[method-assign]
    return recorded


def run(add: Callable[[Request], None], step: Callable[[], object], requests: Sequence[Request], seed: int) -> None:
    """Add requests with random numbers of steps between them, and step until all have ended."""
    rng = random.Random(seed)
    for request in requests:
        add(request)
        for _ in range(rng.choice([0, 0, 0, 1, 20])):
            step()
    while not all(r.finish_reason for r in requests):
        step()


def make_requests(seed: int) -> list[Request]:
    """Requests that begin alike. Some prompts are equal, and some are a prompt with the beginning of another."""
    rng = random.Random(seed)
    return [make_request(prompt, rng.randint(1, 60)) for prompt in related_prompts(seed, 30)]


@pytest.mark.parametrize("num_pages", [18, 40, 2000])
@pytest.mark.parametrize("tier_kinds", [(), ("local",), ("shared",), ("local", "shared")])
@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_steps_and_hits_equal_the_engines(num_pages: int, tier_kinds: Sequence[str], seed: int, tmp_path: Path) -> None:
    """In a pool so small that prefixes are evicted and requests preempted, in a larger one, and in one without end.

    A local tier is compared with RAM. The shared tier of one replica is compared with a disk: both take everything
    that was computed.
    """
    tiers = {"local": "ram:capacity=1GB", "shared": disk_spec(tmp_path, "1GB")}
    engine, real = real_engine(num_pages, [tiers[kind] for kind in tier_kinds]), make_requests(seed)
    expected, prefix_cache = record_schedule(engine.scheduler, real), engine.cache.prefix_cache
    assert isinstance(prefix_cache, PrefixCache)

    def step_engine() -> None:
        engine.step()
        if prefix_cache.offloader:
            prefix_cache.offloader.sync()

    run(engine.add, step_engine, real, seed)
    simulated = make_requests(seed)
    answers = {r: iter(other.output_tokens) for r, other in zip(simulated, real, strict=True)}

    class AnsweringReplica(SimulatedReplica):
        """Answers as the engine did."""

        def next_token(self, request: Request) -> int:
            return next(answers[request])

    replica = simulated_replica(num_pages, tier_kinds, AnsweringReplica)
    schedule = record_schedule(replica.scheduler, simulated)

    def step() -> None:
        if replica.start_step():
            replica.finish_step(now=1.0)
        replica.cache.check()

    run(replica.add, step, simulated, seed)
    assert schedule == expected
    for name in ("num_cached_tokens", "num_preemptions"):
        assert [getattr(r.stats, name) for r in simulated] == [getattr(r.stats, name) for r in real]
    assert sum(r.stats.num_cached_tokens for r in real) > 500
    assert (sum(r.stats.num_preemptions for r in real) > 0) == (num_pages == 18)
    loaded = prefix_cache.offloader.num_loaded_tokens if prefix_cache.offloader else {}
    assert list(replica.cache.num_loaded_tokens.values()) == list(loaded.values())
    if num_pages != 40:
        assert any(loaded.values()) == (num_pages == 18 and bool(tier_kinds))
    assert replica.cache.free_pages == replica.cache.total_pages
    assert replica.cache.tree.num_evictable_pages * PAGES_PER_PAGE == prefix_cache.num_evictable_pages
