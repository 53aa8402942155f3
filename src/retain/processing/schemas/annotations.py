"""Keywords of a JSON schema that change nothing about which values match, left out before a compiler sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from retain.processing.schemas.parts import iter_parts, open_root

# Those that llguidance enforces. JSON Schema: others are to be ignored.
KNOWN_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid")
COUNTS = ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties")
Schema = Mapping[str, Any]
# Keywords that llguidance refuses, each with when it means nothing in a part.
MEANS_NOTHING: Mapping[str, Callable[[Schema], bool]] = {
    "$dynamicAnchor": lambda part: True,
    "$recursiveAnchor": lambda part: True,
    "contains": lambda part: part.get("minContains") == 0 and "maxContains" not in part,
    "dependencies": lambda part: part["dependencies"] == {},
    "dependentRequired": lambda part: part["dependentRequired"] == {},
    "dependentSchemas": lambda part: part["dependentSchemas"] == {},
    "else": lambda part: "if" not in part,
    "if": lambda part: "then" not in part and "else" not in part,
    "maxContains": lambda part: "contains" not in part,
    "minContains": lambda part: "contains" not in part or part["minContains"] == 0,
    "not": lambda part: part["not"] is False,
    "propertyNames": lambda part: part["propertyNames"] in (True, {}, {"type": "string"}),
    "then": lambda part: "if" not in part,
    "unevaluatedItems": lambda part: (
        part["unevaluatedItems"] in (True, {}) or isinstance(part.get("items"), dict | bool)
    ),
    "unevaluatedProperties": lambda part: part["unevaluatedProperties"] in (True, {}) or "additionalProperties" in part,
    "uniqueItems": lambda part: part["uniqueItems"] is False,
}


def drop_annotations(schema: dict[str, Any]) -> None:
    """Drop keywords that change nothing, such as formats that nobody knows, and write 3.0 as 3, in place."""
    for part in list(iter_parts(open_root(schema))):
        keywords = part.schema
        if isinstance(keywords.get("format"), str) and keywords["format"] not in KNOWN_FORMATS:
            del keywords["format"]
        for name in [
            name for name, means_nothing in MEANS_NOTHING.items() if name in keywords and means_nothing(keywords)
        ]:
            del keywords[name]
        for name in COUNTS:
            if isinstance(keywords.get(name), float) and keywords[name].is_integer():
                keywords[name] = int(keywords[name])
