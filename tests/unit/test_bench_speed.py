"""Timing of decode steps: exactly the steps that decode and do nothing else, whatever else takes how long."""

from __future__ import annotations

import json
import random
import re
import shlex
import sys
from collections.abc import Iterator
from time import perf_counter

import pytest

from retain import LLM
from retain.bench import budget, speed
from retain.bench.bytes_read import cache_bytes_read
from retain.bench.engines import DecodeTimer
from retain.bench.speed import measure_peer
from retain.engine.engine import Engine
from retain.kv.eviction import policies
from tests.helpers.cli import run_cli

DECODE_STEP_S = 0.01  # of the fake clock; a step that computes prompts takes 0.5 to 1.5 s


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("random:tiny", kv_memory="64MiB")


class FakeClock:
    """A clock that only the steps of an engine advance: by a fixed time for decoding, by a random one for prefill."""

    def __init__(self, engine: Engine):
        self.now, self.random, self.run_step, self.engine = 0.0, random.Random(0), engine.step, engine

    def step(self) -> object:
        waiting, running = self.engine.scheduler.waiting, self.engine.scheduler.running
        computes_prompt = bool(waiting) or any(r.num_uncomputed_tokens > 1 for r in running)
        self.now += self.random.uniform(0.5, 1.5) if computes_prompt else DECODE_STEP_S
        return self.run_step()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    fake = FakeClock(llm.engine)
    monkeypatch.setattr(llm.engine, "step", fake.step)
    yield fake
    llm.cache.check()


@pytest.mark.parametrize("batch_size", [1, 4])
def test_decode_speed_does_not_depend_on_the_noise_of_prefill(llm: LLM, clock: FakeClock, batch_size: int) -> None:
    """The difference of two runs gave 64,000,000,000 and 107 tokens per second here."""
    workload = speed.Workload("some", prompt_len=600, output_len=16, batch_size=batch_size)
    row = speed.measure_workload(llm, workload, bandwidth=1e9, clock=clock)
    assert row["decode_tok_s"] == pytest.approx(batch_size / DECODE_STEP_S)
    assert row["decode_step_ms"] == pytest.approx(1e3 * DECODE_STEP_S)
    assert 0.5 < row["prefill_s"] < 1.5 * (1 + 2 * batch_size) + DECODE_STEP_S * batch_size


def test_decode_time_is_part_of_the_wall_time(llm: LLM) -> None:
    workload = speed.Workload("some", prompt_len=200, output_len=16, batch_size=2)
    started = perf_counter()
    timer = speed.time_decoding(llm, workload, seed=0)
    wall_s = perf_counter() - started
    assert timer.tokens_per_s * wall_s >= workload.output_len * workload.batch_size
    assert 0 < timer.forward_seconds < timer.seconds


@pytest.mark.parametrize(
    ("policy", "length", "tokens"),
    [
        ("full", 400, 400),
        ("h2o:budget=100,interval=20", 400, 120),
        ("h2o:budget=100,interval=20", 90, 90),
        ("ring:window=70", 400, 70),
        ("h2o:budget=100,interval=20,look=30", 400, None),
        ("look:slots=30", 400, None),
    ],
)
def test_a_step_reads_what_is_attended_to(policy: str, length: int, tokens: int | None) -> None:
    """A look reads sketches of all that is held, and what it chose; positions of all."""
    llm = LLM("random:tiny", kv_memory="32MiB", allow_policy=(policy,))
    planner = llm.cache.planner
    heads = sum(len(g.windows) * g.num_kv_heads for g in planner.spec.groups)
    (pages,) = planner.pages.formats if planner.pages else ()
    slot = sum(pages.bytes) / pages.page_size
    read = cache_bytes_read(planner, llm.cache.plan_policy(policies.parse(policy), length), length)
    held = 120 if "budget" in policy else length
    looked = 30 * slot + held * (4 + pages.sketch_bytes / pages.page_size)
    assert read == pytest.approx(heads * (looked if tokens is None else tokens * (slot + 4)))


def test_workloads_beyond_the_context_are_left_out_or_refused(llm: LLM) -> None:
    chosen = speed.fitting_workloads(speed.select_workloads([]), llm.max_model_len)
    assert [w.name for w in chosen] == ["short-1", "short-8", "short-32"]
    with pytest.raises(ValueError, match="4096 tokens and 1 more do not fit the model's context of 2048"):
        speed.measure_workload(llm, speed.WORKLOADS[3], bandwidth=1e9)


def test_batch_that_never_decodes_together_is_reported() -> None:
    small = LLM("random:tiny", kv_memory="128KiB", prefix_cache="off")
    per_request = small.cache.pages_needed(small.policy.resolve(200), 200, 200)
    batch_size = small.cache.total_pages // per_request + 1
    workload = speed.Workload("some", prompt_len=200, output_len=1, batch_size=batch_size)
    with pytest.raises(ValueError, match="never decodes together"):
        speed.time_decoding(small, workload, seed=0)


def test_timer_counts_no_step_that_admits_or_computes_prompts(llm: LLM, clock: FakeClock) -> None:
    requests = [budget._make_request(llm, 300, "full", seed, output_len=10 + 5 * seed) for seed in range(3)]
    timer = DecodeTimer(llm.engine, clock=clock)
    llm.engine.add(requests[0])
    counts = []
    for i in range(60):
        if i in (4, 9):
            llm.engine.add(requests[1 + (i == 9)])
        timer.step()
        counts.append((timer.num_steps, timer.num_tokens))
    assert counts[0] == (0, 0) and counts[3] == (3, 3) == counts[4]  # a prompt beside a request that decodes
    assert timer.seconds == pytest.approx(timer.num_steps * DECODE_STEP_S)
    assert timer.num_tokens == sum(10 + 5 * seed for seed in range(3)) - 6  # all but those of the three prompt steps
    assert timer.host_share == 1  # on this clock the model takes no time
    timer.min_batch = 2
    assert timer.tokens_per_s == pytest.approx(timer.num_tokens / timer.seconds)


def test_throughput_times_decode_steps_alone(llm: LLM) -> None:
    lines = list(budget.measure_throughput(llm, prompt_len=100, output_len=8, num_requests=5))
    assert lines[0]["policy"] == "full" and lines[0]["decode_speedup_over_full"] == 1
    for line in lines:
        assert line["tok_s"] > 0 and line["decode_tok_s"] > 0 and line["max_running"] == 5
    assert llm.cache.free_pages == llm.cache.total_pages


@pytest.mark.slow
@pytest.mark.usefixtures("shared_engines")
def test_bench_speed_prints_json_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "WORKLOADS", (speed.Workload("short-1", 20, 3, 2),))
    code, out, _ = run_cli(capsys, "bench", "speed", "--model", "random:tiny", "--workloads", "short-1", "--json")
    row = json.loads(out)
    keys = "engine workload prompt new batch prefill_s prefill_tok_s decode_tok_s decode_step_ms host_share"
    keys += " read_mb bandwidth note"
    assert code == 0 and set(row) == set(keys.split()) and row["decode_tok_s"] > 0


# Another engine


def peer_command(code: str) -> str:
    return shlex.join([sys.executable, "-c", code])


PRINT_ROW = """
import json, sys
print("loading")
print(json.dumps({"engine": "other 1.0", "workload": sys.argv[1], "prefill_tok_s": 50.0, "decode_tok_s": 4}))
"""


@pytest.mark.slow
def test_a_peer_runs_beside_every_workload(capsys: pytest.CaptureFixture[str]) -> None:
    command = peer_command(PRINT_ROW)
    bench = ("bench", "speed", "--model", "random:tiny", "--workloads", "short-1", "--peer", command)
    ours, other, ratios = (json.loads(line) for line in run_cli(capsys, *bench, "--json").out.splitlines())
    assert other["engine"] == ratios["peer"] == "other 1.0"
    assert ratios["prefill_ratio"] == pytest.approx(ours["prefill_tok_s"] / 50, abs=0.001)
    assert ratios["decode_ratio"] == pytest.approx(ours["decode_tok_s"] / 4, abs=0.001)
    assert "x the decoding of other 1.0" in run_cli(capsys, *bench).out


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-engine", "cannot be run"),
        ("'", "cannot be run: No closing quotation"),
        (peer_command("raise SystemExit('no such model')"), "ends with exit code 1 on short-1: no such model"),
        (peer_command('print(\'{"workload": "short-1"}\')'), "prints no prefill_tok_s and decode_tok_s for short-1"),
    ],
)
def test_a_failing_peer_is_reported_in_a_line(command: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        measure_peer(command, "short-1")


def test_a_peer_may_skip_a_workload() -> None:
    assert measure_peer(peer_command("print(1); print('[]')"), "short-8") is None


@pytest.mark.slow
def test_precision_bench_fits_as_many_requests_as_bytes_say(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("bench", "precision", "--model", "random:tiny", "--num-repeats", 1, "--prompt-len", 100)
    lines = [json.loads(line) for line in run_cli(capsys, *args, "--json").out.splitlines()]
    assert [line["kv_dtype"] for line in lines] == 3 * ["bfloat16", "int8", "k8v4"]
    for line in lines[-3:]:
        assert line["ratio"] == pytest.approx(line["expected_ratio"], rel=0.05)
        assert line["max_running"] == int(line["requests_fit"]) and not line["num_preemptions"]


def test_precision_bench_runs_each_policy_in_the_dtypes_that_can_have_it(capsys: pytest.CaptureFixture[str]) -> None:
    demoting = "sinks:budget=16,prefill=stream,demote=int4"
    args = ("--num-repeats", 1, "--prompt-len", 100, "--measurements", "decode", "--policies", f"full {demoting}")
    printed = run_cli(
        capsys, "bench", "precision", "--model", "random:tiny", *args, "--kv-dtypes", "int8,int4", "--json"
    )
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [(n["kv_dtype"], n["policy"]) for n in lines] == [("int8", "full"), ("int8", demoting), ("int4", "full")]
