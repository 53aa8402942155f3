"""What every call passes before anything looks at it: its key, the size of its body, the time that it takes to come.

A middleware, in plain ASGI: what streams must not be held up by it. What is not known here: bodies' contents.
"""

from __future__ import annotations

import asyncio
import logging

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from retain.server.errors import Refused
from retain.server.keys import Keys
from retain.server.limits import Limits

PAGES = ("/inspect", "/inspect/inspect.css", "/inspect/inspect.js")
OPEN = ("/health", "/ready", "/docs", "/openapi.json", *PAGES)  # these tell nothing of anybody
log = logging.getLogger("retain")


class Guard:
    """Before an app."""

    def __init__(self, app: ASGIApp, keys: Keys, limits: Limits):
        self.app, self.keys, self.limits = app, keys, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {k: v.decode("latin-1") for k, v in scope["headers"] if k in (b"authorization", b"content-length")}
        key, begun = self.keys.find(headers.get(b"authorization")), False
        scope.setdefault("state", {})["key"] = key

        async def heard(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            if key is None and scope["path"] not in OPEN and scope["method"] != "OPTIONS":
                raise Refused(401, "give an API key: Authorization: Bearer KEY", headers={"WWW-Authenticate": "Bearer"})
            length = headers.get(b"content-length", "0")
            if not length.isdigit() or int(length) > self.limits.body:
                raise self._large()
            await self.app(scope, self._bounded(receive), heard)
        except Refused as refused:
            await refused.response()(scope, receive, send)
        except Exception:
            log.exception("%s %s failed", scope["method"], scope["path"])
            if begun:
                raise
            await Refused(500, "the server failed at this request").response()(scope, receive, send)

    def _bounded(self, receive: Receive) -> Receive:
        """The same body, if it is small enough and comes soon enough."""
        size, done = 0, False
        until = asyncio.get_running_loop().time() + self.limits.upload_s

        async def bounded() -> Message:
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
            if size > self.limits.body:
                raise HTTPException(413, self._large().message)
            return message

        return bounded

    def _large(self) -> Refused:
        return Refused(413, f"the body is larger than {self.limits.body} bytes")
