"""What went wrong, as OpenAI says it: {"error": {"message", "type", "param", "code"}}. No path, no stack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class APIError(Exception):
    """An answer that is an error. `param`: which field of the body is to blame."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        kind = ERROR_TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def to_response(self) -> JSONResponse:
        """As HTTP."""
        return JSONResponse(self.to_dict(), self.status, dict(self.headers or {}))


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is no answer."""

    error: ErrorDetail


def to_validation_error(errors: Sequence[Mapping[str, Any]]) -> APIError:
    """The first thing that is wrong with a body, as pydantic tells it."""
    first = errors[0]
    if first.get("type") == "json_invalid":
        return APIError(400, "the body is not JSON")
    where = [str(part) for part in first.get("loc", ()) if part != "body" and not str(part).endswith("Body")]
    param = ".".join(where) or None
    if first.get("type") == "extra_forbidden":
        return APIError(400, f"unknown field {param!r}", param)
    said = str(first.get("msg", "not valid")).removeprefix("Value error, ")
    return APIError(400, f"{param}: {said}" if param else said, param)
