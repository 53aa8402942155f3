"""Counts of work by thread: what each thread of a server that runs in this process does for a request."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple


class ServerSteps(NamedTuple):
    """Steps of the threads of a server: lines of Python, of any module, and calls of its functions."""

    event_loop: int
    engine: int
    preparation: int  # all others that Python started: those that parse and prepare bodies


class ThreadCounter:
    """Counts the steps of the threads that start while it is installed: the caller's own do not count."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, int] = defaultdict(int)  # by identifier
        self._counts = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch the threads that start until the block ends."""
        threading.settrace(self._trace)
        try:
            yield
        finally:
            threading.settrace(None)  # type: ignore[arg-type]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what the threads do until the block ends."""
        self._steps.clear()
        self._counts = True
        try:
            yield
        finally:
            self._counts = False

    def read(self, event_loop: int, engine: int) -> ServerSteps:
        """Return the steps of the last block. `event_loop`, `engine`: the identifiers of these threads."""
        others = self._steps.keys() - {event_loop, engine}
        return ServerSteps(self._steps[event_loop], self._steps[engine], sum(self._steps[i] for i in others))

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not self._counts:
            return None
        self._steps[threading.get_ident()] += 1
        return self._trace
