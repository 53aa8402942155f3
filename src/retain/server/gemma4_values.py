"""Grammar of values as Gemma 4 writes them: bare keys, and strings between marks of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from retain.processing.lark import write_text, write_text_before
from retain.processing.schemas.json_schema import list_constants
from retain.server.text_arguments import Schema, find_types, follow_references, iter_member_rules, list_parameters

BARE_KEY = re.compile(r"[^\W\d]\w*")
ANY_KEY = r"/[^\W\d]\w*/"
MAX_DEPTH = 64
PATTERNS = {
    "integer": r"/-?(0|[1-9][0-9]*)/",
    "number": r"/-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,3})?/",
    "boolean": '"true" | "false"',
    "null": '"null"',
}


class ValueRules:
    """Lark rules of the values that one JSON schema matches. Lengths, bounds and patterns are not demanded.

    `prefix` begins their names. `root` is what references are to.
    """

    def __init__(self, prefix: str, root: Schema, quote: str, special_tokens: Collection[str] = ()):
        self.rules: list[str] = []
        self._prefix = prefix
        self._root = root
        self._quote = write_text(quote, special_tokens)
        self._text_rule = write_text_before(f"{prefix}_text", quote, special_tokens)
        self._has_text = False
        self._names: dict[str, str] = {}  # of the rules of references and of any value
        self._num_rules = 0

    def add(self, schema: Schema, depth: int = 0) -> str:
        """Add the rules of a schema. Returns the name of its own. Raises ValueError for one that is too deep."""
        if depth > MAX_DEPTH:
            raise ValueError(f"the schema is nested more than {MAX_DEPTH} deep")
        reference = schema.get("$ref", "") if isinstance(schema, dict) else ""
        if not isinstance(schema, dict) or not schema:
            reference = "any"
        if reference in self._names:
            return self._names[reference]
        name = f"{self._prefix}_{self._num_rules}"
        self._num_rules += 1
        if reference:
            self._names[reference] = name
        found = follow_references(schema, self._root)
        ways = self._list_ways(name, found if isinstance(found, dict) else {}, depth)
        self.rules.append(f"{name}: {' | '.join(ways)}")
        return name

    def _list_ways(self, name: str, schema: dict[str, Any], depth: int) -> list[str]:
        """Return the grammars of which a value has one."""
        if values := list_constants(schema):
            return [self._write(value) for value in values]
        branches = next((schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)), None)
        if branches:
            return [self.add(branch, depth + 1) for branch in branches]
        types = find_types(schema, self._root) or {"string", "number", "boolean", "null", "array", "object"}
        return [self._write_type(name, kind, schema, depth) for kind in sorted(types)]

    def _write_type(self, name: str, kind: str, schema: dict[str, Any], depth: int) -> str:
        if kind in PATTERNS:
            return PATTERNS[kind]
        if kind == "string":
            self._add_text()
            return f"{self._quote} {self._prefix}_text"
        if kind == "array":
            if schema.get("items") is False:
                return '"[]"'
            item = self.add(schema.get("items"), depth + 1)
            return f'"[" ({item} ("," {item})*)? "]"'
        parameters = list_parameters(schema)
        if not parameters and schema.get("additionalProperties") is False:
            return '"{}"'
        if not parameters:
            value = self.add(schema.get("additionalProperties") or None, depth + 1)
            self.rules.append(f"{name}_key: {ANY_KEY}")
            return f'"{{" ({name}_key ":" {value} ("," {name}_key ":" {value})*)? "}}"'
        members = [
            (f'{self._write_key(p.name)} ":" {self.add(p.schema, depth + 1)}', p.is_required) for p in parameters
        ]
        self.rules += iter_member_rules(f"{name}_members", members, '","')
        return f'"{{" {name}_members "}}"'

    def _add_text(self) -> None:
        if not self._has_text:
            self.rules.append(self._text_rule)
        self._has_text = True

    def _write_key(self, key: str) -> str:
        return json.dumps(key) if BARE_KEY.fullmatch(key) else f"{self._quote} {json.dumps(key)} {self._quote}"

    def _write(self, value: Any) -> str:
        """Return the grammar of one value."""
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}" if value else f"{self._quote} {self._quote}"
        if isinstance(value, list):
            return " ".join(['"["', ' "," '.join(map(self._write, value)), '"]"'])
        if isinstance(value, dict):
            members = (f'{self._write_key(key)} ":" {self._write(item)}' for key, item in value.items())
            return " ".join(['"{"', ' "," '.join(members), '"}"'])
        return json.dumps(json.dumps(value))
