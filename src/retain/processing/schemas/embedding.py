"""Parts of a JSON schema as schemas of their own."""

from __future__ import annotations

from typing import Any

from retain.processing.schemas.parts import LISTS, MAPS, SINGLE, Part, SchemaError

OF_WHOLE_SCHEMAS = ("$anchor", "$defs", "$id", "$schema", "definitions", "id")


def embed(part: Part) -> dict[str, Any]:
    """Return a part with all that it refers to. Its `$comment` says where it was (see refusals.py).

    Raises SchemaError for a reference that leads nowhere.
    """
    embedding = _Embedding()
    embedded = embedding.copy(part)
    embedded["$comment"] = str(part.place)
    if definitions := embedding.copy_targets():
        embedded["$defs"] = definitions
    dialect = part.root.get("$schema") if isinstance(part.root, dict) else None
    return embedded if dialect is None else {"$schema": dialect, **embedded}


class _Embedding:
    """Copies parts, with references to definitions that it numbers."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # of definitions, by the ids of their parts
        self._truths: dict[str, bool] = {}  # definitions that are true or false, by name
        self._queue: list[Part] = []

    def copy(self, part: Part) -> dict[str, Any]:
        """Return a copy of a part. The parts that it refers to are left to `copy_targets`."""
        copied: dict[str, Any] = {}
        for keyword, value in part.schema.items():
            if keyword == "$ref":
                copied[keyword] = self._refer(part, value)
            elif keyword in LISTS and isinstance(value, list):
                copied[keyword] = [self._copy_inner(part, item, keyword, i) for i, item in enumerate(value)]
            elif keyword in OF_WHOLE_SCHEMAS:
                continue
            elif keyword in MAPS and isinstance(value, dict):
                copied[keyword] = {name: self._copy_inner(part, item, keyword, name) for name, item in value.items()}
            else:
                copied[keyword] = self._copy_inner(part, value, keyword) if keyword in SINGLE else value
        return copied

    def copy_targets(self) -> dict[str, Any]:
        """Return the definitions that copies refer to."""
        definitions: dict[str, Any] = dict(self._truths)
        while self._queue:
            part = self._queue.pop()
            definitions[self._names[id(part.schema)]] = self.copy(part)
        return definitions

    def _copy_inner(self, part: Part, schema: Any, *tokens: object) -> Any:
        return self.copy(part.enter(schema, *tokens)) if isinstance(schema, dict) else schema

    def _refer(self, part: Part, reference: Any) -> str:
        target = part.follow(reference) if isinstance(reference, str) else None
        if target is None:
            truth = part.follow_to_truth(reference) if isinstance(reference, str) else None
            if truth is not None:
                self._truths[str(truth)] = truth
                return f"#/$defs/{truth}"
            raise SchemaError(part.place.at("$ref"), "`$ref` leads to no schema")
        if id(target.schema) not in self._names:
            self._names[id(target.schema)] = str(len(self._names))
            self._queue.append(target)
        return f"#/$defs/{self._names[id(target.schema)]}"
