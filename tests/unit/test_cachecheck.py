"""`retain cachecheck` finds every planted fault by its checks, and none in servers without faults."""

import httpx
import pytest

from retain.cachecheck.client import Transport
from retain.cachecheck.config import CachecheckConfig
from retain.cachecheck.results import Outcome
from retain.cachecheck.runner import Surroundings, run_checks
from tests.helpers import fake_cache_server as fake

KEYS = ("sk-one", "sk-two")
COMMANDS = {"restart_command": "restart", "reload_command": "reload"}
FOUND_BY = {
    fake.StaleAfterEdit: {"edits"},
    fake.OffByOneAtBlockEnd: {"lengths"},
    fake.HitIgnoresSalt: {"salts"},
    fake.HitIgnoresKey: {"keys"},
    fake.WrongPositionsAfterHit: {"lengths"},
    fake.PartialBlockShared: {"lengths"},
    fake.ConcurrentSwap: {"concurrency"},
    fake.StreamDropsLast: {"streams"},
    fake.UsageClaimsHits: {"usage"},
    fake.SurvivesReload: {"reload"},
    fake.SiblingTail: {"branches"},
    fake.OtherLogprobsOnHit: {"logprobs"},
}


def check(server, url="http://fake/v1", keys=KEYS, **options):
    """Run checks against a fake server."""

    def run_command(command, timeout):
        {"flush": server.flush, "restart": server.flush, "reload": server.reload}[command]()

    transport = Transport(httpx.MockTransport(server.handle), lambda: server.now)
    config = CachecheckConfig(**{"seed": 7, **COMMANDS, **options})
    return run_checks(url, config, keys, Surroundings(transport, run_command))


def faults(report):
    """Return the names of the checks that found a fault."""
    return {result.name for result in report.results if result.outcome == Outcome.FAULT}


def test_a_server_without_faults_passes_every_check():
    report = check(fake.FakeServer())
    assert {result.outcome for result in report.results} == {Outcome.PASSED} and report.exit_code == 0


@pytest.mark.parametrize("server", FOUND_BY, ids=lambda cls: cls.__name__)
def test_every_planted_fault_is_found_by_its_check(server):
    report = check(server())
    assert faults(report) >= FOUND_BY[server] and report.exit_code == 1
