"""The command: its arguments, addresses, output and exit codes; bad input is one line."""

import dataclasses
import json
import math
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from cachecheck.client import ServerClient, Transport, find_api
from cachecheck.command import main
from cachecheck.config import CachecheckConfig, Number
from cachecheck.terminal import CONTROLS, escape_controls
from cachecheck.texts import Prompt
from fake_cache_server import FakeServer, StreamDropsLast

CLOSED = "http://127.0.0.1:1"
KINDS = {field.name: field.metadata["kind"] for field in dataclasses.fields(CachecheckConfig)}
NUMBERS = {name: kind for name, kind in KINDS.items() if isinstance(kind, Number)}
START = "import sys; sys.path[:] = sys.argv.pop(1).split('|'); from cachecheck.command import main; sys.exit(main())"


@contextmanager
def serve(server):
    """Serve a fake server over HTTP; yields its address, without a path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            request = httpx.Request(self.command, CLOSED + self.path, content=body, headers=dict(self.headers))
            response = server.handle(request) if self.path.startswith("/v1/") else httpx.Response(404)
            self.send_response(response.status_code)
            self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            self.wfile.write(response.content)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    http_server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http_server.server_port}"
    finally:
        http_server.shutdown()
        thread.join()
        http_server.server_close()


def command_line(*words):
    """Return the command in a process of its own, which finds the package where this one does."""
    return [sys.executable, "-c", START, "|".join(sys.path), *map(str, words)]


def run(*words):
    return subprocess.run(command_line(*words), capture_output=True, text=True, timeout=60)


def fail(capsys, *words):
    """Run the command in this process; it must fail with one line, which is returned."""
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    return err


def test_an_address_is_enough():
    """Every check runs for which the server offers what it needs; without counts and salts none asks the clock."""
    with serve(FakeServer(offers=frozenset({"logprobs"}))) as url:
        done = run(url)
    assert done.returncode == 0 and f"toy at {url}/v1" in done.stdout, done.stdout + done.stderr
    verdicts = [line.split(": ") for line in done.stderr.splitlines()[1:]]
    assert {name for name, verdict, *_ in verdicts if verdict == "skipped"} == {
        "salts",
        "keys",
        "usage",
        "adapters",
        "reasoning",
        "tiers",
        "reset",
        "restart",
        "reload",
    }
    assert len(verdicts) == 17


def test_a_fault_is_exit_code_1_and_reported_in_every_form(tmp_path):
    junit = tmp_path / "junit.xml"
    with serve(StreamDropsLast()) as url:
        done = run(f"{url}/v1", "--checks", "edits, streams", "--json", "--junit", junit)
    report = json.loads(done.stdout)
    assert done.returncode == report["exit_code"] == 1
    assert [check["outcome"] for check in report["checks"]] == ["passed", "fault"]
    assert '<testcase classname="cachecheck" name="streams"' in junit.read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((CLOSED,), "127.0.0.1:1/v1: "),
        (("ftp://x",), "begins with http://"),
        (("http://[",), "http://["),
        ((CLOSED, "--checks", "edits,lenghts"), "unknown check 'lenghts': choose from lengths, "),
        ((CLOSED, "--checks", ","), "argument --checks: name at least one"),
        ((CLOSED, "--reference", "warm"), "--reference is cold or replay, not 'warm'"),
        ((CLOSED, "--max-tokens", "x\x1b"), r"argument --max-tokens: 'x\x1b' should be an integer"),
        ((CLOSED, "--no-such"), "unrecognized arguments: --no-such"),
        ((), "the following arguments are required: URL"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    line = fail(capsys, *words)
    assert message in line and line.startswith("cachecheck: ") and not CONTROLS.search(line)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_its_bounds_is_refused_by_class_and_command(name, capsys):
    number = NUMBERS[name]
    step = 1 if number.kind is int else 1e-6
    outside = [number.low if number.above else number.low - step, number.high + max(step, number.high * 1e-6)]
    outside = [int(n) for n in outside] if number.kind is int else [*map(float, outside), math.nan, math.inf, -math.inf]
    for value in outside:
        with pytest.raises(ValueError, match=f"^{name} must be ") as error:
            CachecheckConfig(**{name: value})
        option = "--" + name.replace("_", "-")
        line = fail(capsys, CLOSED, f"{option}={value}")
        assert line == f"cachecheck: argument {option}: {str(error.value).removeprefix(name + ' ')}\n"


def answer_below(prefix):
    """Return a transport to a server whose API is below a path."""

    def handle(request):
        models = {"data": [{"id": "toy"}]}
        return httpx.Response(200, json=models) if request.url.path == f"{prefix}/models" else httpx.Response(404)

    return Transport(httpx.MockTransport(handle))


@pytest.mark.parametrize(
    ("prefix", "url", "expected"),
    [
        ("/v1", "http://x", "http://x/v1"),
        ("/v1", "http://x/", "http://x/v1"),
        ("/v1", "http://x/v1", "http://x/v1"),
        ("", "http://x", "http://x"),
        ("/api", "http://x/api", "http://x/api"),
    ],
)
def test_an_address_without_a_path_is_that_of_the_server(prefix, url, expected):
    assert find_api(url, None, 1.0, answer_below(prefix)) == expected


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_without_an_end_is_refused(is_stream, monkeypatch):
    monkeypatch.setattr("cachecheck.http_client.MAX_BYTES", 1000)
    parts = iter(lambda: b"data: " + b"x" * 100, None)
    transport = Transport(httpx.MockTransport(lambda _: httpx.Response(200, content=parts)))
    client = ServerClient("http://x", None, 1.0, transport)
    with pytest.raises(ValueError, match="larger than 1000 bytes"):
        client.ask(Prompt(("a",)), {"stream": is_stream})


def test_control_characters_are_visible_and_other_text_stays():
    assert escape_controls("a\tb\nc\x1b[2J\x9b\u202e\udc80é€") == "a\tb\nc\\x1b[2J\\x9b\\u202e\\udc80é€"


def test_the_end_of_the_reader_ends_the_command_quietly():
    with serve(FakeServer()) as url:
        command = command_line(url, "--checks", "logprobs")
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(60) == 0 and "Traceback" not in err and "Exception" not in err
