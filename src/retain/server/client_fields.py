"""Rules for fields that clients send and the server does not honour, read from client_fields.toml.

A field is accepted where it changes no answer, and refused where it would.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ONLY_DEFAULT = "another value would change the answer"


@dataclass(frozen=True)
class Accepted:
    """A field that is left out, because it changes nothing here. `values`: only these change nothing; None: all."""

    why: str
    values: tuple[Any, ...] | None = None

    def allows(self, value: Any) -> bool:
        """Return whether a JSON value is left out. Types count: false is not 0."""
        return self.values is None or any(type(v) is type(value) and v == value for v in self.values)


@dataclass(frozen=True)
class Refused:
    """A field that would change the answer, and that the server cannot honour."""

    why: str


Rule = Accepted | Refused
FieldTable = Mapping[str, Rule]


@cache
def read_field_tables() -> Mapping[str, FieldTable]:
    """Return the rules of the fields of each object of a request, by the name of its table."""
    content = _read_file()
    tables: dict[str, dict[str, Rule]] = {}
    for name, rows in content["fields"].items():
        tables[name] = {}
        for included in content["includes"].get(name, ()):
            tables[name] |= tables[included]
        tables[name] |= {field: _read_rule(**row) for field, row in rows.items()}
    return tables


def read_refused_types() -> Mapping[str, str]:
    """Return the types of blocks that Anthropic's API has and the server refuses, with the reasons."""
    return _read_file()["refused_types"]


def read_left_out_types() -> Mapping[str, list[str]]:
    """Return the types of `tools` and of `items` that are left out of requests of the Responses API."""
    return _read_file()["left_out_types"]


@cache
def _read_file() -> Mapping[str, Any]:
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        return tomllib.load(file)


def _read_rule(
    *, accepted: str | None = None, refused: str | None = None, only: list[Any] | None = None, why: str = ONLY_DEFAULT
) -> Rule:
    if refused is not None:
        return Refused(refused)
    return Accepted(why, tuple(only)) if only is not None else Accepted(accepted or "")
