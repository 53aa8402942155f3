"""Where a JSON schema has integers that llguidance would round: it reads numbers as 64-bit floats.

Beyond 2^53 it allows a neighbour in place of a constant, and it fails for most bounds beyond 10^18.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from retain.processing.schemas.json_schema import list_of
from retain.processing.schemas.parts import DEFINITIONS, Part, iter_inner, iter_parts

FIRST_LARGE = 2**53
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMERIC = (*BOUNDS, "multipleOf")


def is_large(number: Any) -> bool:
    """Return whether an integer is one that llguidance would round as a constant, or a number one as a bound."""
    return isinstance(number, int | float) and abs(number) >= FIRST_LARGE


def find_parts_with_large_integers(root: Part) -> set[int]:
    """Return the ids of the parts that have large integers, or parts with such. Takes time linear in the schema."""
    outer: defaultdict[int, list[int]] = defaultdict(list)
    found = []
    for part in iter_parts(root, DEFINITIONS):
        for inner in iter_inner(part, DEFINITIONS):
            outer[id(inner.schema)].append(id(part.schema))
        if has_large_bound(part.schema) or any(map(has_large_integer, _constants(part.schema))):
            found.append(id(part.schema))
    reached = set(found)
    while found:
        new = set(outer.pop(found.pop(), ())) - reached
        reached |= new
        found += new
    return reached


def has_large_bound(schema: Mapping[str, Any]) -> bool:
    """Return whether a part bounds numbers by a large one."""
    return any(is_large(schema.get(name)) for name in BOUNDS)


def has_large_integer(value: Any) -> bool:
    """Return whether a constant is or holds a large integer. Floats are constants that keep their value."""
    stack = [value]
    while stack:
        x = stack.pop()
        if isinstance(x, dict | list):
            stack += x.values() if isinstance(x, dict) else x
        elif isinstance(x, int) and is_large(x):
            return True
    return False


def _constants(schema: Mapping[str, Any]) -> Iterator[Any]:
    if "const" in schema:
        yield schema["const"]
    yield from list_of(schema.get("enum"))
