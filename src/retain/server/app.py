"""The routes: which address means what. What is not known here: how answers are made, how the engine runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from retain import __version__
from retain.engine.spec_decode.speculator import NO_SPECULATION
from retain.kv.eviction import policies
from retain.server.auth import ApiKeys
from retain.server.inspector import routes
from retain.server.inspector.recorder import Inspector
from retain.server.metrics import Metrics
from retain.server.middleware import AuthMiddleware
from retain.server.openai import schemas
from retain.server.openai.errors import APIError, ErrorResponse, to_validation_error
from retain.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from retain.server.openai.serving import OpenAIServing

Json = dict[str, Any]
ERROR_RESPONSES: dict[int | str, Json] = {
    400: {"model": ErrorResponse, "description": "The body is not what it should be"},
    401: {"model": ErrorResponse, "description": "No such key"},
    404: {"model": ErrorResponse, "description": "No such model, or no such page"},
    408: {"model": ErrorResponse, "description": "It took too long"},
    413: {"model": ErrorResponse, "description": "The body is too large"},
    429: {"model": ErrorResponse, "description": "Later: see Retry-After"},
    500: {"model": ErrorResponse, "description": "The server failed"},
    503: {"model": ErrorResponse, "description": "The server is going away"},
}


def create_app(
    service: OpenAIServing,
    metrics: Metrics,
    api_keys: ApiKeys,
    cors_origins: Sequence[str] = (),
    inspector: Inspector | None = None,
) -> FastAPI:
    """All of it, for one model."""
    api = FastAPI(title="retain", version=__version__, description=__doc__.split(":")[0], redoc_url=None)
    desk = service.processor

    @api.post(
        "/v1/chat/completions", response_model=None, responses=_generation_responses(schemas.ChatCompletionResponse)
    )
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """A conversation goes on."""
        service.check_model(body.model)
        key = request.state.key
        return await service.handle(body, body.n or 1, key, lambda: service.prepare_chat(body, key))

    @api.post("/v1/completions", response_model=None, responses=_generation_responses(schemas.CompletionResponse))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """A text goes on; or several."""
        service.check_model(body.model)
        key, n = request.state.key, len(body.prompts) * (body.n or 1)
        return await service.handle(body, n, key, lambda: service.prepare_completion(body, key))

    def build_model_card() -> Json:
        about = {
            "context": service.llm.max_model_len,
            "kv_policy": policies.to_spec(service.llm.policy),
            "speculate": service.llm.config.speculate,
            "drafters": service.drafters,
        }
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "retain",
            "max_model_len": service.llm.max_model_len,
            "retain": about,
        }

    @api.get("/v1/models", responses=_with_error_responses(200, schemas.ModelList), response_model=None)
    async def list_models() -> JSONResponse:
        """What is served."""
        return JSONResponse({"object": "list", "data": [build_model_card()]})

    @api.get("/v1/models/{model:path}", responses=_with_error_responses(200, schemas.ModelCard), response_model=None)
    async def get_model(model: str) -> JSONResponse:
        """One of them."""
        service.check_model(model)
        return JSONResponse(build_model_card())

    @api.post("/tokenize", responses=_with_error_responses(200, schemas.TokenizeResponse), response_model=None)
    async def tokenize(body: TokenizeCompletionRequest | TokenizeChatRequest) -> JSONResponse:
        """A text, or a conversation, as token ids."""
        service.check_model(body.model)

        def encode_body() -> list[int]:
            if isinstance(body, TokenizeCompletionRequest):
                return desk.tokenizer.encode(body.prompt, body.add_special_tokens)
            return desk.tokenizer.encode_chat(service.to_template_messages(body.messages), body.add_generation_prompt)

        found = await asyncio.to_thread(encode_body)
        return JSONResponse({"tokens": found, "count": len(found), "max_model_len": service.llm.max_model_len})

    @api.get("/tokenizer_info", responses=_with_error_responses(200, schemas.TokenizerInfo), response_model=None)
    async def tokenizer_info() -> JSONResponse:
        """What lm-eval asks about a tokenizer that it cannot load."""
        tokens = desk.tokenizer.special_tokens_map
        names = ("bos_token", "eos_token", "pad_token")
        return JSONResponse({**{n: tokens.get(n) for n in names}, "chat_template": desk.tokenizer.chat_template})

    @api.post("/detokenize", responses=_with_error_responses(200, schemas.DetokenizeResponse), response_model=None)
    async def detokenize(body: DetokenizeRequest) -> JSONResponse:
        """Token ids as a text."""
        service.check_model(body.model)
        return JSONResponse({"prompt": await asyncio.to_thread(desk.tokenizer.decode, body.tokens)})

    @api.get("/health", response_model=None)
    async def health() -> JSONResponse:
        """Whether the process is well; 503 where it should be started anew."""
        broken = service.engine_thread.fatal_error
        return JSONResponse({"status": broken or "ok"}, 503 if broken else 200)

    @api.get("/ready", response_model=None)
    async def ready() -> JSONResponse:
        """Whether it takes requests."""
        closed = service.admission.closed or bool(service.engine_thread.fatal_error)
        return JSONResponse({"status": "closed" if closed else "ready"}, 503 if closed else 200)

    @api.get(
        "/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}, 401: ERROR_RESPONSES[401]}
    )
    async def get_metrics() -> Response:
        """For Prometheus."""
        return Response(await service.engine_thread.call(metrics.render), media_type="text/plain; version=0.0.4")

    @api.exception_handler(APIError)
    async def handle_api_error(request: Request, error: APIError) -> JSONResponse:
        return error.to_response()

    @api.exception_handler(RequestValidationError)
    async def handle_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return to_validation_error(error.errors()).to_response()

    @api.exception_handler(HTTPException)
    async def handle_http_exception(request: Request, error: HTTPException) -> JSONResponse:
        return APIError(error.status_code, str(error.detail), headers=error.headers).to_response()

    @api.exception_handler(ValueError)
    async def handle_value_error(request: Request, error: ValueError) -> JSONResponse:
        return APIError(400, " ".join(str(error).split())).to_response()

    if inspector:
        routes.add_routes(api, service.engine_thread, inspector)
    api.add_middleware(AuthMiddleware, api_keys=api_keys, limits=service.limits)
    if cors_origins:  # outermost, so that web pages can read what the guard refuses
        api.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    api.openapi = lambda: build_openapi_schema(api, service, bool(api_keys))  # type: ignore[method-assign]
    return api


def _with_error_responses(status: int, model: Any) -> dict[int | str, Json]:
    return {**ERROR_RESPONSES, status: {"model": model}}


def _generation_responses(model: Any) -> dict[int | str, Json]:
    """Whole, or, with stream, as events."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    events = {"text/event-stream": {"schema": event}}
    return {**ERROR_RESPONSES, 200: {"model": model, "content": events}}


def build_openapi_schema(api: FastAPI, service: OpenAIServing, requires_key: bool) -> Json:
    """The OpenAPI document: errors are ours, not the framework's, and the model is the one that there is."""
    if api.openapi_schema:
        return api.openapi_schema
    doc = get_openapi(title=api.title, version=api.version, description=api.description, routes=api.routes)
    for path in doc["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    found = doc["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        found.pop(name, None)
    for body in ("ChatBody", "CompletionBody"):
        fields = found[body]["properties"]
        fields["model"] = {"type": "string", "enum": [service.model_name]}
        for field, most in (("pin", service.limits.max_pin_s), ("n", service.limits.max_choices)):
            fields[field]["anyOf"][0]["maximum"] = most
        fields["kv_policy"]["anyOf"][0]["pattern"] = f"^({'|'.join(policies.names())})(:|$)"
        fields["speculate"]["anyOf"][0]["enum"] = [NO_SPECULATION, *service.drafters]
    if not service.tool_format:  # the model's template knows no tools
        for field in ("tools", "tool_choice", "parallel_tool_calls"):
            del found["ChatBody"]["properties"][field]
    if requires_key:
        doc["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        doc["security"] = [{"key": []}]
    api.openapi_schema = doc
    return doc
