"""A uvicorn server that drains: what was accepted before a signal is finished, and whatever comes after it is refused.

The port stays open meanwhile, so that probes of /ready find out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from retain.server.openai.serving import OpenAIServing
from retain.signals import END_SIGNALS, end_at_next_signal, is_main_thread

log = logging.getLogger(__name__)
EXIT_GRACE_S = 30.0  # from the end of the drain to the end of the process, whatever hangs
CUT_GRACE_S = 5.0  # from a second signal to the end of the process
CLOSE_GRACE_S = 2.0  # for answers to be written once the server stops; then their connections are aborted


class Watchdog:
    """Ends the process when its time is over, although something hangs. The stores are made to survive this."""

    def __init__(self) -> None:
        self._timers: list[threading.Timer] = []

    def start(self, seconds: float) -> None:
        """End the process after so many seconds, unless it has ended."""
        timer = threading.Timer(seconds, _exit_at_once)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def stop(self) -> None:
        """Cancel the timers, so that none ends the process."""
        for timer in self._timers:
            timer.cancel()


def _exit_at_once() -> None:
    log.critical("the server hangs: exiting at once")
    os._exit(1)


class QuietlyCancelled:
    """An application whose requests end without a traceback when uvicorn cancels them at the end of its shutdown."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a connection on to the application, and log no error if it is cancelled (ASGI)."""
        with suppress(asyncio.CancelledError):
            await self.app(scope, receive, send)


class GracefulServer(uvicorn.Server):
    """A server that drains on the first signal, cuts requests off on the second, and ends at the third.

    While it drains, /ready is 503, new requests are refused, and answers close their connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: OpenAIServing,
        drain_timeout: float,
        watchdog: Watchdog,
        on_ready: Callable[[GracefulServer], None] | None = None,
    ):
        """`watchdog`: started by signals, in case the shutdown hangs."""
        config.timeout_graceful_shutdown = round(2 * CLOSE_GRACE_S)
        super().__init__(config)
        self.service = service
        self.drain_timeout = drain_timeout
        self.on_ready = on_ready
        self.watchdog = watchdog
        self._num_signals = 0
        self._accepted: set[asyncio.Task[None]] | None = None  # requests to be finished, once the server drains
        self._drain_ends_at = 0.0  # by the event loop's clock

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals from now on, also while the engine stops: whoever calls `serve` restores the handlers."""
        if is_main_thread():
            for number in END_SIGNALS:
                signal.signal(number, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal to end."""
        self._num_signals += 1
        if self._num_signals == 1:
            self.service.admission.closed = True
            self.watchdog.start(self.drain_timeout + EXIT_GRACE_S)
        else:
            self.watchdog.start(CUT_GRACE_S)
            end_at_next_signal()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to shut down (uvicorn, ten times a second)."""
        if self.service.engine_thread.rank_error:
            self.should_exit = True
        elif self._num_signals:
            self.should_exit = self.should_exit or self._is_drained()
        return await super().on_tick(counter)

    def _is_drained(self) -> bool:
        """Return whether all that was accepted before the signal has ended. Cuts it off when its time is over."""
        now = asyncio.get_running_loop().time()
        if self._accepted is None:
            self._accepted = set(self.server_state.tasks)
            self._drain_ends_at = now + self.drain_timeout
            self.config.encoded_headers.append((b"connection", b"close"))
            self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]
            log.info("draining: %d requests in flight", len(self._accepted))
        self._accepted = {task for task in self._accepted if not task.done()}
        if self._accepted and self._num_signals == 1 and now < self._drain_ends_at:
            return False
        if self._accepted:
            reason = "the drain timeout is over" if self._num_signals == 1 else "a second signal"
            log.warning("%s: %d requests are cut off", reason, len(self._accepted))
            self.service.engine_thread.close()
        return True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Bind the port, log the address and call `on_ready`."""
        await super().startup(sockets)
        if self.started:
            log.info("serving %s at %s", self.service.model_name, self.url)
            if self.on_ready:
                self.on_ready(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the port and all connections."""
        asyncio.get_running_loop().call_later(CLOSE_GRACE_S, self._abort_connections)
        await super().shutdown(sockets)

    def _abort_connections(self) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport:
                connection.transport.abort()

    @property
    def url(self) -> str:
        """The base URL for clients, which ends in /v1."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
