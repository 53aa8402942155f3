"""A replica: one engine and one application in a Ray actor; and the Ray Serve application of several."""

from __future__ import annotations

import fcntl
import logging
import sys
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from ray import serve
from ray.serve import Application
from starlette.types import ASGIApp

from retain.cluster.config import ClusterSettings
from retain.files import get_cache_dir, make_private_folder
from retain.terminal import EscapingFormatter
from retain.threads import available_cores, pin_to_cores, share_of_cores

if TYPE_CHECKING:
    from retain.server.openai.serving import OpenAIServing

SESSION_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"  # by the header x-session-id
SPARE_REQUESTS = 128  # of a replica: requests that it refuses, and those that need no engine


def build_application(settings: ClusterSettings) -> Application:
    """Build the Ray Serve application: one deployment, `replica`, which a Serve config may scale and place."""
    cluster = settings.cluster
    num_admitted = settings.engine.max_running_requests + settings.server.limits.max_queued_requests
    options: dict[str, Any] = {}
    if cluster.replicas_per_machine:
        options["max_replicas_per_node"] = cluster.replicas_per_machine
    if cluster.affinity == "session":
        options["request_router_config"] = {"request_router_class": SESSION_ROUTER}
    deployment = serve.deployment(
        name="replica",
        num_replicas=cluster.replicas,
        max_ongoing_requests=num_admitted + SPARE_REQUESTS,  # so the replica answers 429, and Ray queues none
        ray_actor_options={"num_cpus": 0, "num_gpus": cluster.gpus},
        max_constructor_retry_count=1,  # a wrong option stays wrong
        graceful_shutdown_timeout_s=settings.graceful_shutdown_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5.0,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        **options,
    )
    return deployment(Replica).bind(settings)


@serve.ingress()
class Replica:
    """Runs the application of `retain serve`. Ray asks for its health, and deletes it once it is idle."""

    def __init__(self, settings: ClusterSettings):
        _log_to_stderr()
        context = serve.get_replica_context()
        self._id = context.replica_tag
        self._handle = serve.get_deployment_handle(context.deployment, context.app_name)
        self._settings = settings
        self._stack = AsyncExitStack()
        self._service: OpenAIServing  # once the engine is loaded
        folder = get_cache_dir() / "replicas" / f"{context.app_name}-{settings.server.port}"
        self._index, lock = claim_index(folder)
        self._stack.enter_context(lock)
        num_shares = settings.cluster.replicas_per_machine or settings.cluster.replicas
        pin_to_cores(share_of_cores(available_cores(), self._index, num_shares))
        sys.setswitchinterval(0.001)  # as in `retain serve`

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Load the engine and return its application, whose /metrics are those of all replicas.

        Raises ValueError or OSError as `retain serve` does.
        """
        from retain.llm import LLM  # imports torch, after the cores are known
        from retain.server import app, launch

        load_llm = partial(LLM, **vars(self._settings.engine_of(self._index)))
        self._service = await self._stack.enter_async_context(launch.open_service(load_llm, self._settings.server))
        return app.create_app(self._service, self.render_all_metrics, self._settings.server)

    async def __del__(self) -> None:
        """Stop the engine and close its stores. Ray calls this when the last request of the replica has ended."""
        await self._stack.aclose()

    def check_health(self) -> None:
        """Raise RuntimeError if the engine cannot go on. Then Ray replaces this replica."""
        if error := self._service.engine_thread.fatal_error:
            raise RuntimeError(error)

    async def render_metrics(self) -> tuple[str, bytes]:
        """Return the name of this replica and its metrics in Prometheus' text format."""
        return self._id, await self._service.engine_thread.render_metrics()

    async def render_all_metrics(self) -> bytes:
        """Return the metrics of all replicas, with the label `replica`. One that does not answer is left out."""
        answers = self._handle.broadcast("render_metrics")
        pages: list[Any] = await answers.results_async(timeout_s=10.0, return_exceptions=True)
        return label_pages(dict(page for page in pages if not isinstance(page, BaseException)))


def claim_index(folder: Path) -> tuple[int, IO[bytes]]:
    """Claim the lowest number that no other process has, and return it with the file whose lock holds it.

    The system releases the lock with the process, however it ends. Raises OSError.
    """
    make_private_folder(folder)
    index = 0
    while True:
        lock = (folder / f"{index}.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return index, lock
        except BlockingIOError:
            lock.close()
        index += 1


@dataclass(eq=False)
class _Merged(Collector):
    metrics: dict[str, Metric] = field(default_factory=dict)

    def collect(self) -> Iterable[Metric]:
        return self.metrics.values()


def label_pages(pages: Mapping[str, bytes]) -> bytes:
    """Return one page with the samples of all pages, each with the label `replica`: its page's name."""
    merged = _Merged()
    registry = CollectorRegistry()
    for replica, page in pages.items():
        for metric in text_string_to_metric_families(page.decode()):
            known = merged.metrics.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            known.samples += [s._replace(labels={"replica": replica, **s.labels}) for s in metric.samples]
    registry.register(merged)
    return generate_latest(registry)


def _log_to_stderr() -> None:
    """Write the package's log to the process's standard error, which Ray shows; `sys.stderr` may be a file of Serve."""
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(EscapingFormatter())
    logger = logging.getLogger("retain")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
