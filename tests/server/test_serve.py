"""The process of `retain serve`: start-up errors, SIGTERM, and a store on disk that survives SIGKILL."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from retain.cli.main import main
from tests.server.conftest import HTTP, wait_until

RETAIN = (sys.executable, "-m", "retain.cli")
STORY = "It was a bright cold day in April, and the clocks were striking thirteen. " * 12


class ServerProcess:
    """A process of `retain serve` that listens."""

    def __init__(self, model, *options):
        command = [*RETAIN, "serve", "--model", model, "--served-model-name", "m", "--port", "0", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.log = ""
        self.url = next(match[0] for line in self.process.stderr if (match := re.search(r"http://\S+/v1", line)))

    def post(self, **fields):
        body = {"model": "m", "prompt": STORY, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
        return HTTP.post(f"{self.url}/completions", json=body)

    def wait_for_metric(self, pattern):
        """Wait until a line of the metrics begins with the pattern."""
        url = f"{self.url.removesuffix('/v1')}/metrics"
        wait_until(lambda: re.search(f"^{pattern}", HTTP.get(url).text, re.MULTILINE), 60)

    def stop(self, signal_number):
        self.process.send_signal(signal_number)
        code = self.process.wait(120)
        self.log += self.process.stderr.read()
        self.process.stderr.close()
        return code


def start_streams(server, num_streams, executor):
    """Start long streams, two of which run at once. Returns futures of their texts."""

    def stream(i):
        body = {"model": "m", "prompt": f"{i} times", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with HTTP.stream("POST", f"{server.url}/completions", json=body) as response:
            return "".join(response.iter_text())

    streams = []
    for i in range(num_streams):
        streams.append(executor.submit(stream, i))  # in this order
        server.wait_for_metric(rf"vllm:num_requests_{('running', 'waiting')[i // 2]}{{.*}} {i % 2 + 1}.0")
    return streams


@pytest.mark.slow
def test_sigterm_finishes_running_and_waiting_requests():
    server = ServerProcess("random:tiny", "--max-running-requests", "2", "--kv-memory", "64MiB")
    with ThreadPoolExecutor(4) as executor:
        streams = start_streams(server, 4, executor)
        assert server.stop(signal.SIGTERM) == 0
        texts = [each.result() for each in streams]
    assert "draining: 4 requests in flight" in server.log and "times" not in server.log
    assert all(text.rstrip().endswith("data: [DONE]") and text.count("data: {") >= 500 for text in texts)
    with pytest.raises(httpx.ConnectError):
        server.post()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_process_at_once_with_one_line(number):
    server = ServerProcess("random:tiny", "--max-running-requests", "2", "--kv-memory", "64MiB")
    root = server.url.removesuffix("/v1")
    with ThreadPoolExecutor(3) as executor:
        streams = start_streams(server, 3, executor)
        server.process.send_signal(number)
        server.log = server.process.stderr.readline()  # a probe would be a request in flight
        assert HTTP.get(f"{root}/ready").status_code == 503
        assert server.stop(number) == 0
        assert all("the server is shutting down" in each.result() for each in streams)
    lines = [line.split(": ", 1)[1] for line in server.log.strip().splitlines()]
    assert lines == ["draining: 3 requests in flight", "a second signal: 3 requests are cut off", "shut down"]


@pytest.mark.slow
def test_disk_tier_survives_sigkill(tmp_path):
    options = ("--kv-memory", "512MiB", "--tier", f"disk:path={tmp_path / 'store'},capacity=1GiB")
    killed = ServerProcess("smollm2", *options)
    first = killed.post().json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    killed.wait_for_metric(r'retain_tier_transferred_bytes_total{direction="written",.*tier="disk"} [1-9]')
    time.sleep(1)  # until every span is written
    killed.stop(signal.SIGKILL)
    restarted = ServerProcess("smollm2", *options)
    second = restarted.post().json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert restarted.stop(signal.SIGINT) == 0


INVALID_OPTIONS = [
    (("--model", "nothing.gguf"), "nothing.gguf"),
    (("--model", "random:tiny", "--kv-policy", "lru"), "unknown KV policy"),
    (("--model", "random:tiny", "--api-keys", "/nowhere"), "nowhere"),
    (("--model", "random:tiny", "--allow-drafter", "magic"), "unknown drafter"),
    (("--model", "random:tiny", "--max-body-size", "x"), "size"),
    (("--model", "random:tiny", "--host", "0.0.0.0"), "--insecure-no-api-key"),
    (("--model", "random:tiny", "--operator", "eve"), "no API key is named 'eve'"),
]


def run_main(*arguments):
    """Run the command in this process, in a thread, because a server changes its thread's CPU affinity."""

    def run():
        try:
            return main(["serve", *arguments])
        except SystemExit as error:
            return error.code

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(run).result(120)


@pytest.mark.parametrize(("options", "expected"), INVALID_OPTIONS)
def test_invalid_option_prints_one_line(options, expected, capsys):
    assert run_main("--port", "0", "--log-level", "error", *options) == 2
    stderr = capsys.readouterr().err
    assert expected in stderr and len(stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_process_with_invalid_option_exits_with_one_line():
    """The engine is loaded, and its thread runs, when the option is found to be invalid."""
    options, expected = INVALID_OPTIONS[3]
    done = subprocess.run([*RETAIN, "serve", "--port", "0", *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and expected in done.stderr and "Traceback" not in done.stderr


def test_port_in_use_prints_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert run_main("--model", "random:tiny", "--port", str(taken.getsockname()[1])) != 0
    stderr = capsys.readouterr().err
    assert "in use" in stderr and "Traceback" not in stderr


def test_a_rank_that_dies_ends_the_server():
    """What runs is answered with 503, and the exit status is not 0."""
    server = ServerProcess("random:tiny", "--tensor-parallel", "2", "--kv-memory", "16MiB", "--max-model-len", "2048")
    assert server.post().status_code == 200
    threads = Path(f"/proc/{server.process.pid}/task").iterdir()
    children = [child for thread in threads for child in (thread / "children").read_text().split()]
    (worker,) = (child for child in children if "rank_processes" in Path(f"/proc/{child}/cmdline").read_text())
    with ThreadPoolExecutor(1) as executor:
        answer = executor.submit(server.post, max_tokens=1900)
        server.wait_for_metric(r"vllm:num_requests_running{.*} 1.0")
        os.kill(int(worker), signal.SIGKILL)
        assert answer.result().status_code == 503
    assert server.process.wait(60) == 2
    log = server.process.stderr.read()
    server.process.stderr.close()
    assert "rank 1 has ended" in log and "Traceback" not in log
