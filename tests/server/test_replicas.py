"""Two tiny replicas of `retain cluster up`, then one in their place.

The tests share one cluster and run in order; the last one stops it.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import ray
from ray import serve

from retain.cli.cluster import build
from tests.helpers.file_modes import open_to_others
from tests.server.conftest import HTTP, wait_until
from tests.server.test_routers import find_free_ports

pytestmark = pytest.mark.slow
OPTIONS = {
    "model": "random:tiny",
    "kv_memory": "64MiB",
    "max_running_requests": 4,
    "max_queued_requests": 2,
}
STREAM_TOKENS = 1900
ENGINE_NAME = "ray::ServeReplica:retain:replica"


class Cluster:
    """The processes of `retain cluster up` with two replicas, and requests to them."""

    def __init__(self, folder: Path):
        options = [text for name, value in OPTIONS.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "retain.cli", "cluster", "up", *options, "--replicas", "2"]
        command += ["--port", str(find_free_ports(1)[0])]
        environment = {**os.environ, "TMPDIR": str(folder), "RETAIN_CACHE": str(folder / "cache")}
        self.folder = folder
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, umask=0)
        self.log: list[str] = []
        url: Future[str] = Future()
        self._reader = threading.Thread(target=self._read_log, args=(url,), daemon=True)
        self._reader.start()
        try:
            self.url = url.result(180)
        except BaseException:
            self.process.terminate()  # it stops what it has started
            self.process.wait(60)
            raise

    def _read_log(self, url: "Future[str]") -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(r"serving \S+ at (http://\S+/v1)", line):
                url.set_result(match[1])
        if not url.done():
            url.set_exception(AssertionError("".join(self.log)))

    def post(self, session: str = "", prompt: str = "x", max_tokens: int = 2) -> httpx.Response:
        body = {"model": "random:tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        return HTTP.post(f"{self.url}/completions", json=body, headers={"x-session-id": session} if session else {})

    def start_stream(self, executor: ThreadPoolExecutor, session: str) -> "Future[tuple[int, bool]]":
        """Start a stream in a thread. Returns when its first chunk is there, or when it has ended without one."""
        started = threading.Event()
        stream = executor.submit(self._stream, session, started)
        stream.add_done_callback(lambda _: started.set())
        assert started.wait(120)
        return stream

    def _stream(self, session: str, started: threading.Event) -> tuple[int, bool]:
        """Return the number of tokens that a stream brought, and whether it ended as it should."""
        body = {"model": "random:tiny", "prompt": session, "max_tokens": STREAM_TOKENS, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        text = ""
        try:
            with HTTP.stream(
                "POST", f"{self.url}/completions", json=body, headers={"x-session-id": session}
            ) as response:
                for part in response.iter_text():
                    text += part
                    started.set()
        except httpx.HTTPError:
            return 0, False
        usage = re.search(r'"completion_tokens":(\d+)', text)
        return int(usage[1]) if usage else 0, text.rstrip().endswith("data: [DONE]")

    def metric(self, name: str) -> dict[str, float]:
        """Return a metric of each replica: sums over its other labels."""
        found: dict[str, float] = {}
        page = HTTP.get(f"{self.url.removesuffix('/v1')}/metrics").text
        for replica, value in re.findall(rf'^vllm:{name}{{.*replica="(\w+)".*}} (\S+)$', page, re.MULTILINE):
            found[replica] = found.get(replica, 0.0) + float(value)
        return found

    def wait_for_metric(self, name: str, condition: Callable[[list[float]], bool]) -> None:
        """Wait until the values of the replicas meet a condition. Asks seldom: replicas that start need the cores."""
        end = time.monotonic() + 120
        while not condition(list(self.metric(name).values())):
            assert time.monotonic() < end
            time.sleep(0.2)

    def count(self, function: Callable[[], object]) -> list[float]:
        """Return how many requests each replica finished while a function ran."""
        before = self.metric("request_prompt_tokens_count")
        function()
        after = self.metric("request_prompt_tokens_count")
        return [after[replica] - before.get(replica, 0) for replica in after]

    def processes(self, name: str = "") -> dict[int, str]:
        """Return the command line of each process below the command whose own begins so."""
        parents, names = {}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                pid, (state, parent) = int(stat.parent.name), stat.read_text().rpartition(")")[2].split()[:2]
                names[pid] = (stat.parent / "cmdline").read_text()
            except OSError:
                continue
            if state != "Z":
                parents[pid] = int(parent)
        below = {self.process.pid}
        while more := {pid for pid, parent in parents.items() if parent in below} - below:
            below |= more
        return {pid: names[pid] for pid in below - {self.process.pid} if names[pid].startswith(name)}

    def deploy(self, **options: object) -> None:
        """Deploy the application anew, from this process. Returns when its replicas run."""
        names = self.processes().values()
        (address,) = {m[1] for name in names if (m := re.search(r"--gcs-address=(\S+?)\0", name))}
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        serve.run(build({**OPTIONS, **options}), name="retain")
        ray.shutdown()  # a process that is connected when the cluster ends is ended with it


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="rc", dir="/tmp"))  # short: paths of sockets are
    running = Cluster(folder)
    yield running
    running.process.kill()
    running.process.wait(30)
    shutil.rmtree(folder, ignore_errors=True)


def in_threads(function: Callable[[str], object], names: list[str]) -> list:
    with ThreadPoolExecutor(len(names)) as executor:
        return list(executor.map(function, names))


def test_openais_client_answers_and_streams(cluster):
    client = openai.OpenAI(base_url=cluster.url, api_key="none")
    options = {"model": "random:tiny", "prompt": "Once", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**options)
    chunks = list(client.completions.create(**options, stream=True))
    assert whole.usage.completion_tokens == 20 and len(chunks) > 10
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text


def test_what_ray_starts_has_the_priority_of_the_command(cluster):
    priorities = {os.getpriority(os.PRIO_PROCESS, pid) for pid in cluster.processes("ray::")}
    assert priorities == {os.getpriority(os.PRIO_PROCESS, cluster.process.pid)}


def test_a_session_stays_on_its_replica_and_sessions_spread(cluster):
    one = cluster.count(lambda: [cluster.post("alice") for _ in range(6)])
    many = cluster.count(lambda: [cluster.post(f"session {i}") for i in range(24)])
    assert sorted(one) == [0, 6]
    assert sum(many) == 24 and min(many) > 0


def test_a_hang_up_cancels_the_request(cluster):
    body = {"model": "random:tiny", "prompt": "x", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", f"{cluster.url}/completions", json=body) as response:
        assert "data: {" in next(response.iter_text())  # chunk by chunk, and then this client hangs up
    cluster.wait_for_metric("num_requests_running", lambda running: sum(running) == 0)
    page = HTTP.get(f"{cluster.url.removesuffix('/v1')}/metrics").text
    assert re.search(r'finished_reason="abort",.*} 1\.0', page)


def test_the_replica_answers_429(cluster):
    # Long answers to many requests: on a busy machine they come in one after the other, and must still meet.
    responses = in_threads(lambda _: cluster.post("bob", max_tokens=STREAM_TOKENS), ["bob"] * 24)
    refused = [r for r in responses if r.status_code != 200]
    assert refused and len(responses) - len(refused) >= 6
    for response in refused:
        assert response.status_code == 429 and response.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(response.headers["Retry-After"]) > 0


def test_a_killed_replica_loses_only_what_ran_there(cluster):
    first = cluster.processes(ENGINE_NAME)
    assert len(first) == 2
    sessions: dict[int, str] = {}  # one on each replica
    names = (f"session {i}" for i in range(24))
    while len(sessions) < 2:
        session = next(names)
        sessions[cluster.count(lambda session=session: cluster.post(session)).index(1)] = session
    with ThreadPoolExecutor(2) as executor:
        streams = [cluster.start_stream(executor, session) for session in sessions.values()]
        os.kill(min(first), signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{min(first)}").exists())  # until then it accepts requests, and loses them
        assert [cluster.post(session).status_code for session in sessions.values()] == [200, 200]
    assert sorted(s.result() for s in streams) == [(0, False), (STREAM_TOKENS, True)]
    cluster.wait_for_metric("num_requests_running", lambda running: len(running) == 2)
    assert len(cluster.processes(ENGINE_NAME).keys() - first) == 1


def test_scaling_down_loses_no_chunk(cluster):
    with ThreadPoolExecutor(4) as executor:
        streams = [cluster.start_stream(executor, f"session {i}") for i in range(4)]
        cluster.deploy(replicas=1)
    assert [s.result() for s in streams] == [(STREAM_TOKENS, True)] * 4
    cluster.wait_for_metric("num_requests_running", lambda running: len(running) == 1)


def test_others_reach_nothing_that_a_cluster_writes(cluster):
    """Its processes run under a umask that gives every file to everybody."""
    assert list(cluster.folder.rglob("raylet")) and not open_to_others(cluster.folder)


def test_sigterm_drains_and_leaves_nothing(cluster):
    processes = cluster.processes()
    with ThreadPoolExecutor(1) as executor:
        stream = cluster.start_stream(executor, "last")
        cluster.process.send_signal(signal.SIGTERM)
        assert stream.result() == (STREAM_TOKENS, True)
    assert cluster.process.wait(60) == 0
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    assert not list(cluster.folder.glob("retain-ray-*"))
    assert "Traceback" not in "".join(cluster.log)
