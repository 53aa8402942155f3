"""Options of prefix caching: `exact`, `exact:keep=prompt`, `selective:ratio=0.25` or `off`."""

from __future__ import annotations

from dataclasses import dataclass

from retain.options import Fraction, check_bounds
from retain.plugins import check_choice, from_strings, parse_spec


@dataclass(frozen=True)
class PrefixConfig:
    """Cache prefixes exactly. Raises ValueError."""

    keep: str = "all"  # of a request: or prompt, no answers

    def __post_init__(self) -> None:
        check_choice("keep", self.keep, "all", "prompt")


@dataclass(frozen=True)
class SelectiveConfig(PrefixConfig):
    """Load from tiers only the share `ratio` of the tokens, those with the most attention. Raises ValueError."""

    ratio: Fraction = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(self)


def parse(spec: str) -> PrefixConfig | None:
    """Return the configuration that a spec names; None for `off`. Raises ValueError."""
    name, options = parse_spec(spec)
    if name == "off" and not options:
        return None
    if name not in ("exact", "selective"):
        raise ValueError(f"unknown prefix {spec!r}: choose exact, exact:keep=prompt, selective:ratio=0.25 or off")
    config: PrefixConfig = from_strings(SelectiveConfig if name == "selective" else PrefixConfig, name, options)
    return config
