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
from retain.engine.drafting import NO_SPECULATION
from retain.kv import policies
from retain.server import looking, schemas
from retain.server.bodies import ChatBody, CompletionBody, DetokenizeBody, TalkBody, TextBody
from retain.server.errors import Error, Refused, invalid
from retain.server.guard import Guard
from retain.server.inspector import Inspector
from retain.server.keys import Keys
from retain.server.metrics import Metrics
from retain.server.service import Service

Json = dict[str, Any]
WRONG: dict[int | str, Json] = {
    400: {"model": Error, "description": "The body is not what it should be"},
    401: {"model": Error, "description": "No such key"},
    404: {"model": Error, "description": "No such model, or no such page"},
    408: {"model": Error, "description": "It took too long"},
    413: {"model": Error, "description": "The body is too large"},
    429: {"model": Error, "description": "Later: see Retry-After"},
    500: {"model": Error, "description": "The server failed"},
    503: {"model": Error, "description": "The server is going away"},
}


def app(
    service: Service, metrics: Metrics, keys: Keys, cors: Sequence[str] = (), inspector: Inspector | None = None
) -> FastAPI:
    """All of it, for one model."""
    api = FastAPI(title="retain", version=__version__, description=__doc__.split(":")[0], redoc_url=None)
    desk = service.desk

    @api.post("/v1/chat/completions", response_model=None, responses=_answers(schemas.Chat))
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """A conversation goes on."""
        service.known(body.model)
        key = request.state.key
        return await service.answer(body, body.n or 1, key, lambda: service.chat(body, key))

    @api.post("/v1/completions", response_model=None, responses=_answers(schemas.Completion))
    async def completions(body: CompletionBody, request: Request) -> Response:
        """A text goes on; or several."""
        service.known(body.model)
        key, n = request.state.key, len(body.prompts) * (body.n or 1)
        return await service.answer(body, n, key, lambda: service.completion(body, key))

    def card() -> Json:
        about = {
            "context": service.llm.max_model_len,
            "kv_policy": policies.to_spec(service.llm.policy),
            "speculate": service.llm.config.speculate,
            "drafters": service.drafters,
        }
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "retain",
            "max_model_len": service.llm.max_model_len,
            "retain": about,
        }

    @api.get("/v1/models", responses=_wrong(200, schemas.ModelList), response_model=None)
    async def models() -> JSONResponse:
        """What is served."""
        return JSONResponse({"object": "list", "data": [card()]})

    @api.get("/v1/models/{model:path}", responses=_wrong(200, schemas.ModelCard), response_model=None)
    async def model(model: str) -> JSONResponse:
        """One of them."""
        service.known(model)
        return JSONResponse(card())

    @api.post("/tokenize", responses=_wrong(200, schemas.Tokenized), response_model=None)
    async def tokenize(body: TextBody | TalkBody) -> JSONResponse:
        """A text, or a conversation, as token ids."""
        service.known(body.model)

        def ids() -> list[int]:
            if isinstance(body, TextBody):
                return desk.tokenizer.encode(body.prompt, body.add_special_tokens)
            return desk.tokenizer.encode_chat(service.messages(body.messages), body.add_generation_prompt)

        found = await asyncio.to_thread(ids)
        return JSONResponse({"tokens": found, "count": len(found), "max_model_len": service.llm.max_model_len})

    @api.get("/tokenizer_info", responses=_wrong(200, schemas.TokenizerInfo), response_model=None)
    async def tokenizer_info() -> JSONResponse:
        """What lm-eval asks about a tokenizer that it cannot load."""
        tokens = desk.tokenizer.special_tokens_map
        names = ("bos_token", "eos_token", "pad_token")
        return JSONResponse({**{n: tokens.get(n) for n in names}, "chat_template": desk.tokenizer.chat_template})

    @api.post("/detokenize", responses=_wrong(200, schemas.Detokenized), response_model=None)
    async def detokenize(body: DetokenizeBody) -> JSONResponse:
        """Token ids as a text."""
        service.known(body.model)
        return JSONResponse({"prompt": await asyncio.to_thread(desk.tokenizer.decode, body.tokens)})

    @api.get("/health", response_model=None)
    async def health() -> JSONResponse:
        """Whether the process is well; 503 where it should be started anew."""
        broken = service.worker.broken
        return JSONResponse({"status": broken or "ok"}, 503 if broken else 200)

    @api.get("/ready", response_model=None)
    async def ready() -> JSONResponse:
        """Whether it takes requests."""
        closed = service.gate.closed or bool(service.worker.broken)
        return JSONResponse({"status": "closed" if closed else "ready"}, 503 if closed else 200)

    @api.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}, 401: WRONG[401]})
    async def counted() -> Response:
        """For Prometheus."""
        return Response(await service.worker.call(metrics.text), media_type="text/plain; version=0.0.4")

    @api.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return error.response()

    @api.exception_handler(RequestValidationError)
    async def wrong(request: Request, error: RequestValidationError) -> JSONResponse:
        return invalid(error.errors()).response()

    @api.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        return Refused(error.status_code, str(error.detail), headers=error.headers).response()

    @api.exception_handler(ValueError)
    async def value(request: Request, error: ValueError) -> JSONResponse:
        return Refused(400, " ".join(str(error).split())).response()

    if inspector:
        looking.routes(api, service.worker, inspector)
    api.add_middleware(Guard, keys=keys, limits=service.limits)
    if cors:  # outermost, so that web pages can read what the guard refuses
        api.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    api.openapi = lambda: described(api, service, bool(keys))  # type: ignore[method-assign]
    return api


def _wrong(status: int, model: Any) -> dict[int | str, Json]:
    return {**WRONG, status: {"model": model}}


def _answers(model: Any) -> dict[int | str, Json]:
    """Whole, or, with stream, as events."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    events = {"text/event-stream": {"schema": event}}
    return {**WRONG, 200: {"model": model, "content": events}}


def described(api: FastAPI, service: Service, keys: bool) -> Json:
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
        fields["model"] = {"type": "string", "enum": [service.name]}
        for field, most in (("pin", service.limits.pin_s), ("n", service.limits.choices)):
            fields[field]["anyOf"][0]["maximum"] = most
        fields["kv_policy"]["anyOf"][0]["pattern"] = f"^({'|'.join(policies.names())})(:|$)"
        fields["speculate"]["anyOf"][0]["enum"] = [NO_SPECULATION, *service.drafters]
    if not service.way:  # the model's template knows no tools
        for field in ("tools", "tool_choice", "parallel_tool_calls"):
            del found["ChatBody"]["properties"][field]
    if keys:
        doc["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        doc["security"] = [{"key": []}]
    api.openapi_schema = doc
    return doc
