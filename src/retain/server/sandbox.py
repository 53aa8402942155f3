"""Run work on untrusted input in processes that may be killed: chat templates of models, grammars of requests."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from retain.processing.chat_template import Messages, Tools, Variables
from retain.server.sandbox_worker import read_frame, write_frame

NUM_WORKERS = 2
MEMORY_BYTES = 2**29  # of one request, beyond what an idle worker has


class Sandbox:
    """Runs operations in worker processes, each under a limit of time and memory. Threads may share a sandbox."""

    def __init__(self, timeout_s: float, num_workers: int = NUM_WORKERS, memory_bytes: int = MEMORY_BYTES):
        """`timeout_s`: seconds that one operation may take."""
        self.timeout_s, self.memory_bytes = timeout_s, memory_bytes
        self._closed = False
        # Places of workers. A worker that was killed leaves None, which the next operation replaces.
        self._idle: queue.LifoQueue[subprocess.Popen[bytes] | None] = queue.LifoQueue()
        for i in range(num_workers):
            self._idle.put(self._start_worker() if i == num_workers - 1 else None)  # one is ready for the first request

    def render_chat(self, source: str, special_tokens: dict[str, str], **arguments: Any) -> str:
        """Render a chat template (see ChatTemplate). Raises ValueError, also where it takes too long."""
        subject = "the chat template"
        return str(self._call(subject, "render_chat", source=source, special_tokens=special_tokens, **arguments))

    def check_grammar(self, grammar: str) -> None:
        """Raise ValueError if compiling a grammar takes too much time, memory or stack."""
        self._call("the grammar", "check_grammar", grammar=grammar)

    def close(self) -> None:
        """End the idle workers; others end with their operation."""
        self._closed = True
        with suppress(queue.Empty):
            while True:
                _end(self._idle.get_nowait())

    def _call(self, subject: str, operation: str, **arguments: Any) -> Any:
        """Run an operation in a worker. Raises ValueError with a line about the subject."""
        worker, frame = self._idle.get(), None
        if worker and worker.poll() is not None:  # it was killed from outside
            _end(worker)
            worker = None
        try:
            worker = worker or self._start_worker()
            assert worker.stdin and worker.stdout
            with suppress(BrokenPipeError):  # the worker died
                write_frame(worker.stdin, json.dumps((operation, arguments)).encode())
                frame = read_frame(worker.stdout)
        finally:
            if frame is None or self._closed:
                _end(worker)
            self._idle.put(None if frame is None or self._closed else worker)
        if frame is None:
            timed_out = worker.returncode == -signal.SIGALRM
            reason = (
                f"takes longer than {self.timeout_s:g} s" if timed_out else "needs too much memory or nests too deeply"
            )
            raise ValueError(f"{subject} {reason}: simplify it")
        reply = json.loads(frame)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["result"]

    def _start_worker(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "retain.server.sandbox_worker", str(self.timeout_s), str(self.memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )


class SandboxedRenderer:
    """Renders chat templates in a sandbox (see TemplateRenderer)."""

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Messages,
        add_generation_prompt: bool,
        tools: Tools | None,
        variables: Variables,
    ) -> str:
        """Return the messages as prompt text. Raises ValueError."""
        return self.sandbox.render_chat(
            source,
            dict(special_tokens),
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            tools=tools and list(tools),
            variables=dict(variables),
        )


def _end(worker: subprocess.Popen[bytes] | None) -> None:
    """Kill a worker and wait for it, so that no process is left behind."""
    if worker:
        worker.kill()
        worker.wait()
        for pipe in (worker.stdin, worker.stdout):
            with suppress(OSError):
                if pipe:
                    pipe.close()
