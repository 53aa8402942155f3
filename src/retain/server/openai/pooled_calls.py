"""Calls whose texts are computed and pooled, in place of answers: many of them, a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from retain.engine.request import FinishReason
from retain.processing.output import RequestOutputState
from retain.processing.pooling import PooledPlan
from retain.server.openai.errors import APIError
from retain.server.openai.protocol import CacheSalt, Json
from retain.server.openai.serving import OpenAIServing
from retain.server.request_group import CallInfo, EngineError, PooledCallStats, RequestGroup
from retain.server.request_model import StrictModel
from retain.server.usage import count_tokens

T = TypeVar("T")
MAX_TEXTS = 2048  # of a call, as in OpenAI's API


class PooledFields(StrictModel, other_fields="pooled"):
    """Fields common to all requests whose texts are pooled."""

    prompt_field: ClassVar[str]  # what errors about the texts name
    operation: ClassVar[str]  # in traces

    model: str
    cache_salt: CacheSalt = None


class PooledUsage(BaseModel):
    """Token counts; `prompt_tokens_details` has those that were cached, of texts of the same call, too."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


async def answer_pooled(
    service: OpenAIServing,
    body: PooledFields,
    request: Request,
    num_texts: int,
    plan: Callable[[], PooledPlan[T]],
    to_response: Callable[[T, PooledUsage], Json],
) -> Response:
    """Admit a call, compute its texts, and return its answer. Raises APIError. `plan` and `to_response` run in threads.

    A call of many texts is as many choices as a request of its key may have, and never more of them run at once.
    """
    service.check_model(body.model)
    admission = request.state.admission
    key_name = admission.key_name
    size = min(service.limits.max_choices, service.limits.max_requests_per_key or service.limits.max_choices)
    stats = PooledCallStats(CallInfo(body.operation, body.model, admission.trace_headers))
    try:
        async with service.admit(admission, body.prompt_field, min(num_texts, size)):
            planned = await service.preparation.run(key_name, plan)
            for stage in planned.stages:
                for i in range(0, len(stage), size):
                    preparing = partial(_prepare_all, stage[i : i + size])
                    states = await service.preparation.run(key_name, preparing)
                    await _run(service, RequestGroup(states, key_name, call=None), stats)
            stats.finish_reason = FinishReason.STOP
            answering = partial(_encode, planned, to_response, _to_usage(stats))
            content = await service.preparation.run(key_name, answering)
    finally:
        if stats.num_texts:
            service.engine_thread.report(stats)
    return Response(content, media_type="application/json")


def _prepare_all(prepares: Sequence[Callable[[], RequestOutputState]]) -> list[RequestOutputState]:
    return [prepare() for prepare in prepares]


def _encode(plan: PooledPlan[T], to_response: Callable[[T, PooledUsage], Json], usage: PooledUsage) -> bytes:
    return orjson.dumps(to_response(plan.result(), usage))


async def _run(service: OpenAIServing, group: RequestGroup, stats: PooledCallStats) -> None:
    """Compute the texts of a group. Raises APIError; whatever ends it, nothing of it runs on."""
    num_left = len(group.requests)
    try:
        await service.engine_thread.submit(group)
        stats.num_texts += num_left
        while num_left:
            num_left -= sum(delta.finish_reason is not None for delta in await group.get_deltas())
    except EngineError as error:
        stats.finish_reason = FinishReason.FAILED
        raise APIError(error.status, str(error)) from None
    finally:
        if num_left:
            service.engine_thread.cancel(group)
    if any(r.finish_reason is FinishReason.OUT_OF_MEMORY for r in group.requests):
        stats.finish_reason = FinishReason.OUT_OF_MEMORY
        raise APIError(500, "the request needs more KV memory than was planned for it")
    counted = count_tokens(group)
    stats.num_prompt_tokens += counted.prompt
    stats.num_cached_tokens += counted.cached


def _to_usage(stats: PooledCallStats) -> PooledUsage:
    return PooledUsage(
        prompt_tokens=stats.num_prompt_tokens,
        total_tokens=stats.num_prompt_tokens,
        prompt_tokens_details={"cached_tokens": stats.num_cached_tokens},
    )
