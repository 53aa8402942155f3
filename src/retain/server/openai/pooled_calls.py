"""Calls whose texts are computed and pooled, in place of answers: many of them, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import orjson
from fastapi import Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from retain.engine.request import FinishReason
from retain.processing.output import RequestOutputState
from retain.processing.pooling import PooledText
from retain.server import client_fields
from retain.server.openai.errors import APIError
from retain.server.openai.serving import OpenAIServing
from retain.server.request_group import CallInfo, EngineError, RequestGroup
from retain.server.request_model import StrictModel
from retain.server.usage import count_tokens

MAX_TEXTS = 2048  # of a call, as in OpenAI's API


class PooledFields(StrictModel, other_fields=client_fields.POOLED):
    """Fields common to all requests whose texts are pooled."""

    prompt_field: ClassVar[str] = "input"
    operation: ClassVar[str] = "embeddings"  # in traces

    model: str
    cache_salt: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Share prefixes only with requests of the same key and salt"
    )


class PooledUsage(BaseModel):
    """Token counts; `prompt_tokens_details` has those that were cached, of texts of the same call, too."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class PooledCall(NamedTuple):
    """What a call prepares and computes, stage by stage, and how its answer is made of that; all of it in threads.

    A text is prepared shortly before it is computed: together the prompts of a call may be far longer than its body.
    """

    stages: Sequence[Sequence[Callable[[], PooledText]]]
    answer: Callable[[PooledUsage], Any]


async def answer_pooled(
    service: OpenAIServing,
    body: PooledFields,
    request: Request,
    num_texts: int,
    prepare: Callable[[], PooledCall],
) -> Response:
    """Admit a call, compute its texts, and return its answer. Raises APIError.

    A call of many texts is as many choices as a request may have, and never more of them run at once.
    """
    service.check_model(body.model)
    admission = request.state.admission
    key_name = admission.key_name
    size = service.limits.max_choices
    info = CallInfo(body.operation, body.model, admission.trace_headers)
    async with service.admit(admission, body.prompt_field, min(num_texts, size)):
        call = await service.preparation.run(key_name, prepare)
        usage = PooledUsage(prompt_tokens=0, total_tokens=0, prompt_tokens_details={"cached_tokens": 0})
        for stage in call.stages:
            for i in range(0, len(stage), size):
                preparing = partial(_prepare_all, stage[i : i + size])
                states = await service.preparation.run(key_name, preparing)
                group = RequestGroup(states, key_name, call=info)
                await _run(service, group)
                _count(usage, group)
        content = await service.preparation.run(key_name, lambda: orjson.dumps(call.answer(usage)))
    return Response(content, media_type="application/json")


def _prepare_all(prepares: Sequence[Callable[[], PooledText]]) -> list[RequestOutputState]:
    return [prepare().state for prepare in prepares]


async def _run(service: OpenAIServing, group: RequestGroup) -> None:
    """Compute the texts of a group. Raises APIError; whatever ends it, nothing of it runs on."""
    num_left = len(group.requests)
    try:
        await service.engine_thread.submit(group)
        while num_left:
            num_left -= sum(delta.finish_reason is not None for delta in await group.get_deltas())
    except EngineError as error:
        raise APIError(error.status, str(error)) from None
    finally:
        if num_left:
            service.engine_thread.cancel(group)
    if any(r.finish_reason is FinishReason.OUT_OF_MEMORY for r in group.requests):
        raise APIError(500, "the request needs more KV memory than was planned for it")


def _count(usage: PooledUsage, group: RequestGroup) -> None:
    counted = count_tokens(group)
    usage.prompt_tokens += counted.prompt
    usage.total_tokens += counted.prompt
    usage.prompt_tokens_details["cached_tokens"] += counted.cached
