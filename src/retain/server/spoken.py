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
from retain.engine.request import Request, FinishReason
from retain.server.errors import Refused
from retain.server.shapes import ChatChoice, CompletionChoice, Json
from retain.server.worker import Failed, News, Order, Worker


@dataclass
class Saying:
    """How an order's answers are said."""

    prefix: str
    whole: str  # of "object"
    part: str
    choices: Sequence[ChatChoice | CompletionChoice]
    told: Callable[[int], Json]  # the whole of choice i
    parts: Callable[[News], list[Json]]
    usage: bool  # at the end of a stream


GRACE = 5.0  # seconds to tell somebody that it is too late


class Gone(Exception):
    """Who asked does not listen any more."""


class Spoken(Response):
    """An order's answers, whole or as server-sent events. Who hangs up ends it."""

    def __init__(
        self, worker: Worker, model: str, until: float, order: Order, saying: Saying, stream: bool, inside: ExitStack
    ):
        """`model` is its name; after `until`, on the loop's clock, it is too late; `inside` is left at the end."""
        super().__init__()
        self.worker, self.until, self.order, self.saying = worker, until, order, saying
        self.stream, self.inside = stream, inside
        self.head = {
            "id": f"{saying.prefix}{uuid4().hex}",
            "object": saying.part if stream else saying.whole,
            "created": int(time()),
            "model": model,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        with self.inside:
            late = asyncio.get_running_loop().call_at(self.until, self._late)
            left = asyncio.create_task(self._listen(receive))
            try:
                async with asyncio.timeout_at(self.until + GRACE):  # who does not read is not waited for either
                    await (self._stream(scope, receive, send) if self.stream else self._whole(scope, receive, send))
            except (Gone, TimeoutError):
                pass
            finally:
                late.cancel()
                left.cancel()
                self.worker.cancel(self.order)

    def _late(self) -> None:
        self.worker.cancel(self.order)
        self.order.fail(Refused(408, "the answer took too long"))

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.order.fail(Gone())

    async def _news(self) -> AsyncIterator[list[News]]:
        left = len(self.order.replies)
        while left:
            news = await self.order.wait()
            if any(n.why is FinishReason.FAILED for n in news):
                raise Refused(400, "the form of the answer is too complex to be followed", "response_format")
            yield news
            left -= sum(n.why is not None for n in news)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for news in self._news():
                for n in news:
                    self.saying.choices[n.index].add(n)
        except (Failed, Refused) as error:
            await _refusal(error).response()(scope, receive, send)
            return
        said = [self.saying.told(i) for i in range(len(self.saying.choices))]
        data = orjson.dumps({**self.head, "choices": said, **self._counted()})
        await Response(data, media_type="application/json")(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        end: Json | None = None
        try:
            async for news in self._news():
                chunks = [chunk for n in news for chunk in self.saying.parts(n)]
                if data := b"".join(self._event([chunk]) for chunk in chunks):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
        except (Failed, Refused) as error:
            end = _refusal(error).body()
        last = b"data: " + orjson.dumps(end) + b"\n\n" if end else self._last()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    def _event(self, choices: list[Json], **more: Any) -> bytes:
        if self.saying.usage and not more:
            more = {"usage": None}
        return b"data: " + orjson.dumps({**self.head, "choices": choices, **more}) + b"\n\n"

    def _last(self) -> bytes:
        usage = self._event([], **self._counted()) if self.saying.usage else b""
        return usage + b"data: [DONE]\n\n"

    def _counted(self) -> Json:
        return {"usage": usage(self.order, self.saying), "retain": cost(self.worker.llm.processor, self.order)}


def usage(order: Order, saying: Saying) -> Json:
    """Tokens of an order that has ended: each prompt once."""
    prompts: dict[int, list[Request]] = {}
    for reply in order.replies:
        prompts.setdefault(id(reply.request.prompt), []).append(reply.request)
    asked = sum(len(rs[0].prompt) for rs in prompts.values())
    said = sum(c.tokens for c in saying.choices)
    details = {"cached_tokens": sum(max(r.num_cached_tokens for r in rs) for rs in prompts.values())}
    if order.pinned:
        details["pinned_tokens"] = order.pinned
    return {
        "prompt_tokens": asked,
        "completion_tokens": said,
        "total_tokens": asked + said,
        "prompt_tokens_details": details,
    }


def cost(desk: Processor, order: Order) -> list[Json]:
    """What the cache and the drafts of each answer came to."""
    out = []
    for reply in order.replies:
        answer = desk.to_output(reply)
        told = {k: v for k, v in answer.kv.items() if k != "groups"}
        out.append({"kv": told, "speculate": answer.speculate, "preempted": answer.num_preemptions})
    return out


def _refusal(error: Exception) -> Refused:
    return error if isinstance(error, Refused) else Refused(getattr(error, "status", 500), str(error))
