"""The width of a schema: what is beyond it is refused before a matcher computes it, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retain.processing.grammar import TOO_WIDE, grammar_from_json_schema
from retain.processing.schemas.width import find_part_that_is_too_wide


def optional(begin: int, end: int) -> dict[str, Any]:
    properties = {f"p{i}": {"type": "string"} for i in range(begin, end)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def choice(n: int) -> dict[str, Any]:
    return {"anyOf": [{"const": [i]} for i in range(n)]}


# The widest schema of each shape that llguidance can follow, and a narrower one; by the number of what makes it wide.
SHAPES: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "optional properties": (490, lambda n: optional(0, n)),
    "properties in parts": (
        490,
        lambda n: (
            {"allOf": [{"properties": optional(0, n // 2)["properties"]}, {"$ref": "#/$defs/rest"}]}
            | {"$defs": {"rest": {"properties": optional(n // 2, n)["properties"]}}}
        ),
    ),
    "a choice": (1900, choice),
    "a choice of choices": (1900, lambda n: {"oneOf": [choice(n // 2), {"anyOf": [choice(n // 2)]}]}),
    "an enumeration": (1900, lambda n: {"enum": [[i, i] for i in range(n)]}),
}


def within(part: dict[str, Any]) -> dict[str, Any]:
    """A part at a place that the first token does not reach."""
    definitions = part.pop("$defs", {})
    return {"type": "object", "properties": {"x": part}, "required": ["x"], "$defs": definitions}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_schema_that_is_too_wide_is_refused_before_it_is_compiled(shape: str) -> None:
    n, build = SHAPES[shape]
    grammar_from_json_schema(within(build(n)))
    with pytest.raises(ValueError) as error:
        grammar_from_json_schema(within(build(n * 11 // 10)))
    assert str(error.value) == f"JSON schema at #/properties/x: {TOO_WIDE}"


@pytest.mark.parametrize("shape", ["optional properties", "a choice", "an enumeration"])
def test_what_is_refused_could_not_be_followed_anyway(shape: str) -> None:
    from llguidance import LLMatcher, LLTokenizer

    n, build = SHAPES[shape]
    tokenizer = LLTokenizer("byte")
    for size, can_follow in ((n, True), (n * 11 // 10, False)):
        grammar = LLMatcher.grammar_from_json_schema(within(build(size)))
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        beginning = b'{"x": {"p1": "' if "optional" in shape else b'{"x": [1'
        followed = all(matcher.consume_token(byte) for byte in beginning)
        assert followed == can_follow


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {
            "type": "object",
            "properties": {f"p{i}": {} for i in range(4000)},
            "required": [f"p{i}" for i in range(4000)],
        },
        {"enum": [f"{i}" for i in range(4000)]},
        {"type": "array", "prefixItems": [{"const": i} for i in range(4000)]},
        {"type": "object", "properties": {f"p{i}": optional(0, 100) for i in range(40)}},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
        {"properties": {"properties": {"type": "object"}, "anyOf": {}, "enum": {}, "required": {}, "$ref": {}}},
        {"properties": {"x": {"default": optional(0, 1000), "examples": [optional(0, 1000)]}}},
    ],
    ids=range(8),
)
def test_what_is_long_or_large_but_not_wide_passes(schema: Any) -> None:
    assert find_part_that_is_too_wide(schema) is None


def test_the_width_takes_no_stack_and_looks_at_each_part_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    from retain.processing.schemas import width as schema_width

    counts: list[int] = []
    measured = schema_width._own_width
    for length in (2000, 4000):
        seen: list[Any] = []
        monkeypatch.setattr(schema_width, "_own_width", lambda part, seen=seen: (seen.append(1), measured(part))[1])
        chain: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(length)}
        find_part_that_is_too_wide({"$defs": {**chain, f"d{length}": {}}, "$ref": "#/$defs/d0"})
        counts.append(len(seen))
    assert counts[1] < 2.1 * counts[0]
