"""Prompts as token ids, without generating: /render below each endpoint that generates, as vLLM's server has it.

Gateways that know what replicas have cached ask for the token ids of a request before they choose a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from uuid import uuid4

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from retain.processing.input import GenerateRequest
from retain.server.openai.body import BodyRoute
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.errors import ERROR_RESPONSES
from retain.server.openai.protocol import CompletionRequest, Json
from retain.server.openai.serving import OpenAIServing


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
        service.check_model(body.model)
        key = request.state.key
        return await service.run_admitted(
            key, lambda: render_one(service, body.model, service.prepare_chat_request(body, key)[0])
        )

    @router.post("/completions/render", response_model=None, responses={200: {"model": list[RenderedRequest]}})
    async def render_completion(body: CompletionRequest, request: Request) -> Response:
        """Return the token ids of each prompt of a completion."""
        service.check_model(body.model)
        key = request.state.key
        return await service.run_admitted(
            key,
            lambda: render_all(service, body.model, service.prepare_completion(body, key).requests),
            body.prompt_field,
        )

    return router


def render_one(service: OpenAIServing, model: str, generated: GenerateRequest) -> Response:
    """Return the response for a request that has one prompt. Raises ValueError if it could not be generated."""
    service.process([generated])
    return _to_response(_describe(model, generated))


def render_all(service: OpenAIServing, model: str, generated: Sequence[GenerateRequest]) -> Response:
    """Return the response for a request that may have several prompts. Raises ValueError as `render_one`."""
    service.process(generated)
    return _to_response([_describe(model, one) for one in generated])


def _describe(model: str, generated: GenerateRequest) -> Json:
    return {
        "request_id": f"render-{uuid4().hex}",
        "model": model,
        "token_ids": generated.prompt,
        "sampling_params": asdict(generated.params),
    }


def _to_response(content: Json | list[Json]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
