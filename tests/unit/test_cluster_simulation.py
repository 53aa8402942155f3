"""Simulated replicas: times computed by hand, nothing lost, equal seeds equal results, and routing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retain.bench.simulation.calibrate import calibrate, fit_steps
from retain.bench.simulation.calibration import StepWork, load_calibration, measure_work
from retain.bench.simulation.report import summarize
from retain.bench.simulation.routing import ROUTERS, KvAwareRouter, PrefixRouter
from retain.bench.simulation.simulator import Cluster
from retain.bench.simulation.tiers import SimulatedTier, TierConfig, parse_setting
from retain.bench.simulation.trace import TracedRequest, generate_conversations, scale_arrivals
from retain.engine.request import Request
from retain.kv.prefix.block_hash import hash_blocks
from retain.llm import LLM
from tests.helpers.calibrations import SECONDS, make_calibration
from tests.helpers.cli import assert_one_line_error, run_cli

CALIBRATION = make_calibration()
UNLIMITED_SHARED = "shared:read=1GB"


def traced(arrival_time: float, prompt: Sequence[int], output_len: int = 3, session: int = 0) -> TracedRequest:
    tokens = np.array(prompt, np.int32)
    return TracedRequest(arrival_time, tokens, output_len, session, hash_blocks(b"", tokens, CALIBRATION.page_size))


def conversations(num_requests: int = 60, num_replicas: int = 3, load: float = 1.0) -> list[TracedRequest]:
    """Conversations whose prompts fit into 512 tokens."""
    requests = generate_conversations(num_requests, 0, CALIBRATION)
    return scale_arrivals(requests, CALIBRATION, num_replicas, load)


def run(
    requests: Sequence[TracedRequest],
    routing: str = "random",
    num_replicas: int = 3,
    tiers: str = "none",
    seed: int = 0,
) -> tuple[Cluster, list[Request]]:
    cluster = Cluster(CALIBRATION, ROUTERS[routing](num_replicas, seed), parse_setting(tiers))
    return cluster, cluster.run(requests)


def num_hits(requests: Sequence[Request]) -> int:
    return sum(r.stats.num_cached_tokens for r in requests)


# ---- times -----------------------------------------------------------------------------------------------------------


def test_work_of_a_step() -> None:
    assert measure_work([(0, 3), (10, 2), (7, 1), (4, 1)]) == StepWork(1, 5, 1 + 2 + 3 + 11 + 12, 2, 8 + 5)


def test_a_replica_without_contention_takes_the_sum_of_its_steps() -> None:
    """100 prompt tokens in chunks of 64 and 36; then the whole pages of the prompt are there for another one."""
    prompt = list(range(100))
    _, (first, second) = run([traced(5.0, prompt), traced(50.0, [*prompt[:96], *range(200, 210)])], num_replicas=1)
    first_chunk = 0.01 + 64 * 0.002 + 64 * 65 / 2 * 1e-6
    second_chunk = 0.01 + 36 * 0.002 + (36 * 64 + 36 * 37 / 2) * 1e-6
    decoding = [0.01 + 0.001 + n * 1e-5 for n in (101, 102)]
    assert first.stats.first_token_time == pytest.approx(5 + first_chunk + second_chunk)
    assert first.stats.finish_time == pytest.approx(5 + first_chunk + second_chunk + sum(decoding))
    assert CALIBRATION.seconds_alone(100, 3) == pytest.approx(first_chunk + second_chunk + sum(decoding))
    assert second.stats.num_cached_tokens == 96
    rest = 0.01 + 10 * 0.002 + (10 * 96 + 10 * 11 / 2) * 1e-6
    assert second.stats.first_token_time == pytest.approx(50 + rest)


def test_a_load_takes_as_long_as_latency_and_bytes_and_is_not_started_where_computing_is_faster() -> None:
    prompts = [list(range(k, k + 97)) for k in (0, 1000)]
    requests = [traced(10.0 * i, p) for i, p in enumerate([prompts[0], prompts[0], prompts[1], prompts[1]])]
    spread = {"routing": "least-loaded", "num_replicas": 40}  # no replica gets a prompt twice
    load_s = 0.15 + 6 * CALIBRATION.page_bytes / 1e6
    _, found = run(requests, tiers="shared:read=1MB,latency=0.15", **spread)
    assert [r.stats.num_cached_tokens for r in found] == [0, 96, 0, 96]
    assert found[1].stats.first_token_time == pytest.approx(10 + load_s)
    _, found = run(requests, tiers="none", **spread)
    assert num_hits(found) == 0


def test_slow_tiers_are_not_read_twice() -> None:
    """The first read tells how slow the tier is. From then on computing is faster."""
    prompts = [list(range(k, k + 97)) for k in (0, 1000)]
    chosen = [ROUTERS["session"](2, 0).choose(traced(0, [1], session=s), [0, 0]) for s in range(20)]
    a, b = chosen.index(0), chosen.index(1)
    requests = [
        *(traced(i, p, session=a) for i, p in enumerate(prompts)),
        traced(5, range(2000, 2097), session=b),
        *(traced(10 + i, p, session=b) for i, p in enumerate(prompts)),
    ]
    cluster, found = run(requests, "session", 2, f"shared:read={6 * CALIBRATION.page_bytes // 10}")
    hits = [r.stats.num_cached_tokens for r in found]
    assert hits == [0, 0, 0, 96, 0] and found[3].stats.first_token_time > 19
    assert cluster.tiers[0].num_read_bytes == 6 * CALIBRATION.page_bytes


def test_the_fit_finds_the_seconds_of_each_kind_of_work() -> None:
    rng = np.random.default_rng(0)
    work = [
        measure_work([(int(c), int(n)) for c, n in rng.integers(1, 60, (rng.integers(1, 6), 2))]) for _ in range(80)
    ]
    samples = [(w, CALIBRATION.step_seconds(w)) for w in work]
    samples[7] = samples[7][0], 9.0  # something else ran
    seconds, error, num_steps = fit_steps(samples)
    assert seconds == pytest.approx(SECONDS) and error < 1e-6 and num_steps == 80
    decoding_only = [(measure_work([(n, 1)]), 0.01 - 1e-5 * n) for n in range(50)]
    assert min(fit_steps(decoding_only)[0]) == 0  # a negative rate is none


# ---- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTERS)
@pytest.mark.parametrize("tiers", ["none", "local:read=1GB,capacity=1MB+shared:read=1GB,latency=0.01"])
def test_nothing_is_lost(routing: str, tiers: str) -> None:
    requests = conversations()
    cluster, found = run(requests, routing, tiers=tiers)
    assert all(len(r.output_tokens) == t.output_len for r, t in zip(found, requests, strict=True))
    assert all(r.stats.arrival_time < r.stats.first_token_time <= r.stats.finish_time for r in found)
    assert cluster.loads == [0, 0, 0] and len(cluster.assigned) == len(requests)
    for replica in cluster.replicas:
        replica.cache.check()
        assert replica.cache.free_pages == replica.cache.total_pages and replica.is_idle
    if not any(r.stats.num_preemptions for r in found):
        fresh = sum(len(t.prompt) + t.output_len - 1 for t in requests) - num_hits(found)
        assert sum(r.num_computed_tokens for r in cluster.replicas) == fresh
    line = summarize(cluster, found, tiers, routing)
    assert line["hit_rate"] >= line["hit_rate_local"] + line["hit_rate_shared"] > -1
    assert 0 < line["utilization"] <= 1


@pytest.mark.parametrize("routing", ROUTERS)
def test_the_same_seed_gives_the_same_result(routing: str) -> None:
    lines = [summarize(*run(conversations(), routing, seed=seed), "", "") for seed in (1, 1)]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("routing", ROUTERS)
def test_every_policy_is_the_same_on_one_replica(routing: str) -> None:
    assert summarize(*run(conversations(), routing, 1), "", "") == summarize(*run(conversations(), "random", 1), "", "")


@pytest.mark.parametrize("routing", ["random", "session"])
def test_a_shared_tier_never_has_fewer_hits_than_none(routing: str) -> None:
    """Of requests that do not overlap: otherwise a faster answer may come before the prefix that it lacks."""
    requests = [replace(r, arrival_time=100.0 * i) for i, r in enumerate(conversations())]
    without, shared = (run(requests, routing, tiers=tiers)[1] for tiers in ("none", UNLIMITED_SHARED))
    pairs = [(a.stats.num_cached_tokens, b.stats.num_cached_tokens) for a, b in zip(without, shared, strict=True)]
    assert all(a <= b for a, b in pairs)
    assert num_hits(shared) > num_hits(without)


def test_a_tier_drops_what_was_used_least_recently() -> None:
    tier = SimulatedTier("local", TierConfig(read=1000, capacity=30), page_bytes=10)
    tier.add([b"1", b"2", b"3"])
    tier.touch([b"1"])
    tier.add([b"4"])
    assert [key in tier for key in (b"1", b"2", b"3", b"4")] == [True, False, True, True] and len(tier) == 3
    assert tier.read([b"1", b"3"]) == pytest.approx(0.02) and (tier.num_read_bytes, tier.num_written_bytes) == (20, 40)


# ---- routing ---------------------------------------------------------------------------------------------------------


def test_sessions_stay_and_a_removed_replica_moves_only_its_own() -> None:
    requests = [traced(0, [1], session=s) for s in range(60)]
    five, four = ([ROUTERS["session"](n, 0).choose(r, [0] * n) for r in requests] for n in (5, 4))
    assert set(five) == set(range(5))
    assert all(a == b for a, b in zip(five, four, strict=True) if a != 4)


def test_a_prefix_stays_until_its_replica_has_too_much_to_do() -> None:
    router = PrefixRouter(4, 0)
    request, longer = traced(0, list(range(64))), traced(0, list(range(90)))
    home = router.choose(request, [0] * 4)
    assert router.choose(longer, [0] * 4) == home
    loads = [1] * 4
    loads[home] = 9
    assert router.choose(request, loads) != home


def test_kv_aware_follows_the_events_and_weighs_load() -> None:
    router, request = KvAwareRouter(3, 0), traced(0, list(range(160)))
    router.on_stored(1, request.keys[:4])
    router.on_stored(2, request.keys)
    assert router.matched_pages(request.keys) == {1: 4, 2: 10}
    assert router.choose(request, [0, 0, 0]) == 2
    router.on_evicted(2, request.keys[3:])
    assert router.matched_pages(request.keys) == {1: 4, 2: 3} and router.choose(request, [0, 0, 0]) == 1
    for _ in range(5):
        router.choose(traced(0, list(range(1000, 1160))), [0, 0, 0])
    assert router.choose(request, [0, 3, 3]) == 0


def test_kv_aware_knows_what_every_replica_has() -> None:
    """After evictions to a local tier, and from it."""
    router = KvAwareRouter(3, 0)
    cluster = Cluster(replace(CALIBRATION, num_pages=60), router, parse_setting("local:read=1GB,capacity=200kB"))
    cluster.run(conversations())
    assert sum(tier.num_read_bytes for tier in cluster.tiers) > 0
    for i, (replica, tier) in enumerate(zip(cluster.replicas, cluster.tiers, strict=True)):
        in_tree = {h for n in replica.cache.tree.iter_nodes() if len(n.tokens) >= 16 for h in n.block_hashes}
        assert in_tree == replica.cache.tree_keys and len(tier) <= 20
        known = {key for key, holders in router.holders.items() if i in holders}
        assert known == in_tree | {key for key in router.holders if key in tier}


# ---- the command -----------------------------------------------------------------------------------------------------


def test_calibration_of_a_tiny_engine_is_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "retain.bench.simulation.calibrate.ROUNDS", ((32, 4, 1), (64, 4, 3), (40, 4, 2), (8, 4, 1), (16, 4, 2))
    )
    llm = LLM("random:tiny", kv_memory="1MiB", max_batched_tokens=128)
    calibration = calibrate(llm)
    calibration.save(tmp_path / "file.json")
    assert load_calibration(tmp_path / "file.json") == calibration
    assert calibration.options == {"model": "random:tiny", "kv_memory": 2**20, "max_batched_tokens": 128}
    assert calibration.num_pages * calibration.page_bytes <= 2**20 and min(calibration.seconds) >= 0
    assert calibration.num_steps == 4 + 13 + 8 + 4 + 8  # 3 prompts of 64 tokens take two steps of 128


@pytest.mark.slow
def test_the_command_prints_a_line_for_each_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CALIBRATION.save(tmp_path / "file.json")
    trace = [
        {"timestamp": 3000 * (i // 3), "input_length": 1500 + i, "output_length": 50, "hash_ids": [0, 1 + i % 2, i + 3]}
        for i in range(12)
    ]
    (tmp_path / "mooncake_conversation_trace.jsonl").write_text("\n".join(map(json.dumps, trace)))
    args = ("bench", "cluster", "--simulate", "--calibration", tmp_path / "file.json", "--num-prompts", 12)
    options = ("--replicas", "1,3", "--tier-settings", "none shared:read=1GB", "--data-dir", tmp_path)
    result = run_cli(capsys, *args, *options, "--json", "--output-dir", tmp_path / "out")
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [(x["replicas"], x["tiers"], x["routing"]) for x in lines] == [
        (n, t, r) for n in (1, 3) for t in ("none", "shared:read=1GB") for r in ROUTERS
    ]
    assert json.loads((tmp_path / "out" / "cluster.json").read_text()) == lines
    assert (tmp_path / "out" / "cluster.png").stat().st_size > 1000
    assert all(x["requests"] == 12 and x["hit_rate"] > 0.3 for x in lines)
    table = run_cli(capsys, *args, "--replicas", 2)
    assert table.code == 0 and len(table.out.splitlines()) == 1 + 3 * len(ROUTERS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "needs one of --simulate, --validate and --calibrate"),
        (["--simulate", "--validate"], "needs one of"),
        (["--simulate", "--replicas", "0"], "at least 1"),
        (["--simulate", "--routing", "best"], "unknown routing policy 'best'"),
        (["--simulate", "--tier-settings", "tape:read=1GB"], "a setting is none, or"),
        (["--simulate", "--tier-settings", "local:latency=1"], "local needs read="),
        (["--simulate", "--calibration", __file__], "is not a file of"),
        (["--simulate", "--data-dir", "/nowhere"], "no such file"),
        (["--simulate", "--kv-memory", "1MiB"], "pages of KV memory"),
        (["--validate", "--routing", "kv-aware"], "leave out kv-aware"),
        (["--simulate", "--dtype", "float32"], "--dtype is an option of --calibrate"),
        (["--validate", "--kv-memory", "1GiB"], "--kv-memory is an option of --calibrate"),
        (["--calibrate", "f", "--model", "random:tiny", "--kv-policy", "full"], "compares policies"),
    ],
)
def test_bad_input_gets_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_one_line_error(run_cli(capsys, "bench", "cluster", *options), message)


@pytest.mark.slow
def test_validation_runs_two_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The requests do not overlap. Real answers have a few tokens in common with prompts: the vocabulary is small."""
    sizes = {"page_size": 64, "max_model_len": 1024, "vocab_size": 128, "max_batched_tokens": 512}
    options = {"model": "random:tiny", "kv_memory": "64MiB", "max_model_len": 1024}
    make_calibration(**sizes, seconds=StepWork(0.001), options=options).save(tmp_path / "file.json")
    args = (
        "--calibration",
        tmp_path / "file.json",
        "--num-prompts",
        8,
        "--load",
        0.05,
        "--routing",
        "session",
        "--json",
    )
    result = run_cli(capsys, "bench", "cluster", "--validate", *args)
    real, simulated, ratio = map(json.loads, result.out.splitlines())
    assert real["requests"] == simulated["requests"] == 8
    assert real["hit_rate"] == pytest.approx(simulated["hit_rate"], abs=0.1) and simulated["hit_rate"] > 0.2
    assert ratio["hit_rate"] == pytest.approx(simulated["hit_rate"] / real["hit_rate"], abs=0.001)
