"""`retain serve`: arguments to a server's configuration."""

from __future__ import annotations

import os
from argparse import Namespace
from functools import partial
from pathlib import Path

from retain.cli.args import from_args, given_args
from retain.config import Config
from retain.plugins import needs_extra
from retain.server import auth
from retain.server.config import Limits, ServerConfig


def serve(args: Namespace) -> int:
    """Serve a model until SIGTERM or SIGINT. Arguments are checked before the model is loaded."""
    config = from_args(Config, args)
    server_config = parse_server_config(args, config.model)
    with needs_extra("serving", "serve"):
        from retain.server import launch
        from retain.server.drain import EXIT_GRACE_S, Watchdog
    from retain.cli import loading

    watchdog = Watchdog()
    load_llm = partial(loading.load_llm, config, server_config.allowed_drafters)
    launch.serve(load_llm, server_config, watchdog=watchdog)
    watchdog.start(EXIT_GRACE_S)  # Python waits for threads that prepare requests, however long they take
    return 0


def parse_server_config(args: Namespace, model: str) -> ServerConfig:
    """Return the configuration of a model's server. Raises ValueError, or OSError for a file of keys."""
    return ServerConfig.for_model(
        model,
        **given_args(args, ServerConfig)
        | {
            "api_keys": auth.load_api_keys(Path(args.api_keys) if args.api_keys else None, os.environ, args.operator),
            "limits": from_args(Limits, args),
        },
    )
