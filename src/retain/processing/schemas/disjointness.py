"""Whether two parts of a JSON schema exclude each other, as far as their types and constants tell."""

from __future__ import annotations

import json
from typing import Any

from retain.processing.schemas.json_schema import TYPES, list_constants, list_of
from retain.processing.schemas.parts import Part

MAX_STEPS = 8  # references in a row that are followed
KINDS = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}


def kind_of(value: Any) -> str:
    """Return the type of a JSON value; of an integer, too, it is number."""
    return KINDS.get(type(value), "object")


def matches_type(value: Any, types: Any) -> bool:
    """Return whether a JSON value is of a `type` of JSON Schema, or of one of several."""
    if types is None:
        return True
    is_integer = kind_of(value) == "number" and (isinstance(value, int) or value.is_integer())
    return any(t == kind_of(value) or (t == "integer" and is_integer) for t in _list_types(types))


def exclude_each_other(a: Part, b: Part) -> bool:
    """Return whether it is certain that no value matches both of two parts: by themselves, or by a required member."""
    a = _follow(a)
    b = _follow(b)
    if _are_apart(a, b):
        return True
    names = {name for part in (a, b) for name in list_of(part.schema.get("required")) if isinstance(name, str)}
    return _kinds(a) | _kinds(b) == {"object"} and any(_are_apart(_member(a, name), _member(b, name)) for name in names)


def _are_apart(a: Part | None, b: Part | None) -> bool:
    """Return whether two parts have no type in common, or different constants."""
    if a is None or b is None:
        return False
    ours = _constants(a)
    theirs = _constants(b)
    if ours is not None and theirs is not None:
        return not ours & theirs
    return not _kinds(a) & _kinds(b)


def _member(part: Part, name: str) -> Part | None:
    properties = part.schema.get("properties")
    member = properties.get(name) if isinstance(properties, dict) else None
    return _follow(part.enter(member, "properties", name)) if isinstance(member, dict) else None


def _follow(part: Part) -> Part:
    for _ in range(MAX_STEPS):
        reference = part.schema.get("$ref")
        target = part.follow(reference) if isinstance(reference, str) else None
        if target is None:
            break
        part = target
    return part


def _kinds(part: Part) -> set[str]:
    constants = list_constants(part.schema)
    if constants is not None:
        return {kind_of(value) for value in constants}
    types = _list_types(part.schema.get("type", TYPES))
    return {"number" if t == "integer" else t for t in types if isinstance(t, str)}


def _constants(part: Part) -> set[str] | None:
    constants = list_constants(part.schema)
    if constants is None:
        return None
    return {json.dumps(_normalize(value), sort_keys=True) for value in constants}


def _normalize(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _list_types(types: Any) -> list[Any]:
    return [types] if isinstance(types, str) else list(types) if isinstance(types, list | tuple) else []
