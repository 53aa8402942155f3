"""Processes of the sandbox: whose fault an end is, that every wait ends, and that nothing of a process is left."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retain.server.openai.errors import APIError
from retain.server.sandbox import Sandbox
from retain.server.sandbox_worker import EXIT_OUT_OF_MEMORY
from retain.server.worker_process import WorkerLost, WorkerProcess

pytestmark = pytest.mark.slow

NO_MESSAGES: dict[str, Any] = {"messages": [], "add_generation_prompt": True, "tools": None, "variables": {}}
HANG_GUARD_S = 120
# Workers as scripts: they start, read the request to its end, and then do one thing to it. A worker that answers and
# ends before its parent has written all is lost, rightly.
PREAMBLE = """
import os, signal, sys, time
def write(data):
    os.write(1, len(data).to_bytes(4, "big") + data)
write(b"S")
"""
READ = """
length = int.from_bytes(sys.stdin.buffer.read(4), "big")
sys.stdin.buffer.read(length)
"""
ANSWER = "write(b'Rfine')"
LOSE = {  # how a worker is lost by nothing that the input did
    "SIGKILL": "os.kill(os.getpid(), signal.SIGKILL)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
    "SIGHUP": "os.kill(os.getpid(), signal.SIGHUP)",
    "exit code 0": "os._exit(0)",
    "exit code 1": "os._exit(1)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "silent": "time.sleep(1000)",
    "closes its output": "os.close(1); time.sleep(1000)",
    "half a reply": "os.write(1, b'\\0\\0\\0\\7R'); os._exit(0)",
    "no length": "os.write(1, b'Traceback (most recent call last)'); time.sleep(1000)",
    "no text": "write(b'R\\xff'); time.sleep(1000)",
    "no kind": "os.write(1, bytes(4)); time.sleep(1000)",
}
BLAME = {  # what an input does to a worker
    f"os._exit({EXIT_OUT_OF_MEMORY})": "needs too much memory",
    "os.kill(os.getpid(), signal.SIGABRT)": "needs too much memory",
    "os.kill(os.getpid(), signal.SIGSEGV)": "nests too deeply",
    "os.kill(os.getpid(), signal.SIGBUS)": "nests too deeply",
    "os.kill(os.getpid(), signal.SIGPROF)": "takes longer than 0.2 s",
    "write(b'Eit is wrong')": "it is wrong",
}


def children() -> set[int]:
    """The processes that this one started and that are still there, ended ones included."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process of the test is left, not even as a zombie."""
    before = children()
    yield
    assert children() <= before


class ScriptedSandbox(Sandbox):
    """A sandbox whose workers run these scripts, in this order."""

    def __init__(self, *scripts: str, read: str = READ):
        self.scripts = [PREAMBLE + read + script for script in scripts]
        self.num_started = 0
        super().__init__(0.2)

    def _start_worker(self) -> WorkerProcess:
        self.num_started += 1
        return WorkerProcess(["-c", self.scripts[self.num_started - 1]])

    def render_nothing(self) -> str:
        try:
            return self.render("", {}, **NO_MESSAGES)
        finally:
            self.close()


@pytest.mark.parametrize("way", LOSE)
def test_a_lost_worker_is_replaced_once_and_the_input_is_not_blamed(
    way: str, monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    monkeypatch.setattr("retain.server.worker_process.EXIT_TIMEOUT_S", 0.5)
    assert ScriptedSandbox(LOSE[way], ANSWER).render_nothing() == "fine"


@pytest.mark.parametrize("way", ["SIGKILL", "stopped"])
def test_a_request_that_loses_two_workers_may_be_sent_again(way: str, nothing_left: None) -> None:
    sandbox = ScriptedSandbox(LOSE[way], LOSE[way], ANSWER)
    with pytest.raises(APIError) as error:
        sandbox.render_nothing()
    assert error.value.status == 503 and int((error.value.headers or {})["Retry-After"]) >= 1
    assert sandbox.num_started == 2


@pytest.mark.parametrize("script", BLAME)
def test_what_the_input_did_itself_is_its_fault_at_once(script: str, nothing_left: None) -> None:
    sandbox = ScriptedSandbox(script, ANSWER)
    with pytest.raises(ValueError, match=BLAME[script]):
        sandbox.render_nothing()
    assert sandbox.num_started == 1


def test_a_failure_of_our_own_is_neither(nothing_left: None) -> None:
    with pytest.raises(RuntimeError, match="oh"):
        ScriptedSandbox("write(b'Foh')").render_nothing()


def test_a_worker_that_reads_nothing_ends_the_wait(nothing_left: None) -> None:
    """The pipe is full then: also a write has an end."""
    sandbox = ScriptedSandbox(LOSE["silent"], READ + ANSWER, read="")
    messages = [{"role": "user", "content": "x" * 2**20}]
    try:
        assert sandbox.render("", {}, **NO_MESSAGES | {"messages": messages}) == "fine"
    finally:
        sandbox.close()


def test_a_worker_that_cannot_be_started_is_not_the_input_s_fault(
    monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    monkeypatch.setattr("retain.server.worker_process.sys.executable", "/nowhere/python")
    sandbox = Sandbox(1.0)  # the server starts all the same
    with pytest.raises(APIError) as error:
        sandbox.render("a", {}, **NO_MESSAGES)
    assert error.value.status == 503
    monkeypatch.undo()
    assert sandbox.render("a", {}, **NO_MESSAGES) == "a"
    sandbox.close()


def test_a_worker_that_ends_while_it_starts_is_not_the_input_s_fault(nothing_left: None) -> None:
    worker = WorkerProcess(["-c", "1 / 0"])
    with pytest.raises(WorkerLost) as error:
        worker.call(b"", 1.0)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_signal_from_outside_during_a_request_blames_no_input(number: signal.Signals, nothing_left: None) -> None:
    before = children()
    texts = []
    sandbox = ScriptedSandbox("time.sleep(1000)", ANSWER)
    sandbox.timeout_s = HANG_GUARD_S
    thread = threading.Thread(target=lambda: texts.append(sandbox.render_nothing()))
    thread.start()
    (worker,) = children() - before
    os.kill(worker, number)
    thread.join(HANG_GUARD_S)
    assert texts == ["fine"] and sandbox.num_started == 2


# ---- real workers ----------------------------------------------------------------------------------------------------


def test_an_idle_worker_that_was_stopped_is_replaced(nothing_left: None) -> None:
    before = children()
    sandbox = Sandbox(60.0)
    assert sandbox.render("a", {}, **NO_MESSAGES) == "a"
    (worker,) = children() - before
    os.kill(worker, signal.SIGSTOP)
    assert sandbox.render("b", {}, **NO_MESSAGES) == "b"
    sandbox.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes longer than 0.5 s"),
        ("{{ 'x' * 1001 }}", "writes more than 1000 characters"),
        (f"{{{{ raise_exception('y' * {10**6}) }}}}", "yyy"),
    ],
)
def test_limits_of_a_template_are_told_in_one_short_line(source: str, message: str, nothing_left: None) -> None:
    sandbox = Sandbox(0.5, max_characters=1000)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        sandbox.render(source, {}, **NO_MESSAGES)
    assert len(str(error.value)) < 1100 and "\n" not in str(error.value)
    assert sandbox.render("{{ 'x' * 1000 }}", {}, **NO_MESSAGES) == "x" * 1000
    sandbox.close()


def test_the_memory_of_an_output_is_bounded_in_the_parent() -> None:
    """A text of 100 MB ends where it was written: nothing as large comes over the pipe."""
    source = "{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}"
    sandbox = Sandbox(60.0)
    sizes = []
    read = WorkerProcess._read

    def counted(self: WorkerProcess, size: int, deadline: float) -> bytearray:
        sizes.append(size)
        return read(self, size, deadline)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="writes more than"):
        patch.setattr(WorkerProcess, "_read", counted)
        sandbox.render(source, {}, **NO_MESSAGES)
    sandbox.close()
    assert max(sizes) < 1000


@pytest.mark.parametrize("text", ["ä\n😀", "\ud800", "\x00", ""])
def test_any_text_comes_through(text: str) -> None:
    sandbox = Sandbox(60.0)
    assert sandbox.render("{{ messages[0] }}", {}, **NO_MESSAGES | {"messages": [{"t": text}]})
    assert sandbox.render(f"{text}", {}, **NO_MESSAGES) == text
    sandbox.close()


def test_templates_do_not_wait_for_grammars() -> None:
    """Each operation has workers of its own."""
    sandbox = Sandbox(60.0)
    sandbox.check_grammar('{"grammars": []}')
    sandbox.render("a", {}, **NO_MESSAGES)
    assert {name: len(idle) for name, idle in sandbox._idle.items()} == {"render_chat": 1, "check_grammar": 1}
    sandbox.close()
