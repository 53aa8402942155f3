"""What the schema of a request allows is answered: no value derived from it fails later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
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
LOGPROBS: dict[str, dict[str, Any]] = {
    "chat/completions": {"logprobs": True, "top_logprobs": 2},
    "completions": {"logprobs": 2},
    "messages": {},
    "responses": {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
}
LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")  # the context bounds these


@pytest.fixture(scope="module")
def openapi(tiny_server: GracefulServer) -> dict[str, Any]:
    found: dict[str, Any] = HTTP.get(f"{tiny_server.url.removesuffix('/v1')}/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def schemas(openapi: dict[str, Any]) -> dict[str, Any]:
    return openapi["components"]["schemas"]  # type: ignore[no-any-return]


def numeric_bounds(field: dict[str, Any]) -> Iterator[float]:
    """Yield the least and the largest number that the schema of a field allows."""
    for kind in field.get("anyOf", [field]):
        if kind.get("type") in ("integer", "number") and "const" not in kind:
            cast, step = (int, 1) if kind["type"] == "integer" else (float, 1e-9)  # FastAPI writes bounds as floats
            yield cast(kind["minimum"] if "minimum" in kind else kind["exclusiveMinimum"] + step)
            yield cast(kind["maximum"]) if "maximum" in kind else cast(kind["exclusiveMaximum"]) - step


@pytest.mark.slow
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


def few_values(field: dict[str, Any]) -> Iterator[object]:
    """Yield the values of a field that has few: null, truth values, and those of an enumeration."""
    for kind in field.get("anyOf", [field]):
        yield from {"null": [None], "boolean": [True, False]}.get(kind.get("type", ""), [])
        yield from kind.get("enum", [])
        yield from (kind[name] for name in ("const",) if name in kind)


@pytest.mark.slow
@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_to_each_value_of_a_field_is_of_the_schema(
    route: str, tiny_server: GracefulServer, openapi: dict[str, Any]
) -> None:
    """With log-probabilities and without. What the engine of this model cannot do is refused as is documented."""
    model, required = ROUTES[route]
    documented = openapi["paths"][f"/v1/{route}"]["post"]["responses"]
    components = {"components": openapi["components"]}
    validators = {
        status: jsonschema_rs.Draft202012Validator(found["content"]["application/json"]["schema"] | components)
        for status, found in documented.items()
    }
    fields = openapi["components"]["schemas"][model]["properties"]
    fields = {name: field for name, field in fields.items() if name not in (*LENGTHS, "stream")}
    cases = [(name, value) for name, field in fields.items() for value in few_values(field)]
    assert len(cases) > 20
    num_answered = 0
    for beside in ({}, LOGPROBS[route]):
        for name, value in cases:
            response = HTTP.post(
                f"{tiny_server.url}/{route}", json={"model": "smollm2", **required, **beside, name: value}
            )
            error = next(validators[str(response.status_code)].iter_errors(response.json()), None)
            assert error is None, (name, value, response.text, str(error))
            num_answered += response.status_code == 200
    assert num_answered > len(cases)
