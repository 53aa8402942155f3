"""The FastAPI application: routes, middleware, error handlers and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware

from retain import __version__
from retain.engine.spec_decode.speculator import NO_SPECULATION
from retain.kv.eviction import policies
from retain.kv.eviction.auto_policy import AUTO
from retain.server.anthropic import models as anthropic_models
from retain.server.anthropic import routes as anthropic_routes
from retain.server.config import ServerConfig
from retain.server.error_format import add_error_handlers
from retain.server.middleware import AuthMiddleware, HeadMiddleware
from retain.server.openai import cache_routes, embeddings, lora_routes, render_routes, reranking, routes, tokenization
from retain.server.openai.errors import ERROR_RESPONSES, check_operator
from retain.server.openai.responses import routes as responses_routes
from retain.server.openai.responses.store import ResponseStore
from retain.server.openai.serving import OpenAIServing

RenderMetrics = Callable[[], Awaitable[bytes]]  # to Prometheus' text format
DESCRIPTION = "Server of the retain inference engine, compatible with OpenAI's and Anthropic's APIs"
WELCOME = (
    f"{DESCRIPTION}.",
    "POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, /v1/embeddings, /v1/rerank, /v1/score",
    "GET /v1/models, /health, /ready, /metrics, /openapi.json, and with --inspect /inspect",
    "",
)


def create_app(service: OpenAIServing, render_metrics: RenderMetrics, config: ServerConfig) -> FastAPI:
    """Create the application for one served model."""
    app = FastAPI(title="retain", version=__version__, description=DESCRIPTION, redoc_url=None, docs_url=None)
    app.state.body_parser = service.body_parser  # see BodyRoute
    app.include_router(anthropic_models.create_router(service))
    app.include_router(routes.create_router(service))
    app.include_router(responses_routes.create_router(service, ResponseStore(service.limits.max_stored_bytes)))
    app.include_router(embeddings.create_router(service))
    app.include_router(reranking.create_router(service))
    app.include_router(render_routes.create_router(service))
    app.include_router(tokenization.create_router(service))
    app.include_router(cache_routes.create_router(service))
    if service.allows_lora_updates:
        app.include_router(lora_routes.create_router(service))
    app.include_router(anthropic_routes.create_router(service))
    _add_operations_routes(app, service, render_metrics)
    for observer in service.engine_thread.observers:
        observer.add_routes(app, service.engine_thread, service.preparation)
    add_error_handlers(app)
    app.add_middleware(HeadMiddleware)
    app.add_middleware(AuthMiddleware, config=config, admission=service.admission)
    if config.allowed_origins:  # outermost, so that web pages can read the errors of AuthMiddleware
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    app.openapi = lambda: build_openapi_schema(app, service, bool(config.api_keys))  # type: ignore[method-assign]
    return app


def _add_operations_routes(app: FastAPI, service: OpenAIServing, render_metrics: RenderMetrics) -> None:
    engine_thread = service.engine_thread

    @app.get("/health", response_model=None)
    async def health() -> JSONResponse:
        """Liveness: 503 after a fatal engine error."""
        error = engine_thread.fatal_error
        return JSONResponse({"status": error or "ok"}, 503 if error else 200)

    @app.get("/ready", response_model=None)
    async def ready() -> JSONResponse:
        """Readiness: 503 while draining or after a fatal engine error."""
        problem = engine_thread.fatal_error or ("draining" if service.admission.closed else None)
        return JSONResponse({"status": problem or "ready"}, 503 if problem else 200)

    @app.get("/", include_in_schema=False)
    async def describe() -> Response:
        """Say what is here, to people who open the address in a browser."""
        return Response("\n".join(WELCOME), media_type="text/plain")

    errors: dict[int | str, dict[str, Any]] = {status: ERROR_RESPONSES[status] for status in (401, 403)}

    @app.get("/metrics", response_model=None, responses={200: {"content": {"text/plain": {}}}, **errors})
    async def get_metrics(request: Request) -> Response:
        """Prometheus metrics, sums over all keys."""
        check_operator(request.state.key, "read /metrics")
        return Response(await render_metrics(), media_type="text/plain; version=0.0.4")


def build_openapi_schema(app: FastAPI, service: OpenAIServing, requires_key: bool) -> dict[str, Any]:
    """Build the OpenAPI document once, with this server's model, limits, policies and drafters filled in."""
    if app.openapi_schema:
        return app.openapi_schema
    doc = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path in doc["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # FastAPI's own; validation errors are 400 here
    schemas = doc["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    model_schema = {"type": "string"} if service.any_model_name else {"type": "string", "enum": [*service.model_names]}
    schemas["CountTokensRequest"]["properties"]["model"] = model_schema
    hints = ("ChatHint", "CompletionHint")
    for name in ("ChatCompletionRequest", "CompletionRequest", "MessagesRequest", "ResponsesRequest", *hints):
        fields = schemas[name]["properties"]
        fields["model"] = model_schema
        fields["pin"]["anyOf"][0]["maximum"] = service.limits.max_pin_seconds
        for count in ("n", "best_of"):
            if "anyOf" in fields.get(count, {}):  # else it is accepted at one value
                fields[count]["anyOf"][0]["maximum"] = service.limits.max_choices
        fields["kv_policy"]["anyOf"][0]["pattern"] = f"^$|^({'|'.join([AUTO, *policies.names()])})(:|$)"
        fields["speculate"]["anyOf"][0]["enum"] = ["", NO_SPECULATION, *service.drafters]
    if not service.dialect.tool_format:  # the model's chat template does not support tools
        for name in ("ChatCompletionRequest", "ResponsesRequest", "MessagesRequest", "CountTokensRequest", "ChatHint"):
            for field in ("tools", "tool_choice", "parallel_tool_calls"):
                schemas[name]["properties"].pop(field, None)
    if requires_key:
        doc["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        doc["security"] = [{"key": []}]
    app.openapi_schema = doc
    return doc
