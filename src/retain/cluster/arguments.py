"""Options of a Ray Serve config file or of `serve run`, by name, as the dataclasses of a replica."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from retain.cluster.config import PROXY_LIMITS, ClusterConfig, ClusterSettings
from retain.config import Config
from retain.options import ByteCount, field_types, split_bounds
from retain.plugins import PARSERS
from retain.server import auth
from retain.server.config import Limits, ServerConfig

T = TypeVar("T")
SECTIONS = (Config, ServerConfig, Limits, ClusterConfig)
KEY_OPTIONS = ("api_keys", "operator")  # as `retain serve` has them: a file, and names of keys
BOOLEANS = {"true": True, "false": False}


def parse_arguments(arguments: Mapping[str, Any], environment: Mapping[str, str]) -> ClusterSettings:
    """Return the settings that the options mean; texts are parsed. Raises ValueError or OSError.

    The names are those of the command line with underscores: `max_running_requests`, `api_keys` (a file).
    """
    rest = {name: value for name, value in arguments.items() if name not in KEY_OPTIONS}
    known = {name for section in SECTIONS for name in field_types(section)} - {"limits", *KEY_OPTIONS, *PROXY_LIMITS}
    if unknown := sorted(rest.keys() - known):
        raise ValueError(
            f"unknown option {unknown[0]!r}: the options are those of `retain cluster up`, with underscores"
        )
    if "model" not in rest:
        raise ValueError("the option model is missing")
    file, operators = arguments.get("api_keys"), arguments.get("operator", ())
    keys = auth.load_api_keys(
        Path(file) if file else None, environment, [operators] if isinstance(operators, str) else operators
    )
    engine = Config(**_fields_of(Config, rest))
    server = ServerConfig.for_model(
        engine.model, **_fields_of(ServerConfig, rest), api_keys=keys, limits=Limits(**_fields_of(Limits, rest))
    )
    return ClusterSettings(engine, server, ClusterConfig(**_fields_of(ClusterConfig, rest)))


def _fields_of(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are fields of a dataclass, in the types of the fields."""
    types = field_types(cls)
    names = [f.name for f in dataclasses.fields(cls) if f.name in options]
    return {name: _convert(name, types[name], options[name]) for name in names}


def _convert(name: str, kind: Any, value: Any) -> Any:
    """Return a value of a field. Raises ValueError."""
    if value is None:
        return None
    kind, _ = split_bounds(kind)  # the dataclass checks them
    if typing.get_origin(kind) is tuple:
        return (value,) if isinstance(value, str) else tuple(value)
    if isinstance(value, str):
        try:
            return BOOLEANS[value.lower()] if kind is bool else PARSERS.get(kind, str)(value)
        except (KeyError, ValueError):
            raise ValueError(f"{name}={value!r} should be {'true or false' if kind is bool else 'a number'}") from None
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not (int if kind == ByteCount else kind):
        raise ValueError(f"{name}={value!r} should be of type {getattr(kind, '__name__', 'size')}")
    return value
