"""An HTTP request as one argument of a call between processes, and its response as a stream of ASGI messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

SCOPE_FIELDS = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client")


@dataclass(frozen=True)
class ForwardedRequest:
    """A request with its whole body. `affinity` chooses its replica (see AffinityRouter)."""

    affinity: str | None
    scope: dict[str, Any]
    body: bytes

    @classmethod
    def from_scope(cls, scope: Scope, body: bytes, affinity: str | None) -> ForwardedRequest:
        """Return a request with what can be sent of its ASGI scope."""
        return cls(affinity, {name: scope[name] for name in SCOPE_FIELDS if name in scope}, body)


async def run_app(app: ASGIApp, request: ForwardedRequest) -> AsyncIterator[Message]:
    """Yield the messages of an application's response.

    Where the iteration ends early, the client hung up: the application is told so, and then cancelled.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    received, hung_up = False, asyncio.Event()

    async def receive() -> Message:
        nonlocal received
        if not received:
            received = True
            return {"type": "http.request", "body": request.body, "more_body": False}
        await hung_up.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app({**request.scope, "state": {}, "asgi": {"version": "3.0"}}, receive, messages.put)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while message := await messages.get():
            yield message
        await task  # raises what the application raised
    finally:
        hung_up.set()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
