"""`retain cluster`: arguments to the settings of replicas; and the same options as a Ray Serve config has them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from contextlib import redirect_stderr
from importlib.util import find_spec
from io import StringIO
from typing import Any

from retain.cli.args import build_parser, from_args
from retain.cli.serve import parse_server_config
from retain.cluster.config import ClusterConfig, ClusterSettings
from retain.config import Config
from retain.server import hosts


def cluster(args: Namespace) -> int:
    """Serve a model by replicas until SIGTERM or SIGINT. Arguments are checked before Ray starts."""
    settings = _settings_of(args)
    server = settings.server
    hosts.check_exposure(server.host, bool(server.api_keys), server.insecure_no_api_key)
    for package in ("ray", "fastapi"):
        if find_spec(package) is None:
            raise ValueError(f"replicas need the package {package}: pip install 'retain[serve,ray]'")
    from retain.cluster import launch

    launch.up(settings)
    return 0


def build(options: Mapping[str, Any]) -> Any:
    """Build the Ray Serve application of `serve run retain.cli.cluster:build model=smollm2 replicas=2`.

    The options are those of `retain cluster up`, with underscores. Raises ValueError or OSError.
    """
    settings = parse_options(options)
    from retain.cluster.replica import build_application  # imports Ray, an optional package

    return build_application(settings)


def parse_options(options: Mapping[str, Any]) -> ClusterSettings:
    """Return the settings that options by name mean. Raises ValueError or OSError."""
    arguments = ["cluster", "up"]
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        for item in value if isinstance(value, list | tuple) else [value]:
            if item is not None and str(item).lower() != "false":
                arguments.append(option if str(item).lower() == "true" else f"{option}={item}")
    message = StringIO()
    try:
        with redirect_stderr(message):
            args = build_parser().parse_args(arguments)
    except SystemExit:
        raise ValueError(message.getvalue().strip()) from None
    return _settings_of(args)


def _settings_of(args: Namespace) -> ClusterSettings:
    config = from_args(Config, args)
    return ClusterSettings(config, parse_server_config(args, config.model), from_args(ClusterConfig, args))
