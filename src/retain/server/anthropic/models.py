"""The list of models in Anthropic's format, for requests that name a version of its API.

OpenAI's format has the same addresses, so a header tells the clients apart.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from retain.server.anthropic.errors import create_request_id_header, to_error_response
from retain.server.openai.errors import APIError
from retain.server.openai.serving import OpenAIServing

VERSION_HEADER = b"anthropic-version"


class VersionedRoute(APIRoute):
    """A route for requests with the header that clients of Anthropic's API send."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return whether the route is for a request (Starlette)."""
        if scope["type"] == "http" and any(name == VERSION_HEADER for name, _ in scope["headers"]):
            return super().matches(scope)
        return Match.NONE, {}


def create_router(service: OpenAIServing) -> APIRouter:
    """Create the routes for a served model. They go before OpenAI's."""
    router = APIRouter(prefix="/v1", route_class=VersionedRoute)

    def describe_model(name: str) -> dict[str, Any]:
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": service.llm.max_model_len,
            "max_tokens": service.limits.max_output_tokens or service.llm.max_model_len,
        }

    @router.get("/models", include_in_schema=False)
    async def list_models() -> JSONResponse:
        """List the served models in Anthropic's format, for requests with the header anthropic-version."""
        models = [describe_model(name) for name in service.model_names]
        page = {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
        return JSONResponse(page, headers=create_request_id_header())

    @router.get("/models/{model:path}", include_in_schema=False)
    async def get_model(model: str) -> JSONResponse:
        """Get one model in Anthropic's format."""
        try:
            service.check_model(model)
        except APIError as error:
            return to_error_response(error)
        return JSONResponse(describe_model(model), headers=create_request_id_header())

    return router
