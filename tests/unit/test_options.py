"""Every number that can be given has bounds where it is defined, and a number outside them is refused in one line."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from retain.bench import config as bench_config
from retain.cli import args
from retain.cli.args import build_parser
from retain.cluster.config import ClusterConfig
from retain.config import Config
from retain.engine import drafters
from retain.fit.config import FitConfig
from retain.kv.eviction import policies
from retain.kv.prefix.config import SelectiveConfig
from retain.kv.stores import tiers
from retain.options import Bounds, ByteCount, bounds_of, field_types, split_bounds
from retain.plugins import Amount, from_strings
from retain.sampling_params import SamplingParams
from retain.server.config import Limits, ServerConfig
from retain.server.observers.kv_events.config import KVEventsOptions
from retain.tune.config import TuneConfig

COMMANDS: dict[type, str] = {
    Config: "run",
    SamplingParams: "run",
    ServerConfig: "serve",
    Limits: "serve",
    ClusterConfig: "cluster up",
    TuneConfig: "tune",
    FitConfig: "fit",
    **{
        cls: f"bench {name.removesuffix('BenchConfig').lower()}"
        for name, cls in vars(bench_config).items()
        if name.endswith("BenchConfig")
    },
}
PLUGINS = [(policies, "Policy"), (drafters, "Drafter"), (tiers, "Tier")]
SPECS: dict[str, type] = {
    "selective": SelectiveConfig,
    "--kv-events": KVEventsOptions,
    **{
        name: getattr(import_module(f"{package.__name__}.{name}"), cls)
        for package, cls in PLUGINS
        for name in package.names()
    },
}
REQUIRED = {"model": "m", "data": "d", "out": "o", "within": "kl=1"}
NOT_NUMBERS = ("logit_bias",)  # pairs, with bounds of their own
NO_OPTIONS = ("n", "stop_token_ids")  # of sampling parameters, on the command line


def numbers_of(cls: type) -> Iterator[tuple[str, Any, bool]]:
    """Yield the fields of a dataclass that are numbers or tuples of them, their types, and whether they are tuples."""
    for name, kind in field_types(cls).items():
        is_tuple = typing.get_origin(kind) is tuple
        item = typing.get_args(kind)[0] if is_tuple else kind
        if split_bounds(item)[0] in (int, float, ByteCount) and name not in NOT_NUMBERS:
            yield name, item, is_tuple


def numbers_outside(kind: Any) -> list[float]:
    """Return numbers of a type just out of its bounds, and far."""
    base, bounds = split_bounds(kind)
    assert bounds
    step = 1e-6 * max(abs(bounds.high), 1) if base is float else 1
    ends = [bounds.low if bounds.above else bounds.low - step, bounds.high + step]
    return [*map(float, ends), math.nan, math.inf, -math.inf] if base is float else ends


CONFIG_FIELDS = [(cls, *number) for cls in COMMANDS for number in numbers_of(cls)]
SPEC_FIELDS = [(name, *number) for name, cls in SPECS.items() for number in numbers_of(cls)]


def arguments_for(cls: type) -> dict[str, Any]:
    return {f.name: REQUIRED[f.name] for f in dataclasses.fields(cls) if f.name in REQUIRED}


@pytest.mark.parametrize(("cls", "name", "kind", "is_tuple"), CONFIG_FIELDS)
def test_a_number_out_of_its_bounds_is_refused_by_class_and_command(
    cls: type, name: str, kind: Any, is_tuple: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    default = next(f.default for f in dataclasses.fields(cls) if f.name == name)
    assert cls(**arguments_for(cls) | {name: default})
    bounds = bounds_of(cls)[name]
    command, option = COMMANDS[cls].split(), "--" + name.replace("_", "-")
    for number in numbers_outside(kind):
        with pytest.raises(ValueError) as error:
            cls(**arguments_for(cls) | {name: (number,) if is_tuple else number})
        assert str(error.value) == f"{name} must be {bounds}, not {number}"
        if name in NO_OPTIONS:
            continue
        text = str(number)
        with pytest.raises(SystemExit):
            build_parser().parse_args([*command, f"{option}={text}"])
        lines = capsys.readouterr().err.splitlines()
        is_size = split_bounds(kind)[0] == ByteCount
        expected = "'-1' is not a size" if is_size and number < 0 else f"must be {bounds}"
        assert len(lines) == 1 and f"argument {option}: {expected}" in lines[0]


@pytest.mark.parametrize(("spec", "name", "kind", "is_tuple"), SPEC_FIELDS)
def test_a_number_of_a_spec_out_of_its_bounds_is_refused(spec: str, name: str, kind: Any, is_tuple: bool) -> None:
    for number in numbers_outside(kind):
        with pytest.raises(ValueError) as error:
            from_strings(SPECS[spec], spec, {name: str(number)})
        assert str(error.value).startswith(f"{spec}: {name} ") and "\n" not in str(error.value)
        if number >= 0 or split_bounds(kind)[0] != ByteCount:
            assert str(error.value) == f"{spec}: {name} must be {bounds_of(SPECS[spec])[name]}, not {number}"


AMOUNTS = [(spec, name) for spec, cls in SPECS.items() for name, kind in field_types(cls).items() if kind is Amount]
WRONG_AMOUNTS = {
    "101%": "must be above 0% and at most 100%, not 101%",
    "0%": "must be above 0% and at most 100%, not 0%",
    "-1%": "must be above 0% and at most 100%, not -1%",
    "nan%": "must be above 0% and at most 100%, not nan%",
    "0": f"must be {Bounds(1)}, not 0",
    str(2**28 + 1): f"must be {Bounds(1)}, not {2**28 + 1}",
    "half": "'half' should be a number or a percentage",
    "%": "'%' should be a number or a percentage",
}


@pytest.mark.parametrize("text", WRONG_AMOUNTS)
@pytest.mark.parametrize(("spec", "name"), [*AMOUNTS, ("h2o", "demote")])
def test_an_amount_out_of_its_bounds_is_refused(spec: str, name: str, text: str) -> None:
    prefix = "int4:" if name == "demote" else ""
    with pytest.raises(ValueError) as error:
        from_strings(SPECS[spec], spec, {name: prefix + text})
    assert str(error.value) == f"{spec}: {name} {WRONG_AMOUNTS[text]}"


TEXTS = [
    (spec, name)
    for spec, cls in SPECS.items()
    for name, kind in field_types(cls).items()
    if kind is str and name not in ("path", "url", "endpoint", "region", "topic")
    and name not in ("file", "model", "press", "weights")  # checked where they are used
]  # fmt: skip


@pytest.mark.parametrize(("spec", "name"), TEXTS)
def test_a_text_that_is_no_choice_is_refused_with_the_choices(spec: str, name: str) -> None:
    needed = {f"{n}": "10%" for s, n in AMOUNTS if s == spec and n == "budget"}
    needed |= {"press": "tests.helpers.presses.KeyNorm"} if spec == "press" else {}
    needed |= {"path": "x", "capacity": "1GB"} if spec == "disk" else {"capacity": "1GB"} if spec == "ram" else {}
    package = next((p for p, _ in PLUGINS if spec in p.names()), None)
    with pytest.raises(ValueError) as error:
        if package:
            package.parse(f"{spec}:" + ",".join(f"{k}={v}" for k, v in {**needed, name: "wrong"}.items()))
        else:
            from_strings(SPECS[spec], spec, {name: "wrong"})
    message = str(error.value)
    assert name in message and "wrong" in message and "\n" not in message


def test_every_dataclass_of_options_is_in_the_table() -> None:
    used = {cls for cls in vars(args).values() if dataclasses.is_dataclass(cls)}
    assert used <= COMMANDS.keys()
