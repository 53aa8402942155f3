"""`retain cluster`: arguments to the settings of replicas."""

from __future__ import annotations

from argparse import Namespace

from retain.cli.args import from_args
from retain.cli.serve import parse_server_config
from retain.cluster.config import ClusterConfig, ClusterSettings
from retain.cluster.environment import set_environment
from retain.config import Config


def cluster(args: Namespace) -> int:
    """Serve a model by replicas until SIGTERM or SIGINT. Arguments are checked before Ray starts."""
    config = from_args(Config, args)
    settings = ClusterSettings(config, parse_server_config(args, config.model), from_args(ClusterConfig, args))
    set_environment(settings.cluster.address)
    try:
        from retain.cluster import launch
    except ModuleNotFoundError as error:
        raise ValueError(f"replicas need the package {error.name}: pip install 'retain[serve,ray]'") from None

    launch.up(settings)
    return 0
