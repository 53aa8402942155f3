"""Specs and plug-ins: `name:key=value,...` names a module of a package and the options of the class in it.

A plug-in is a file (or a folder) of a package, selected by its name: KV policies, drafters, tiers, backends, model
families and bench tasks. An unknown name or option is an error. Does not depend on: which plug-ins exist.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from retain.files import quote
from retain.options import OPTION_GROUP, Bounds, ByteCount, field_types, option_values, split_bounds

UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": 2**10, "m": 10**6, "mb": 10**6, "mib": 2**20}
UNITS |= {"g": 10**9, "gb": 10**9, "gib": 2**30, "t": 10**12, "tb": 10**12, "tib": 2**40}
AMOUNT = Bounds(1)
PERCENTAGE = Bounds(0, 100, above=True)


@contextmanager
def needs_extra(purpose: str, extra: str) -> Iterator[None]:
    """Import optional packages inside. Raises ValueError where one is missing: `extra` of this package brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{purpose} needs the package {error.name}: pip install 'retain[{extra}]'") from None


def check_choice(name: str, value: str, *allowed: str) -> None:
    """Raise ValueError unless `value` is allowed."""
    if value not in allowed:
        raise ValueError(f"{name} is {', '.join(allowed[:-1])} or {allowed[-1]}, not {value!r}")


def check_known(kind: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ValueError for a name that is not known; `kind` is the word for it in the message."""
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}: choose from {', '.join(known)}")


def parse_size(text: str | int) -> int:
    """Return the bytes of 1048576, "512MiB" or "2GB". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-z]*)\s*", str(text).lower())
    if not match or match[2] not in UNITS:
        raise ValueError(f"{quote(text, 40)} is not a size: write it like 512MiB or 2GB")
    return int((float if "." in match[1] else int)(match[1]) * UNITS[match[2]])


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
    is_share = text.endswith("%")
    try:
        number = float(text[:-1]) if is_share else int(text)
    except ValueError:
        raise ValueError(f"{quote(text, 40)} should be a number or a percentage") from None
    if is_share and PERCENTAGE.find_problem(number):
        raise ValueError(f"must be above 0% and at most 100%, not {text}")
    if not is_share and (problem := AMOUNT.find_problem(number)):
        raise ValueError(problem)
    return Amount(fraction=number / 100) if is_share else Amount(tokens=int(number))


def parse_number(kind: type[int] | type[float], text: str) -> Any:
    """Return a number. Raises ValueError."""
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{quote(text, 40)} should be {'an integer' if kind is int else 'a number'}") from None


PARSERS: dict[Any, Callable[[str], Any]] = {  # of a spec's options; every other type takes the text as it is
    int: partial(parse_number, int),
    float: partial(parse_number, float),
    Amount: parse_amount,
    ByteCount: parse_size,
}


def from_strings(cls: type, name: str, strings: dict[str, str]) -> Any:
    """Build a dataclass from the texts of its fields. Raises ValueError with the allowed options."""
    defaults = option_values(cls)
    types_by_name = field_types(cls)
    values: dict[str, Any] = {}
    for key, text in strings.items():
        if key not in defaults:
            raise ValueError(f"{name} has no option {key!r}: it takes {', '.join(defaults) or 'none'}")
        kind, bounds = split_bounds(types_by_name[key])
        try:
            values[key] = PARSERS.get(kind, getattr(kind, "parse", str))(text)
        except ValueError as error:
            raise ValueError(f"{name}: {key} {error}") from None
        if bounds and (problem := bounds.find_problem(values[key])):
            raise ValueError(f"{name}: {key} {problem}")
    required = [option for option, default in defaults.items() if default is dataclasses.MISSING]
    if missing := [option for option in required if option not in values]:
        raise ValueError(f"{name} needs {', '.join(f'{m}=...' for m in missing)}")
    for f in dataclasses.fields(cls):
        if f.metadata == OPTION_GROUP:
            group: Any = f.default
            given = {option: values.pop(option) for option in option_values(group) if option in values}
            values[f.name] = dataclasses.replace(group, **given)
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
