"""A replica: one engine and one application in a Ray actor.

Torch is imported when a replica is built: OpenMP reads the replica's cores then.
"""

from __future__ import annotations

import importlib
import logging
import sys
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve
from starlette.types import ASGIApp

from retain.cluster.config import ClusterSettings
from retain.cluster.cores import available_cores, claim_index, share_of_cores
from retain.cluster.metrics import label_pages
from retain.files import get_cache_dir
from retain.terminal import EscapingFormatter
from retain.threads import pin_to_cores

if TYPE_CHECKING:
    from retain.server.launch import OpenedService

METRICS_TIMEOUT_S = 10.0


@serve.ingress()
class Replica:
    """Runs the application of `retain serve`. Ray asks for its health, and deletes it once it is idle."""

    def __init__(self, settings: ClusterSettings):
        _log_to_stderr()
        context = serve.get_replica_context()
        self._id, self._name = context.replica_tag, context.replica_id.to_full_id_str()
        self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        self._settings, self._stack = settings, AsyncExitStack()
        self._opened: OpenedService  # once the engine is loaded
        folder = get_cache_dir() / "replicas" / f"{context.app_name}-{settings.server.port}"
        self._index, lock = claim_index(folder)
        self._stack.enter_context(lock)
        cores = share_of_cores(available_cores(), self._index, settings.cluster.num_replicas_per_machine)
        pin_to_cores(cores)
        sys.setswitchinterval(0.001)  # as in `retain serve`

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Load the engine and return its application, whose /metrics are those of all replicas.

        Raises ValueError or OSError as `retain serve` does.
        """
        llm, launch, app = (
            importlib.import_module(f"retain.{name}") for name in ("llm", "server.launch", "server.app")
        )
        settings = self._settings
        load_llm = partial(llm.LLM, **vars(settings.engine_of(self._index)))
        self._opened = await self._stack.enter_async_context(launch.open_service(load_llm, settings.server))
        service, inspector = self._opened.service, self._opened.inspector
        opened: ASGIApp = app.create_app(service, self.render_all_metrics, settings.server, inspector)
        return opened

    async def __del__(self) -> None:
        """Stop the engine and close its stores. Ray calls this when the last request of the replica has ended."""
        await self._stack.aclose()

    def check_health(self) -> None:
        """Raise RuntimeError if the engine cannot go on. Then Ray replaces this replica."""
        if error := self._opened.service.engine_thread.fatal_error:
            raise RuntimeError(error)

    async def get_load(self) -> tuple[str, int]:
        """Return the name by which HAProxy knows this replica, and its requests in flight."""
        return self._name, self._opened.service.admission.num_in_flight

    async def render_metrics(self) -> tuple[str, bytes]:
        """Return the name of this replica and its metrics in Prometheus' text format."""
        return self._id, await self._opened.service.engine_thread.call(self._opened.metrics.render)

    async def render_all_metrics(self) -> bytes:
        """Return the metrics of all replicas, with the label `replica`. One that does not answer is left out."""
        pages: list[Any] = await self._handle.broadcast("render_metrics").results_async(
            timeout_s=METRICS_TIMEOUT_S, return_exceptions=True
        )
        return label_pages(dict(page for page in pages if not isinstance(page, BaseException)))


def _log_to_stderr() -> None:
    """Write the package's log to the process's standard error, which Ray shows; `sys.stderr` may be a file of Serve."""
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(EscapingFormatter())
    logger = logging.getLogger("retain")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
