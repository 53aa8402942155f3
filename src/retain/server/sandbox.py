"""Run work on untrusted input in processes that may be killed: chat templates of models, grammars of requests.

How a worker ends says whose fault it was:

| what the parent sees | whose it is | what follows |
|---|---|---|
| a reply with an error: of the template, of a deep input, of a long output | the input's | ValueError |
| exit code 65: no memory, by Python's MemoryError | the input's | ValueError |
| SIGABRT: no memory, for a library | the input's | ValueError |
| SIGSEGV, SIGBUS: no stack, or no memory for a library | the input's | ValueError |
| SIGPROF: too much time of the processor | the input's | ValueError |
| any other signal, such as SIGKILL and SIGTERM, and any other exit code | not the input's | a fresh worker, once |
| stopped by a signal, or no reply in `REPLY_TIMEOUT_FACTOR` times the limit | not the input's | a fresh worker, once |
| bytes that are no reply | not the input's | a fresh worker, once |
| a process that cannot be started | not the input's | a fresh worker, once |
| a reply with a failure: an error of our own | ours | RuntimeError |

Where the fresh worker is lost too, the request fails with 503. A signal of the first group that somebody else sends
cannot be told from the process's own.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from retain.processing.chat_template import Messages, Tools, Variables
from retain.server.openai.errors import APIError
from retain.server.sandbox_worker import ERROR, EXIT_OUT_OF_MEMORY, RESULT
from retain.server.worker_process import Reply, WorkerLost, WorkerProcess

MEMORY_BYTES = 2**29  # of one request, beyond what an idle worker has
MAX_CHARACTERS = 2**24  # that a template may write
REPLY_TIMEOUT_FACTOR = 10  # times the limit of processor time, on the clock
RETRY_AFTER_S = 1
DEEP = "needs too much memory or nests too deeply"
LARGE = "needs too much memory"
log = logging.getLogger(__name__)


class Sandbox:
    """Runs operations in worker processes, each under a limit of processor time and memory.

    Threads may share a sandbox. It has as many workers as threads call it at once; templates and grammars have workers
    of their own, which wait for the next call.
    """

    def __init__(self, timeout_s: float, memory_bytes: int = MEMORY_BYTES, max_characters: int = MAX_CHARACTERS):
        """`timeout_s`: seconds of a processor that one operation may take. `max_characters`: of a rendered prompt."""
        self.timeout_s = timeout_s
        self.memory_bytes = memory_bytes
        self.max_characters = max_characters
        self._lock = threading.Lock()  # of the two below
        self._closed = False
        self._idle: defaultdict[str, list[WorkerProcess]] = defaultdict(list)  # by operation, the newest last
        with suppress(WorkerLost):  # the first request tries again, and says so
            self._idle["render_chat"].append(self._start_worker())

    def render(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        messages: Messages,
        add_generation_prompt: bool,
        tools: Tools | None,
        variables: Variables,
    ) -> str:
        """Return messages as prompt text by the template `source`, rendered in a worker process.

        Raises ValueError, also where it takes too long, and APIError.
        """
        return self._call(
            "the chat template",
            "render_chat",
            source=source,
            special_tokens=dict(special_tokens),
            max_characters=self.max_characters,
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            tools=tools and list(tools),
            variables=dict(variables),
        )

    def check_grammar(self, grammar: str, special_tokens: Sequence[str] = ()) -> None:
        """Raise ValueError if compiling a grammar takes too much time, memory or stack. Raises APIError.

        `special_tokens`: those that the grammar may name.
        """
        self._call("the grammar", "check_grammar", grammar=grammar, special_tokens=list(special_tokens))

    def close(self) -> None:
        """End the idle workers; others end with their operation."""
        with self._lock:
            self._closed = True
            idle = [worker for workers in self._idle.values() for worker in workers]
            self._idle.clear()
        for worker in idle:
            worker.end()

    def _call(self, subject: str, operation: str, **arguments: Any) -> str:
        """Run an operation in a worker. Raises ValueError with a line about the subject, or APIError."""
        request = json.dumps((operation, arguments)).encode()
        try:
            reply = self._call_worker(operation, request)
        except WorkerLost as lost:
            if reason := self._find_fault(lost):
                raise ValueError(f"{subject} {reason}: simplify it") from None
            headers = {"Retry-After": str(RETRY_AFTER_S)}
            raise APIError(503, "a process of the server was lost: retry", headers=headers) from None
        if reply.kind == ERROR:
            raise ValueError(reply.text)
        if reply.kind != RESULT:
            raise RuntimeError(f"{operation} failed in its process: {reply.text}")
        return reply.text

    def _call_worker(self, operation: str, request: bytes) -> Reply:
        """Send a request to a worker, and again to a fresh one if that is lost by nothing the input did.

        Raises WorkerLost.
        """
        try:
            return self._use(self._take_idle(operation) or self._start_worker(), operation, request)
        except WorkerLost as lost:
            if self._find_fault(lost):
                raise
            log.warning("a process of the sandbox was lost: %s", lost)
        return self._use(self._start_worker(), operation, request)

    def _use(self, worker: WorkerProcess, operation: str, request: bytes) -> Reply:
        reply = worker.call(request, REPLY_TIMEOUT_FACTOR * self.timeout_s)
        with self._lock:
            if not self._closed:
                self._idle[operation].append(worker)
                return reply
        worker.end()
        return reply

    def _find_fault(self, lost: WorkerLost) -> str | None:
        """Return what the input did to a lost worker; None where it did nothing."""
        faults = {
            EXIT_OUT_OF_MEMORY: LARGE,
            -signal.SIGABRT: LARGE,
            -signal.SIGSEGV: DEEP,
            -signal.SIGBUS: DEEP,
            -signal.SIGPROF: f"takes longer than {self.timeout_s:g} s",
        }
        return None if lost.exit_code is None else faults.get(lost.exit_code)

    def _take_idle(self, operation: str) -> WorkerProcess | None:
        """Return an idle worker of an operation, if there is one. Those that somebody killed are forgotten."""
        with self._lock:
            ended = []
            for name, workers in self._idle.items():
                ended += [worker for worker in workers if worker.has_ended]
                self._idle[name] = [worker for worker in workers if worker not in ended]
            worker = self._idle[operation].pop() if self._idle[operation] else None
        for gone in ended:
            gone.end()
        return worker

    def _start_worker(self) -> WorkerProcess:
        arguments = ["-m", "retain.server.sandbox_worker", str(self.timeout_s), str(self.memory_bytes)]
        return WorkerProcess(arguments)
