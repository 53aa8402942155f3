"""Where and why a JSON schema is refused, in words of our own.

llguidance says what it refuses, and mostly not where. Its words quote the schema and name parts of the library, so
they only select what is looked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from retain.processing.schemas.disjointness import exclude_each_other
from retain.processing.schemas.json_schema import TYPES, list_of
from retain.processing.schemas.parts import (
    DEFINITIONS,
    LISTS,
    MAPS,
    SINGLE,
    Part,
    SchemaError,
    SchemaPlace,
    iter_parts,
    iter_places,
    open_root,
)

UNSUPPORTED = (
    "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "contains", "dependencies",
    "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
)  # fmt: skip
COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
NUMBERS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf")
TEXTS = ("$ref", "format", "pattern")
ANNOTATIONS = {"$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "examples", "title"}
RANGES = (
    ("minimum", "maximum"), ("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"),
)  # fmt: skip
MAX_MESSAGE = 2000  # characters of llguidance's message that are looked at, for each part of a schema
MAX_FACTOR = 2**32 - 1  # of llguidance's decimal numbers
OVERLAP = "alternatives of `oneOf` may overlap: use `anyOf`"
NO_VALUE = "no value matches"
INVALID = "it is invalid, or uses a feature that is not supported"
TOO_LARGE = "the schema is too large"

Problem = tuple[SchemaPlace, str]
Finder = Callable[[Part, str], Problem | None]


def explain_refusal(schema: Any, message: str) -> SchemaError:
    """Return the error of a schema that llguidance refuses with a message."""
    message = message[:MAX_MESSAGE]
    if not isinstance(schema, dict):
        return SchemaError(SchemaPlace(), INVALID if schema is not False else NO_VALUE)
    comment = schema.get("$comment", "")
    root = open_root(schema, _parse_place(comment if isinstance(comment, str) else ""))
    finders = [finder for pattern, finder in FINDERS if re.search(pattern, message)]
    for finder in (*finders, find_wrong_value):
        for part in iter_parts(root, DEFINITIONS):
            if problem := finder(part, message):
                return SchemaError(*problem)
    return SchemaError(root.place, next((words for found, words in WHOLE.items() if found in message), INVALID))


def check_keywords(root: Part) -> None:
    """Raise SchemaError for keywords that are not supported, and for values that a keyword cannot have."""
    for part in iter_parts(root, DEFINITIONS):
        if problem := find_unsupported(part, "") or find_wrong_value(part, ""):
            raise SchemaError(*problem)


def find_unsupported(part: Part, message: str) -> Problem | None:
    """Find a keyword that is not supported."""
    name = next((name for name in part.schema if name in UNSUPPORTED), None)
    return (part.place.at(name), f"`{name}` is not supported") if name else None


def find_wrong_value(part: Part, message: str) -> Problem | None:
    """Find a keyword whose value is of a wrong type."""
    for name, value in part.schema.items():
        if words := _find_wrong_type(name, value):
            return part.place.at(name), f"`{name}` must be {words}"
    inner = iter_places(part.schema, DEFINITIONS)
    wrong = next((tokens for tokens, schema in inner if not isinstance(schema, dict | bool)), None)
    return (part.place.at(*wrong), "a schema is an object, true or false") if wrong else None


def _find_wrong_type(name: str, value: Any) -> str | None:
    """Return what the value of a keyword must be; None where it is."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value - value == 0  # it is finite
    rules = (
        (name == "type", _is_type(value), f"one or several of {', '.join(TYPES)}"),
        (name in COUNTS, is_number and value >= 0 and value % 1 == 0, "a whole number from 0"),
        (name == "multipleOf", is_number and value > 0, "a number above 0"),
        (name.startswith("exclusiveM"), is_number or isinstance(value, bool), "a number"),
        (name in NUMBERS, is_number or isinstance(value, bool), "a number"),
        (name in TEXTS, isinstance(value, str), "a text"),
        (name in MAPS, isinstance(value, dict), "an object of schemas"),
        (name in LISTS and name not in SINGLE, isinstance(value, list), "a list of schemas"),
        (name in SINGLE, isinstance(value, dict | bool | list), "a schema"),
        (name == "enum", isinstance(value, list), "a list"),
        (name == "required", _is_list_of_texts(value), "a list of texts"),
    )
    return next((words for applies, is_right, words in rules if applies and not is_right), None)


def _is_type(value: Any) -> bool:
    types = value if isinstance(value, list) else [value]
    return all(isinstance(t, str) and t in TYPES for t in types)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def find_reference(part: Part, message: str) -> Problem | None:
    """Find a reference that leads to no schema, or an address that is no such."""
    reference = part.schema.get("$ref")
    if isinstance(reference, str) and part.follow(reference) is None and part.follow_to_truth(reference) is None:
        if reference.startswith("#"):
            return part.place.at("$ref"), "`$ref` leads to no schema"
        return part.place.at("$ref"), "`$ref` leads out of the schema"
    for name in ("$schema", "$id"):
        value = part.schema.get(name)
        if isinstance(value, str) and value in message:
            return part.place.at(name), f"`{name}` is not known or not valid"
    return None


def find_circle(part: Part, message: str) -> Problem | None:
    """Find a reference beside other keywords that leads back to itself."""
    reference = part.schema.get("$ref")
    if isinstance(reference, str) and part.schema.keys() - ANNOTATIONS != {"$ref"}:
        return part.place.at("$ref"), "a `$ref` that leads back here is not supported beside other keywords"
    return None


def find_one_of(part: Part, message: str) -> Problem | None:
    """Find alternatives of which more than one may match."""
    inner = [part.enter(s, "oneOf", i) for i, s in enumerate(list_of(part.schema.get("oneOf"))) if isinstance(s, dict)]
    near = pairwise(inner)  # comparing all would take the square of their number
    if "oneOf" in part.schema and (len(inner) < 2 or not all(exclude_each_other(a, b) for a, b in near)):
        return part.place.at("oneOf"), OVERLAP
    return None


def find_any_one_of(part: Part, message: str) -> Problem | None:
    """Find a choice of exactly one."""
    return (part.place.at("oneOf"), OVERLAP) if "oneOf" in part.schema else None


def find_count_of_properties(part: Part, message: str) -> Problem | None:
    """Find a count of properties beside optional ones."""
    name = next((name for name in ("minProperties", "maxProperties") if name in part.schema), None)
    words = f"`{name}` is supported only where all of `properties` are required"
    return (part.place.at(name), words) if name else None


def find_overlapping_patterns(part: Part, message: str) -> Problem | None:
    """Return the problem if the message is about two `patternProperties` that one name may match; else None."""
    patterns = part.schema.get("patternProperties")
    if isinstance(patterns, dict) and len([p for p in patterns if f"/{p}/" in message]) >= min(2, len(patterns)):
        return part.place.at("patternProperties"), "`patternProperties` has patterns that one name may match"
    return None


def find_pattern(part: Part, message: str) -> Problem | None:
    """Find the regular expression that a message is about."""
    for place, pattern in _iter_patterns(part):
        if _in_message(pattern, message):
            return place, _describe_pattern(pattern, message)
    return None


def find_any_pattern(part: Part, message: str) -> Problem | None:
    """Find the first regular expression of a schema's part, which an error of llguidance is about."""
    return next(((place, _describe_pattern(pattern, message)) for place, pattern in _iter_patterns(part)), None)


def _iter_patterns(part: Part) -> Iterator[tuple[SchemaPlace, str]]:
    pattern = part.schema.get("pattern")
    if isinstance(pattern, str):
        yield part.place.at("pattern"), pattern
    patterns = part.schema.get("patternProperties")
    for name in patterns if isinstance(patterns, dict) else ():
        yield part.place.at("patternProperties", name), name


def _in_message(pattern: str, message: str) -> bool:
    """Return whether a message quotes a pattern, in which it writes classes such as \\d out."""
    words = re.split(r"\\[dDsSwW]", pattern)
    if len(words) == 1:
        return f"    {pattern}\n" in message or f"/{pattern}/" in message
    position = 0
    for word in words:
        position = message.find(word, position)
        if position < 0:
            return False
        position += len(word)
    return True


def _describe_pattern(pattern: str, message: str) -> str:
    if "Unsatisfiable" in message:
        return f"{NO_VALUE}: no text matches the regular expression"
    if re.search(r"\(\?(=|!|<=|<!)|\\[bBAzZG]", pattern):
        return "a regular expression that looks around is not supported"
    return "the regular expression is invalid or not supported"


def find_multiple(part: Part, message: str) -> Problem | None:
    """Find a `multipleOf` that is 0, or that has too many digits."""
    factor = part.schema.get("multipleOf")
    if not isinstance(factor, int | float):
        return None
    if factor == 0:
        return part.place.at("multipleOf"), "`multipleOf` must be a number above 0"
    while factor % 1 and factor <= MAX_FACTOR:
        factor *= 10
    return (part.place.at("multipleOf"), "`multipleOf` has too many digits") if factor > MAX_FACTOR else None


def find_contradiction(part: Part, message: str) -> Problem | None:
    """Find a part whose bounds or constants leave no value."""
    for name in ("enum", "type", "anyOf", "oneOf"):
        if part.schema.get(name) == []:
            return part.place.at(name), f"{NO_VALUE}: `{name}` is empty"
    for low, high in RANGES:
        values = [part.schema.get(name) for name in (low, high)]
        if all(isinstance(value, int | float) for value in values) and values[0] > values[1]:  # type: ignore[operator]
            return part.place.at(low), f"{NO_VALUE}: `{low}` is above `{high}`"
    return None


def find_options(part: Part, message: str) -> Problem | None:
    """Find `x-guidance`, by which a schema would set options of llguidance."""
    return (part.place.at("x-guidance"), "`x-guidance` is not valid") if "x-guidance" in part.schema else None


def _parse_place(text: str) -> SchemaPlace:
    """Return the place that a JSON pointer names."""
    tokens = [token.replace("~1", "/").replace("~0", "~") for token in text.split("/")[1:]]
    return SchemaPlace().at(*tokens) if text.startswith("#/") else SchemaPlace()


# What is looked for, by what llguidance's message contains.
FINDERS: tuple[tuple[str, Finder], ...] = (
    ("Unimplemented keys", find_unsupported),
    ("does not exist|registry|URI reference|[Aa]nchor", find_reference),
    ("circular references", find_circle),
    ("oneOf constraints", find_one_of),
    ("oneOf constraints", find_any_one_of),
    ("min/maxProperties", find_count_of_properties),
    ("patternProperty regexes", find_overlapping_patterns),
    ("regex", find_pattern),
    ("(?i)regex", find_any_pattern),
    ("multiple of|multipleOf", find_multiple),
    ("Unsatisfiable", find_contradiction),
    ("unknown field|JsonCompileOptions", find_options),
)
WHOLE = {"Unsatisfiable": NO_VALUE, "NoExtension": NO_VALUE, "too big": TOO_LARGE, "too large": TOO_LARGE}
WHOLE |= {"limit": TOO_LARGE}
