"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}. They contain no path and no stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

from retain.files import shorten
from retain.processing.input import PromptTooLongError
from retain.server.auth import ApiKey

MAX_MESSAGE_LENGTH = 600  # characters: a message may quote what the client sent
# By the type of pydantic's error, with the values of its context; others keep their message.
WORDS = {
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "Input should be an object"),
    "union_tag_not_found": "the object has no {discriminator}",
    "union_tag_invalid": "{discriminator} is '{tag}', but should be one of {expected_tags}",
}
ERROR_TYPES = {  # others are of the request below 500, and of the server above
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ErrorDetail(BaseModel):
    """Message and type of an error, and the parameter that it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Body of the response to a failed request."""

    error: ErrorDetail


ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in (
        (400, "Invalid request"),
        (401, "Missing or invalid API key"),
        (403, "Not allowed to this API key"),
        (404, "Model or path not found"),
        (408, "Request timeout"),
        (413, "Request body too large"),
        (415, "Request body compressed, or not declared as JSON by a browser"),
        (429, "Too many requests: retry after Retry-After seconds"),
        (500, "Internal server error"),
        (503, "The server is shutting down"),
    )
}


class APIError(Exception):
    """An error response. `param` names the request field at fault. Both are cut and put on one line."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        message = shorten(message, MAX_MESSAGE_LENGTH)
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = headers
        self.param = None if param is None else shorten(param)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the response."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def to_response(self) -> JSONResponse:
        """Return the HTTP response to a failed request, in OpenAI's form."""
        return JSONResponse(self.to_dict(), self.status, dict(self.headers or {}))


class ContextLengthError(APIError):
    """A prompt leaves no room for an answer. Agents that see this error shorten the conversation and ask again.

    The wording is OpenAI's, because many look for it. Other APIs have their own.
    """

    def __init__(self, error: PromptTooLongError, field: str):
        """`field`: of the request, that the prompt is in."""
        message = (
            f"This model's maximum context length is {error.max_context} tokens. However, your {field} resulted in "
            f"{error.num_tokens} tokens, and the answer needs at least one. Please reduce the length of the {field}."
        )
        super().__init__(400, message, field, "context_length_exceeded")
        self.num_tokens = error.num_tokens
        self.max_context = error.max_context


def check_operator(key: ApiKey, action: str) -> None:
    """Raise APIError unless an API key is an operator's. `action` says what others may not do."""
    if not key.is_operator:
        raise APIError(403, f"this API key may not {action}: name it with --operator when the server starts")


def invalid_request(error: Exception, prompt_field: str = "messages") -> APIError:
    """Convert an exception to a 400 with a one-line message. `prompt_field` is what a prompt that is too long is in."""
    if isinstance(error, PromptTooLongError):
        return ContextLengthError(error, prompt_field)
    if isinstance(error, RecursionError):
        return APIError(400, "the request body is nested too deeply")
    return APIError(400, " ".join(str(error).split()))


def to_validation_error(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """Convert pydantic's list of errors to a 400 that names the first invalid field of the body."""
    param, message = describe_first(errors)
    if errors[0].get("type") == "extra_forbidden":
        return APIError(400, f"unknown field {param!r}", param)
    return APIError(400, f"{param}: {message}" if param else message, param)


def describe_first(errors: Sequence[Mapping[str, Any]]) -> tuple[str | None, str]:
    """Return the field of the first of pydantic's errors, None for the whole body, and what is wrong with it.

    Locations are fields as clients write them (see field_paths.py).
    """
    first = errors[0]
    field = shorten(".".join(map(str, first.get("loc", ()))))  # keys come from the client
    kind = first.get("type", "")
    if kind in WORDS:
        return field or None, WORDS[kind].format_map(first.get("ctx", {}))
    return field or None, str(first.get("msg", "not valid")).removeprefix("Value error, ")
