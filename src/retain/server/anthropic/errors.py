"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from retain.server.client_fields import read_refused_types
from retain.server.openai.errors import ERROR_RESPONSES as OPENAI_ERROR_RESPONSES
from retain.server.openai.errors import ERROR_TYPES as OPENAI_ERROR_TYPES
from retain.server.openai.errors import APIError, ContextLengthError, describe_first

PATH = "/v1/messages"
ERROR_TYPES = OPENAI_ERROR_TYPES | {413: "request_too_large", 503: "overloaded_error"}


class AnthropicErrorDetail(BaseModel):
    """Type and message of an error."""

    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """Body of the response to a failed request."""

    type: str
    error: AnthropicErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {**response, "model": AnthropicErrorResponse} for status, response in OPENAI_ERROR_RESPONSES.items()
}


def has_anthropic_errors(path: str) -> bool:
    """Return whether errors of this address are in Anthropic's format."""
    return path == PATH or path.startswith(f"{PATH}/")


def to_error_json(error: APIError) -> dict[str, Any]:
    """Return an error as JSON in Anthropic's form."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, ContextLengthError):  # the words that agents look for
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_context - 1} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def to_error_response(error: APIError) -> JSONResponse:
    """Return the HTTP response to a failed request, in Anthropic's form."""
    return JSONResponse(to_error_json(error), error.status, {**create_request_id_header(), **(error.headers or {})})


def create_request_id_header() -> dict[str, str]:
    """Return the header by which clients name a request in their logs."""
    return {"request-id": f"req_{uuid4().hex[:24]}"}


def to_validation_error(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Convert pydantic's list of errors to a 400 that names the first invalid field of the body."""
    first = errors[0]
    param, message = describe_first(errors)
    if first.get("type") == "extra_forbidden":
        message = "unknown field"
    elif first.get("type") == "union_tag_invalid":  # a type of block, such as an image
        name, tag = (first["ctx"][key].strip("'") for key in ("discriminator", "tag"))
        message = f"the {name} '{tag}' is not supported here"
        if refused := read_refused_types().get(tag):
            message += f": {refused}"
    return APIError(400, f"{param}: {message}" if param else message, param)
