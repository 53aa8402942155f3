"""Arguments that a dialect writes as text or as members of a list: their types, and the grammar that demands them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from retain.processing.grammar import lark_json_rule
from retain.processing.lark import write_text, write_text_before
from retain.processing.schemas.disjointness import kind_of
from retain.processing.schemas.embedding import embed
from retain.processing.schemas.json_schema import list_constants, resolve
from retain.processing.schemas.parts import open_root
from retain.server.literals import LiteralReader
from retain.server.tool_format import read_json

Schema = Any
EMPTY = '""'  # the grammar of no text
MAX_REFERENCES = 16  # of a schema to another one that is a reference again
WORDS = {"True": True, "False": False, "None": None}  # as jinja writes constants


def find_types(schema: Schema, root: Schema, outer: frozenset[int] = frozenset()) -> set[str]:
    """Return the JSON types that a schema allows; none if it allows any. `root` is what references are to.

    `outer`: ids of the schemas that this one is an alternative of. One that refers to itself adds nothing.
    """
    schema = follow_references(schema, root)
    if not isinstance(schema, dict) or id(schema) in outer:
        return set()
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {name for name in declared if isinstance(name, str)}
    if (constants := list_constants(schema)) is not None:
        return {type_of(value) for value in constants}
    outer |= {id(schema)}
    branches: list[Schema] = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), [])
    others = [branch for branch in branches if id(follow_references(branch, root)) not in outer]
    found = [find_types(branch, root, outer) for branch in others]
    return set().union(*found) if all(found) else set()


def follow_references(schema: Schema, root: Schema) -> Schema:
    """Return what a schema refers to within its root; any value where that leads nowhere."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str):
            return schema
        schema, _root = resolve(reference, root)
    return True


def type_of(value: Any) -> str:
    """Return the JSON type of a value. Numbers without a fraction are integers."""
    kind = kind_of(value)
    return "integer" if kind == "number" and value == int(value) else kind


def read_text_value(text: str, schema: Schema, root: Schema) -> Any:
    """Return the value that a text is, by the types of its schema. A text of no such type stays a text."""
    types = find_types(schema, root)
    if types == {"string"}:
        return text
    value = _read_value(text.strip(), may_be_text=not types or "string" in types)
    if isinstance(value, str):
        return text
    kind = type_of(value)
    return value if not types or kind in types or (kind == "integer" and "number" in types) else text


def _read_value(text: str, may_be_text: bool) -> Any:
    """Return the value of JSON, or what templates write of other values: literals of Python. A text is no value."""
    if text in WORDS:
        return WORDS[text]
    value = read_json(text)
    if value is not None or text == "null":
        return value
    if may_be_text or not text.startswith(("[", "{")):
        return text
    reader = LiteralReader(text)
    try:
        value = reader.read_value()
    except (ValueError, RecursionError):
        return text
    return value if reader.is_at_end else text


def stand_alone(schema: Schema, root: Schema) -> Schema:
    """Return a part of a schema as a document of its own, whose references keep their meaning.

    Raises ValueError for a reference that leads nowhere.
    """
    if not isinstance(schema, dict) or '"$ref"' not in json.dumps(schema):
        return schema
    return embed(open_root(root).enter(schema))


class Parameter(NamedTuple):
    """A parameter of a function: its schema, and whether a call must have it."""

    name: str
    schema: Schema
    is_required: bool


def list_parameters(root: Schema) -> list[Parameter]:
    """Return the parameters that the schema of a function names."""
    root = root if isinstance(root, dict) else {}
    properties = root.get("properties")
    required = root.get("required")
    names = required if isinstance(required, list) else []
    found = properties.items() if isinstance(properties, dict) else ()
    return [Parameter(name, schema, name in names) for name, schema in found]


@dataclass(frozen=True)
class TextLayout:
    """What a dialect writes around the name and the value of a parameter whose value is text."""

    before_name: str
    before_value: str
    after_value: str


def iter_text_rules(
    prefix: str, root: Schema, layout: TextLayout, special_tokens: Collection[str] = ()
) -> Iterator[str]:
    """Yield the Lark rules of parameters that are written as text; the first one, `prefix`, is of all of them.

    A value that may be a text is free text up to what follows it, if the schema does not list what it may be.
    """
    parameters = list_parameters(root)
    names = [f"{prefix}_{i}" + ("" if p.is_required else "?") for i, p in enumerate(parameters)]
    yield f"{prefix}: {' '.join(names) or EMPTY}"
    for i, parameter in enumerate(parameters):
        name = f"{prefix}_{i}"
        before = write_text(layout.before_name + parameter.name + layout.before_value, special_tokens)
        after = write_text(layout.after_value, special_tokens)
        texts = _list_texts(parameter.schema, root)
        if texts:
            yield f"{name}: {before} ({' | '.join(write_text(t) for t in texts)}) {after}"
        elif "string" in (find_types(parameter.schema, root) or {"string"}):
            yield f"{name}: {before} {name}_text"
            yield write_text_before(f"{name}_text", layout.after_value, special_tokens)
        else:
            yield f"{name}: {before} {name}_value {after}"
            yield lark_json_rule(f"{name}_value", stand_alone(parameter.schema, root))


def _list_texts(schema: Schema, root: Schema) -> list[str]:
    """Return the texts that a schema lists, if it lists texts."""
    schema = follow_references(schema, root)
    if not isinstance(schema, dict):
        return []
    values = list_constants(schema) or []
    if "string" not in map(type_of, values):
        return []
    return [value if isinstance(value, str) else json.dumps(value) for value in values]


def iter_member_rules(prefix: str, members: Sequence[tuple[str, bool]], separator: str) -> Iterator[str]:
    """Yield the Lark rules of members with separators between them; the first one, `prefix`, is of all of them.

    `members`: the grammar of each, and whether it must be there. They keep their order.
    """
    yield f"{prefix}: {prefix}_0"
    for i, (member, is_required) in enumerate(members):
        skipped = "" if is_required else f" | {prefix}_{i + 1}"
        later = "" if is_required else f" | {prefix}_{i + 1}m"
        yield f"{prefix}_{i}: {member} {prefix}_{i + 1}m{skipped}"
        yield f"{prefix}_{i}m: {separator} {member} {prefix}_{i + 1}m{later}"
    yield f"{prefix}_{len(members)}: {EMPTY}"
    yield f"{prefix}_{len(members)}m: {EMPTY}"


def convert_texts(given: Mapping[str, str], root: Schema) -> dict[str, Any]:
    """Return arguments that are texts as values of the types that the schema of their function says."""
    schemas = {parameter.name: parameter.schema for parameter in list_parameters(root)}
    return {name: read_text_value(text, schemas.get(name), root) for name, text in given.items()}
