"""The router: HAProxy asks it for the replica of each request, and sends the request there itself."""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from retain.cluster.affinity import hash_key, prefix_key
from retain.cluster.config import ClusterSettings
from retain.cluster.environment import HAPROXY_ENV
from retain.cluster.haproxy import SESSION_HEADER
from retain.cluster.routing import ReplicaLoads, choose

TRUNCATED_HEADER = "x-body-truncated"  # HAProxy: the body is only the beginning of a request's
ANSWER_TIMEOUT_S = 10.0


@serve.ingress()
class Router:
    """Chooses replicas by session, by text or by load. A session stays where it is while its replica runs."""

    def __init__(self, settings: ClusterSettings, replicas: DeploymentHandle[Any]):
        if os.environ.get(HAPROXY_ENV) != "1":
            raise ValueError(f"Ray needs {HAPROXY_ENV}=1 in its environment, on every machine")
        self._settings, self._replicas = settings, replicas
        self._loads = ReplicaLoads(self._ask_for_loads)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the application that answers HAProxy."""
        return Starlette(routes=[Route("/internal/route", self.route, methods=["POST"])])

    async def route(self, request: Request) -> JSONResponse:
        """Return the name of a replica as `replica_id`, or 503 where none runs."""
        num_ongoing = await self._loads.get()
        if not num_ongoing:
            return JSONResponse({"error": "no replica runs"}, 503)
        if session := request.headers.get(SESSION_HEADER):
            replica_id = choose(num_ongoing, session, spread=float("inf"))
        else:
            replica_id = choose(num_ongoing, await self._key_of_text(request), self._settings.affinity_spread)
        return JSONResponse({"replica_id": replica_id})

    async def _key_of_text(self, request: Request) -> str | None:
        if self._settings.cluster.affinity != "prefix":
            return None
        body, num_chars = await request.body(), self._settings.cluster.affinity_chars
        if TRUNCATED_HEADER in request.headers:  # no JSON: what it begins with has to do
            return hash_key(repr(body[:num_chars]))
        return prefix_key(body, num_chars)

    async def _ask_for_loads(self) -> list[tuple[str, int]]:
        try:
            answers: list[Any] = await self._replicas.broadcast("get_load").results_async(
                timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True
            )
        except DeploymentUnavailableError:
            return []
        return [answer for answer in answers if not isinstance(answer, BaseException)]
