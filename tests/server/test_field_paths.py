"""Errors name fields as clients write them: no piece of a name is a tag, a type or a validator of pydantic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from retain.server.anthropic.errors import to_validation_error as to_anthropic_error
from retain.server.openai.body import parse_body
from retain.server.openai.errors import APIError, to_validation_error
from retain.server.request_model import StrictModel
from tests.server.test_request_fields import MODELS

REQUESTS = [model for model in MODELS if model.__name__.endswith("Request")]
WRONG = (5, "x", [5], [["x"]], [{}], {}, {"type": "nonsense"}, {"role": "nonsense"}, {"no_such_field": 1})
PYDANTIC = ("tag", "discriminator", "<", "()", "-str", "function-", "dictionary", "instance of", "ctx")
MAX_DEPTH = 7


@cache
def known_names() -> set[str]:
    """Return the names of all fields of all objects in requests."""
    return {field.alias or name for model in MODELS for name, field in model.model_fields.items()}


def build_values(schema: dict[str, Any], definitions: dict[str, Any], depth: int = 0) -> Iterator[Any]:
    """Yield values that a JSON schema allows, with every member of its unions and every field of its objects."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if depth > MAX_DEPTH:
        return
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        for alternative in alternatives:
            yield from build_values(alternative, definitions, depth)
    elif "const" in schema or "enum" in schema:
        yield schema["const"] if "const" in schema else schema["enum"][0]
    elif schema.get("type") == "array":
        for item in build_values(schema.get("items", {}), definitions, depth + 1):
            yield [item]
    elif schema.get("type") == "object":
        yield from build_objects(schema, definitions, depth)
    elif schema.get("type") != "null":
        examples = {"integer": schema.get("minimum", 1), "boolean": True, "number": 1.0, "string": "x"}
        yield examples.get(schema.get("type", ""), {"any": 1})


def build_objects(schema: dict[str, Any], definitions: dict[str, Any], depth: int) -> Iterator[Any]:
    values = {n: list(build_values(s, definitions, depth + 1)) for n, s in schema.get("properties", {}).items()}
    required = {name: values[name][0] for name in schema.get("required", ()) if values[name]}
    yield required
    for name, found in values.items():
        for value in found:
            yield {**required, name: value}


def places_in(value: Any) -> Iterator[list[int | str]]:
    """Yield the keys and indexes of every value in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield [key]
        yield from ([key, *rest] for rest in places_in(inner))


def spoil(body: Any) -> Iterator[Any]:
    """Yield a body with another value at each place, or without one."""
    for *outer, last in places_in(body):
        for wrong in (*WRONG, None):
            spoiled = deepcopy(body)
            inner = spoiled
            for piece in outer:
                inner = inner[piece]
            if wrong is None:
                del inner[last]
            else:
                inner[last] = wrong
            yield spoiled


def check_location(location: tuple[int | str, ...], body: Any) -> None:
    """Every piece is a key or an index of the body; the last one may be a field that is missing."""
    for i, piece in enumerate(location):
        is_key = isinstance(body, dict) and piece in body
        is_index = isinstance(body, list) and isinstance(piece, int) and piece < len(body)
        is_missing = i + 1 == len(location) and isinstance(body, dict) and piece in known_names()
        assert is_key or is_index or is_missing, (location, piece)
        body = body[piece] if not is_missing or is_key else None


@pytest.mark.parametrize("model", REQUESTS, ids=lambda m: f"{m.__module__.split('.')[2]}-{m.__name__}")
def test_every_piece_of_a_name_is_a_field_or_an_index(model: type[StrictModel]) -> None:
    schema = model.model_json_schema()
    adapter: TypeAdapter[Any] = TypeAdapter(model)
    bodies = list(build_values(schema, schema.get("$defs", {})))[:4000]
    spoiled = {json.dumps(s): s for body in bodies[:: max(1, len(bodies) // 60)] for s in spoil(body)}
    num_refused = 0
    for text, body in spoiled.items():
        try:
            parse_body(text.encode(), adapter)
        except RequestValidationError as refused:
            (error,) = refused.errors()
            check_location(error["loc"], body)
            check_words(to_validation_error([error]), body)
            check_words(to_anthropic_error([error]), body)
            num_refused += 1
    assert num_refused > 20


def check_words(error: APIError, body: Any) -> None:
    assert not any(word in error.message for word in PYDANTIC), (error.message, body)
    assert error.param is None or repr(error.param) in error.message or error.message.startswith(f"{error.param}: ")


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("Completion", {"prompt": 5}, "prompt", "valid string"),
        ("Completion", {"prompt": ["x", 5]}, "prompt.1", "valid string"),
        ("Completion", {"prompt": [[1], ["x"]]}, "prompt.1.0", "valid integer"),
        ("Completion", {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias.x", "pattern"),
        ("ChatCompletion", {"messages": [{"role": "robot"}]}, "messages.0", "'role' is 'robot', but should be one of"),
        ("ChatCompletion", {"messages": [{"user": 1, "role": "user", "content": 5}]}, "messages.0.content", "list"),
        ("ChatCompletion", {"messages": [{"role": "user", "content": "x"}], "tool_choice": {}}, "tool_choice.type", ""),
    ],
)
def test_errors_say_which_field_is_wrong_and_what_it_should_be(path: str, fields: Any, param: str, words: str) -> None:
    model = next(m for m in MODELS if m.__name__ == f"{path}Request")
    with pytest.raises(RequestValidationError) as refused:
        parse_body(json.dumps({"model": "m", **fields}).encode(), TypeAdapter(model))
    error = to_validation_error(refused.value.errors())
    assert error.param == param and words in error.message


def test_the_raw_errors_do_have_pieces_of_pydantic() -> None:
    """Without this the laws above could hold for errors that need no care."""
    model = next(m for m in MODELS if m.__name__ == "ChatCompletionRequest")
    with pytest.raises(ValidationError) as raised:
        model.model_validate({"model": "m", "messages": [{"role": "user", "content": [5]}]})
    assert "user" in raised.value.errors()[0]["loc"]
