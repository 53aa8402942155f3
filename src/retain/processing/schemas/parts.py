"""The parts of a JSON schema, each with its place. Data in a schema, such as an example, is no part of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from retain.files import shorten
from retain.processing.schemas.json_schema import find_target, read_pointer, resolve, root_of

SINGLE = (
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    """A place in a schema. Its text is a JSON pointer."""

    outer: SchemaPlace | None = None
    token: str = ""

    def at(self, *tokens: object) -> SchemaPlace:
        """Return a place within this one."""
        place = self
        for token in tokens:
            place = SchemaPlace(place, str(token))
        return place

    def __str__(self) -> str:
        tokens: list[str] = []
        place = self
        while place.outer is not None:
            tokens.append(place.token.replace("~", "~0").replace("/", "~1"))
            place = place.outer
        return "/".join(["#", *reversed(tokens)])


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part of a schema that is an object, where it is, and the root that its references are relative to."""

    schema: dict[str, Any]
    place: SchemaPlace
    root: Any
    root_place: SchemaPlace

    def enter(self, schema: Any, *tokens: object) -> Part:
        """Return the part at some tokens from this one."""
        return open_part(schema, self.place.at(*tokens), self.root, self.root_place)

    def follow(self, reference: str) -> Part | None:
        """Return the part that a reference leads to; None for one that leads to no object."""
        found, root = resolve(reference, self.root)
        if not isinstance(found, dict):
            return None
        place = self.root_place.at(*read_pointer(reference))
        return open_part(found, place, root, self.root_place if root is self.root else place)

    def follow_to_truth(self, reference: str) -> bool | None:
        """Return the schema `true` or `false` that a reference leads to; None for one that leads to neither."""
        found, _ = find_target(reference, self.root) or (None, None)
        return found if isinstance(found, bool) else None


class SchemaError(ValueError):
    """A schema is refused: where, and why."""

    def __init__(self, place: SchemaPlace, words: str):
        super().__init__(f"JSON schema at {shorten(place, 200)}: {words}")
        self.is_of_whole = place.outer is None


def find_place_beyond(schema: Any, max_depth: int) -> SchemaPlace | None:
    """Return the first place in a JSON value that is nested too deeply; None if there is none."""
    level = [schema]
    for _ in range(max_depth + 1):
        level = [item for value in level for item in _items(value)]
    if not level:
        return None
    stack = [(schema, SchemaPlace(), max_depth)]
    while stack:
        value, place, depth = stack.pop()
        if depth < 0:
            return place
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        stack += reversed([(item, place.at(token), depth - 1) for token, item in items])
    return None


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def open_part(schema: dict[str, Any], place: SchemaPlace, root: Any, root_place: SchemaPlace) -> Part:
    """Return a part, whose references are relative to itself where it has an id."""
    own_root = root_of(schema, root)
    return Part(schema, place, own_root, root_place if own_root is root else place)


def open_root(schema: dict[str, Any], place: SchemaPlace | None = None) -> Part:
    """Return a whole schema as a part."""
    place = place or SchemaPlace()
    return Part(schema, place, schema, place)


def iter_places(schema: dict[str, Any], skipped: Collection[str] = ()) -> Iterator[tuple[tuple[object, ...], Any]]:
    """Yield what stands for a part within a part, with the tokens that lead there. It may be no schema."""
    for keyword, value in schema.items():
        if keyword in skipped:
            continue
        if keyword in LISTS and isinstance(value, list):
            yield from (((keyword, i), item) for i, item in enumerate(value))
        elif keyword in MAPS and isinstance(value, dict):
            yield from (((keyword, name), item) for name, item in value.items())
        elif keyword in SINGLE:
            yield (keyword,), value


def iter_inner(part: Part, skipped: Collection[str] = ()) -> Iterator[Part]:
    """Yield the parts within a part, in order, then the one that its reference leads to."""
    for tokens, inner in iter_places(part.schema, skipped):
        if isinstance(inner, dict):
            yield part.enter(inner, *tokens)
    reference = part.schema.get("$ref")
    if isinstance(reference, str) and (target := part.follow(reference)):
        yield target


def iter_parts(root: Part, skipped: Collection[str] = ()) -> Iterator[Part]:
    """Yield each part of a schema once, the outer ones first, in time linear in its size.

    `skipped`: keywords that are not entered. Without definitions only those that something refers to are found.
    """
    seen: set[int] = set()  # ids of parts, which the schema keeps alive
    stack = [root]
    while stack:
        part = stack.pop()
        if id(part.schema) not in seen:
            seen.add(id(part.schema))
            yield part
            stack += reversed(list(iter_inner(part, skipped)))
