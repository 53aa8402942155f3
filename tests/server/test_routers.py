"""vllm-router in front of two replicas: chats stream through, and requests go to where their beginning is."""

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import openai
import pytest

from retain.server.launch import GracefulServer
from retain.server.observers.metrics import Metrics
from tests.server.conftest import HTTP, run_tiny_server, wait_until

HITS = ("vllm_router_kv_placement_lookups_total", "hit")
ROUTER = Path(sys.executable).parent / "vllm-router"
pytestmark = pytest.mark.skipif(not ROUTER.exists(), reason="vllm-router is not installed")


def find_free_ports(n: int) -> list[int]:
    """Return ports that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in sockets]


class Routed(NamedTuple):
    """A running router and the replicas behind it."""

    url: str  # ends in /v1
    metrics_url: str
    servers: list[GracefulServer]

    def metric(self, name: str, label: str) -> float:
        """Return a number of the router's, 0 where it has none yet."""
        found = re.search(rf"^{name}{{[^}}]*{label}[^}}]*}} (\S+)$", HTTP.get(self.metrics_url).text, re.M)
        return float(found[1]) if found else 0.0

    def num_prompt_tokens(self) -> list[int]:
        """Return how many prompt tokens each replica has been given so far."""
        observers = [observer for s in self.servers for observer in s.service.engine_thread.observers]
        return [int(o.prompt_tokens._value.get()) for o in observers if isinstance(o, Metrics)]


@contextmanager
def run_router(policy: str, *options: str, kv_events: bool = False) -> Iterator[Routed]:
    """Run a router and two replicas on this machine until the block ends."""
    with ExitStack() as stack:
        ports = find_free_ports(6)
        servers = []
        for port in ports[:2]:
            spec = {"kv_events": f"tcp://127.0.0.1:{port},replay={ports[2 + len(servers)]}"} if kv_events else {}
            servers.append(stack.enter_context(run_tiny_server(**spec)))
        workers = [s.url.removesuffix("/v1") for s in servers]
        command = [
            ROUTER,
            "--host",
            "127.0.0.1",
            "--port",
            str(ports[4]),
            "--policy",
            policy,
            "--worker-urls",
            *workers,
        ]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports[5])]
        command += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "1", *options]
        if kv_events:
            command += ["--kv-event-block-size", "64", "--kv-event-model", "smollm2"]
            for worker, port, replay in zip(workers, ports, ports[2:], strict=False):
                command += ["--kv-event-source", f"{worker}=tcp://127.0.0.1:{port}"]
                command += ["--kv-event-replay-source", f"{worker}=tcp://127.0.0.1:{replay}"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        stack.callback(process.communicate)
        stack.callback(process.terminate)
        url = f"http://127.0.0.1:{ports[4]}"
        wait_until(lambda: is_up(f"{url}/health"))
        yield Routed(f"{url}/v1", f"http://127.0.0.1:{ports[5]}/metrics", servers)


def is_up(url: str) -> bool:
    try:
        return HTTP.get(url).status_code == 200
    except httpx.TransportError:
        return False


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def ask(router: Routed, prompt: str) -> tuple[int, int]:
    """Ask for one token. Returns the replica that answered, and the prompt tokens that it had cached."""
    before = router.num_prompt_tokens()
    usage = connect(router.url).completions.create(model="smollm2", prompt=prompt, max_tokens=1, temperature=0).usage
    wait_until(lambda: sum(router.num_prompt_tokens()) == sum(before) + usage.prompt_tokens)
    (replica,) = (i for i, (x, y) in enumerate(zip(before, router.num_prompt_tokens(), strict=True)) if x != y)
    return replica, usage.prompt_tokens_details.cached_tokens


@contextmanager
def busy_replica(router: Routed, prompt: str) -> Iterator[int]:
    """Keep a request in flight until the block ends. Returns the replica that answers it."""
    options = {"model": "smollm2", "prompt": prompt, "max_tokens": 1600, "extra_body": {"ignore_eos": True}}
    before = router.num_prompt_tokens()
    with connect(router.url).completions.create(**options, stream=True) as stream:
        next(iter(stream))
        wait_until(lambda: router.num_prompt_tokens() != before)  # counted behind the first token
        yield next(i for i, s in enumerate(router.servers) if s.service.admission.num_in_flight)
    wait_until(lambda: not any(s.service.llm.engine.has_unfinished_requests for s in router.servers))


@pytest.fixture(scope="module")
def cache_aware() -> Iterator[Routed]:
    with run_router("cache_aware", "--health-failure-threshold", "1", "--health-success-threshold", "1") as router:
        yield router


@pytest.mark.slow
def test_chats_stream_through_a_router(cache_aware):
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "Tell me"}], "max_tokens": 20}
    body |= {"temperature": 0, "extra_body": {"ignore_eos": True}}
    direct = connect(cache_aware.servers[0].url).chat.completions.create(**body).choices[0].message.content
    chunks = list(connect(cache_aware.url).chat.completions.create(**body, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == direct and len(chunks) > 5
    assert connect(cache_aware.url).chat.completions.create(**body).choices[0].message.content == direct


def test_a_router_routes_by_rendered_tokens(cache_aware):
    ask(cache_aware, "a" * 300)
    assert cache_aware.metric("vllm_router_kv_routing_inputs_total", "render")
    assert not cache_aware.metric("vllm_router_kv_routing_inputs_total", "tokenize")
    assert ask(cache_aware, "a" * 300 + "b")[1] >= 256


def test_a_full_server_tells_through_a_router_when_to_retry(cache_aware, monkeypatch):
    for server in cache_aware.servers:
        monkeypatch.setattr(server.service.admission, "max_in_flight", 0)
    with pytest.raises(openai.RateLimitError) as error:
        ask(cache_aware, "x")
    assert int(error.value.response.headers["retry-after"]) >= 1


def test_a_router_sends_nothing_to_a_draining_replica(cache_aware, monkeypatch):
    draining = cache_aware.servers[0]
    worker = re.escape(draining.url.removesuffix("/v1"))
    with monkeypatch.context() as patch:
        patch.setattr(draining.service.admission, "closed", True)
        wait_until(lambda: not cache_aware.metric("vllm_router_worker_health", worker))
        num_rejected = draining.service.admission.num_rejected.total()
        assert {ask(cache_aware, f"{i}" * 300)[0] for i in range(4)} == {1}
        assert draining.service.admission.num_rejected.total() == num_rejected
    wait_until(lambda: cache_aware.metric("vllm_router_worker_health", worker))


@pytest.mark.slow
def test_a_router_that_gets_events_finds_the_replica_that_has_a_prefix():
    """A new prefix goes to the replica that is less busy; afterwards each goes to where its beginning is."""
    with run_router("kv_aware", kv_events=True) as router:
        first, second = "a" * 400, "b" * 400
        with busy_replica(router, first) as home_of_first:
            home_of_second, cached = ask(router, second)
            assert home_of_second != home_of_first and cached == 0
            wait_until(lambda: ask(router, second)[1] and router.metric(*HITS))  # until the router has the events
        for i in range(3):
            assert ask(router, f"{first}{i}") == (home_of_first, 400)
            assert ask(router, f"{second}{i}") == (home_of_second, 400)
        assert router.metric(*HITS) >= 6
