"""Parts of a schema that no value matches are found, and a grammar without them has no dead end."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retain.processing.grammar import GrammarCompiler, grammar_from_json_schema
from retain.processing.schemas.json_schema import MatchableParts, drop_unmatchable
from tests.helpers.tokenizers import open_tokenizer

NAMES = ("A", "B", "C")


def parts(of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Generate schemas whose parts are `of`."""
    names = st.lists(st.sampled_from("ab"), max_size=2, unique=True)
    properties = st.dictionaries(st.sampled_from("ab"), of, max_size=2)
    some = st.lists(of, min_size=1, max_size=2)
    return st.one_of(
        st.fixed_dictionaries({"type": st.just("object"), "properties": properties, "required": names}),
        st.fixed_dictionaries({"type": st.just("array"), "items": of, "minItems": st.integers(0, 2)}),
        st.fixed_dictionaries({"type": st.just("array"), "prefixItems": some, "minItems": st.integers(0, 3)}),
        st.fixed_dictionaries({"type": st.sampled_from(["object", ["object", "null"]]), "additionalProperties": of})
        .flatmap(lambda s: names.map(lambda required: {**s, "required": required})),
        some.map(lambda schemas: {"anyOf": schemas}),
        some.map(lambda schemas: {"allOf": schemas}),
    )  # fmt: skip


leaves = st.one_of(
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"enum": []}, False, {"const": {"$ref": "#/$defs/A"}}]),
    st.sampled_from(NAMES).map(lambda name: {"$ref": f"#/$defs/{name}"}),
    st.just({"$ref": "#"}),
)
schemas = st.recursive(leaves, parts, max_leaves=4)
definitions = st.fixed_dictionaries(dict.fromkeys(NAMES, schemas))
documents = st.builds(lambda parts, root: {"$defs": parts, "anyOf": [root]}, definitions, schemas)


def can_match(part: Any, root: Any, height: int) -> bool:
    """Return whether a value that nests less than `height` deep matches a part; references count as a level, too."""
    if isinstance(part, bool) or not height:
        return part is True and bool(height)

    def matches(x: Any) -> bool:
        return can_match(x, root, height - 1)

    if "$ref" in part:
        return matches(root["$defs"][part["$ref"][-1]] if part["$ref"] != "#" else root)
    if part.get("enum") == [] or not all(map(matches, part.get("allOf", ()))):
        return False
    if "anyOf" in part and not any(map(matches, part["anyOf"])):
        return False
    if part.get("type") == "object":
        other = part.get("additionalProperties", True)
        return all(matches(part.get("properties", {}).get(name, other)) for name in part["required"])
    if part.get("type") == "array":
        first, rest = part.get("prefixItems", []), part.get("items", True)
        n = part["minItems"]
        return all(map(matches, first[:n])) and (n <= len(first) or matches(rest))
    return True


@settings(max_examples=150, derandomize=True)
@given(documents)
def test_parts_that_match_nothing_are_those_of_which_no_value_can_be_built(document: dict[str, Any]) -> None:
    document = json.loads(json.dumps(document))  # so that no two parts are the same object
    found, height = MatchableParts(document), 12
    assert found.matches_nothing(document) != can_match(document, document, height)
    for part in document["$defs"].values():  # some are never referred to
        assert not (found.matches_nothing(part) and can_match(part, document, height))


def test_what_matches_something_stays_as_it_is() -> None:
    dead = {"$ref": "#/$defs/Loop"}
    kept = {"const": dead, "default": dead, "examples": [dead], "enum": [dead], "$comment": "#/$defs/Loop"}
    schema = {"$defs": {"Loop": {"$ref": "#/$defs/Loop"}}, "properties": {"a": dead, "b": kept}, "anyOf": [dead, True]}
    assert drop_unmatchable(schema) == {
        "$defs": {"Loop": False}, "properties": {"a": False, "b": kept}, "anyOf": [False, True],
    }  # fmt: skip
    assert drop_unmatchable(kept) == kept and drop_unmatchable(True) is True
    for unknown in ("#anchor", "http://x/y#/a", "other", "#/nowhere", "#/$defs/9", "#nowhere/x"):
        schema = {"$ref": unknown, "$defs": {"A": {"$ref": unknown}}}
        assert drop_unmatchable(schema) == schema


def test_references_are_to_the_nearest_root() -> None:
    inner = {"$id": "http://x/inner", "$defs": {"A": {"type": "null"}}, "properties": {"a": {"$ref": "#/$defs/A"}}}
    definitions = {"A": {"$ref": "#/$defs/A"}, "In%ner~": inner}
    properties = {"b": {"$ref": "#/$defs/In%25ner~0"}, "c": {"$ref": "#/$defs/A"}}
    assert drop_unmatchable({"$defs": definitions, "properties": properties}) == {
        "$defs": {"A": False, "In%ner~": inner},
        "properties": {**properties, "c": False},
    }


def test_a_long_chain_of_references_takes_no_stack_and_little_time() -> None:
    n = 3000
    chain: dict[str, Any] = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(n)}
    assert drop_unmatchable({"$defs": chain | {str(n): {"type": "null"}}, "$ref": "#/$defs/0"})
    assert drop_unmatchable({"$defs": chain | {str(n): {"$ref": "#/$defs/0"}}, "$ref": "#/$defs/0"}) is False


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = open_tokenizer("smollm2")
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.mark.slow
@settings(max_examples=15, derandomize=True)
@given(documents, st.integers(0, 2**31))
def test_a_grammar_of_a_schema_has_no_dead_end(compiler: GrammarCompiler, document: dict[str, Any], seed: int) -> None:
    """Wherever random tokens lead, another may follow, and a complete text is a value of the schema."""
    try:
        state = compiler.compile(grammar_from_json_schema(document))
    except ValueError:
        return
    generator, tokens = torch.Generator().manual_seed(seed), []
    short = torch.tensor([1.0 / (1 + len(compiler.tokenizer.token_bytes(i))) for i in range(compiler.vocab_size)])
    for _ in range(40):
        logits = torch.rand(1, compiler.vocab_size, generator=generator) * short
        state.mask_logits(logits, [])
        tokens.append(int(logits.argmax()))
        assert state.accept_token(tokens[-1]), compiler.tokenizer.decode(tokens)
        if state.is_complete or tokens[-1] in compiler.tokenizer.stop_token_ids:
            jsonschema.validate(json.loads(compiler.tokenizer.decode(tokens)), document)
            break


@pytest.mark.parametrize("kind", [5, 1.5, True, None, [{}], [5, "object"], {}])
def test_a_type_that_is_none_is_left_to_the_compiler(kind: Any) -> None:
    for schema in ({"type": kind}, {"type": "object", "properties": {"a": {"type": kind}}}):
        assert drop_unmatchable(schema) == schema
