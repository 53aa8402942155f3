"""The process: how it begins, what SIGTERM does to who runs and who waits, and that a store outlives SIGKILL."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

RETAIN = Path(sys.executable).parent / "retain"
STORY = "It was a bright cold day in April, and the clocks were striking thirteen. " * 12


class ServerProcess:
    """`retain serve` of SmolLM2, listening."""

    def __init__(self, *options, log=None):
        command = [RETAIN, "serve", "--model", "smollm2", "--port", "0", "--kv-memory", "512MiB", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.url = None
        for line in self.process.stderr:
            if match := re.search(r"http://\S+/v1", line):
                self.url = match[0]
                break
        assert self.url

    def post(self, **fields):
        body = {"model": "smollm2", "prompt": STORY, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
        return httpx.post(f"{self.url}/completions", json=body, timeout=120)

    def wait_for_metric(self, pattern):
        """Wait for a line of its metrics that begins so."""
        deadline, root = time.monotonic() + 60, self.url.removesuffix("/v1")
        while not re.search(f"^{pattern}", httpx.get(f"{root}/metrics").text, re.MULTILINE):
            assert time.monotonic() < deadline, pattern
            time.sleep(0.05)

    def stop(self, signal_number):
        self.process.send_signal(signal_number)
        code = self.process.wait(120)
        self.process.stderr.close()
        return code


def test_sigterm_finishes_running_and_rejects_waiting():
    server = ServerProcess("--max-requests", "2")
    texts, codes = {}, {}

    def stream(i):
        body = {"model": "smollm2", "prompt": f"{i} {STORY}", "max_tokens": 700, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/completions", json=body, timeout=120) as said:
            codes[i] = said.status_code
            texts[i] = "".join(said.iter_text())

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(4)]
    for t, says in zip(threads, ("running 1.0", "running 2.0", "waiting 1.0", "waiting 2.0"), strict=True):
        t.start()  # in this order
        server.wait_for_metric(f"retain_num_requests_{says}")
    assert server.stop(signal.SIGTERM) == 0
    for t in threads:
        t.join()
    for i in (0, 1):
        assert texts[i].rstrip().endswith("data: [DONE]") and texts[i].count("data: {") >= 500
    for i in (2, 3):
        assert "going away" in texts[i] and "[DONE]" not in texts[i]
    with pytest.raises(httpx.ConnectError):
        server.post()


def test_disk_tier_survives_sigkill(tmp_path):
    tier = ("--tier", f"disk:path={tmp_path / 'store'},capacity=1GiB")
    first = ServerProcess(*tier)
    said = first.post().json()
    assert said["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    first.wait_for_metric(r'retain_tier_total{tier="disk",what="written"} [1-9]')
    time.sleep(1)  # every span of it
    first.stop(signal.SIGKILL)
    again = ServerProcess(*tier)
    told = again.post().json()
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert told["choices"][0]["text"] == said["choices"][0]["text"]
    assert again.stop(signal.SIGINT) == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--model", "nothing.gguf"), "nothing.gguf"),
        (("--model", "smollm2", "--kv-policy", "lru"), "unknown KV policy"),
        (("--model", "smollm2", "--api-keys", "/nowhere"), "nowhere"),
        (("--model", "smollm2", "--drafter", "magic"), "unknown drafter"),
        (("--model", "smollm2", "--body", "x"), "size"),
    ],
)
def test_invalid_option_prints_one_line(options, expected):
    done = subprocess.run([RETAIN, "serve", "--port", "0", *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and expected in done.stderr
    assert "Traceback" not in done.stderr


def test_port_in_use_prints_one_line():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [RETAIN, "serve", "--model", "smollm2", "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "in use" in done.stderr and "Traceback" not in done.stderr
