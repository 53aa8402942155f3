"""HTTP responses of generation requests: a JSON object, or server-sent events.

A stream costs a few dozen microseconds a token, so events are encoded by hand and sent without wrappers.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from retain.engine.request import FinishReason
from retain.server.disconnects import wait_for_disconnect
from retain.server.engine_thread import EngineThread
from retain.server.openai.errors import APIError
from retain.server.request_group import EngineError, OutputDelta, RequestGroup
from retain.server.warning_header import add_warnings

WRITE_GRACE_S = 5.0  # time to write the timeout error after the deadline
KEEP_ALIVE_S = 15.0  # of silence: clients give up on a stream after some minutes without a byte
KEEP_ALIVE = b": still computing\n\n"  # a comment, which every reader of events skips


class ClientDisconnected(Exception):
    """The client closed the connection."""


class ResponseEncoder(ABC):
    """Encodes the answer to one request in the format of one API: as a JSON object, or as server-sent events."""

    headers: Mapping[str, str] = {}  # of the response, beside those of its format

    @abstractmethod
    def update(self, delta: OutputDelta) -> None:
        """Add newly generated text of a choice to the full response."""

    @abstractmethod
    def encode_full(self, group: RequestGroup) -> bytes:
        """Encode the full response of a finished group."""

    def encode_start(self, group: RequestGroup) -> bytes:
        """Encode what precedes the first delta of a stream."""
        return b""

    @abstractmethod
    def encode_delta(self, delta: OutputDelta) -> bytes:
        """Add a delta, and encode the events of a stream for it; empty if it adds nothing visible."""

    @abstractmethod
    def encode_end(self, group: RequestGroup) -> bytes:
        """Encode the last events of a stream whose group has finished."""

    @abstractmethod
    def encode_stream_error(self, error: APIError) -> bytes:
        """Encode the event that ends a failed stream."""

    def to_error_response(self, error: APIError) -> Response:
        """Return the response to a request that failed before its stream began."""
        return error.to_response()


class GenerationResponse(Response):
    """The response of a request group. Cancels the group when the client disconnects or the deadline passes."""

    def __init__(
        self,
        engine_thread: EngineThread,
        deadline: float,
        group: RequestGroup,
        encoder: ResponseEncoder,
        stream: bool,
    ):
        """`deadline` is a time of the event loop's clock."""
        super().__init__()
        self.engine_thread = engine_thread
        self.deadline = deadline
        self.group = group
        self.encoder = encoder
        self.stream = stream
        self.follow_up: Callable[[], Awaitable[None]] | None = None  # what is to be done when all is sent
        self._is_silent = True  # since `_keep_alive` looked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send the response (ASGI)."""
        timeout = asyncio.get_running_loop().call_at(self.deadline, self._on_timeout)
        disconnect = asyncio.create_task(self._fail_on_disconnect(receive))
        respond = self._send_stream if self.stream else self._send_full
        try:
            async with asyncio.timeout_at(self.deadline + WRITE_GRACE_S):  # also if the client reads nothing
                await respond(scope, receive, send)
            if self.follow_up and not self.group.num_unfinished:
                await self.follow_up()
        except (ClientDisconnected, TimeoutError):
            pass
        finally:
            timeout.cancel()
            disconnect.cancel()
            self.engine_thread.cancel(self.group)

    def _on_timeout(self) -> None:
        self.engine_thread.cancel(self.group)
        self.group.fail(APIError(408, "the request timed out"))

    async def _fail_on_disconnect(self, receive: Receive) -> None:
        await wait_for_disconnect(receive)
        self.group.fail(ClientDisconnected())

    async def _iter_deltas(self) -> AsyncIterator[list[OutputDelta]]:
        """Yield deltas until every choice has finished. Raises what the group failed with."""
        num_unfinished = len(self.group.request_states)
        while num_unfinished:
            deltas = await self.group.get_deltas()
            for delta in deltas:
                if delta.finish_reason is FinishReason.FAILED:
                    raise APIError(400, self._explain_failure(delta.index), "response_format")
                if delta.finish_reason is FinishReason.OUT_OF_MEMORY:
                    raise EngineError("the request needs more KV memory than was planned for it")
            yield deltas
            num_unfinished -= sum(d.finish_reason is not None for d in deltas)

    def _explain_failure(self, index: int) -> str:
        """Return why a choice cannot follow its grammar."""
        grammar = self.group.requests[index].grammar
        return f"the answer cannot follow the requested format or tool call: {grammar.error if grammar else ''}"

    async def _send_full(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for deltas in self._iter_deltas():
                for delta in deltas:
                    self.encoder.update(delta)
        except (EngineError, APIError) as error:
            await self.encoder.to_error_response(_to_api_error(error))(scope, receive, send)
            return
        data = self.encoder.encode_full(self.group)
        headers = add_warnings(self.encoder.headers, self.group.warnings)
        await Response(data, headers=headers, media_type="application/json")(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        headers += [(name.encode(), value.encode()) for name, value in self.encoder.headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        encoder = self.encoder
        keep_alive = asyncio.create_task(self._keep_alive(send))
        try:
            if start := encoder.encode_start(self.group):
                await send({"type": "http.response.body", "body": start, "more_body": True})
            async for deltas in self._iter_deltas():
                if data := b"".join(encoder.encode_delta(delta) for delta in deltas):
                    self._is_silent = False
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            last = encoder.encode_end(self.group)
        except (EngineError, APIError) as error:
            last = encoder.encode_stream_error(_to_api_error(error))
        finally:
            keep_alive.cancel()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment after each silence, until this is cancelled: a long prompt, or a call that is not whole."""
        while True:
            self._is_silent = True
            await asyncio.sleep(KEEP_ALIVE_S)
            if self._is_silent:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})


def _to_api_error(error: EngineError | APIError) -> APIError:
    return error if isinstance(error, APIError) else APIError(error.status, str(error))
