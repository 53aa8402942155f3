"""The argument parser: commands, and options generated from the configuration dataclasses.

Importing this module loads no torch: `retain --help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import typing
from argparse import SUPPRESS, Namespace
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

from retain.bench import config as bench_config
from retain.cluster.config import PROXY_LIMITS, ClusterConfig
from retain.config import Config
from retain.fit.config import FitConfig
from retain.options import ByteCount, NonNegativeFloat, Size, field_types, split_bounds
from retain.plugins import PARSERS, format_size
from retain.sampling_params import SamplingParams
from retain.server.config import Limits, ServerConfig
from retain.terminal import escape_controls
from retain.tune.config import TuneConfig

T = TypeVar("T")
Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"
LOG_LEVELS = ("debug", "info", "warning", "error")
SERVER_OPTION_NAMES = {
    "allowed_drafters": "--allow-drafter",
    "allowed_hosts": "--allow-host",
    "enable_inspector": "--inspect",
}


class CommandParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, and knows no abbreviations."""

    def __init__(self, **options: Any):
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        """Print the error, which quotes arguments, and exit with code 2."""
        self.exit(2, escape_controls(f"{self.prog}: {' '.join(message.split())}") + "\n")


def build_parser() -> CommandParser:
    """Build the parser of every command. Options that are not given are absent: dataclasses hold the defaults."""
    parser = CommandParser(prog="retain", description="An LLM inference engine whose subject is the KV cache.")
    commands = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="run | chat | serve | cluster | bench | tune | fit | model | cache | cachecheck",
    )
    engine, sampling, logging, quiet = (CommandParser(add_help=False) for _ in range(4))
    add_arguments(engine, Config)
    add_arguments(sampling, SamplingParams, exclude=("logit_bias", "logprobs", "stop_token_ids", "n"))
    add_log_level(quiet, "warning")
    add_log_level(logging, "info")
    run = commands.add_parser("run", parents=[engine, sampling, quiet], help="answer one prompt")
    run.add_argument("prompt", nargs="?", help="raw text; - is standard input")
    run.add_argument("-f", "--file", help="read the prompt from a file")
    run.add_argument("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    add_arguments(run, SamplingParams, include=("logprobs",))
    run.add_argument("--json", action="store_true", help="print one JSON object")
    chat = commands.add_parser("chat", parents=[engine, sampling, quiet], help="chat in the terminal")
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--url", help="chat with a server, such as http://127.0.0.1:8000/v1 (key: $OPENAI_API_KEY)")
    serve = commands.add_parser("serve", parents=[engine, logging], help="serve the OpenAI API over HTTP")
    _add_server_options(serve)
    add_arguments(serve, Limits)
    cluster = commands.add_parser("cluster", help="serve the OpenAI API by replicas on Ray Serve")
    actions = cluster.add_subparsers(dest="action", required=True, metavar="up")
    up = actions.add_parser("up", parents=[engine, logging], help="run replicas of a server until SIGTERM")
    add_arguments(up, ClusterConfig)
    _add_server_options(up)
    add_arguments(up, Limits, exclude=PROXY_LIMITS)
    bench = commands.add_parser("bench", help="measure speed, quality and load")
    _add_benches(bench, engine, quiet)
    tune = commands.add_parser(
        "tune", parents=[engine, quiet], help="find the KV policy with the least memory that holds a bound on quality"
    )
    add_arguments(tune, TuneConfig)
    tune.add_argument("--json", action="store_true", help="print one JSON object")
    fit = commands.add_parser("fit", parents=[quiet], help="fit a gate of the policy `gate` to a model")
    add_arguments(fit, Config, include=("model",))
    add_arguments(fit, FitConfig)
    fit.add_argument("--json", action="store_true", help="print one JSON object")
    model = commands.add_parser("model", parents=[quiet], help="print what a model computes and caches")
    model.add_argument("model", metavar="MODEL", help="as --model of other commands")
    add_arguments(model, Config, include=("weights", "dtype", "max_model_len"))
    model.add_argument("--run", metavar="TEXT", help="compute a text, and print how large each output is")
    model.add_argument("--json", action="store_true", help="print one JSON object")
    cache = commands.add_parser("cache", help="look after the store of a tier, and explain prefix misses")
    _add_cache_actions(cache, quiet)
    _add_cachecheck(commands, quiet)
    return parser


def _add_server_options(parser: CommandParser) -> None:
    parser.add_argument(
        "--api-keys", metavar="FILE", help="accept only these API keys: lines of `name key` (also $RETAIN_API_KEYS)"
    )
    parser.add_argument(
        "--operator",
        metavar="NAME",
        action="append",
        default=[],
        help="name of an API key that may read sums over all keys: /metrics, the inspector's totals "
        "(may be repeated; a key that is alone may)",
    )
    add_arguments(
        parser,
        ServerConfig,
        exclude=("api_keys", "limits"),
        names=SERVER_OPTION_NAMES,
        shown_defaults={"served_model_name": "the --model, without its folder and suffix"},
    )


def _add_cache_actions(cache: CommandParser, quiet: CommandParser) -> None:
    actions = cache.add_subparsers(dest="action", required=True, metavar="ls | verify | clear | sweep | why")
    for name, help in (
        ("ls", "list the spans of a store"),
        ("verify", "check a store, and remove what is damaged"),
        ("clear", "remove every span of a store"),
        ("sweep", "remove old spans of a store"),
    ):
        action = actions.add_parser(name, parents=[quiet], help=help)
        action.add_argument("path", metavar="STORE", help="the folder of --tier disk, or remote:url=s3://BUCKET/FOLDER")
        if name == "ls":
            action.add_argument("--json", action="store_true", help="a JSON line for each span")
        if name == "sweep":
            action.add_argument(
                "--max-bytes", type=_number_parser(Size), default=2**62, help="keep the newest, up to this size"
            )
            action.add_argument(
                "--max-age",
                type=_number_parser(NonNegativeFloat),
                default=math.inf,
                metavar="DAYS",
                help="remove what is older",
            )
    why = actions.add_parser("why", parents=[quiet], help="say what a cache would have of recorded requests, and why")
    add_why_arguments(why)


def add_why_arguments(why: argparse.ArgumentParser) -> None:
    """Add the arguments of `retain cache why`, which the package prefix_doctor has, too."""
    why.add_argument(
        "files", nargs="+", metavar="FILE", help="JSON bodies of requests, one or one a line, in order; or a text"
    )
    add_arguments(why, Config, include=("model", "kv_policy"))
    why.set_defaults(kv_policy="full")
    why.add_argument("--json", action="store_true", help="a JSON line for each prompt")


def _add_cachecheck(commands: Commands, quiet: CommandParser) -> None:
    """Add the command of the package `cachecheck`. Without the package it takes any words, and says what to install."""
    help = "test the prefix cache of a server from outside"
    try:
        from cachecheck.command import add_arguments as add_cachecheck_arguments
    except ModuleNotFoundError:
        absent = commands.add_parser("cachecheck", prefix_chars="\0", add_help=False, help=help)
        absent.add_argument("words", nargs="*")  # options, too: nothing begins with that prefix
        absent.set_defaults(log_level="warning")
        return
    add_cachecheck_arguments(commands.add_parser("cachecheck", parents=[quiet], help=help))


def _add_benches(bench: CommandParser, engine: CommandParser, quiet: CommandParser) -> None:
    benches = bench.add_subparsers(
        dest="bench",
        required=True,
        metavar="speed | budget | precision | quality | speculate | prefix",
    )

    def add(name: str, config: type, help: str, json_help: str, parents: list[CommandParser]) -> None:
        parser = benches.add_parser(name, parents=[*parents, quiet], help=help)
        add_arguments(parser, config)
        parser.add_argument("--json", action="store_true", help=json_help)

    c = bench_config
    add("speed", c.SpeedBenchConfig, "speed of prefill and decoding", "a JSON line for each workload", [engine])
    add("budget", c.BudgetBenchConfig, "speed of KV budgets", "a JSON line for each figure", [engine])
    add("precision", c.PrecisionBenchConfig, "speed and memory of dtypes of K and V", "a JSON line for each", [engine])
    add("quality", c.QualityBenchConfig, "quality of KV budgets", "a JSON line for each policy and metric", [engine])
    add(
        "speculate",
        c.SpeculateBenchConfig,
        "speed of speculative decoding",
        "a JSON line for each workload and drafter",
        [engine],
    )
    add(
        "prefix",
        c.PrefixBenchConfig,
        "time to first token of shared prefixes",
        "a JSON line for each workload and method",
        [engine],
    )


def add_log_level(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option --log-level to a command's parser."""
    parser.add_argument(
        "--log-level", choices=LOG_LEVELS, default=default, help=f"of the log on standard error (default: {default})"
    )


def add_arguments(
    parser: argparse.ArgumentParser,
    cls: type,
    *,
    include: Collection[str] | None = None,
    exclude: Collection[str] = (),
    names: Mapping[str, str] | None = None,
    shown_defaults: Mapping[str, str] | None = None,
) -> None:
    """Add an option for each field of a dataclass, or for those of `include`; `--max-tokens` sets `max_tokens`.

    The field's type chooses the parser, its metadata hold `help` and, for a tuple given at once, its `separator`
    or `nargs`; a tuple without them is an option that may be repeated. `names` are options that are not named as
    their field, `shown_defaults` replace the field's default in the help.
    """
    types = field_types(cls)
    for field in dataclasses.fields(cls):
        if field.name in exclude or (include is not None and field.name not in include):
            continue
        option = (names or {}).get(field.name) or "--" + field.name.replace("_", "-")
        default = (shown_defaults or {}).get(field.name) or _format_default(field, types[field.name])
        text = field.metadata["help"] + (f" (default: {default})" if default else "")
        parser.add_argument(
            option,
            dest=field.name,
            default=SUPPRESS,
            help=text.replace("%", "%%"),
            **_argument_settings(types[field.name], option, field.metadata),
        )


def _argument_settings(kind: Any, option: str, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    if kind is bool:
        return {"action": "store_true"}
    name = option.lstrip("-").replace("-", "_").upper()
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        metadata = metadata or {}
        if separator := metadata.get("separator", ""):
            return {"type": _split_parser(item, separator), "metavar": name}
        if nargs := metadata.get("nargs"):
            return {"nargs": nargs, **_argument_settings(item, option)}
        return {"action": "append", **_argument_settings(item, option)}
    settings: dict[Any, dict[str, Any]] = {
        str: {"metavar": name},
        int: {"type": _number_parser(kind), "metavar": "N"},
        float: {"type": _number_parser(kind), "metavar": "X"},
        Path: {"type": Path, "metavar": "PATH"},
        ByteCount: {"type": _number_parser(kind), "metavar": "SIZE"},
    }
    return settings[split_bounds(kind)[0]]


def _number_parser(kind: Any) -> Callable[[str], Any]:
    """Return a parser of numbers of a type, within its bounds."""
    base, bounds = split_bounds(kind)

    def parse(text: str) -> Any:
        try:
            value = PARSERS[base](text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if bounds and (problem := bounds.find_problem(value)):
            raise argparse.ArgumentTypeError(problem)
        return value

    return parse


def _split_parser(item: Any, separator: str) -> Callable[[str], tuple[Any, ...]]:
    parse_item = str if item is str else _number_parser(item)

    def parse(text: str) -> tuple[Any, ...]:
        parts = [part.strip() for part in text.split(separator) if part.strip()]
        if not parts:
            raise argparse.ArgumentTypeError("name at least one")
        return tuple(map(parse_item, parts))

    return parse


def _format_default(field: dataclasses.Field[Any], kind: Any) -> str:
    """Return the default as an option would give it; empty where the help says it, or where there is none to say."""
    default = field.default
    if default is dataclasses.MISSING or default is None or default is False or default == ():
        return ""
    if isinstance(default, tuple):
        return field.metadata.get("separator", " ").join(map(str, default))
    base, _ = split_bounds(kind)
    return format_size(default) if base == ByteCount else f"{default:g}" if base is float else str(default)


def given_args(args: Namespace, cls: type) -> dict[str, Any]:
    """Return the fields of a dataclass that were given as options."""
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(cls) if hasattr(args, f.name)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def from_args(cls: type[T], args: Namespace, **values: Any) -> T:
    """Build a dataclass from the given options and from `values`. Raises ValueError where a value is missing."""
    given = given_args(args, cls) | values
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and field.name not in given:
            raise ValueError(f"--{field.name.replace('_', '-')} is missing: {field.metadata['help']}")
    return cls(**given)
