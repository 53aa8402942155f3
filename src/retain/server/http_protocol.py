"""HTTP connections with bounds that hold before a request is known: their number, and the size and time of headers.

It adds to uvicorn's connection, which bounds none of them:

    bytes of a request up to the end of its headers, and around its body: max_header_size
    seconds from the first byte of a request to the end of its headers:   header_timeout
    seconds for the rest of a body after the response:                    header_timeout
    seconds in which the client reads nothing of what was written for it: send_timeout
    open connections:                                                     max_connections

A client may close its sending side after a request. It still gets the answer; a client that is gone is noticed, also
with other requests behind the one that runs. Uvicorn tells only the newest request.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import select
import socket
import sys
import termios
from collections import deque
from contextlib import suppress
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from retain.server.config import Limits
from retain.server.openai.errors import APIError

log = logging.getLogger(__name__)
LOG_EVERY = 100  # log the first rejection by a limit, and then every 100th of a server
GONE_POLL_S = 0.25  # how often a connection of which nothing is read is checked for a client that is gone
FRAMING_BYTES = 8  # of a chunk of a body, besides its content: clients may send single bytes


class RejectionLog:
    """Counts the connections that each limit ended, for all connections of a server."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("max_connections", "max_header_size", "header_timeout", "send_timeout"), 0)

    def add(self, limit: str) -> None:
        """Count a connection that was ended."""
        self.counts[limit] += 1
        if self.counts[limit] % LOG_EVERY == 1:
            log.warning("connection closed by %s (%d in total)", limit, self.counts[limit])


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. Until `on_headers_complete` nothing of the application has seen the request."""

    def __init__(self, limits: Limits, rejections: RejectionLog, **uvicorn_options: Any):
        super().__init__(**uvicorn_options)
        self._limits = limits
        self._rejections = rejections
        self._in_headers = True  # of a request, or before its first byte
        self._in_body = False
        self._header_bytes = 0  # of this request, up to the end of its headers
        self._frame_bytes = 0  # received since the headers, without the body's content
        self._body_bytes = 0
        self._is_rejected = False
        self._is_half_closed = False  # by the client, after its last request
        self._cycles: deque[RequestResponseCycle] = deque()  # requests in order; the first ones may be answered
        self._timer: asyncio.TimerHandle | None = None
        self._gone_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    # ---- the connection ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, or close it at once where there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._rejections.add("max_connections")
            self._is_rejected = True
            transport.abort()
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and tell every unfinished request that its client is gone."""
        for timer in (self._timer, self._gone_timer, self._send_timer):
            if timer:
                timer.cancel()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True  # from now on it writes nothing
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and end the connection where it exceeds a limit."""
        if self._is_rejected:
            return
        if self._in_headers:
            self._header_bytes += len(data)
            if not self._timer:
                self._start_timer()
        elif self._in_body:
            self._frame_bytes += len(data)
        super().data_received(data)
        if self._is_rejected:
            return
        if self._in_headers and self._header_bytes > self._limits.max_header_size:
            self._reject_headers()
        elif self._in_body and self._frame_bytes > self._limits.max_header_size + FRAMING_BYTES * self._body_bytes:
            self._rejections.add("max_header_size")
            self._is_rejected = True
            self.transport.abort()

    def pause_writing(self) -> None:
        """Wait until the client has read what was written for it, as long as it reads some of it."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """Go on writing, and stop the timer of a client that reads nothing."""
        if self._send_timer:
            self._send_timer.cancel()
        super().resume_writing()

    def _expect_reading(self) -> None:
        self._send_timer = self.loop.call_later(self._limits.send_timeout, self._check_reading, self._count_unread())

    def _count_unread(self) -> int:
        """Return the bytes that the client has not read, here and in the system's buffer of the socket."""
        unread = self.transport.get_write_buffer_size()
        with suppress(OSError):  # a system that does not tell
            queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            unread += int.from_bytes(queued, sys.byteorder)
        return unread

    def _check_reading(self, unread: int) -> None:
        """Abort the connection if as many bytes are unread as before."""
        if self._count_unread() < unread:
            self._expect_reading()
        else:
            self._rejections.add("send_timeout")
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for the answer, if a whole request was received. False closes it."""
        cycle = self.cycle
        if self._is_rejected or cycle is None or cycle.response_complete or cycle.more_body or not self._in_headers:
            return False
        cycle.keep_alive = False  # the connection is closed after the answer
        self._is_half_closed = True
        running = self._forget_answered_cycles()[0]
        if running.scope["http_version"] == "1.1" and not running.response_started:
            # A client that waits ignores this; the system of one that is gone answers with a reset.
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._start_gone_timer()
        return True

    def _forget_answered_cycles(self) -> deque[RequestResponseCycle]:
        """Return the cycles from the one that runs on."""
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        return self._cycles

    def _start_gone_timer(self) -> None:
        if self._gone_timer:
            self._gone_timer.cancel()
        self._gone_timer = self.loop.call_later(GONE_POLL_S, self._check_gone)

    def _check_gone(self) -> None:
        """Abort the connection if the client has reset it, and read on if it has closed its sending side.

        Nothing else shows it: nothing is read after the client's last request, nor behind a request in the pipeline.
        """
        if self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif self._is_half_closed or self.pipeline:
            if not self._is_half_closed and _is_closed_by_peer(connection.fileno()):
                self.flow.resume_reading()
            self._start_gone_timer()

    # ---- the parser ----------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        """Start the request, unless its headers are too large."""
        self._stop_timer()
        self._in_headers = False
        self._in_body = True
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_header_size:
            self._reject_headers()
        else:
            super().on_headers_complete()
            self._forget_answered_cycles().append(self.cycle)
            if self.pipeline:  # uvicorn has paused reading
                self._start_gone_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Those after a body count as its framing, and nobody reads them."""
        if not self._in_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        """Store a part of the body."""
        self._body_bytes += len(body)
        if not self._is_rejected:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the counts and the timer for the next request of the connection."""
        self._stop_timer()
        self._in_headers = True
        self._in_body = False
        self._header_bytes = self._frame_bytes = self._body_bytes = 0
        if not self._is_rejected:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request; one that is still sending its body gets a little time for it."""
        super().on_response_complete()
        if self._in_body and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._start_timer()

    # ---- the limits ----------------------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._limits.header_timeout, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None

    def _on_timeout(self) -> None:
        """End a connection whose request is too slow."""
        self._timer = None
        if self.transport.is_closing():
            return
        if self.cycle and not self.cycle.response_complete and self._in_headers:  # the next request can wait
            self._start_timer()
            return
        self._rejections.add("header_timeout")
        if self._in_headers and self._header_bytes:
            self._reject(APIError(408, "timed out while reading the request's headers"))
        else:
            self._is_rejected = True
            self.transport.close()

    def _reject_headers(self) -> None:
        self._rejections.add("max_header_size")
        self._reject(APIError(431, f"the request's headers exceed {self._limits.max_header_size} bytes"))

    def _reject(self, error: APIError) -> None:
        """Answer with an error, and close the connection."""
        self._is_rejected = True
        body = bytes(error.to_response().body)
        if not self.cycle or self.cycle.response_complete:  # otherwise an earlier answer would be cut in two
            head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


def _is_closed_by_peer(file_number: int) -> bool:
    """Tell whether the peer sends nothing more, which may be unread behind what it has sent."""
    poll = select.poll()
    poll.register(file_number, getattr(select, "POLLRDHUP", 0))  # Linux only; a reset is always told
    return bool(poll.poll(0))
