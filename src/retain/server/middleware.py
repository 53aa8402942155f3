"""What every call passes before anything looks at it: its key, the size of its body, the time that it takes to come.

A middleware, in plain ASGI: what streams must not be held up by it. What is not known here: bodies' contents.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retain.server.admission import Limits
from retain.server.auth import ApiKeys
from retain.server.openai.errors import APIError

INSPECTOR_PATHS = ("/inspect", "/inspect/inspect.css", "/inspect/inspect.js")
PUBLIC_PATHS = ("/health", "/ready", "/docs", "/openapi.json", *INSPECTOR_PATHS)  # these tell nothing of anybody
log = logging.getLogger("retain")


class AuthMiddleware:
    """Before an app."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys, limits: Limits):
        self.app, self.api_keys, self.limits = app, api_keys, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {k: v.decode("latin-1") for k, v in scope["headers"] if k in (b"authorization", b"content-length")}
        key, begun = self.api_keys.authenticate(headers.get(b"authorization")), False
        scope.setdefault("state", {})["key"] = key

        async def send_wrapper(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            if key is None and scope["path"] not in PUBLIC_PATHS and scope["method"] != "OPTIONS":
                raise APIError(
                    401, "give an API key: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"}
                )
            length = headers.get(b"content-length", "0")
            if not length.isdigit() or int(length) > self.limits.max_body_size:
                raise self._body_too_large_error()
            await self.app(scope, self._limit_body(receive), send_wrapper)
        except APIError as refused:
            await refused.to_response()(scope, receive, send)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if begun:
                raise
            await APIError(500, "the server failed at this request").to_response()(scope, receive, send)

    def _limit_body(self, receive: Receive) -> Receive:
        """The same body, if it is small enough and comes soon enough."""
        size, done = 0, False
        until = asyncio.get_running_loop().time() + self.limits.upload_timeout

        async def receive_limited() -> Message:
            nonlocal size, done
            if done:
                return await receive()  # whether somebody still listens
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, "the body did not come in time") from None
            size += len(message.get("body", b""))
            done = not message.get("more_body", False)
            if size > self.limits.max_body_size:
                raise HTTPException(413, self._body_too_large_error().message)
            return message

        return receive_limited

    def _body_too_large_error(self) -> APIError:
        return APIError(413, f"the body is larger than {self.limits.max_body_size} bytes")
