"""Options of a run. The command line is generated from them."""

from __future__ import annotations

import dataclasses
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

REFERENCES = ("cold", "replay")
MAX_NUMBER = 2**28


@dataclass(frozen=True)
class Number:
    """Numbers of a type within bounds; `above`: the least one itself is too low."""

    kind: type[int] | type[float]
    low: int
    high: int = MAX_NUMBER
    above: bool = False

    def find_problem(self, value: float) -> str | None:
        """Say what a number out of bounds must be, NaN included; None for one within them."""
        is_enough = value > self.low if self.above else value >= self.low
        if is_enough and value <= self.high:
            return None
        return f"must be {'above' if self.above else 'at least'} {self.low} and at most {self.high}, not {value}"

    def parse(self, text: str) -> float:
        """Return the number that an option gives. Raises ArgumentTypeError."""
        try:
            value = self.kind(text)
        except ValueError:
            kind = "an integer" if self.kind is int else "a number"
            raise ArgumentTypeError(f"{text[:40]!r} should be {kind}") from None
        if problem := self.find_problem(value):
            raise ArgumentTypeError(problem)
        return value


def parse_names(text: str) -> tuple[str, ...]:
    """Return comma-separated names. Raises ArgumentTypeError where there is none."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ArgumentTypeError("name at least one")
    return names


def option(help: str, default: Any = None, kind: Number | Callable[[str], Any] = str) -> Any:
    """Return a field that is an option of the command line; `kind` parses what is given."""
    return dataclasses.field(default=default, metadata={"help": help, "kind": kind})


@dataclass(frozen=True)
class CachecheckConfig:
    """Options of a run. Raises ValueError for a number out of its bounds."""

    model: str | None = option("name of the model (default: the first of /models)")
    checks: tuple[str, ...] = option("names of checks, comma-separated (default: all)", (), parse_names)
    seed: int | None = option(
        "seed of all texts: the same seed sends the same requests (default: drawn, and reported)",
        kind=Number(int, 0, 2**63 - 1),
    )
    reference: str = option(
        "what a turn of a chat must equal: cold, the same prompt without a cache; replay, the same chat "
        "from its first turn, for caches that drop tokens by design",
        "cold",
    )
    tolerance: float | None = option(
        "difference of log-probabilities that is no fault (default: 0.1, or three times that of repeated requests)",
        kind=Number(float, 0),
    )
    max_tokens: int = option("tokens of an answer", 8, Number(int, 1))
    concurrency: int = option("requests at once, in the check `concurrency`", 8, Number(int, 1))
    flush_command: str | None = option("shell command that empties the cache, for servers without salts")
    reset_command: str | None = option("shell command that empties all levels of the cache, for the check `reset`")
    restart_command: str | None = option("shell command that restarts the server, for the check `restart`")
    reload_command: str | None = option(
        "shell command that loads other weights behind the same address, for the check `reload`"
    )
    adapters: tuple[str, ...] = option(
        "two folders of adapters (LoRA) on the server, comma-separated, which may be loaded: for the check `adapters`",
        (),
        parse_names,
    )
    pressure: int = option(
        "words of other texts that fill the cache, for the check `tiers` (default: 0, it is left out)",
        0,
        Number(int, 0),
    )
    stored_metric: str | None = option(
        "metric that counts what is stored below the cache, for the check `tiers` (default: those that are known)"
    )
    timeout: float = option("seconds that an answer or a command may take", 120.0, Number(float, 0, above=True))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            kind = field.metadata["kind"]
            value = getattr(self, field.name)
            if isinstance(kind, Number) and value is not None and (problem := kind.find_problem(value)):
                raise ValueError(f"{field.name} {problem}")
        if self.adapters and len(self.adapters) != 2:
            raise ValueError(f"--adapters takes two folders, not {len(self.adapters)}")
        if self.reference not in REFERENCES:
            raise ValueError(f"--reference is {' or '.join(REFERENCES)}, not {self.reference!r}")
