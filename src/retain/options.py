"""Options as fields of dataclasses: their types, and the bounds of numbers.

The bounds of a number are part of its type, where the option is defined: `port: Port = 8000`. They are checked wherever
the option is given: by `check_bounds` in Python, by the command line, and in specs.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

MAX_NUMBER = 2**28  # sums of a few such numbers stay within 32 bits
MAX_SIZE = 2**62  # bytes
OPTION_GROUP = {"is_group": True}  # metadata of a field whose own fields are options of the class, too
RESOLVED = {"is_resolved": True}  # metadata of a field that is no option: its value follows from them, and from more


@dataclass(frozen=True)
class Bounds:
    """The least and the largest value of a number; `above`: the least one itself is too low."""

    low: float
    high: float = MAX_NUMBER
    above: bool = False

    def __str__(self) -> str:
        return f"{'above' if self.above else 'at least'} {self.low} and at most {self.high}"

    def find_problem(self, value: float) -> str | None:
        """Say what a number out of bounds must be, NaN included; None for one within them."""
        is_enough = value > self.low if self.above else value >= self.low
        return None if is_enough and value <= self.high else f"must be {self}, not {value}"


PositiveInt = Annotated[int, Bounds(1)]
NonNegativeInt = Annotated[int, Bounds(0)]
PositiveFloat = Annotated[float, Bounds(0, above=True)]
NonNegativeFloat = Annotated[float, Bounds(0)]
Fraction = Annotated[float, Bounds(0, 1, above=True)]
Probability = Annotated[float, Bounds(0, 1)]
Port = Annotated[int, Bounds(0, 2**16 - 1)]
Seed = Annotated[int, Bounds(0, 2**63 - 1)]
ByteCount = Annotated[int, "bytes"]  # written with a unit: 512MiB, 2GB
Size = Annotated[ByteCount, Bounds(1, MAX_SIZE)]


def option(default: Any, help: str, **details: str) -> Any:
    """Return a field of a dataclass that is an option, with its help; `details` are for the command line."""
    return dataclasses.field(default=default, metadata={"help": help, **details})


def option_fields(owner: Any) -> Iterator[tuple[Any, dataclasses.Field[Any]]]:
    """Yield the options of a dataclass or of an instance, those of groups among them, each behind its holder."""
    for f in dataclasses.fields(owner):
        if f.metadata == OPTION_GROUP:
            yield from option_fields(f.default if isinstance(owner, type) else getattr(owner, f.name))
        elif f.init and f.metadata != RESOLVED:
            yield owner, f


def option_values(owner: Any) -> dict[str, Any]:
    """Return the options of an instance by name; of a dataclass their defaults, MISSING where there is none."""
    found = {}
    for holder, f in option_fields(owner):
        default = f.default_factory if f.default is dataclasses.MISSING else f.default
        found[f.name] = default if isinstance(holder, type) else getattr(holder, f.name)
    return found


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the type of each option of a dataclass; `X | None` counts as X."""
    found = {}
    for holder, f in option_fields(cls):
        hints = typing.get_type_hints(holder if isinstance(holder, type) else type(holder), include_extras=True)
        found[f.name] = _without_none(hints[f.name])
    return found


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    members = [member for member in typing.get_args(hint) if member is not types.NoneType]
    return members[0] if len(members) == 1 else hint


def split_bounds(kind: Any) -> tuple[Any, Bounds | None]:
    """Return the type of a field without its bounds, and these."""
    if typing.get_origin(kind) is not Annotated:
        return kind, None
    base, *notes = typing.get_args(kind)
    bounds = next((note for note in notes if isinstance(note, Bounds)), None)
    others = tuple(note for note in notes if note is not bounds)
    return (Annotated[(base, *others)] if others else base), bounds


@cache
def bounds_of(cls: type) -> dict[str, Bounds]:
    """Return the bounds of each field of a dataclass that has some; those of a tuple are its items'."""
    found = {}
    for name, kind in field_types(cls).items():
        item = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind
        if bounds := split_bounds(item)[1]:
            found[name] = bounds
    return found


def check_bounds(options: Any) -> None:
    """Raise ValueError where a field of a dataclass is out of its bounds; None is within them."""
    values = option_values(options)
    for name, bounds in bounds_of(options.__class__).items():
        value = values[name]
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and (problem := bounds.find_problem(number)):
                raise ValueError(f"{name} {problem}")
