"""Integers beyond 2^53 in schemas: a grammar allows exactly the values that match, or the schema is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from retain.processing.grammar import grammar_from_json_schema, grammar_from_lark, lark_json_rule
from retain.processing.schemas.parts import SchemaError

BIG = 2**53 + 1
SPECIAL = [v * sign for sign in (1, -1) for v in (2**53, BIG, 2**63 - 1, 2**63, 2**63 + 1, 2**64, 2**64 + 1, 10**22)]
INTEGERS = st.integers(-(2**80), 2**80) | st.integers(-(2**54), 2**54) | st.sampled_from(SPECIAL)


@lru_cache(1)
def compile_over_bytes(grammar: str) -> Any:
    from llguidance import LLMatcher, LLTokenizer

    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    assert not matcher.is_error() or "Unsatisfiable" in matcher.get_error(), matcher.get_error()
    return matcher


def match(grammar: str, text: str) -> bool:
    """Return whether a text is one of those of a grammar."""
    matcher = compile_over_bytes(grammar).deep_copy()
    return all(matcher.consume_token(byte) for byte in text.encode()) and bool(matcher.is_accepting())


def allows(schema: Any, value: Any) -> bool:
    return match(grammar_from_json_schema(schema), value if isinstance(value, str) else json.dumps(value))


def in_object(schema: Any) -> Any:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}


# Where a part may be in a schema, and what a value of it then becomes.
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "root": (lambda s: s, lambda v: v),
    "property": (in_object, lambda v: {"a": v}),
    "optional property": (
        lambda s: {"type": "object", "properties": {"x": {"type": "string"}, "a": s, "z": {"type": "null"}}},
        lambda v: {"a": v, "z": None, "others": [1]},
    ),
    "other property": (lambda s: {"type": "object", "additionalProperties": s}, lambda v: {"b": v, "c": v}),
    "items": (lambda s: {"type": "array", "items": s, "minItems": 1, "maxItems": 2}, lambda v: [v, v]),
    "first item": (lambda s: {"type": "array", "prefixItems": [s], "minItems": 1}, lambda v: [v, "x", {}]),
    "alternative": (lambda s: {"anyOf": [{"type": "string"}, s]}, lambda v: v),
    "only one": (lambda s: {"allOf": [s], "title": "x"}, lambda v: v),
    "reference": (lambda s: {"$ref": "#/$defs/A", "$defs": {"A": in_object(s)}}, lambda v: {"a": v}),
    "reference to the root": (
        lambda s: {"type": "object", "properties": {"next": {"$ref": "#"}, "a": s}, "required": ["a"]},
        lambda v: {"next": {"a": v}, "a": v},
    ),
    "constant object": (lambda s: s, lambda v: v),
}


def forms(v: int) -> list[dict[str, Any]]:
    return [
        {"const": v},
        {"enum": [v, "x", {"a": [v]}]},
        {"type": "integer", "minimum": v, "maximum": v},
        {"type": "integer", "exclusiveMinimum": v - 1, "exclusiveMaximum": v + 1},
        {"type": ["integer", "null"], "enum": [v, None]},
    ]


@settings(max_examples=60, deadline=None)
@given(INTEGERS, st.sampled_from(sorted(PLACES)), st.integers(0, 4))
def test_a_grammar_of_an_integer_allows_this_one_only(v: int, place: str, form: int) -> None:
    build, put = PLACES[place]
    grammar = grammar_from_json_schema(build(forms(v)[form]))
    assert match(grammar, json.dumps(put(v)))
    for near in (v - 1, v + 1, -v, v * 10, v // 10, float(v), 2 * v + 3):
        if near != v:
            assert not match(grammar, json.dumps(put(near))), near


@settings(max_examples=60, deadline=None)
@given(INTEGERS, st.integers(-3, 3), st.sampled_from(["integer", "number"]), st.data())
def test_bounds_allow_exactly_what_is_within(v: int, distance: int, kind: str, data: st.DataObject) -> None:
    names = st.sampled_from(["minimum", "exclusiveMinimum"]), st.sampled_from(["maximum", "exclusiveMaximum"])
    low, high = (data.draw(name | st.none()) for name in names)
    bounds = {low: v, high: v + data.draw(st.integers(0, 2**70) | st.integers(0, 20))}
    schema = {"type": kind, **{name: bound for name, bound in bounds.items() if name}}
    validator = jsonschema.Draft202012Validator(schema)
    for bound in bounds.values():
        number = bound + distance
        try:
            grammar = grammar_from_json_schema(in_object(schema))
            assert match(grammar, json.dumps({"a": number})) == validator.is_valid(number)
        except SchemaError:
            assume(False)
        if kind == "number" and number:
            is_fraction_valid = validator.is_valid(number) and validator.is_valid(number + (1 if number > 0 else -1))
            if is_fraction_valid:
                assert match(grammar, f'{{"a": {number}.25}}') and match(grammar, f'{{"a": {number}.0}}')


def in_order(members: dict[str, Any]) -> dict[str, Any]:
    """Equal objects as equal texts: a grammar wants the members of a constant in their order."""
    return dict(sorted(members.items()))


values = st.recursive(
    INTEGERS | st.sampled_from([None, True, "x", 1.5, 1e22, 3.0]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2).map(in_order),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(values, values)
def test_a_constant_allows_its_own_value_only(value: Any, other: Any) -> None:
    grammar = grammar_from_json_schema({"enum": [value, "y"]})
    assert json.loads(json.dumps(value)) == value and match(grammar, json.dumps(shorten_floats(value)))
    assert match(grammar, json.dumps(shorten_floats(other))) == (other in (value, "y") and type(other) is type(value))


def shorten_floats(value: Any) -> Any:
    """Return a value whose whole floats are integers, as a grammar writes them."""
    if isinstance(value, dict):
        return {name: shorten_floats(item) for name, item in value.items()}
    if isinstance(value, list):
        return [shorten_floats(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


large = [{"const": BIG}, {"type": "integer", "minimum": BIG}, {"type": "number", "maximum": -BIG}, {"maximum": BIG}]
plain = [{"type": "string", "maxLength": 1}, {"type": "null"}, {"$ref": "#/$defs/A"}, True, False]
leaves = st.sampled_from([*large, {"enum": [BIG, "x", [BIG]]}, *plain])
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(
            lambda a, b, more, required: {
                "type": "object", "properties": {"a": a, "b": b}, "required": required, "additionalProperties": more
            },
            inner, inner, inner, st.lists(st.sampled_from("abc"), unique=True, max_size=2),
        ),
        st.builds(
            lambda first, items, least, most: {
                "type": "array", "prefixItems": first, "items": items, "minItems": least, "maxItems": least + most
            },
            st.lists(inner, min_size=1, max_size=2), inner, st.integers(0, 2), st.integers(0, 3),
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some}),
        st.builds(lambda items: {"type": ["array", "string"], "items": items, "minItems": 1}, inner),
    ),
    max_leaves=5,
)  # fmt: skip
documents = st.builds(lambda a, root: {"$defs": {"A": a}, "anyOf": [root, {"const": [BIG, BIG]}]}, schemas, schemas)
atoms = st.sampled_from([BIG, BIG - 1, BIG + 1, -BIG, -BIG - 1, 0, "x", "xx", None, [BIG], [], {}])
candidates = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3).map(lambda d: dict(sorted(d.items())))
    ),
    max_leaves=5,
)


def refer_to_truth(place: str) -> dict[str, Any]:
    """Return a schema with a reference to a part that is true or false."""
    member = {"type": "array", "items": {"$ref": place}, "prefixItems": [{"const": BIG}, True]}
    return {"$defs": {"A": True, "a/b": False}, "anyOf": [member, {"const": [BIG, BIG, BIG]}]}


@settings(max_examples=200, deadline=None)
@given(documents, st.lists(candidates, min_size=5, max_size=12))
@example(refer_to_truth("#/$defs/A"), [[BIG], [], [BIG, BIG, BIG - 1], BIG])
@example(refer_to_truth("#/$defs/a~1b"), [[BIG], [], [BIG, BIG, BIG - 1], BIG])
@example(refer_to_truth("#/anyOf/0/prefixItems/1"), [[BIG], [], [BIG, BIG, BIG - 1], BIG])
def test_a_grammar_allows_the_values_of_a_schema(document: Any, some: list[Any]) -> None:
    try:
        grammar = grammar_from_json_schema(document)
    except SchemaError as error:
        assert "no value matches" in str(error)  # an array or a required member
        return
    validator = jsonschema.Draft202012Validator(document)
    for value in some:
        wanted = is_valid(validator, value)
        for text in (json.dumps(value, separators=(",", ":")), json.dumps(value, indent=1)):
            assert wanted is None or match(grammar, text) == wanted, (document, value)
        assert not match(grammar, f" {json.dumps(value)}") and not match(grammar, f"{json.dumps(value)} ")


def is_valid(validator: Any, value: Any) -> bool | None:
    """Return whether a value matches a schema; None where a reference leads to itself."""
    try:
        return bool(validator.is_valid(value))
    except RecursionError:
        return None


def test_a_rule_of_a_grammar_has_such_a_schema_in_it() -> None:
    lark = f'start: "<" value ">" value\n{lark_json_rule("value", in_object({"const": BIG}))}'
    text = json.dumps({"a": BIG})
    assert match(grammar_from_lark(lark), f"<{text}>{text}")
    for wrong in (f"<{text}>{text} ", f"<{text} >{text}", f"< {text}>{text}", f"<{text}>" + json.dumps({"a": BIG + 1})):
        assert not match(grammar_from_lark(lark), wrong)


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "object", "patternProperties": {"^a": {"const": BIG}}}, "/patternProperties"),
        ({"type": "object", "properties": {"b": {"const": BIG}}, "minProperties": 2}, "/minProperties"),
        ({"type": "integer", "minimum": BIG, "multipleOf": 3}, "/multipleOf"),
        ({"allOf": [{"type": "integer", "minimum": BIG}, {"maximum": 2**60}]}, "/allOf"),
        ({"$ref": "#/$defs/A", "maximum": BIG}, "/$ref"),
        ({"oneOf": [{"minimum": BIG}, {"maximum": BIG}]}, "/oneOf"),
        ({"const": [BIG], "minItems": 3}, ""),
        ({"type": "string", "enum": [BIG]}, ""),
        ({"minimum": BIG, "not": {"const": BIG}}, "/not"),
        ({"minimum": BIG, "maximum": "x"}, "/maximum"),
        ({"items": {"const": BIG}, "minItems": "x"}, "/minItems"),
        ({"minimum": -BIG, "maximum": float("inf")}, "/maximum"),
        ({"minimum": float("nan"), "maximum": BIG}, "/minimum"),
        ({"properties": {f"p{i}": {"const": BIG} for i in range(257)}}, ""),
        ({"prefixItems": [{"const": BIG}] * 257}, ""),
    ],
)
def test_what_cannot_be_exact_is_refused_with_its_place(part: Any, place: str) -> None:
    with pytest.raises(SchemaError) as error:
        grammar_from_json_schema({**in_object(part), "$defs": {"A": {"type": "integer"}}})
    assert str(error.value).startswith(f"JSON schema at #/properties/a{place}: ")


@pytest.mark.parametrize(
    "name", ["a/b", "\x7f", "\0", "\n", "/", "\\", '"', "é", "\u2028", "", "#", "//", "😀", "start:"]
)
def test_a_member_has_its_schema_however_its_name_is_written(name: str) -> None:
    schema = {"type": "object", "properties": {name: {"const": BIG}}, "additionalProperties": {"type": "string"}}
    grammar = grammar_from_json_schema(schema)
    plain = json.dumps(name, ensure_ascii=False)
    for written in (plain, json.dumps(name), plain.replace("/", "\\/")):
        assert json.loads(written) == name
        assert match(grammar, f"{{{plain}: {BIG}}}")
        assert not match(grammar, f'{{{written}: "x"}}')


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(
    ("low", "high"),
    [(-(2**63), 2**63 - 1), (0, 2**64 - 1), (-1.7976931348623157e308, 1.7976931348623157e308), (0, 1e300)],
)
def test_bounds_of_code_generators_are_followed(kind: str, low: float, high: float) -> None:
    grammar = grammar_from_json_schema(in_object({"type": kind, "minimum": low, "maximum": high, "format": "int64"}))
    for number in (0, 5, int(low), int(high), int(low) - 1, int(high) + 1):
        assert match(grammar, json.dumps({"a": number})) == (int(low) <= number <= int(high))


def test_constants_that_json_cannot_write_match_nothing() -> None:
    schema = {"enum": [float("nan"), float("inf"), -(10**400), BIG]}
    assert allows(schema, BIG) and allows(schema, -(10**400)) and not allows(schema, "NaN")


def test_alternatives_that_exclude_each_other_are_followed() -> None:
    kinds = [
        {"properties": {"k": {"const": k}, "id": {"const": BIG + i}}, "required": ["k", "id"]}
        for i, k in enumerate("ab")
    ]
    schema = {"oneOf": [{"type": "object", **kind} for kind in kinds]}
    assert allows(schema, {"k": "a", "id": BIG}) and not allows(schema, {"k": "b", "id": BIG})
    assert allows({"oneOf": [{"const": BIG}, {"const": BIG + 1}, {"type": "null"}]}, BIG + 1)


def test_a_grammar_is_linear_in_its_schema() -> None:
    sizes = []
    for n in (100, 200):
        node = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}}
        leaf = {f"q{i}": {"type": "array", "items": {"$ref": "#/$defs/node"}} for i in range(n)}
        schema = {"$defs": {"node": node}, "type": "object", "properties": {**leaf, "big": {"const": BIG}}}
        try:
            sizes.append(len(grammar_from_json_schema(schema)))
        except SchemaError as error:
            assert "too large" in str(error)
            sizes.append(0)
    assert sizes[1] < 2.5 * sizes[0] or sizes[1] == 0
