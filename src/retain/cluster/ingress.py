"""The ingress of `--affinity prefix`: reads a request's body, and forwards it to the replica of its beginning."""

from __future__ import annotations

from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.responses import Response
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.types import Receive, Scope, Send

from retain.cluster.affinity import hash_key, prefix_key
from retain.cluster.config import ClusterSettings
from retain.cluster.forwarding import ForwardedRequest
from retain.server.auth import ANONYMOUS
from retain.server.error_format import add_error_handlers
from retain.server.middleware import AuthMiddleware

SESSION_HEADER = "x-session-id"
METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"]


@serve.ingress()
class Ingress:
    """Forwards requests to replicas. A session chooses the replica where the request names one, else its text does."""

    def __init__(self, settings: ClusterSettings, replicas: DeploymentHandle[Any]):
        self._settings, self._replicas = settings, replicas.options(stream=True)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Build an application that checks keys, hosts and sizes as each replica does, and forwards the rest."""
        app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        app.add_api_route("/{path:path}", self.forward, methods=METHODS, response_model=None)
        add_error_handlers(app)
        app.add_middleware(AuthMiddleware, config=self._settings.server)
        return app

    async def forward(self, request: Request) -> Response:
        """Read the body, choose the key, and return the response of a replica."""
        body = await request.body()
        salt = (request.state.key or ANONYMOUS).salt
        session = request.headers.get(SESSION_HEADER)
        key = hash_key(salt, session) if session else prefix_key(body, salt, self._settings.cluster.affinity_chars)
        return ForwardedResponse(self._replicas, ForwardedRequest.from_scope(request.scope, body, key))


class ForwardedResponse(Response):
    """The response of a replica, chunk by chunk. A client that hangs up cancels the call."""

    def __init__(self, replicas: DeploymentHandle[Any], request: ForwardedRequest):
        super().__init__()
        self._replicas, self._request = replicas, request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the messages of the replica as they come."""
        messages = cast(DeploymentResponseGenerator[Any], self._replicas.forward.remote(self._request))
        try:
            async for message in messages:
                await send(message)
        except BaseException:
            messages.cancel()  # type: ignore[no-untyped-call]
            raise
