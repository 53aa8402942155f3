"""Orders become answers: whole, or as server-sent events. What is not known here: what was asked.

A stream costs a few dozen microseconds a token: what is sent is made by hand, and nothing wraps it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import time
from typing import Any
from uuid import uuid4

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from retain.desk import Processor
from retain.engine.request import FinishReason, Request
from retain.server.engine_thread import EngineError, EngineThread, OutputDelta, RequestGroup
from retain.server.openai.errors import APIError
from retain.server.openai.responses import ChatChoiceBuilder, CompletionChoiceBuilder, Json


@dataclass
class ResponseBuilder:
    """How an order's answers are said."""

    id_prefix: str
    object_name: str  # of "object"
    chunk_object_name: str
    choices: Sequence[ChatChoiceBuilder | CompletionChoiceBuilder]
    build_choice: Callable[[int], Json]  # the whole of choice i
    build_chunks: Callable[[OutputDelta], list[Json]]
    include_usage: bool  # at the end of a stream


WRITE_GRACE_S = 5.0  # seconds to tell somebody that it is too late


class ClientDisconnected(Exception):
    """Who asked does not listen any more."""


class GenerationResponse(Response):
    """An order's answers, whole or as server-sent events. Who hangs up ends it."""

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
        """`model` is its name; after `until`, on the loop's clock, it is too late; `inside` is left at the end."""
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
        """See ASGI."""
        with self.admission:
            late = asyncio.get_running_loop().call_at(self.deadline, self._on_timeout)
            left = asyncio.create_task(self._watch_disconnect(receive))
            try:
                async with asyncio.timeout_at(
                    self.deadline + WRITE_GRACE_S
                ):  # who does not read is not waited for either
                    await (
                        self._send_stream(scope, receive, send)
                        if self.stream
                        else self._send_full(scope, receive, send)
                    )
            except (ClientDisconnected, TimeoutError):
                pass
            finally:
                late.cancel()
                left.cancel()
                self.engine_thread.cancel(self.group)

    def _on_timeout(self) -> None:
        self.engine_thread.cancel(self.group)
        self.group.fail(APIError(408, "the answer took too long"))

    async def _watch_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.group.fail(ClientDisconnected())

    async def _iter_deltas(self) -> AsyncIterator[list[OutputDelta]]:
        left = len(self.group.request_states)
        while left:
            news = await self.group.get_deltas()
            if any(n.finish_reason is FinishReason.FAILED for n in news):
                raise APIError(400, "the form of the answer is too complex to be followed", "response_format")
            yield news
            left -= sum(n.finish_reason is not None for n in news)

    async def _send_full(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for news in self._iter_deltas():
                for n in news:
                    self.builder.choices[n.index].update(n)
        except (EngineError, APIError) as error:
            await _to_api_error(error).to_response()(scope, receive, send)
            return
        said = [self.builder.build_choice(i) for i in range(len(self.builder.choices))]
        data = orjson.dumps({**self.envelope, "choices": said, **self._usage_fields()})
        await Response(data, media_type="application/json")(scope, receive, send)

    async def _send_stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        end: Json | None = None
        try:
            async for news in self._iter_deltas():
                chunks = [chunk for n in news for chunk in self.builder.build_chunks(n)]
                if data := b"".join(self._encode_event([chunk]) for chunk in chunks):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except (EngineError, APIError) as error:
            end = _to_api_error(error).to_dict()
        last = b"data: " + orjson.dumps(end) + b"\n\n" if end else self._encode_end()
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
            "retain": build_request_stats(self.engine_thread.llm.processor, self.group),
        }


def build_usage(group: RequestGroup, builder: ResponseBuilder) -> Json:
    """Tokens of an order that has ended: each prompt once."""
    prompts: dict[int, list[Request]] = {}
    for reply in group.request_states:
        prompts.setdefault(id(reply.request.prompt), []).append(reply.request)
    asked = sum(len(rs[0].prompt) for rs in prompts.values())
    said = sum(c.num_tokens for c in builder.choices)
    details = {"cached_tokens": sum(max(r.num_cached_tokens for r in rs) for rs in prompts.values())}
    if group.num_pinned_tokens:
        details["pinned_tokens"] = group.num_pinned_tokens
    return {
        "prompt_tokens": asked,
        "completion_tokens": said,
        "total_tokens": asked + said,
        "prompt_tokens_details": details,
    }


def build_request_stats(processor: Processor, group: RequestGroup) -> list[Json]:
    """What the cache and the drafts of each answer came to."""
    out = []
    for reply in group.request_states:
        answer = processor.to_output(reply)
        told = {k: v for k, v in answer.kv.items() if k != "groups"}
        out.append({"kv": told, "speculate": answer.speculate, "preempted": answer.num_preemptions})
    return out


def _to_api_error(error: Exception) -> APIError:
    return error if isinstance(error, APIError) else APIError(getattr(error, "status", 500), str(error))
