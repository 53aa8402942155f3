"""A schema that is refused: the error names the place and the feature, in words of our own, in linear time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.processing.grammar import (
    MAX_SCHEMA_DEPTH,
    GrammarCompiler,
    grammar_from_json_schema,
    grammar_from_lark,
    lark_json_rule,
)
from retain.processing.schemas import parts as schema_parts
from retain.processing.schemas.annotations import KNOWN_FORMATS, MEANS_NOTHING
from retain.processing.schemas.parts import SchemaError, iter_parts, open_root
from retain.processing.schemas.refusals import UNSUPPORTED, explain_refusal
from tests.helpers.tokenizers import open_tokenizer

# Words of llguidance, and of the tables that its words are compared with.
FOREIGN = ("Unimplemented", "coerce", "retriev", "registry", "f64", "u64", "Unsatisfiable", "Expected", "secret")


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = open_tokenizer("smollm2")
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


def refusal(compiler: GrammarCompiler, schema: Any) -> str | None:
    """Return the message of the error that compiling a schema raises; None if it raises none."""
    try:
        compiler.compile(grammar_from_json_schema(schema))
    except ValueError as error:
        return str(error)
    return None


def within(part: Any) -> Any:
    return {"type": "object", "properties": {"x/y": {"anyOf": [{"type": "null"}, part]}, "b": {}}, "required": ["x/y"]}


AMBIGUOUS = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
CIRCLE = {"$ref": "#/$defs/A", "type": "object", "$defs": {"A": {"type": "object", "properties": {"n": {}}}}}
CIRCLE["$defs"]["A"]["properties"]["n"] = {"$ref": "#/$defs/A", "type": "object"}  # type: ignore[index]
REFUSED: list[tuple[Any, str, str]] = [  # a part, where in it the error is, and what is wrong
    ({"not": {"type": "string"}}, "/not", "`not` is not supported"),
    ({"if": {"type": "string"}, "then": {"minLength": 1}}, "/if", "`if` is not supported"),
    ({"type": "array", "uniqueItems": True}, "/uniqueItems", "`uniqueItems` is not supported"),
    ({"type": "array", "contains": {"type": "null"}}, "/contains", "`contains` is not supported"),
    ({"dependentSchemas": {"a": {}}}, "/dependentSchemas", "not supported"),
    ({"unevaluatedProperties": False}, "/unevaluatedProperties", "not supported"),
    ({"propertyNames": {"pattern": "secret"}}, "/propertyNames", "not supported"),
    ({"$dynamicRef": "#secret"}, "/$dynamicRef", "not supported"),
    ({"type": "secret"}, "/type", "must be one or several of null, boolean"),
    ({"type": ["string", 5]}, "/type", "must be one or several of"),
    ({"properties": []}, "/properties", "must be an object of schemas"),
    ({"properties": {"a": 5}}, "/properties/a", "a schema is an object, true or false"),
    ({"type": "object", "required": "a"}, "/required", "must be a list of texts"),
    ({"type": "array", "items": 5}, "/items", "must be a schema"),
    ({"type": "array", "minItems": -1}, "/minItems", "must be a whole number from 0"),
    ({"type": "string", "minLength": 1.5}, "/minLength", "must be a whole number from 0"),
    ({"type": "integer", "minimum": "secret"}, "/minimum", "must be a number"),
    ({"type": "string", "pattern": 5}, "/pattern", "must be a text"),
    ({"type": "string", "format": 5}, "/format", "must be a text"),
    ({"anyOf": {}}, "/anyOf", "must be a list of schemas"),
    ({"enum": 5}, "/enum", "must be a list"),
    ({"type": "integer", "multipleOf": 0}, "/multipleOf", "must be a number above 0"),
    ({"type": "integer", "multipleOf": 2**40}, "/multipleOf", "too many digits"),
    ({"$ref": "#/secret"}, "/$ref", "leads to no schema"),
    ({"$ref": "#secret"}, "/$ref", "leads to no schema"),
    ({"$ref": "http://secret/x"}, "/$ref", "leads out of the schema"),
    ({"$ref": "other.json"}, "/$ref", "leads out of the schema"),
    ({"$ref": 5}, "/$ref", "must be a text"),
    (AMBIGUOUS, "/oneOf", "may overlap: use `anyOf`"),
    ({"anyOf": [{"oneOf": [{"type": "null"}, {"type": "string"}]}, AMBIGUOUS]}, "/anyOf/1/oneOf", "may overlap"),
    ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "/patternProperties", "one name may match"),
    ({"type": "object", "patternProperties": {"(secret": {}}}, "/patternProperties/(secret", "regular expression"),
    ({"type": "object", "properties": {"a": {}}, "minProperties": 2}, "/minProperties", "are required"),
    ({"type": "string", "pattern": "(secret"}, "/pattern", "the regular expression is invalid"),
    ({"type": "string", "pattern": "(?=secret)"}, "/pattern", "looks around is not supported"),
    ({"type": "string", "pattern": "\\bsecret\\d"}, "/pattern", "looks around is not supported"),
    ({"items": {"pattern": "x"}, "allOf": [{"type": "string", "pattern": "\\1"}]}, "/allOf/0/pattern", "invalid"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "where", "words"), REFUSED)
def test_a_refusal_names_the_place_and_the_feature(
    compiler: GrammarCompiler, part: Any, where: str, words: str
) -> None:
    for schema, place in (
        (part, "#"),
        (within(part), "#/properties/x~1y/anyOf/1"),
        ({**within({"$ref": "#/$defs/A"}), "$defs": {"Unused": {"not": {}}, "A": part}}, "#/$defs/A"),
    ):
        message = refusal(compiler, schema)
        assert message is not None and message.startswith(f"JSON schema at {place}{where}: "), message
        assert words in message and not any(word in message.replace(where, "") for word in FOREIGN)


@pytest.mark.parametrize(
    ("schema", "where", "words"),
    [
        (CIRCLE, "#/", "leads back here"),
        ({"x-guidance": {"secret": 1}}, "#/x-guidance", "is not valid"),
        ({"$schema": "http://secret/x", "type": "object"}, "#/$schema", "is not known"),
        ({"type": "integer", "minimum": 5, "maximum": 1}, "#/minimum", "`minimum` is above `maximum`"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "#/minLength", "`minLength` is above `maxLength`"),
        ({"anyOf": []}, "#", "no value matches"),
        ({"type": "string", "pattern": "[^\\s\\S]"}, "#/pattern", "no text matches"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "#", "no value matches"),
        (False, "#", "no value matches"),
        ({"$ref": "#"}, "#", "no value matches"),
        ({"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}, "#", "no value matches"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#", "no value matches"),
        ({"$anchor": "a", "$ref": "#a"}, "#", ""),
        ({"enum": []}, "#/enum", "`enum` is empty"),
        ({"type": "array", "items": {"enum": list(range(100_000))}}, "#", "too large"),
        (5, "#", "invalid"),
    ],
)
def test_a_refusal_of_a_whole_schema_says_why(compiler: GrammarCompiler, schema: Any, where: str, words: str) -> None:
    message = refusal(compiler, schema) or ""
    assert message.startswith(f"JSON schema at {where}") and words in message
    assert not any(word in message for word in FOREIGN)


def test_a_schema_within_a_grammar_and_one_beside_a_large_integer_are_named_too(compiler: GrammarCompiler) -> None:
    lark = "\n".join(["start: a b", lark_json_rule("a", {"const": "x"}), lark_json_rule("b", within({"not": {}}))])
    beside = {**within({"type": "string", "pattern": "("}), "properties": {"a": {"const": 2**60}, "b": {"not": {}}}}
    for grammar, place in ((grammar_from_lark(lark), "#/properties/x~1y/anyOf/1/not"),):
        with pytest.raises(SchemaError, match=f"JSON schema at {place}: `not` is not supported"):
            compiler.compile(grammar)
    with pytest.raises(SchemaError, match="JSON schema at #/properties/b/not: `not`"):
        grammar_from_json_schema(beside)
    unclear = {"type": "object", "properties": {"a": {"const": 2**60}, "b": {"type": "string", "pattern": "("}}}
    with pytest.raises(SchemaError, match="JSON schema at #/properties/b/pattern: the regular expression"):
        compiler.compile(grammar_from_json_schema(unclear))


def test_what_is_too_deep_or_too_wide_is_named() -> None:
    deep: Any = {}
    for _ in range(MAX_SCHEMA_DEPTH // 2 + 1):
        deep = {"properties": {"a": deep}}
    with pytest.raises(SchemaError, match=r"^JSON schema at #/properties/a/properties/a.*: the schema is nested more"):
        grammar_from_json_schema(deep)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}}
    with pytest.raises(SchemaError, match=r"^JSON schema at #/items/anyOf/0: an object with more than"):
        grammar_from_json_schema({"type": "array", "items": {"anyOf": [wide]}})


@pytest.mark.parametrize("name", ["path", "password", "binary", "uri-reference", "regex", "a b", "", "unknown"])
def test_a_format_that_nobody_knows_is_ignored(compiler: GrammarCompiler, name: str) -> None:
    for kind in ("string", "integer", "number", "object", "array", "boolean", "null", ["string", "null"]):
        part = {"type": kind, "format": name}
        assert grammar_from_json_schema(within(part)) == grammar_from_json_schema(within({"type": kind}))
    assert refusal(compiler, {"$ref": "#/components/A", "components": {"A": {"format": name}}}) is None


@pytest.mark.parametrize("name", KNOWN_FORMATS)
def test_a_format_that_is_known_is_enforced(compiler: GrammarCompiler, name: str) -> None:
    grammar = grammar_from_json_schema({"type": "string", "format": name})
    state = compiler.compile(grammar)
    tokens = compiler.tokenizer.encode('"  no such thing  "', add_special_tokens=False)
    assert not all(state.accept_token(token) for token in tokens)
    for kind in ("integer", "boolean"):
        assert refusal(compiler, {"type": kind, "format": name}) is None


def test_a_format_that_is_data_or_a_name_stays() -> None:
    data = {"format": "path", "not": False, "minLength": 3.0}
    schema = {"properties": {"format": {"type": "string"}, "uniqueItems": {"const": data}}, "required": ["format"]}
    for kept in (schema, {"const": data}, {"enum": [data]}, {"default": data}, {"examples": [data]}):
        assert json.loads(grammar_from_json_schema(kept))["grammars"][0]["json_schema"] == kept


@pytest.mark.parametrize(
    "part",
    [
        {"uniqueItems": False}, {"not": False}, {"propertyNames": {"type": "string"}}, {"if": {"type": "null"}},
        {"then": {}}, {"minContains": 2}, {"unevaluatedItems": True}, {"dependentRequired": {}},
        {"additionalProperties": False, "unevaluatedProperties": False}, {"$dynamicAnchor": "x"},
        {"contains": {}, "minContains": 0}, {"minLength": 3.0}, {"items": {}, "unevaluatedItems": False},
    ],
)  # fmt: skip
def test_keywords_that_mean_nothing_are_left_out(compiler: GrammarCompiler, part: Any) -> None:
    assert refusal(compiler, within(part)) is None


def test_each_keyword_that_is_not_supported_is_refused_or_means_nothing() -> None:
    assert {*MEANS_NOTHING, "$dynamicRef", "$recursiveRef"} == set(UNSUPPORTED)


parts = st.recursive(
    st.sampled_from(REFUSED).map(lambda case: case[0]) | st.sampled_from([{"type": "string"}, {}, True]),
    lambda inner: st.one_of(
        st.builds(lambda a, b: {"type": "object", "properties": {"a": a, "not": b}, "required": ["a"]}, inner, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a: {"type": "array", "items": a, "minItems": 1}, inner),
    ),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(parts)
def test_what_is_at_the_place_of_a_refusal_is_its_cause(compiler: GrammarCompiler, schema: Any) -> None:
    """Without it the schema is accepted, or refused for something else."""
    for _ in range(8):
        message = refusal(compiler, schema)
        if message is None:
            return
        assert message.startswith("JSON schema at #") and not any(f" {word}" in message for word in FOREIGN)
        place = message.removeprefix("JSON schema at #").partition(": ")[0]
        schema = without(schema, [t.replace("~1", "/").replace("~0", "~") for t in place.split("/")[1:]])


def without(schema: Any, tokens: list[str]) -> Any:
    if not tokens:
        return {}
    schema = json.loads(json.dumps(schema))
    inner = schema
    for token in tokens[:-1]:
        inner = inner[int(token)] if isinstance(inner, list) else inner[token]
    if isinstance(inner, list):
        inner[int(tokens[-1])] = {}
    else:
        del inner[tokens[-1]]
    return schema


def test_the_place_is_found_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    opened = schema_parts.open_part
    for n in (1000, 2000):
        seen: list[int] = []
        monkeypatch.setattr(schema_parts, "open_part", lambda *args, seen=seen: (seen.append(1), opened(*args))[1])
        chain: Any = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": "#"}]} for i in range(n)}
        schema = {"$defs": {**chain, f"d{n}": {"not": {}}}, "$ref": "#/$defs/d0"}
        error = explain_refusal(schema, "Unimplemented keys")
        assert f"#/$defs/d{n}/not" in str(error)
        assert len(list(iter_parts(open_root(schema)))) == 3 * n + 3
        counts.append(len(seen))
    assert counts[1] < 2.1 * counts[0]


KEYWORDS = [
    *schema_parts.SINGLE, *schema_parts.LISTS, *schema_parts.MAPS, "type", "enum", "const", "$ref", "minimum",
    "maximum", "exclusiveMinimum", "multipleOf", "format", "pattern", "required", "minItems", "maxItems", "minLength",
    "$id", "$schema", "$comment", "uniqueItems", "minProperties", "a",
]  # fmt: skip
ODD = st.recursive(
    st.sampled_from(
        [None, True, False, 0, -1, 2, 1.5, 3.0, 2**53 + 1, 2**64, 1e300, "", "object", "array", "#", "integer"]
    )
    | st.sampled_from(["#/$defs/a", "#/a/0", "#/properties/a", "http://x/y", "date", "(", "^a", "string"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYWORDS), ODD, min_size=1, max_size=5))
def test_any_json_is_a_schema_or_is_refused_at_a_place(compiler: GrammarCompiler, schema: Any) -> None:
    message = refusal(compiler, schema)
    assert message is None or message.startswith("JSON schema at #")
