"""ASGI middleware: authenticates every request, checks its Host, and bounds the size and upload time of its body.

What a request has in flight is returned here, when its response has been sent or the client is gone.
HEAD is answered as GET, without the body. All is plain ASGI, because Starlette's BaseHTTPMiddleware would buffer
streamed responses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retain.files import quote
from retain.server.admission import AdmissionControl
from retain.server.auth import ApiKey
from retain.server.config import ServerConfig
from retain.server.error_format import to_error_response
from retain.server.hosts import HostRule
from retain.server.openai.errors import APIError

INSPECTOR_FILES = ("playground", "common.js", "inspect.css", "inspect.js", "playground.js")
INSPECTOR_PATHS = ("/inspect", *(f"/inspect/{name}" for name in INSPECTOR_FILES))
HEALTH_PATHS = ("/health", "/ready")
PUBLIC_PATHS = ("/", *HEALTH_PATHS, *INSPECTOR_PATHS)  # they reveal nothing about requests
TRACE_HEADERS = (b"traceparent", b"tracestate")
HEADERS = (b"authorization", b"content-length", b"x-api-key", *TRACE_HEADERS)
log = logging.getLogger(__name__)


class AuthMiddleware:
    """Checks the API key and the Host header, and limits the body, before the application handles a request."""

    def __init__(self, app: ASGIApp, config: ServerConfig, admission: AdmissionControl):
        self.app = app
        self.api_keys = config.api_keys
        self.limits = config.limits
        self.admission = admission
        # A browser sends no key by itself, so with keys a page of another origin reads nothing.
        self.host_rule = None if config.api_keys else HostRule(config.allowed_hosts, config.insecure_no_api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate a request by its API key, and pass it on if it is admitted (ASGI).

        Stores the authenticated ApiKey as `request.state.key`, and its RequestAdmission as `request.state.admission`.
        """
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {k: v.decode("latin-1") for k, v in scope["headers"] if k in HEADERS}
        key = self._authenticate(headers)
        response_started = False
        scope.setdefault("state", {})["key"] = key

        async def send_wrapper(message: Message) -> None:
            nonlocal response_started
            response_started = True
            await send(message)

        try:
            self._check_host(scope)
            if key is None and scope["path"] not in PUBLIC_PATHS and scope["method"] != "OPTIONS":
                raise APIError(
                    401,
                    "missing or invalid API key: send Authorization: Bearer KEY, or x-api-key: KEY",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            length = headers.get(b"content-length", "0")
            if not length.isdecimal() or int(length) > self.limits.max_body_size:
                raise self._body_too_large_error()
            deadline = asyncio.get_running_loop().time() + self.limits.request_timeout
            with self.admission.open(key.name if key else "", deadline) as admission:
                # OpenTelemetry logs what it cannot read, and a terminal would obey control characters in it.
                admission.trace_headers = {
                    k.decode(): headers[k] for k in TRACE_HEADERS if headers.get(k, "\0").isprintable()
                }
                scope["state"]["admission"] = admission
                await self.app(scope, self._limit_body(receive), send_wrapper)
        except APIError as error:
            await to_error_response(error, scope["path"])(scope, receive, send)
        except ClientDisconnect:
            log.debug("%s: the client hung up within the body", scope["method"])
        except Exception:
            log.exception("%s %s failed", scope["method"], quote(scope["path"]))
            if response_started:
                raise
            failure = APIError(500, "internal server error")
            await to_error_response(failure, scope["path"])(scope, receive, send)

    def _authenticate(self, headers: Mapping[bytes, str]) -> ApiKey | None:
        """Return the key of either header that clients send it in; OpenAI's header comes first."""
        key = self.api_keys.authenticate(headers.get(b"authorization"))
        return key or self.api_keys.authenticate(f"Bearer {headers.get(b'x-api-key', '')}")

    def _check_host(self, scope: Scope) -> None:
        """Refuse the Host header of a web page that DNS rebinding led here. Raises APIError."""
        if not self.host_rule or scope["path"] in HEALTH_PATHS:
            return
        for name, value in scope["headers"]:
            if name == b"host" and not self.host_rule.accepts(value.decode("latin-1")):
                host = quote(value.decode("latin-1"))
                raise APIError(403, f"Host {host} is not allowed without API keys: start with --allow-host NAME")

    def _limit_body(self, receive: Receive) -> Receive:
        """Wrap `receive` so that it raises for a body that is too large or too slow."""
        size = 0
        complete = False
        deadline = asyncio.get_running_loop().time() + self.limits.upload_timeout

        async def receive_limited() -> Message:
            nonlocal size, complete
            if complete:
                return await receive()  # only a disconnect can follow the body
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                log.warning("request rejected by upload_timeout: %d bytes received", size)
                raise HTTPException(408, "timed out while reading the request body") from None
            size += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if size > self.limits.max_body_size:
                raise HTTPException(413, self._body_too_large_error().message)
            return message

        return receive_limited

    def _body_too_large_error(self) -> APIError:
        log.warning("request rejected by max_body_size, %d bytes", self.limits.max_body_size)
        return APIError(413, f"the request body exceeds {self.limits.max_body_size} bytes: send less")


class HeadMiddleware:
    """Answers HEAD as GET is answered, without the body: probes and monitors send it."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a HEAD request as a GET request, without the body (ASGI)."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self.app(scope, receive, send)

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self.app({**scope, "method": "GET"}, receive, send_without_body)
