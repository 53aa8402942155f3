"""Clients that hang up before their answer is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

from retain.server.openai.errors import APIError

T = TypeVar("T")


async def run_while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of `work`, or cancel it as soon as the client hangs up. Raises APIError then, for nobody.

    `receive` (ASGI): of a request whose body was read.
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


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client has hung up. The body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _expire_on_disconnect(receive: Receive, scope: asyncio.Timeout) -> None:
    await wait_for_disconnect(receive)
    scope.reschedule(asyncio.get_running_loop().time())
