"""Smoke tests of tools/simulation: a replica that steps as the engine does, and the command."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from retain.engine.engine import Engine
from retain.engine.request import Request
from retain.engine.scheduler import ScheduledRequest, Scheduler
from retain.kv.prefix.cache import PrefixCache
from tests.helpers.engines import AlwaysLoad, make_engine, make_request
from tests.helpers.related_requests import related_prompts
from tests.helpers.tiers import disk_spec
from tests.helpers.tiny_models import LLAMA
from tools.simulation.__main__ import main
from tools.simulation.cache import SimulatedCache
from tools.simulation.calibration import Calibration, StepWork
from tools.simulation.replica import SimulatedReplica
from tools.simulation.routing import ROUTERS
from tools.simulation.tiers import SimulatedTier, TierConfig

SECONDS = StepWork(steps=0.01, prompt_tokens=0.002, prompt_slots=1e-6, decode_rows=0.001, decode_slots=1e-5)
CALIBRATION = Calibration(
    seconds=SECONDS,
    page_size=16,
    page_bytes=10_000,
    num_pages=200,
    max_running_requests=8,
    max_batched_tokens=40,
    max_model_len=512,
    vocab_size=1000,
    options={},
    machine="",
    num_threads=1,
    num_steps=0,
    median_error=0.0,
)
Schedule = list[list[tuple[int, int, int]]]  # of each step: (number of a request, tokens before, fresh tokens)
PAGES_PER_PAGE = LLAMA["num_hidden_layers"] * LLAMA["num_key_value_heads"]  # of the engine, for one of tokens


def simulated_replica(num_pages: int, tier_kinds: Sequence[str], replica: type[SimulatedReplica]) -> SimulatedReplica:
    calibration = replace(CALIBRATION, num_pages=num_pages)
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
        page_size=CALIBRATION.page_size,
        max_running_requests=CALIBRATION.max_running_requests,
        max_batched_tokens=CALIBRATION.max_batched_tokens,
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


def test_steps_and_hits_equal_the_engines(tmp_path: Path) -> None:
    """In a pool so small that prefixes are evicted and requests preempted.

    A local tier is compared with RAM. The shared tier of one replica is compared with a disk: both take everything
    that was computed.
    """
    num_pages, seed, tier_kinds = 18, 0, ("local", "shared")
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
    assert sum(r.stats.num_preemptions for r in real) > 0
    loaded = prefix_cache.offloader.num_loaded_tokens if prefix_cache.offloader else {}
    assert list(replica.cache.num_loaded_tokens.values()) == list(loaded.values())
    assert any(loaded.values())
    assert replica.cache.free_pages == replica.cache.total_pages
    assert replica.cache.tree.num_evictable_pages * PAGES_PER_PAGE == prefix_cache.tree.num_evictable_pages


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CALIBRATION.save(tmp_path / "file.json")
    args = ["--simulate", "--calibration", str(tmp_path / "file.json"), "--num-prompts", "30", "--replicas", "1,3"]
    tiers = ["--tier-settings", "none local:read=1GB,capacity=1MB+shared:read=1GB"]
    assert main([*args, *tiers, "--json", "--output-dir", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(line["replicas"], line["tiers"].partition(":")[0], line["routing"]) for line in lines]
    assert found == [(n, t, r) for n in (1, 3) for t in ("none", "local") for r in ROUTERS]
    assert all(line["requests"] == 30 and 0 < line["utilization"] <= 1 for line in lines)
    assert json.loads((tmp_path / "cluster.json").read_text()) == lines
    assert main([*args, "--routing", "session"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 2 * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "needs one of --simulate, --validate and --calibrate"),
        (["--simulate", "--routing", "best"], "unknown routing policy 'best'"),
        (["--simulate", "--tier-settings", "local:latency=1"], "local needs read="),
        (["--simulate", "--calibration", __file__], "is not a file of"),
        (["--validate", "--routing", "kv-aware"], "leave out kv-aware"),
        (["--simulate", "--dtype", "float32"], "--dtype is an option of --calibrate"),
    ],
)
def test_bad_input_gets_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and message in err
