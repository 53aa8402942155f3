"""A worker process of a sandbox, seen from its parent. Every wait for it has a time limit."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import NamedTuple

from retain.server.sandbox_worker import ENCODING_ERRORS, READY

START_TIMEOUT_S = 60.0  # of the machine's time: a new process reads its modules
EXIT_TIMEOUT_S = 5.0  # from the end of a worker's output to its end
POLL_S = 0.25  # how often a worker that is awaited is looked at
MAX_FRAME_BYTES = 2**30  # more than any reply has: such a length is none


class WorkerLost(Exception):
    """A worker that ended, stopped or wrote no reply. It is gone, and nothing of it is left.

    `exit_code` is that of a worker that ended by itself or by a signal, which counts negative; None for all others.
    """

    def __init__(self, reason: str, exit_code: int | None = None):
        super().__init__(reason)
        self.exit_code = exit_code


class Reply(NamedTuple):
    """The reply of a worker (see sandbox_worker)."""

    kind: bytes
    text: str


class WorkerProcess:
    """A process that answers one request at a time. One thread uses it at a time."""

    def __init__(self, arguments: Sequence[str]):
        """Start a process with these arguments of the interpreter. Raises WorkerLost if there can be none."""
        self._has_started = False
        try:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        except OSError as error:
            raise WorkerLost(f"it cannot be started: {error.strerror}") from None
        assert self.process.stdin and self.process.stdout
        self._stdin = self.process.stdin.fileno()
        self._stdout = self.process.stdout.fileno()
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe, False)

    def call(self, request: bytes, timeout_s: float) -> Reply:
        """Send a request and return the reply, which may take `timeout_s` seconds. Raises WorkerLost.

        A worker that has just been started gets the time for that besides.
        """
        try:
            if not self._has_started:
                if self._read_reply(monotonic() + START_TIMEOUT_S).kind != READY:
                    raise WorkerLost("it wrote no reply")
                self._has_started = True
            deadline = monotonic() + timeout_s
            self._write(len(request).to_bytes(4, "big"), deadline)
            self._write(request, deadline)
            return self._read_reply(deadline)
        except OSError:  # the other end of a pipe was closed
            raise self._lose_ended() from None
        except WorkerLost:
            self.end()
            raise

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, for instance because somebody killed it. The system forgets it then."""
        return self.process.poll() is not None

    def end(self) -> None:
        """Kill the process and wait for it, so that nothing of it is left."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                if pipe:
                    pipe.close()

    def _read_reply(self, deadline: float) -> Reply:
        size = int.from_bytes(self._read(4, deadline), "big")
        if not 0 < size < MAX_FRAME_BYTES:
            raise WorkerLost("it wrote no reply")
        frame = memoryview(self._read(size, deadline))
        try:
            return Reply(bytes(frame[:1]), str(frame[1:], errors=ENCODING_ERRORS))
        except UnicodeDecodeError:
            raise WorkerLost("it wrote no reply") from None

    def _read(self, size: int, deadline: float) -> bytearray:
        """Read so many bytes. Memory grows with what has come: the length may be wrong."""
        data = bytearray()
        while len(data) < size:
            self._wait(self._stdout, select.POLLIN, deadline)
            part = os.read(self._stdout, min(size - len(data), 2**20))
            if not part:
                raise self._lose_ended()
            data += part
        return data

    def _write(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            self._wait(self._stdin, select.POLLOUT, deadline)
            with suppress(BlockingIOError):  # the pipe has less room than a write of few bytes needs
                rest = rest[os.write(self._stdin, rest[: 2**20]) :]

    def _wait(self, pipe: int, event: int, deadline: float) -> None:
        """Wait until a pipe can be read or written, or is closed. Raises WorkerLost if that takes too long."""
        poll = select.poll()
        poll.register(pipe, event)
        while not poll.poll(1000 * POLL_S):
            if self._is_stopped():
                raise WorkerLost("it was stopped")
            if monotonic() > deadline:
                raise WorkerLost("it wrote nothing in time")

    def _is_stopped(self) -> bool:
        """Return whether somebody stopped the process (SIGSTOP), where the system tells."""
        if not hasattr(os, "waitid"):
            return False
        found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return found is not None

    def _lose_ended(self) -> WorkerLost:
        """Return the error for a process that has closed its pipes."""
        try:
            exit_code = self.process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            exit_code = None
        self.end()
        return WorkerLost("it ended" if exit_code is None else f"it ended with {exit_code}", exit_code)
