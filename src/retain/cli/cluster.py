"""`retain cluster`: arguments to the settings of replicas."""

from __future__ import annotations

from argparse import Namespace
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from retain.cli.args import from_args
from retain.cli.serve import parse_server_config
from retain.cluster.config import ClusterConfig, ClusterSettings
from retain.cluster.environment import set_environment
from retain.cluster.haproxy import configure_haproxy
from retain.config import Config
from retain.server import hosts


def cluster(args: Namespace) -> int:
    """Serve a model by replicas until SIGTERM or SIGINT. Arguments are checked before Ray starts."""
    config = from_args(Config, args)
    settings = ClusterSettings(config, parse_server_config(args, config.model), from_args(ClusterConfig, args))
    server = settings.server
    hosts.check_exposure(server.host, bool(server.api_keys), server.insecure_no_api_key)
    set_environment(settings.cluster.address)
    for package in ("ray", "fastapi"):
        if find_spec(package) is None:
            raise ValueError(f"replicas need the package {package}: pip install 'retain[serve,ray]'")
    with ExitStack() as stack:
        if settings.cluster.address is None:
            # Ray adds 70 characters to the paths of HAProxy's sockets, which the system limits to 97.
            folder = TemporaryDirectory(prefix="haproxy-", dir="/tmp", ignore_cleanup_errors=True)
            configure_haproxy(Path(stack.enter_context(folder)), forward_body=settings.cluster.affinity == "prefix")
        from retain.cluster import launch  # imports Ray, which reads the environment

        launch.up(settings)
    return 0
