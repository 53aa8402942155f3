"""Specs and plug-ins: `name:key=value,...` names a file of a package and the options of the class that it defines.

An unknown option is an error, never ignored. Does not depend on: which plug-ins exist.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": 2**10, "m": 10**6, "mb": 10**6, "mib": 2**20}
UNITS |= {"g": 10**9, "gb": 10**9, "gib": 2**30, "t": 10**12, "tb": 10**12, "tib": 2**40}


def check_choice(name: str, value: str, *allowed: str) -> None:
    """Raise ValueError where `value` is not allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}")


def parse_size(text: str | int) -> int:
    """Bytes: 1048576, "512MiB", "2GB". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower())
    if not match or match[2] not in UNITS:
        raise ValueError(f"{text!r} is not a size: write it like 512MiB or 2GB")
    return int(float(match[1]) * UNITS[match[2]])


def parse_spec(spec: str) -> tuple[str, dict[str, str]]:
    """`ring:window=512,x=y` -> ("ring", {"window": "512", "x": "y"}). Raises ValueError."""
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
    """So many tokens, or a share of something: 1024 or 50%."""

    tokens: int | None = None
    fraction: float = 0.0

    def resolve(self, total: int) -> int:
        """In tokens."""
        return int(self.fraction * total) if self.tokens is None else self.tokens

    def __str__(self) -> str:
        return f"{100 * self.fraction:g}%" if self.tokens is None else str(self.tokens)


def parse_amount(text: str) -> Amount:
    """ "1024" or "50%". Raises ValueError."""
    if text.endswith("%"):
        share = float(text[:-1]) / 100
        if not 0 < share <= 1:
            raise ValueError(f"{text} is not between 0 and 100%")
        return Amount(fraction=share)
    if not 1 <= int(text) <= MAX_COUNT:
        raise ValueError(f"{text} is not from 1 to {MAX_COUNT}")
    return Amount(tokens=int(text))


Size = int  # bytes; as a text it has units

MAX_COUNT = 2**28  # of what is counted: sums of a few stay in 32 bits


def _parse_bounded_int(text: str) -> int:
    if not -MAX_COUNT <= int(text) <= MAX_COUNT:
        raise ValueError(text)
    return int(text)


def _parse_finite_float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


PARSERS: dict[str, Callable[[str], Any]] = {
    "int": _parse_bounded_int,
    "float": _parse_finite_float,
    "Amount": parse_amount,
    "Size": parse_size,
}


def from_strings(cls: type, name: str, strings: dict[str, str]) -> Any:
    """An instance of a dataclass of int, float, str and Amount (or None) fields from texts.

    Raises ValueError with what is allowed.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values: dict[str, Any] = {}
    for key, text in strings.items():
        if key not in fields:
            raise ValueError(f"{name} has no option {key!r}: it takes {', '.join(fields) or 'none'}")
        kind = PARSERS.get(str(fields[key].type).removesuffix(" | None"), str)
        try:
            values[key] = kind(text)
        except ValueError as error:
            if kind is parse_size:
                raise ValueError(f"{name}: {key}={error}") from None
            raise ValueError(
                f"{name}: {key}={text!r} should be a number{' or a percentage' if kind is parse_amount else ''}"
            ) from None
    missing = [f.name for f in fields.values() if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise ValueError(f"{name} needs {', '.join(f'{m}=...' for m in missing)}")
    return cls(**values)


def plugin_names(package: str) -> list[str]:
    """The modules of a package whose files are named as what they define is chosen."""
    return sorted(m.name for m in pkgutil.iter_modules(importlib.import_module(package).__path__))


def load_plugin(package: str, class_name: str, kind: str, spec: str) -> Any:
    """What a text such as `name:key=value` names: the class `cls` of the module of that name, with its options.

    Raises ValueError with what is allowed; `kind` is what people call it.
    """
    name, given = parse_spec(spec)
    if name not in plugin_names(package):
        raise ValueError(f"unknown {kind} {name!r}: choose one of {', '.join(plugin_names(package))}")
    return from_strings(getattr(importlib.import_module(f"{package}.{name}"), class_name), name, given)
