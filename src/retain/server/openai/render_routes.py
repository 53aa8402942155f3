"""Prompts as token ids, without generating: /render below each endpoint that generates, as vLLM's server has it.

Gateways that know what replicas have cached ask for the token ids of a request before they choose a replica.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from uuid import uuid4

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from retain.processing.input import GenerateRequest
from retain.server.auth import ApiKey
from retain.server.openai.body import BodyRoute
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.errors import ERROR_RESPONSES
from retain.server.openai.protocol import CompletionRequest, GenerationFields, Json
from retain.server.openai.serving import OpenAIServing, Prepared


class RenderedRequest(BaseModel):
    """A request as the engine gets it: the token ids of its prompt, and how tokens are sampled."""

    request_id: str
    model: str
    token_ids: list[int]
    sampling_params: Json


def create_router(service: OpenAIServing) -> APIRouter:
    """Create the routes for a served model."""
    router = APIRouter(prefix="/v1", responses=ERROR_RESPONSES, route_class=BodyRoute)

    @router.post("/chat/completions/render", response_model=None, responses={200: {"model": RenderedRequest}})
    async def render_chat(body: ChatCompletionRequest, request: Request) -> Response:
        """Return the token ids of the prompt that a chat completion has."""
        return await render_one(service, body, request, partial(service.prepare_chat, body))

    @router.post("/completions/render", response_model=None, responses={200: {"model": list[RenderedRequest]}})
    async def render_completion(body: CompletionRequest, request: Request) -> Response:
        """Return the token ids of each prompt of a completion."""
        service.check_model(body.model)
        key = request.state.key
        async with service.admit(request.state.admission, body.prompt_field, body.num_choices):
            prepared, _ = await service.prepare(key.name, lambda: service.prepare_completion(body, key))
            return await _write(service, key.name, [_describe(body.model, one) for one in prepared.requests])

    return router


async def render_one(
    service: OpenAIServing, body: GenerationFields, request: Request, prepare: Callable[[ApiKey], Prepared]
) -> Response:
    """Return the response for a request that has one prompt. Raises APIError if it could not be generated."""
    service.check_model(body.model)
    key = request.state.key
    async with service.admit(request.state.admission):
        prepared, _ = await service.prepare(key.name, lambda: prepare(key))
        return await _write(service, key.name, _describe(body.model, prepared.requests[0]))


def _describe(model: str, generated: GenerateRequest) -> Json:
    return {
        "request_id": f"render-{uuid4().hex}",
        "model": model,
        "token_ids": generated.prompt,
        "sampling_params": asdict(generated.params),
    }


async def _write(service: OpenAIServing, key_name: str, content: Json | list[Json]) -> Response:
    """Return content as a response. Its JSON is as long as a prompt, so it is written in a thread of the key."""
    encoded = await service.preparation.run(key_name, lambda: orjson.dumps(content))
    return Response(encoded, media_type="application/json")
