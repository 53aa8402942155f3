"""Routes of the OpenAI API: chat completions, completions and models."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from retain.kv.eviction import policies
from retain.server.openai.body import BodyRoute
from retain.server.openai.chat_protocol import ChatCompletionRequest, ChatCompletionResponse
from retain.server.openai.errors import ERROR_RESPONSES
from retain.server.openai.protocol import CompletionRequest, CompletionResponse, ModelCard, ModelList, ModelOptions
from retain.server.openai.serving import OpenAIServing


def create_router(service: OpenAIServing) -> APIRouter:
    """Create the routes for a served model."""
    router = APIRouter(prefix="/v1", responses=ERROR_RESPONSES, route_class=BodyRoute)

    @router.post("/chat/completions", response_model=None, responses=describe_generation(ChatCompletionResponse))
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Create a chat completion."""
        return await service.handle(body, request, partial(service.prepare_chat, body), body.n or 1)

    @router.post("/completions", response_model=None, responses=describe_generation(CompletionResponse))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Create a completion for one or several prompts."""
        return await service.handle(body, request, partial(service.prepare_completion, body), body.num_choices)

    def build_model_card(name: str) -> ModelCard:
        llm = service.llm
        options = ModelOptions(
            kv_policy=policies.to_spec(llm.policy), speculate=llm.config.speculate, drafters=service.drafters
        )
        parent = None if name in service.served_names else service.model_name
        limit = llm.max_model_len
        return ModelCard(id=name, created=service.created, max_model_len=limit, parent=parent, retain=options)

    @router.get("/models")
    async def list_models() -> ModelList:
        """List the names of the served model."""
        return ModelList(data=[build_model_card(name) for name in service.model_names])

    @router.get("/models/{model:path}")
    async def get_model(model: str) -> ModelCard:
        """Get the model by one of its names."""
        service.check_model(model)
        return build_model_card(model)

    return router


def describe_generation(model: Any, *event_fields: str) -> dict[int | str, dict[str, Any]]:
    """Describe the successful response: the full object, or server-sent events with `stream`.

    `event_fields`: those that an event has before its data.
    """
    names = [*event_fields, "data"]
    event = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    return {200: {"model": model, "content": {"text/event-stream": {"schema": event}}}}
