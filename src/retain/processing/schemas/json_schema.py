"""Parts of a JSON schema that no value matches, such as one that refers to itself and to nothing else.

A grammar would follow such a part into a dead end. A part matches no value where every value of it would hold another
value of it, without end. Keywords that are not looked at count as matched by some value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any] | bool
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")


@dataclass(eq=False)
class Condition:
    """Something that some value may match: known as soon as `num_missing` of what it depends on are known."""

    num_missing: int
    dependents: list[Condition] = field(default_factory=list)


class MatchableParts:
    """Finds which parts of a schema some value matches, in time linear in its size: as Horn clauses are solved."""

    def __init__(self, schema: Schema):
        self._always = Condition(0)
        self._never = Condition(1)
        self._parts: dict[int, Condition] = {}  # by the id of a part, which the schema keeps alive
        self._queue: list[tuple[Mapping[str, Any], Any]] = []  # parts to be visited, each with its root
        self._add_part(schema, schema)
        while self._queue:
            self._visit(*self._queue.pop())
        self._solve()

    def matches_nothing(self, part: Any) -> bool:
        """Return whether no value matches a part. Anything else, such as an example, counts as matched."""
        condition = self._parts.get(id(part)) if isinstance(part, dict) else None
        return condition is not None and condition.num_missing > 0

    def _add_part(self, part: Any, root: Any) -> Condition:
        if part is False:
            return self._never
        if not isinstance(part, dict):
            return self._always
        if id(part) not in self._parts:
            self._parts[id(part)] = Condition(1)
            self._queue.append((part, root))
        return self._parts[id(part)]

    def _visit(self, part: Mapping[str, Any], root: Any) -> None:
        """Say what a part depends on."""
        root = root_of(part, root)
        needed = []
        if isinstance(part.get("$ref"), str):
            needed.append(self._add_part(*resolve(part["$ref"], root)))
        if part.get("enum") == []:
            needed.append(self._never)
        needed += [self._add_part(p, root) for p in list_of(part.get("allOf"))]
        for name in ("anyOf", "oneOf"):
            if isinstance(part.get(name), list):  # the compiler refuses anything else
                needed.append(self._any_of([self._add_part(p, root) for p in list_of(part[name])]))
        object_condition = self._object(part, root)
        array_condition = self._array(part, root)
        types = part.get("type", TYPES)
        if not isinstance(types, str | list) or not all(isinstance(t, str) for t in types):
            types = TYPES  # the compiler refuses it
        special = {"object": object_condition, "array": array_condition}
        by_type = [special.get(t, self._always) for t in ([types] if isinstance(types, str) else types)]
        needed.append(self._any_of(by_type))
        self._depend(self._parts[id(part)], needed)

    def _object(self, part: Mapping[str, Any], root: Any) -> Condition:
        properties = {name: self._add_part(p, root) for name, p in _members(part.get("properties"))}
        patterns = [self._add_part(p, root) for _, p in _members(part.get("patternProperties"))]
        others = self._add_part(part.get("additionalProperties"), root)
        default = self._always if patterns else others
        required = part.get("required")
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        return self._all_of([properties.get(name, default) for name in names])

    def _array(self, part: Mapping[str, Any], root: Any) -> Condition:
        items = part.get("items")
        first = list_of(items if isinstance(items, list) else part.get("prefixItems"))
        rest = part.get("additionalItems") if isinstance(items, list) else items
        places = [self._add_part(p, root) for p in first]
        others = self._add_part(rest, root)
        length = part.get("minItems", 0)
        if not isinstance(length, int) or length <= len(places):
            return self._all_of(places[: length if isinstance(length, int) else 0])
        return self._all_of([*places, others])

    def _any_of(self, conditions: Sequence[Condition]) -> Condition:
        found = Condition(1)
        for condition in conditions:
            condition.dependents.append(found)
        return found

    def _all_of(self, conditions: Sequence[Condition]) -> Condition:
        found = Condition(0)
        self._depend(found, conditions)
        return found

    def _depend(self, condition: Condition, needed: Sequence[Condition]) -> None:
        """Make a condition known once all of `needed` are, and `_always`."""
        condition.num_missing = len(needed) + 1
        for other in (*needed, self._always):
            other.dependents.append(condition)

    def _solve(self) -> None:
        known = [self._always]
        while known:
            for dependent in known.pop().dependents:
                dependent.num_missing -= 1
                if dependent.num_missing == 0:
                    known.append(dependent)


def drop_unmatchable(schema: Schema) -> Schema:
    """Return a schema with each part that no value matches replaced by `false`; those in it are equal otherwise."""
    schema = json.loads(json.dumps(schema))  # so that an example and a part are never the same object
    parts = MatchableParts(schema)

    def copy(x: Any) -> Any:
        if parts.matches_nothing(x):
            return False
        if isinstance(x, dict):
            return {key: copy(value) for key, value in x.items()}
        return [copy(value) for value in x] if isinstance(x, list) else x

    copied: Schema = copy(schema)
    return copied


def resolve(reference: str, root: Any) -> tuple[Any, Any]:
    """Return what a reference within a document leads to, and the root there; `True` where it leads nowhere."""
    return find_target(reference, root) or (True, root)  # the compiler reports it


def find_target(reference: str, root: Any) -> tuple[Any, Any] | None:
    """Return what a JSON pointer leads to within a document, and the root there; None if it leads nowhere."""
    if not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    found = root
    for name in read_pointer(reference):
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
        if isinstance(found, dict) and isinstance(found.get("$id"), str):
            root = found
    return found, root


def read_pointer(reference: str) -> list[str]:
    """Return the names that a reference's JSON pointer consists of (RFC 6901, sections 4 and 6)."""
    tokens = reference.split("/")[1:]
    is_escaped = "%" in reference or "~" in reference
    return [unquote(t).replace("~1", "/").replace("~0", "~") for t in tokens] if is_escaped else tokens


def root_of(part: Mapping[str, Any], root: Any) -> Any:
    """Return the root of references in a part of a document: the part itself, where it has an id."""
    has_own = isinstance(part.get("$id"), str) and not part["$id"].startswith("#")
    return part if has_own else root


def list_constants(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values of which a schema allows one; None where it lists none."""
    constants = [schema["const"]] if "const" in schema else schema.get("enum")
    return constants if isinstance(constants, list) else None


def list_of(x: Any) -> list[Any]:
    """Return a list of a schema; an empty one for anything else, which the compiler refuses."""
    return x if isinstance(x, list) else []


def _members(x: Any) -> Iterable[tuple[str, Any]]:
    return x.items() if isinstance(x, dict) else ()
