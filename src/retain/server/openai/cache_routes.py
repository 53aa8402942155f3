"""Hints about cached texts: POST /v1/cache/retain, release, demote, prefetch and signal; and /v1/cache/reset."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from retain.engine.hints import Hint
from retain.server.auth import ApiKey
from retain.server.openai.body import BodyRoute
from retain.server.openai.chat_protocol import ChatCompletionRequest
from retain.server.openai.errors import ERROR_RESPONSES, APIError, check_operator
from retain.server.openai.protocol import CacheSalt, CompletionRequest
from retain.server.openai.serving import OpenAIServing, Prepared, compose_salt
from retain.server.request_model import StrictModel

Action = Literal["retain", "release", "demote", "prefetch", "signal"]


class HintFields(StrictModel):
    """What a hint says beside the request whose prompt it is about."""

    seconds: Annotated[float, Field(ge=0)] | None = Field(
        None,
        description="How long to keep the text (retain), or until it is asked for again (prefetch, signal)",
    )
    num_kept_tokens: Annotated[int, Field(ge=0)] = Field(0, description="First tokens that are not released")
    tool: Annotated[str, Field(max_length=256)] = Field(
        "", description="The tool that runs, whose durations are learned (signal)"
    )


class ChatHint(HintFields, ChatCompletionRequest):
    """A hint about a conversation. Behind an answer, its prompt begins no other one unless it says so."""

    @model_validator(mode="after")
    def _end_at_answer(self) -> Self:
        if self.messages[-1].role == "assistant" and "add_generation_prompt" not in self.model_fields_set:
            self.add_generation_prompt = False
        return self


class CompletionHint(HintFields, CompletionRequest):
    """A hint about the prompts of a completion."""


def _tag_body(body: Any) -> str:
    """Select the member of a union of hints, by JSON or by an instance."""
    has_messages = "messages" in body if isinstance(body, dict) else isinstance(body, ChatHint)
    return "<chat>" if has_messages else "<completion>"


CacheHintBody = Annotated[
    Annotated[ChatHint, Tag("<chat>")] | Annotated[CompletionHint, Tag("<completion>")], Discriminator(_tag_body)
]


class ResetBody(StrictModel):
    """Which cached texts to forget: by default all of the API key."""

    cache_salt: CacheSalt = None
    all_keys: bool = Field(False, description="Those of every key; for operators")


class CacheHintResponse(BaseModel):
    """What was done: to how many tokens of the text."""

    object: str = "cache.hint"
    action: str
    tokens: int


def create_router(service: OpenAIServing) -> APIRouter:
    """Create the routes for a served model."""
    router = APIRouter(prefix="/v1/cache", responses=ERROR_RESPONSES, route_class=BodyRoute)
    engine_thread = service.engine_thread

    @router.post("/reset")
    async def reset(body: ResetBody, request: Request) -> CacheHintResponse:
        """Forget cached texts, in the pool and in every tier."""
        key = request.state.key
        if body.all_keys:
            check_operator(key, "reset the cache of all keys")
        hints = service.llm.cache.hints
        own = partial(hints.reset, compose_salt(key, body.cache_salt), body.cache_salt is None)
        forget = hints.reset_all if body.all_keys else own
        async with service.admit(request.state.admission, "cache_salt"):
            return CacheHintResponse(action="reset", tokens=await engine_thread.call(forget))

    @router.post("/{action}")
    async def hint(action: Action, body: CacheHintBody, request: Request) -> CacheHintResponse:
        """Say something about the text of a request that was sent, or will be."""
        service.check_model(body.model)
        key = request.state.key
        limit = service.limits.max_pin_seconds
        if body.seconds is not None and body.seconds > limit:
            raise APIError(400, f"seconds is at most {limit:g}", "seconds")
        if action == "retain" and body.seconds is None:
            raise APIError(400, "seconds is missing: for how long to keep the text", "seconds")
        said = Hint(action, body.seconds, body.num_kept_tokens, body.tool or None)
        num_choices = body.num_choices if isinstance(body, CompletionHint) else body.n or 1
        async with service.admit(request.state.admission, body.prompt_field, num_choices):
            _, states = await service.prepare(key.name, lambda: _prepare(service, body, key))
            requests = {id(state.request.prompt): state.request for state in states}  # one of each prompt
            tokens = [
                await engine_thread.hint(said, r, r.text.head(len(r.prompt)), key.name) for r in requests.values()
            ]
        return CacheHintResponse(action=action, tokens=sum(tokens))

    return router


def _prepare(service: OpenAIServing, body: ChatHint | CompletionHint, key: ApiKey) -> Prepared:
    """Prepare what a hint is about as the request that it is of."""
    return service.prepare_chat(body, key) if isinstance(body, ChatHint) else service.prepare_completion(body, key)
