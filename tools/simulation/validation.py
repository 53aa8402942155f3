"""`python -m tools.simulation --validate`: the same requests on two real replicas and on two simulated ones.

A real replica is a `retain serve` process with one thread, bound to a core of its own. The bench routes as a client,
with the policy and the seed of the simulation, and times what its users would see.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from itertools import chain
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import aiohttp
import numpy as np

from tools.load import RequestTiming, TimedRequest, send_request
from tools.simulation.calibration import Calibration
from tools.simulation.config import SimulationConfig
from tools.simulation.routing import Router, router_class
from tools.simulation.simulator import Cluster
from tools.simulation.trace import TracedRequest, generate_conversations, scale_arrivals

Line = dict[str, Any]
NUM_REPLICAS, NUM_PROMPTS = 2, 40
SERVED_NAME = "model"
START_TIMEOUT, STOP_TIMEOUT = 120.0, 20.0  # seconds
COMPARED = ("hit_rate", "ttft_p50_ms", "ttft_p99_ms", "duration_s", "busy_s")


@dataclass(frozen=True)
class Outcome:
    """What one request met; times are seconds from the start."""

    arrival_time: float
    first_token_time: float
    finish_time: float
    cached_tokens: int


def run(config: SimulationConfig, calibration: Calibration) -> Iterator[Line]:
    """Yield three lines for each routing policy: real, simulated, and their ratios. Raises OSError or ValueError."""
    if (os.cpu_count() or 1) < NUM_REPLICAS:
        raise ValueError(f"--validate needs {NUM_REPLICAS} cores, one for each replica")
    if calibration.num_threads != 1:
        raise ValueError("--validate runs replicas of one core: calibrate with OMP_NUM_THREADS=1, on one core")
    requests = generate_conversations(config.num_prompts or NUM_PROMPTS, config.seed, calibration)
    requests = scale_arrivals(requests, calibration, NUM_REPLICAS, config.load)
    for routing in config.routing or ("session",):
        if routing == "kv-aware":
            raise ValueError("--validate routes as a client, which sees no caches: leave out kv-aware")
        with ExitStack() as running:
            replicas = [running.enter_context(run_replica(calibration, core)) for core in range(NUM_REPLICAS)]
            real, busy_s = asyncio.run(drive(replicas, requests, router_class(routing)(NUM_REPLICAS, config.seed)))
        cluster = Cluster(calibration, router_class(routing)(NUM_REPLICAS, config.seed), {})
        simulated = [
            Outcome(s.arrival_time, s.first_token_time, s.finish_time, s.num_cached_tokens)
            for s in (r.stats for r in cluster.run(requests))
        ]
        simulated_busy_s = sum(replica.busy_seconds for replica in cluster.replicas)
        lines = [summarize(requests, real, busy_s), summarize(requests, simulated, simulated_busy_s)]
        ratios = {name: round(lines[1][name] / lines[0][name], 3) for name in COMPARED}
        for name, line in zip(("real", "simulated", "simulated / real"), [*lines, ratios], strict=True):
            yield {"routing": routing, "replicas": name, **line}


def summarize(requests: Sequence[TracedRequest], outcomes: Sequence[Outcome], busy_s: float) -> Line:
    """Return the figures that are compared. `busy_s` are the seconds that all replicas computed.

    Of real replicas it is their time on the processor: unlike the others it does not depend on what else runs.
    """
    ttft_ms = [1e3 * (o.first_token_time - o.arrival_time) for o in outcomes]
    prompt_tokens = sum(len(r.prompt) for r in requests)
    return {
        "requests": len(requests),
        "hit_rate": round(sum(o.cached_tokens for o in outcomes) / prompt_tokens, 4),
        "ttft_p50_ms": round(float(np.quantile(ttft_ms, 0.5)), 1),
        "ttft_p99_ms": round(float(np.quantile(ttft_ms, 0.99)), 1),
        "duration_s": round(max(o.finish_time for o in outcomes), 2),
        "busy_s": round(busy_s, 2),
    }


@dataclass(frozen=True)
class RealReplica:
    """A process that serves a model."""

    url: str  # base URL
    pid: int

    @property
    def processor_seconds(self) -> float:
        """Time of all its threads on a processor so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def run_replica(calibration: Calibration, core: int) -> Iterator[RealReplica]:
    """Serve the model of a calibration on one core. Raises OSError where it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = ((f"--{name.replace('_', '-')}", str(value)) for name, value in calibration.options.items())
    command = [sys.executable, "-m", "retain.cli", "serve", *chain.from_iterable(given)]
    command += ["--port", str(port), "--served-model-name", SERVED_NAME, "--log-level", "warning"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    try:
        os.sched_setaffinity(process.pid, {core})  # before it has threads, which inherit it
        _wait_until_ready(process, port)
        yield RealReplica(f"http://127.0.0.1:{port}/v1", process.pid)
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    end = monotonic() + START_TIMEOUT
    while process.poll() is None and monotonic() < end:
        with closing(HTTPConnection("127.0.0.1", port, timeout=1)) as connection, suppress(OSError):
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        sleep(0.1)
    raise OSError("a replica for --validate did not start")


async def drive(
    replicas: Sequence[RealReplica], requests: Sequence[TracedRequest], router: Router
) -> tuple[list[Outcome], float]:
    """Send requests when they are due, each to the replica that the router chooses then.

    Returns also the seconds that the replicas spent on them on the processor. Raises ValueError.
    """
    loads = [0] * len(replicas)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        for replica in replicas:  # the first request of a process takes longer
            await send_request(session, replica.url, SERVED_NAME, TimedRequest(0.0, [5] * 8, 4), perf_counter())
        busy_before, started = sum(r.processor_seconds for r in replicas), perf_counter()

        async def send_when_due(traced: TracedRequest) -> Outcome:
            due = started + traced.arrival_time
            await asyncio.sleep(max(due - perf_counter(), 0))
            chosen = router.choose(traced, loads)
            loads[chosen] += 1
            request = TimedRequest(traced.arrival_time, traced.prompt.tolist(), traced.output_len)
            timing = await send_request(session, replicas[chosen].url, SERVED_NAME, request, due)
            loads[chosen] -= 1
            return _outcome(traced, timing)

        outcomes = await asyncio.gather(*map(send_when_due, requests))
        return outcomes, sum(r.processor_seconds for r in replicas) - busy_before


def _outcome(traced: TracedRequest, timing: RequestTiming) -> Outcome:
    if timing.error:
        raise ValueError(f"a replica answered with an error: {timing.error}")
    due = traced.arrival_time
    return Outcome(due, due + timing.ttft, due + timing.latency, timing.cached_tokens)
