"""How many ways to go on a JSON schema offers at one place of a text: its width.

The work of a matcher for one token grows with the square of the width, and it is done in the step of all requests.
llguidance refuses more than 2000 ways too, but after that work, and for each answer again.
"""

from __future__ import annotations

from typing import Any

from retain.processing.schemas.json_schema import list_of, resolve, root_of
from retain.processing.schemas.parts import SchemaPlace, iter_parts, open_root

MAX_WIDTH = 2000
WAYS_PER_OPTIONAL_PROPERTY = 4  # in llguidance's parser; any other alternative is one
SCALARS = ("null", "boolean", "number", "integer", "string")
VALUES = ("const", "default", "enum", "examples")  # keywords that hold no schemas

Part = tuple[Any, Any]  # of a schema, with its root


def find_part_that_is_too_wide(schema: dict[str, Any]) -> SchemaPlace | None:
    """Return the place of a part of a schema that is wider than `MAX_WIDTH`, an inner one; None if there is none."""
    widths = _measure_all(schema)
    if max(widths.values(), default=0) <= MAX_WIDTH:
        return None

    def is_wide(part: dict[str, Any]) -> bool:
        return widths.get(id(part), 0) > MAX_WIDTH

    wide = [part for part in iter_parts(open_root(schema)) if is_wide(part.schema)]
    causes = (part for part in wide if not any(is_wide(other) for other, _ in _beside(part.schema, part.root)))
    return next((part.place for part in (*causes, *wide)), SchemaPlace())


def _measure_all(schema: dict[str, Any]) -> dict[int, int]:
    """Return the widths of all parts of a schema, by their ids, in time linear in its size."""
    widths: dict[int, int] = {}  # by the id of a part, which the schema keeps alive
    parts: list[Part] = [(schema, schema)]
    while parts:  # without places, which would take longer than the widths
        part, root = parts.pop()
        if isinstance(part, dict):
            root = root_of(part, root)
            _measure((part, root), widths)
            parts += [(value, root) for key, value in part.items() if key not in VALUES]
        elif isinstance(part, list):
            parts += [(value, root) for value in part]
    return widths


def _measure(part: Part, widths: dict[int, int]) -> None:
    """Find the width of a part, and first those of the parts that are at the same place of a text."""
    stack = [part]
    while stack:
        current = stack[-1][0]
        beside = _beside(*stack[-1])
        if id(current) not in widths:
            widths[id(current)] = 0  # a reference that leads back adds nothing
            stack += [other for other in beside if id(other[0]) not in widths]
        else:
            stack.pop()
            width = _own_width(current) + sum(widths[id(other)] for other, _ in beside)
            widths[id(current)] = min(width, MAX_WIDTH + 1)


def _beside(part: dict[str, Any], root: Any) -> list[Part]:
    """Return the parts whose ways to go on are also those of a part."""
    others = [(other, root) for name in ("anyOf", "oneOf", "allOf") for other in list_of(part.get(name))]
    if isinstance(part.get("$ref"), str):
        others.append(resolve(part["$ref"], root))
    return [(other, root_of(other, there)) for other, there in others if isinstance(other, dict)]


def _own_width(part: dict[str, Any]) -> int:
    """Count the ways to go on that are of a part itself. Texts, numbers and the like are found together, as one."""
    required = {name for name in list_of(part.get("required")) if isinstance(name, str)}
    properties = part.get("properties")
    num_optional = len(properties.keys() - required) if isinstance(properties, dict) else 0
    num_values = sum(isinstance(value, list | dict) for value in list_of(part.get("enum")))
    is_scalar = str(part.get("type")) in SCALARS or not isinstance(part.get("const", []), list | dict) or "enum" in part
    return WAYS_PER_OPTIONAL_PROPERTY * num_optional + num_values + (not is_scalar)
