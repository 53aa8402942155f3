"""The format of error responses: the address of a request decides whose it is."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from retain.server.anthropic import errors as anthropic_errors
from retain.server.openai.errors import APIError, invalid_request, to_validation_error


def to_error_response(error: APIError, path: str) -> JSONResponse:
    """Return the response to a failed request for this address."""
    if anthropic_errors.has_anthropic_errors(path):
        return anthropic_errors.to_error_response(error)
    return error.to_response()


def to_invalid_request_response(error: RequestValidationError, path: str) -> JSONResponse:
    """Return the response to a request for this address whose body or query is not valid."""
    errors = error.errors()
    if not isinstance(error.body, dict):  # FastAPI's own, of a query or a path, whose location begins with that word
        errors = [{**first, "loc": first["loc"][1:]} for first in errors[:1]]
    if anthropic_errors.has_anthropic_errors(path):
        return anthropic_errors.to_error_response(anthropic_errors.to_validation_error(errors))
    return to_validation_error(errors).to_response()


def add_error_handlers(app: FastAPI) -> None:
    """Let every failed request of an application be answered in the format of its address."""

    @app.exception_handler(APIError)
    async def handle_api_error(request: Request, error: APIError) -> JSONResponse:
        return to_error_response(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def handle_validation_error(request: Request, error: RequestValidationError) -> JSONResponse:
        return to_invalid_request_response(error, request.url.path)

    @app.exception_handler(HTTPException)
    async def handle_http_exception(request: Request, error: HTTPException) -> JSONResponse:
        return to_error_response(
            APIError(error.status_code, str(error.detail), headers=error.headers), request.url.path
        )

    @app.exception_handler(ValueError)
    async def handle_value_error(request: Request, error: ValueError) -> JSONResponse:
        return to_error_response(invalid_request(error), request.url.path)
