"""What the schema of a request allows is answered: no value derived from it fails later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from retain.server.launch import GracefulServer
from tests.server.conftest import HTTP

MESSAGES = [{"role": "user", "content": "Hello"}]
ROUTES = {
    "chat/completions": ("ChatCompletionRequest", {"messages": MESSAGES, "max_tokens": 2, "n": 2}),
    "completions": ("CompletionRequest", {"prompt": "Hello", "max_tokens": 2, "n": 2}),
    "messages": ("MessagesRequest", {"messages": MESSAGES, "max_tokens": 2}),
    "responses": ("ResponsesRequest", {"input": "Hello", "max_output_tokens": 2}),
}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")  # the context bounds these


@pytest.fixture(scope="module")
def schemas(tiny_server: GracefulServer) -> dict[str, Any]:
    found: dict[str, Any] = HTTP.get(f"{tiny_server.url.removesuffix('/v1')}/openapi.json").json()
    return found["components"]["schemas"]  # type: ignore[no-any-return]


def numeric_bounds(field: dict[str, Any]) -> Iterator[float]:
    """Yield the least and the largest number that the schema of a field allows."""
    for kind in field.get("anyOf", [field]):
        if kind.get("type") in ("integer", "number") and "const" not in kind:
            cast, step = (int, 1) if kind["type"] == "integer" else (float, 1e-9)  # FastAPI writes bounds as floats
            yield cast(kind["minimum"] if "minimum" in kind else kind["exclusiveMinimum"] + step)
            yield cast(kind["maximum"]) if "maximum" in kind else cast(kind["exclusiveMaximum"]) - step


@pytest.mark.parametrize("route", ROUTES)
def test_every_bound_of_a_number_is_answered(route: str, tiny_server: GracefulServer, schemas: dict[str, Any]) -> None:
    model, required = ROUTES[route]
    fields = {name: field for name, field in schemas[model]["properties"].items() if name not in LENGTHS}
    bounds = [(name, value) for name, field in fields.items() for value in numeric_bounds(field)]
    assert ("top_k", 2**31 - 1) in bounds
    for name, value in bounds:
        body = {"model": "smollm2", **required, name: value}
        if name == "best_of":
            body["n"] = value
        response: httpx.Response = HTTP.post(f"{tiny_server.url}/{route}", json=body)
        assert response.status_code == 200, (name, value, response.text)
