"""The fields that errors of pydantic are about, as a client writes them.

A location of pydantic also names members of unions: by a tag, or by a type such as `constrained-str`. Only the core
schema of a model tells such a piece from a key of the body.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

CoreSchema = Mapping[str, Any]
INNER = ("schema", "python_schema", "lax_schema", "strict_schema")  # of what adds nothing to a location


def find_field(schema: CoreSchema, location: Sequence[int | str]) -> tuple[int | str, ...]:
    """Return the keys and indexes of a location of an error, without the pieces that name members of unions."""
    places = _Places(schema)
    found = []
    for piece in location:
        if places.enter_member(piece):
            continue
        if not places.enter(piece):
            break
        found.append(piece)
    return tuple(found)


class _Places:
    """The core schemas that may describe a place in a body: several where nothing tells members of a union apart."""

    def __init__(self, schema: CoreSchema):
        self._definitions: dict[str, CoreSchema] = {}
        self._schemas = list(self._resolve([schema]))

    def enter_member(self, piece: int | str) -> bool:
        """Enter the member of a union that a piece names. Returns whether there is one."""
        tagged = [choice for s in self._of("tagged-union") if (choice := s["choices"].get(piece))]
        members = tagged or [choice for s in self._of("union") for choice in s["choices"]]
        if isinstance(piece, int) or not members:
            return False
        self._schemas = list(self._resolve(members))
        return True

    def enter(self, piece: int | str) -> bool:
        """Enter the member of an object or the item of a list. Returns whether one of the schemas has such."""
        inside: list[CoreSchema | None] = []
        for s in self._schemas:
            if s["type"] == "list" and isinstance(piece, int):
                inside.append(s.get("items_schema"))
            elif s["type"] == "dict" and piece != "[key]":
                inside.append(s.get("values_schema"))
            elif s["type"] == "model-fields":  # a piece that is no field is one that the model does not know
                inside.append(_fields_by_alias(s).get(piece))
        self._schemas = list(self._resolve(s for s in inside if s))
        return bool(inside)

    def _of(self, kind: str) -> list[CoreSchema]:
        return [s for s in self._schemas if s["type"] == kind]

    def _resolve(self, schemas: Iterable[Any]) -> Iterator[CoreSchema]:
        """Yield the schemas inside of those that add nothing to a location."""
        stack = list(schemas)
        while stack:
            schema = stack.pop()
            schema = schema[0] if isinstance(schema, tuple) else schema  # a member of a union with its label
            if schema["type"] == "definitions":
                self._definitions |= {s["ref"]: s for s in schema["definitions"]}
            if schema["type"] == "definition-ref":
                stack.append(self._definitions[schema["schema_ref"]])
            elif inner := [schema[name] for name in INNER if name in schema]:
                stack += inner
            else:
                yield schema


def _fields_by_alias(schema: CoreSchema) -> dict[int | str, CoreSchema]:
    return {field.get("validation_alias", name): field["schema"] for name, field in schema["fields"].items()}
