"""HTTP responses of generation requests: a JSON object, or server-sent events.

A stream costs a few dozen microseconds a token, so events are encoded by hand and sent without wrappers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from time import time
from typing import Any
from uuid import uuid4

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from retain.engine.request import FinishReason, Request
from retain.processing.output import OutputProcessor
from retain.server.engine_thread import EngineThread
from retain.server.openai.errors import APIError
from retain.server.openai.responses import Json, ResponseBuilder
from retain.server.request_group import EngineError, OutputDelta, RequestGroup

WRITE_GRACE_S = 5.0  # time to write the timeout error after the deadline


class ClientDisconnected(Exception):
    """The client closed the connection."""


class GenerationResponse(Response):
    """The response of a request group. Cancels the group when the client disconnects or the deadline passes."""

    def __init__(
        self,
        engine_thread: EngineThread,
        model_name: str,
        deadline: float,
        group: RequestGroup,
        builder: ResponseBuilder,
        stream: bool,
        admission: ExitStack,
    ):
        """`deadline` is a time of the event loop's clock. `admission` is closed when the response ends."""
        super().__init__()
        self.engine_thread, self.deadline, self.group, self.builder = engine_thread, deadline, group, builder
        self.stream, self.admission = stream, admission
        self.envelope = {
            "id": f"{builder.id_prefix}{uuid4().hex}",
            "object": builder.chunk_object_name if stream else builder.object_name,
            "created": int(time()),
            "model": model_name,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send the response (ASGI)."""
        with self.admission:
            timeout = asyncio.get_running_loop().call_at(self.deadline, self._on_timeout)
            disconnect = asyncio.create_task(self._watch_disconnect(receive))
            respond = self._send_stream if self.stream else self._send_full
            try:
                async with asyncio.timeout_at(self.deadline + WRITE_GRACE_S):  # also if the client reads nothing
                    await respond(scope, receive, send)
            except (ClientDisconnected, TimeoutError):
                pass
            finally:
                timeout.cancel()
                disconnect.cancel()
                self.engine_thread.cancel(self.group)

    def _on_timeout(self) -> None:
        self.engine_thread.cancel(self.group)
        self.group.fail(APIError(408, "the request timed out"))

    async def _watch_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.group.fail(ClientDisconnected())

    async def _iter_deltas(self) -> AsyncIterator[list[OutputDelta]]:
        """Yield deltas until every choice has finished. Raises what the group failed with."""
        num_unfinished = len(self.builder.choices)
        while num_unfinished:
            deltas = await self.group.get_deltas()
            if any(d.finish_reason is FinishReason.FAILED for d in deltas):
                raise APIError(400, "the response_format grammar is too complex: simplify it", "response_format")
            yield deltas
            num_unfinished -= sum(d.finish_reason is not None for d in deltas)

    async def _send_full(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for deltas in self._iter_deltas():
                for delta in deltas:
                    self.builder.choices[delta.index].update(delta)
        except (EngineError, APIError) as error:
            await _to_api_error(error).to_response()(scope, receive, send)
            return
        data = orjson.dumps({**self.envelope, "choices": self.builder.build_choices(), **self._usage_fields()})
        await Response(data, media_type="application/json")(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for deltas in self._iter_deltas():
                chunks = [chunk for delta in deltas for chunk in self.builder.build_chunks(delta)]
                if data := b"".join(self._encode_event([chunk]) for chunk in chunks):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            last = self._encode_end()
        except (EngineError, APIError) as error:
            last = b"data: " + orjson.dumps(_to_api_error(error).to_dict()) + b"\n\n"
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _encode_event(self, choices: list[Json], **fields: Any) -> bytes:
        if self.builder.include_usage and not fields:
            fields = {"usage": None}
        return b"data: " + orjson.dumps({**self.envelope, "choices": choices, **fields}) + b"\n\n"

    def _encode_end(self) -> bytes:
        usage = self._encode_event([], **self._usage_fields()) if self.builder.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _usage_fields(self) -> Json:
        return {
            "usage": build_usage(self.group, self.builder),
            "retain": build_request_stats(self.engine_thread.llm.output_processor, self.group),
        }


def build_usage(group: RequestGroup, builder: ResponseBuilder) -> Json:
    """Count the tokens of a finished group. Choices of the same prompt count its tokens once."""
    requests_by_prompt: dict[int, list[Request]] = {}
    for request in group.requests:
        requests_by_prompt.setdefault(id(request.prompt), []).append(request)
    prompts = requests_by_prompt.values()
    num_prompt = sum(len(requests[0].prompt) for requests in prompts)
    num_output = sum(choice.num_tokens for choice in builder.choices)
    details = {"cached_tokens": sum(max(r.stats.num_cached_tokens for r in requests) for requests in prompts)}
    if group.num_pinned_tokens:
        details["pinned_tokens"] = group.num_pinned_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": details,
    }


def build_request_stats(output_processor: OutputProcessor, group: RequestGroup) -> list[Json]:
    """Build the KV cache and speculation statistics of each choice of a finished group."""
    stats = []
    for state in group.request_states:
        output = output_processor.to_output(state)
        kv = {k: v for k, v in output.kv.items() if k != "groups"}
        choice = {"kv": kv, "speculate": output.speculate, "num_preemptions": output.num_preemptions}
        stats.append(choice | {"prefix": output.prefix} if output.prefix else choice)
    return stats


def _to_api_error(error: EngineError | APIError) -> APIError:
    return error if isinstance(error, APIError) else APIError(error.status, str(error))
