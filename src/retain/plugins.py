"""Specs and plug-ins: `name:key=value,...` names a module of a package and the options of the class in it.

A plug-in is a file (or a folder) of a package, selected by its name: KV policies, drafters, tiers, backends, model
families and bench tasks. An unknown name or option is an error. Does not depend on: which plug-ins exist.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": 2**10, "m": 10**6, "mb": 10**6, "mib": 2**20}
UNITS |= {"g": 10**9, "gb": 10**9, "gib": 2**30, "t": 10**12, "tb": 10**12, "tib": 2**40}
MAX_COUNT = 2**28  # sums of a few counts stay within 32 bits

Size = Annotated[int, "bytes"]  # written with a unit: 512MiB, 2GB


def check_choice(name: str, value: str, *allowed: str) -> None:
    """Raise ValueError unless `value` is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}")


def parse_size(text: str | int) -> int:
    """Return the bytes of 1048576, "512MiB" or "2GB". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower())
    if not match or match[2] not in UNITS:
        raise ValueError(f"{text!r} is not a size: write it like 512MiB or 2GB")
    return int(float(match[1]) * UNITS[match[2]])


def format_size(size: int) -> str:
    """Return bytes as `parse_size` reads them, in the largest unit that divides them."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Return name and options of a spec: `ring:window=512` is ("ring", {"window": "512"}). Raises ValueError."""
    name, _, rest = spec.partition(":")
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (s.strip() for s in part.partition("="))
        if not (key and equals and value) or key in options:
            raise ValueError(f"{spec!r}: {part!r} should be key=value, each key once")
        options[key] = value
    return name.strip(), options


@dataclass(frozen=True)
class Amount:
    """A number of tokens or a share of a total: 1024 or 50%."""

    tokens: int | None = None
    fraction: float = 0.0

    def resolve(self, total: int) -> int:
        """Return the amount in tokens."""
        return int(self.fraction * total) if self.tokens is None else self.tokens

    def __str__(self) -> str:
        return f"{100 * self.fraction:g}%" if self.tokens is None else str(self.tokens)


def parse_amount(text: str) -> Amount:
    """Return the amount that "1024" or "50%" means. Raises ValueError."""
    if text.endswith("%"):
        share = float(text[:-1]) / 100
        if not 0 < share <= 1:
            raise ValueError(f"{text} is not between 0 and 100%")
        return Amount(fraction=share)
    if not 1 <= int(text) <= MAX_COUNT:
        raise ValueError(f"{text} is not from 1 to {MAX_COUNT}")
    return Amount(tokens=int(text))


def _parse_bounded_int(text: str) -> int:
    if not -MAX_COUNT <= int(text) <= MAX_COUNT:
        raise ValueError(text)
    return int(text)


def _parse_finite_float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


PARSERS: dict[Any, Callable[[str], Any]] = {  # of a spec's options; every other type takes the text as it is
    int: _parse_bounded_int,
    float: _parse_finite_float,
    Amount: parse_amount,
    Size: parse_size,
}


def field_types(cls: type) -> dict[str, Any]:
    """Return the type of each field that a dataclass is built from; `X | None` counts as X."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: _without_none(hints[f.name]) for f in dataclasses.fields(cls) if f.init}


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    members = [member for member in typing.get_args(hint) if member is not types.NoneType]
    return members[0] if len(members) == 1 else hint


def from_strings(cls: type, name: str, strings: dict[str, str]) -> Any:
    """Build a dataclass from the texts of its fields. Raises ValueError with the allowed options."""
    field_by_name = {f.name: f for f in dataclasses.fields(cls) if f.init}
    types_by_name = field_types(cls)
    values: dict[str, Any] = {}
    for key, text in strings.items():
        if key not in field_by_name:
            raise ValueError(f"{name} has no option {key!r}: it takes {', '.join(field_by_name) or 'none'}")
        parse = PARSERS.get(types_by_name[key], getattr(types_by_name[key], "parse", str))
        try:
            values[key] = parse(text)
        except ValueError as error:
            if parse is parse_size or parse not in PARSERS.values():
                raise ValueError(f"{name}: {key}={error}") from None
            expected = "a number or a percentage" if parse is parse_amount else "a number"
            raise ValueError(f"{name}: {key}={text!r} should be {expected}") from None
    missing = [
        f.name
        for f in field_by_name.values()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and f.name not in values
    ]
    if missing:
        raise ValueError(f"{name} needs {', '.join(f'{m}=...' for m in missing)}")
    return cls(**values)


def plugin_names(package: str, folders: bool = False) -> list[str]:
    """Return the names of the plug-ins of a package, sorted; `folders`: its plug-ins are packages, not modules."""
    search_path = importlib.import_module(package).__path__
    return sorted(m.name for m in pkgutil.iter_modules(search_path) if m.ispkg or not folders)


def load_module(package: str, name: str, choices: Sequence[str], kind: str) -> types.ModuleType:
    """Import a plug-in's module. Raises ValueError with the choices; `kind` is the word for it in the message."""
    if name not in choices:
        raise ValueError(f"unknown {kind} {name!r}: choose one of {', '.join(choices)}")
    return importlib.import_module(f"{package}.{name}")


def load_plugin(package: str, class_name: str, kind: str, spec: str) -> Any:
    """Return an instance of the class `class_name` in the module that a spec names, with the spec's options.

    Raises ValueError with the allowed names or options.
    """
    name, options = parse_spec(spec)
    module = load_module(package, name, plugin_names(package), kind)
    return from_strings(getattr(module, class_name), name, options)
