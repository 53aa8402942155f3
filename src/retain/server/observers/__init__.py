"""What watches a served engine, each in a file: `open_observer` in `<name>.py`, or in the folder of that name.

An observer has its own option of the server, and what it needs beside: packages, addresses, routes, metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, TypeVar

from retain.engine.request import Request
from retain.llm import LLM
from retain.plugins import load_module, plugin_names
from retain.server.config import ServerConfig
from retain.server.preparation import PreparationPool
from retain.server.request_group import PooledCallStats, RequestGroup

if TYPE_CHECKING:
    from fastapi import FastAPI
    from prometheus_client import Metric

T = TypeVar("T")


class EngineReader(Protocol):
    """Runs functions in the engine's thread, for routes."""

    async def read(self, function: Callable[[], T]) -> T:
        """Run a function that takes long and changes nothing. Returns its result."""


class Observer:
    """Watches requests and steps. Called in the engine thread, except for `add_routes`.

    Each method does nothing unless a class replaces it.
    """

    def on_request(self, request: Request, group: RequestGroup) -> None:
        """Handle a request that was just queued."""

    def on_step(self, step_s: float, sampled_requests: Sequence[Request]) -> None:
        """Handle a step that took `step_s` seconds and sampled tokens for these requests."""

    def on_finish(self, request: Request, group: RequestGroup) -> None:
        """Handle a request that finished, failed or was cancelled; `group.num_unfinished` does not count it."""

    def on_pooled_call(self, stats: PooledCallStats) -> None:
        """Handle the end of a call whose texts were pooled. Its requests were reported, too."""

    def collect(self) -> Iterable[Metric]:
        """Return what this one adds to a page of metrics."""
        return ()

    def add_routes(self, app: FastAPI, engine: EngineReader, preparation: PreparationPool) -> None:
        """Add routes to the application, if there are any. `preparation` is for what takes long after a read."""


CreateObserver = Callable[[LLM], Observer]


def open_observers(config: ServerConfig, stack: ExitStack) -> list[CreateObserver]:
    """Open the observers that a configuration wants, until the stack is closed, before a model is loaded.

    What is returned makes them in the engine thread. Raises ValueError for an option that is wrong.
    """
    names = plugin_names(__name__)
    opened = [load_module(__name__, name, names, "observer").open_observer(config, stack) for name in names]
    return [create for create in opened if create]
