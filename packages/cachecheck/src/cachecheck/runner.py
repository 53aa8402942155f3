"""Run the checks against a server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from cachecheck.capabilities import detect_capabilities
from cachecheck.checks import choose_checks, load_check
from cachecheck.client import ServerClient, Transport, find_api
from cachecheck.commands import Commands, run_in_shell
from cachecheck.config import CachecheckConfig
from cachecheck.probe import Probe
from cachecheck.report import CheckReport
from cachecheck.results import Case, CheckResult, Outcome, SkipCheck, confirm
from cachecheck.server import Server
from cachecheck.texts import PromptSource

NUM_RUNS = 3  # of a check whose differences need confirmation
MAX_SEED = 2**31


@dataclass(frozen=True)
class RunEnvironment:
    """What a run does besides asking: how it reaches the server, runs commands and reports its progress."""

    transport: Transport = field(default_factory=Transport)
    run_command: Callable[[str, float], None] = run_in_shell
    report_progress: Callable[[str], None] = lambda line: None


def run_checks(
    url: str, config: CachecheckConfig, keys: Sequence[str | None], environment: RunEnvironment
) -> CheckReport:
    """Run the checks that were asked for. Raises ValueError where the server does not answer."""
    names = choose_checks(config.checks)
    seed = random.randrange(MAX_SEED) if config.seed is None else config.seed
    api = find_api(url, keys[0], config.timeout, environment.transport)
    clients = [ServerClient(api, key, config.timeout, environment.transport) for key in keys]
    try:
        commands = Commands(config, clients[0].first_model, environment.run_command)
        server = _inspect_server(clients, config, commands, seed)
        environment.report_progress(f"{server.model}, seed {seed}, cold answers by {server.cold.name or 'order only'}")
        results = []
        for name in names:
            results.append(_run_check(name, server, seed))
            environment.report_progress(f"{name}: {results[-1].verdict}, {results[-1].num_requests} requests")
        return CheckReport(api, server, seed, results)
    finally:
        for client in clients:
            client.close()


def _inspect_server(clients: Sequence[ServerClient], config: CachecheckConfig, commands: Commands, seed: int) -> Server:
    """Find out what the server offers, and how much its answers to repeated requests differ."""
    model = config.model or clients[0].first_model()
    capabilities = detect_capabilities(clients[0], model, seed)
    if config.seed is not None and capabilities.is_warm:
        raise ValueError(f"the server has cached the texts of --seed {seed}: restart it, or choose another seed")
    server = Server(clients, model, config, capabilities, commands)
    server.noise = server.measure_noise(PromptSource(f"{seed} noise", capabilities.endpoint))
    return server


def _run_check(name: str, server: Server, seed: int) -> CheckResult:
    """Run a check, and again on other texts as long as it finds differences that need confirmation."""
    check = load_check(name)
    result = CheckResult(name)
    start = time.perf_counter()
    num_requests = server.num_requests
    num_hits = server.num_hits
    runs: list[list[Case]] = []
    try:
        while len(runs) < NUM_RUNS and (not runs or any(case.needs_confirmation for case in runs[-1])):
            texts = PromptSource(f"{seed} {name} {len(runs)}", server.capabilities.endpoint, server.capabilities.factor)
            runs.append(_run_once(check, Probe(server, texts)))
        result.cases = confirm(runs)
        has_fault = any(case.outcome == Outcome.FAULT for case in result.cases)
        asked = server.num_requests > num_requests
        if server.capabilities.counts_cached and asked and server.num_hits == num_hits and not has_fault:
            result.cases.append(Case("hits", Outcome.UNSURE, "no request of this check found anything in the cache"))
    except SkipCheck as reason:
        result.skipped = str(reason)
    except ValueError as error:  # of one request; what was found before stays
        faults = (case for run in runs for case in run if case.outcome == Outcome.FAULT)
        result.cases = [case for case in faults if not case.needs_confirmation]
        result.error = str(error)
    result.num_requests = server.num_requests - num_requests
    result.seconds = time.perf_counter() - start
    return result


def _run_once(check: ModuleType, probe: Probe) -> list[Case]:
    check.run(probe)
    probe.settle()
    return probe.cases
