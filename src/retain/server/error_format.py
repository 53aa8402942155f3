"""The format of error responses: the address of a request decides whose it is."""

from __future__ import annotations

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from retain.server.anthropic import errors as anthropic_errors
from retain.server.openai.errors import APIError, to_validation_error


def to_error_response(error: APIError, path: str) -> JSONResponse:
    """Return the response to a failed request for this address."""
    if anthropic_errors.has_anthropic_errors(path):
        return anthropic_errors.to_error_response(error)
    return error.to_response()


def to_invalid_body_response(error: RequestValidationError, path: str) -> JSONResponse:
    """Return the response to a request for this address whose body is not valid."""
    if anthropic_errors.has_anthropic_errors(path):
        return anthropic_errors.to_error_response(anthropic_errors.to_validation_error(error.errors(), error.body))
    return to_validation_error(error.errors()).to_response()
