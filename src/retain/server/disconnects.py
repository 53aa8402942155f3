"""Clients that hang up while their request waits or is prepared."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from retain.server.openai.errors import APIError

T = TypeVar("T")


async def run_while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, or cancel it as soon as the client hangs up. Raises APIError then, for nobody.

    `receive` (ASGI) has nothing else to tell: the body was read.
    """
    try:
        async with asyncio.timeout(None) as scope:
            watch = asyncio.create_task(_expire_on_disconnect(receive, scope))
            try:
                return await work
            finally:
                watch.cancel()
    except TimeoutError:
        if not scope.expired():
            raise
        raise APIError(400, "the client closed the connection") from None


async def _expire_on_disconnect(receive: Receive, scope: asyncio.Timeout) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.reschedule(asyncio.get_running_loop().time())
